"""A container against its checkpoint: the error of every tensor, and whether its bytes are reproduced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import codes, kernels
from w4conv.arrays import Array
from w4conv.container import Container, TensorInfo
from w4conv.errors import InputError
from w4conv.files.blobs import config_of
from w4conv.files.digests import FileDigests
from w4conv.measure.distortion import Distortion, DistortionMeter
from w4conv.models import spec_of
from w4conv.progress import Progress
from w4conv.quantization.calibrated import METHODS
from w4conv.quantization.recipe import is_calibrated
from w4conv.scheme import KINDS, TILE_ROWS
from w4conv.sources.base import CodedRows, Source

KEPT_METHOD: Final = "keep"  # codes and scales of the source, unchanged
REPEATABLE_METHOD: Final = "rtn"  # other methods depend on a calibration set, which a container does not hold
# The same computation where there are no windows.
SAME_IN_GGUF: Final = (("gguf", "MistralForCausalLM", "LlamaForCausalLM"),)
_BLOCK_VALUES: Final = 1 << 22  # values compared at a time: 16 MB of float32


@dataclass(frozen=True, slots=True)
class TensorRoundTrip:
    """One tensor.

    same_codes: True where the recorded method reproduces its bytes from the source, or its values equal the source's.
    None as in RoundTrip. Of an export: True where its values equal the container's, rounded to its type.
    """

    name: str
    scheme: str
    same_codes: bool | None
    distortion: Distortion


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """The container against a source; or an export against its container, with source_kind "w4" and method "export".

    changed_files: names of source files whose bytes differ from those that the container records.
    same_codes: True where the recorded method reproduces the bytes of every tensor from this source. None where all
    tensors are reproduced but those that need the calibration set. calibration: the container's record of that set.
    overall: all tensors pooled; quantized: those with codes pooled, None without any. notes: a sentence each.
    """

    source: str
    source_kind: str
    changed_files: tuple[str, ...]
    method: str
    same_codes: bool | None
    calibration: dict[str, Any] | None
    overall: Distortion
    quantized: Distortion | None
    tensors: tuple[TensorRoundTrip, ...]
    notes: tuple[str, ...] = ()


def named_alike(container: Container, source: Source) -> bool:
    """Whether both name the same architecture, or two with the same computation."""
    ours, theirs = _architecture(container.blobs), _architecture(source.blobs)
    return ours == theirs or (source.kind, ours, theirs) in SAME_IN_GGUF


def check_fits(container: Container, source: Source) -> None:
    """Raise InputError when `source` is not a checkpoint of the container's model, naming the first difference."""
    where = f"{source.path} is no source of {container.path}"
    ours, theirs = _architecture(container.blobs), _architecture(source.blobs)
    if not named_alike(container, source):
        raise InputError(f"{where}: its architecture is {theirs}, the container's is {ours}. Name the right checkpoint")
    for name, info in container.tensors.items():
        found = source.tensors.get(name)
        if found is None:
            raise InputError(f"{where}: it has no tensor {name}. Name the right checkpoint")
        if found.shape != info.shape:
            raise InputError(
                f"{where}: {name} has shape {found.shape} in it, {info.shape} in the container. "
                "Name the right checkpoint"
            )


def compare(container: Container, source: Source, *, threads: int | None, progress: Progress) -> RoundTrip:
    """Compare every tensor, a block of rows at a time. `check_fits` holds."""
    method = str(container.provenance.get("method"))
    calibrated = _calibrated(container, method)
    overall, quantized = DistortionMeter(), DistortionMeter()
    tensors = []
    # (coding in source, coding in container) -> names of tensors with equal values
    recoded: dict[tuple[str, str], list[str]] = {}
    progress.start(sum(info.nbytes for info in container.tensors.values()))
    with FileDigests(source.files) as digests:
        for name, info in container.tensors.items():
            meter = DistortionMeter(info.scheme.group_size)
            equal, same, repeatable = True, True, name not in calibrated
            for block in _blocks(container, info, source):
                difference = block.compare(threads)
                meter.add_found(difference, block.values.shape[1])
                equal, same = equal and difference.equal, same and difference.reproduced
            overall.merge(meter)
            if not info.scheme.is_float:
                quantized.merge(meter)
            if equal and repeatable and not same:
                recoded.setdefault((source.tensors[name].stored_as, str(info.scheme)), []).append(name)
            tensors.append(
                TensorRoundTrip(
                    name, str(info.scheme), same or equal or (False if repeatable else None), meter.result()
                )
            )
            progress.advance(info.nbytes, name)
        found = {file.name: digest.hex() for file, digest in zip(source.files, digests.result(), strict=True)}
    return RoundTrip(
        source=str(source.path),
        source_kind=source.kind,
        changed_files=_changed(_recorded_files(container), found),
        method=method,
        same_codes=_all_same([t.same_codes for t in tensors]),
        calibration=container.provenance.get("calibration"),
        overall=overall.result(),
        quantized=quantized.result() if any(not i.scheme.is_float for i in container.tensors.values()) else None,
        tensors=tuple(tensors),
        notes=tuple(
            f"{len(names)} tensors have the very values of the source in another coding: {theirs} there, {ours} here"
            for (theirs, ours), names in recoded.items()
        ),
    )


