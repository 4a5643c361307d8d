"""An export against the container it was made from: every value, the model's settings, the files that travel along."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from w4conv import codes
from w4conv.arrays import F32Array
from w4conv.container import Container
from w4conv.errors import InputError
from w4conv.measure.distortion import DistortionMeter
from w4conv.measure.round_trip import RoundTrip, TensorRoundTrip
from w4conv.models import spec_of
from w4conv.progress import Progress
from w4conv.scheme import TILE_ROWS
from w4conv.sources.base import Source
from w4conv.sources.gguf_architectures import BY_FAMILY

METHOD: Final = "export"
# GGUF has one name for families with the same computation, and no key for some windows; the exporter says so.
GGUF_WITHOUT: Final = ("family", "architecture", "sliding_windows")
# Gemma rounds it to the original type of the weights, which GGUF does not record.
GGUF_ROUNDED: Final = {"embedding_scale": 2**-8}
FLOAT_TOLERANCE: Final = 1e-6  # settings that a format keeps as float32
_BLOCK_VALUES: Final = 1 << 20  # values compared at a time


def compare_export(container: Container, source: Source, progress: Progress) -> tuple[RoundTrip, list[str]]:
    """(comparison, failures).

    A tensor passes when its values equal the container's, rounded to nearest where it is stored as F16 or BF16; of a
    norm that GGUF stores with 1 added, after that. Raises InputError when `source` is not of the
    container's model at all.
    """
    where = f"{source.path} is no export of {container.path}"
    for name, info in container.tensors.items():
        found = source.tensors.get(name)
        if found is None or found.shape != info.shape:
            state = "it has no tensor" if found is None else f"shape {found.shape} instead of {info.shape} in"
            raise InputError(f"{where}: {state} {name}. Name the right container")
    failures = list(_settings(container, source))
    overall, quantized = DistortionMeter(), DistortionMeter()
    tensors = []
    offset = np.float32(_norm_offset(container) if source.kind == "gguf" else 0.0)
    rounded: dict[str, list[str]] = {}
    progress.start(sum(info.nbytes for info in container.tensors.values()))
    for name, info in container.tensors.items():
        stored = source.tensors[name]
        meter = DistortionMeter(info.scheme.group_size)
        exact = fits = True
        is_norm = info.name.endswith("norm.weight")
        for rows in _row_blocks(info.shape):
            ours = _matrix(container.dequantize(name, rows))
            theirs = _matrix(codes.as_f32(source.read(name, rows), stored.dtype))
            meter.add(ours, theirs)
            exact = exact and np.array_equal(ours, theirs)
            expected = (ours + offset) - offset if offset and is_norm else _rounded(ours, stored.dtype)
            fits = fits and np.array_equal(expected, theirs)
        overall.merge(meter)
        if not info.scheme.is_float:
            quantized.merge(meter)
        if fits and not exact:
            how = f"as 1 is added to norms in {stored.stored_as}" if offset and is_norm else ""
            rounded.setdefault(how or f"{info.scheme} to {stored.stored_as}", []).append(name)
        tensors.append(TensorRoundTrip(name, stored.stored_as, fits, meter.result()))
        progress.advance(info.nbytes, name)
    wrong = [t.name for t in tensors if not t.same_codes]
    if wrong:
        more = f" and {len(wrong) - 1} more tensors" if wrong[1:] else ""
        failures.append(f"{wrong[0]}{more}: the values are not those of {container.path}")
    if extra := sorted(set(source.tensors) - set(container.tensors)):
        failures.append(f"{extra[0]}: {container.path} has no such tensor")
    return (
        RoundTrip(
            source=str(container.path),
            source_kind="w4",
            changed_files=(),
            method=METHOD,
            same_codes=not wrong,
            calibration=None,
            overall=overall.result(),
            quantized=quantized.result() if any(not i.scheme.is_float for i in container.tensors.values()) else None,
            tensors=tuple(tensors),
            notes=tuple(f"{len(names)} tensors are rounded, {how}" for how, names in rounded.items()),
        ),
        failures,
    )


def _norm_offset(container: Container) -> float:
    """What GGUF adds to the norms of the model, in float32, which may round their last bits."""
    architecture = BY_FAMILY.get(spec_of(container.blobs).family)
    return architecture.norm_offset if architecture else 0.0


def _settings(container: Container, source: Source) -> Iterator[str]:
    """Failures of the model's settings, and of its other files, against the container."""
    ours, theirs = (asdict(spec_of(blobs)) for blobs in (container.blobs, source.blobs))
    for key, value in ours.items():
        if source.kind == "gguf" and key in GGUF_WITHOUT:
            continue
        tolerance = GGUF_ROUNDED.get(key, FLOAT_TOLERANCE) if source.kind == "gguf" else FLOAT_TOLERANCE
        if not _alike(value, theirs[key], tolerance):
            yield f"{source.path}: {key} is {theirs[key]}, the container's is {value}"
    if source.kind == "gguf":
        return  # its tokenizer is written anew
    for name in container.blobs:
        if name != "config.json" and source.blobs.get(name) != container.blobs[name]:
            yield f"{source.path}: {name} is not that of the container"


def _alike(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key], tolerance) for key in a)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance)
    return bool(a == b)


def _row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the first axis, of bounded size; of a matrix whole tiles."""
    step = max(_BLOCK_VALUES // max(math.prod(shape[1:]), 1) // TILE_ROWS, 1) * TILE_ROWS if len(shape) < 3 else 1
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _matrix(values: F32Array) -> F32Array:
    """(rows, columns) of a vector or a stack."""
    return values.reshape(1, -1) if values.ndim < 2 else values.reshape(-1, values.shape[-1])


def _rounded(values: F32Array, dtype: str) -> F32Array:
    if dtype == "BF16":
        return codes.bf16_to_f32(codes.f32_to_bf16(values))
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32) if dtype == "F16" else values