def _calibrated(container: Container, method: str) -> set[str]:
    """Names of tensors that cannot be reproduced here: calibrated ones, or all where the method is not known."""
    if method in (REPEATABLE_METHOD, KEPT_METHOD):
        return set()
    if method not in METHODS:
        return set(container.tensors)
    spec = spec_of(container.blobs)
    kinds = {name: info.scheme.kind for name, info in container.tensors.items()}
    return {t.name for t in spec.tensors() if is_calibrated(t.role, kinds[t.name], tied_head=spec.tied_head)}


def _all_same(found: list[bool | None]) -> bool | None:
    return False if False in found else None if None in found else True


def _architecture(blobs: Mapping[str, bytes]) -> str:
    named = config_of(blobs).get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "not named in its config.json"


def _recorded_files(container: Container) -> dict[str, str]:
    recorded: Any = container.provenance.get("source", {})
    names = [file["name"] for file in recorded.get("files", [])]
    return dict(zip(names, container.source_digests, strict=True))


def _changed(recorded: dict[str, str], found: dict[str, str]) -> tuple[str, ...]:
    """Names that only one side has, or whose digests differ."""
    return tuple(name for name in recorded | found if recorded.get(name) != found.get(name))


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of a matrix: source values (n_rows, n_columns), and their bytes in the container."""

    info: TensorInfo
    dtype: str
    values: Array
    parts: dict[str, npt.NDArray[np.uint8]]
    coded: CodedRows | None = None  # codes of the source, where it has the scheme of the container

    def compare(self, threads: int | None) -> kernels.Difference:
        """Source and container. reproduced: the bytes are those of the source, or of RTN on its values."""
        scheme, kept = self.info.scheme, self._is_kept()
        if len(self.info.shape) < 2:  # vectors keep their type
            dequantized = codes.dequantize(scheme, self.info.shape, self.parts).reshape(1, -1)
            found = kernels.compare(codes.as_f32(self.values, self.dtype), dequantized, max(dequantized.size, 1))
            same_type = scheme.kind == self.dtype.lower()
            return found._replace(reproduced=same_type and self._equal("values", self.values))
        native = KINDS[scheme.kind].is_rounded_to and (scheme.is_float or scheme.scale_dtype == "f16")
        reproduce = native and not kept
        group_size = scheme.group_size or self.values.shape[1]
        found = kernels.compare_with_source(
            self.values, self.dtype, scheme, self.parts, group_size, reproduce=reproduce, threads=threads
        )
        again = not kept and not scheme.is_float and scheme.has_shifts and self._is_reproduced(threads)
        return found._replace(reproduced=kept or again or found.reproduced)

    def _is_reproduced(self, threads: int | None) -> bool:
        """Whether rounding the values to nearest gives these bytes."""
        packed = kernels.quantize_rtn(self.values, self.dtype, self.info.scheme, threads=threads)
        return all(self._equal(kind, part) for kind, part in packed.parts().items())

    def _is_kept(self) -> bool:
        if self.coded is None:
            return False
        return all(self._equal(kind, part) for kind, part in self.coded.parts(self.info.scheme).items())

    def _equal(self, kind: str, made: Array) -> bool:
        return np.array_equal(self.parts[kind], kernels.as_bytes(made))


def _blocks(container: Container, info: TensorInfo, source: Source) -> Iterator[_Block]:
    dtype, coding = source.tensors[info.name].dtype, source.tensors[info.name].coding
    parts = {part.kind: container.bytes_of(part) for part in info.parts}
    if len(info.shape) < 2:
        yield _Block(info, dtype, source.read(info.name).reshape(1, -1), parts)
        return
    n_matrices, n_rows, n_columns = codes.matrix_shape(info.shape)
    n_tiles = codes.n_tiles(n_rows)
    step = max(_BLOCK_VALUES // max(n_columns, 1) // TILE_ROWS, 1)  # tiles
    for matrix in range(n_matrices):
        for tile in range(0, n_tiles, step):
            last = min(tile + step, n_tiles)
            rows = slice(tile * TILE_ROWS, min(last * TILE_ROWS, n_rows))
            # A part is an array over (matrix, tile), so a run of tiles is a run of bytes.
            taken = {
                kind: raw.reshape(n_matrices * n_tiles, -1)[matrix * n_tiles + tile : matrix * n_tiles + last].ravel()
                for kind, raw in parts.items()
            }
            coded = _read_coded(source, info, matrix, rows) if coding == info.scheme else None
            yield _Block(info, dtype, _read_rows(source, info, matrix, rows), taken, coded)


def _read_coded(source: Source, info: TensorInfo, matrix: int, rows: slice) -> CodedRows:
    if len(info.shape) == 2:
        return source.read_coded(info.name, rows)
    return source.read_coded(info.name, slice(matrix, matrix + 1)).matrix(0, rows)


def _read_rows(source: Source, info: TensorInfo, matrix: int, rows: slice) -> Array:
    if len(info.shape) == 2:
        return source.read(info.name, rows)
    per_first = codes.matrix_shape(info.shape)[0] // info.shape[0]  # matrices under one index of the first axis
    first = source.read(info.name, slice(matrix // per_first, matrix // per_first + 1))
    return np.ascontiguousarray(first.reshape(per_first, *info.shape[-2:])[matrix % per_first, rows])
