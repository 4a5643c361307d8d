"""A GGUF file as a source: tensors under Hugging Face names, in Hugging Face row order, dequantized on reading."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import VALUE_DTYPES
from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile
from w4conv.scheme import QuantScheme
from w4conv.sources.base import CodedRows, Source, SourceTensor
from w4conv.sources.gguf_architectures import ARCHITECTURES, TOP_NAMES, Architecture
from w4conv.sources.gguf_blocks import coded, coding_of
from w4conv.sources.gguf_config import LONG_FACTORS, ROPE_FACTORS, rebuild_config, rebuild_generation_config
from w4conv.sources.gguf_header import GgufHeader, GgufTensor
from w4conv.sources.gguf_tokenizer import rebuild_tokenizer
from w4conv.sources.reading import row_range, values

# What the gguf package can dequantize.
DEQUANTIZABLE: Final = {
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS",
}  # fmt: skip
BLOCK: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")
MAX_EXPERTS: Final = 1024
SPLIT: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_SPLITS: Final = 1000


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies. n_heads: heads whose rows are stored interleaved, 0 where the rows are in order.

    offset: what the file's values have over the checkpoint's. second: where the other half of the rows lies, of each
    matrix of a stack; alternating: the halves' rows take turns.
    """

    file: MappedFile
    tensor: GgufTensor
    n_heads: int
    offset: float = 0.0
    second: _Place | None = None
    alternating: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        n_matrices, *rest = self.tensor.shape
        return self.tensor.shape if self.second is None else (n_matrices, 2 * rest[0], *rest[1:])

    def whole(self, first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(n_matrices, n_rows / 2, ...) of both halves -> (n_matrices, n_rows, ...)."""
        if not self.alternating:
            return np.concatenate([first, second], axis=1)
        return np.stack([first, second], axis=2).reshape(first.shape[0], -1, *first.shape[2:])


class GgufSource(Source):
    """See `open_gguf`."""

    kind = "gguf"

    def __init__(
        self,
        path: Path,
        *,
        headers: list[GgufHeader],
        places: dict[str, _Place],
        blobs: dict[str, bytes],
        notes: list[str],
    ) -> None:
        self.path = path
        self.files = tuple(header.path for header in headers)
        self._places = places
        self.tensors = {name: self._source_tensor(name, place) for name, place in places.items()}
        self.blobs = blobs
        self.notes = tuple(notes)

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.generic]:
        place = self._places[name]
        found = self._read(place, rows)
        return found if place.second is None else place.whole(found, self._read(place.second, rows))

    def _read(self, place: _Place, rows: slice | None) -> npt.NDArray[np.generic]:
        tensor = place.tensor
        start, stop = row_range(rows, tensor.shape)
        shape = (stop - start, *tensor.shape[1:])
        raw = self._raw(place, start, stop)
        if place.offset:
            if tensor.type_name != "F32":
                raise InputError(f"{place.file.path}: {tensor.name}: a norm of type {tensor.type_name}, expected F32")
            weights: npt.NDArray[np.float32] = values(raw, "F32", shape).astype(np.float32) - np.float32(place.offset)
            return weights
        if tensor.type_name in VALUE_DTYPES:
            return values(raw, tensor.type_name, shape)
        return _dequantized(raw, tensor, shape, f"{place.file.path}: {tensor.name}")

    @staticmethod
    def _raw(place: _Place, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of the rows [start, stop) of the checkpoint."""
        tensor = place.tensor
        n_bytes = tensor.nbytes // tensor.shape[0]
        if place.n_heads and start < stop:
            # Rows of a head stay within the head, so the bytes touched are those of the heads that are touched.
            order = stored_rows(tensor.shape[0] // place.n_heads, start, stop)
            first, last = int(order.min()), int(order.max()) + 1
            raw = place.file.view(tensor.offset + first * n_bytes, (last - first) * n_bytes)
            return raw.reshape(last - first, n_bytes)[order - first].reshape(-1)
        return place.file.view(tensor.offset + start * n_bytes, (stop - start) * n_bytes)

    def read_coded(self, name: str, rows: slice) -> CodedRows:
        place, coding = self._places[name], self.tensors[name].coding
        if coding is None:
            raise ValueError(f"{name} has no coding")
        first = self._read_coded(place, rows, coding)
        if place.second is None:
            return first
        return first.joined(self._read_coded(place.second, rows, coding), place.whole)

    def _read_coded(self, place: _Place, rows: slice, coding: QuantScheme) -> CodedRows:
        shape = place.tensor.shape
        start, stop = row_range(rows, shape)
        raw = self._raw(place, start, stop).reshape((stop - start) * math.prod(shape[1:-1]), -1)
        found = coded(raw, place.tensor.type_name, coding, f"{place.file.path}: {place.tensor.name}")
        return found if len(shape) == 2 else found.stacked(shape[1])

    def _source_tensor(self, name: str, place: _Place) -> SourceTensor:
        tensor = place.tensor
        dtype = tensor.type_name if tensor.type_name in VALUE_DTYPES else "F32"
        codings = {self._coding(half) for half in (place, place.second) if half is not None}
        return SourceTensor(name, place.shape, dtype, tensor.type_name, codings.pop() if len(codings) == 1 else None)

    @staticmethod
    def _coding(place: _Place) -> QuantScheme | None:
        tensor = place.tensor
        if len(tensor.shape) not in (2, 3) or not tensor.nbytes:
            return None
        n_rows = math.prod(tensor.shape[:-1])
        row_nbytes = tensor.nbytes // n_rows

        def read(start: int, stop: int) -> npt.NDArray[np.uint8]:  # in whatever order
            return place.file.view(tensor.offset + start * row_nbytes, (stop - start) * row_nbytes)

        return coding_of(tensor.type_name, n_rows, row_nbytes, read)

    def close(self) -> None:
        for place in self._places.values():
            place.file.close()


def stored_rows(head_dim: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Rows of the file that hold the rows [start, stop) of the checkpoint.

    A file of the `llama` architecture stores the rows of a head as pairs (i, i + head_dim / 2), pair after pair; a
    Hugging Face checkpoint stores the first halves of all pairs, then the second.
    """
    head, row = np.divmod(np.arange(start, stop), head_dim)
    half = head_dim // 2
    return head * head_dim + np.where(row < half, 2 * row, 2 * (row - half) + 1)


def open_gguf(path: Path, *, raw: bool = False) -> GgufSource:
    """Open a GGUF file of a supported architecture; of a split model, its first part. raw: of any; see `open_source`.

    Opening reads the header alone. Raises InputError naming the file, and the key or tensor, that is corrupt, missing
    or not supported.
    """
    headers = _open_parts(path)
    header = headers[0]
    kind = header.text("general.type", "model")
    if kind != "model":
        advice = "; merge it into its base model first" if kind == "adapter" else ""
        raise header.error("general.type", f"{kind!r} is not a model{advice}")
    name = header.text("general.architecture")
    if raw:
        return _open_raw(path, headers, name)
    if name not in ARCHITECTURES:
        raise header.error("general.architecture", f"{name!r} is not supported; known are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    stored = _all_tensors(headers)
    if not stored:
        raise InputError(f"{path}: holds no tensors, only metadata")
    factors = {name: _row(name, *stored.pop(name)) for name in (ROPE_FACTORS, *LONG_FACTORS) if name in stored}
    places = _named(architecture, header, stored)
    config = rebuild_config(
        header,
        architecture,
        vocab_size=places["model.embed_tokens.weight"].tensor.shape[0],
        biases=frozenset(name for name in places if name.endswith(".bias")),
        tied="lm_head.weight" not in places,
        factors=factors,
        dtype=_main_dtype(places),
    )
    blobs = {"config.json": config, "generation_config.json": rebuild_generation_config(header)}
    tokenizer, notes = rebuild_tokenizer(header)
    blobs |= tokenizer
    return GgufSource(path, headers=headers, places=places, blobs=blobs, notes=[*_notes(places, blobs), *notes])


def _open_raw(path: Path, headers: list[GgufHeader], architecture: str) -> GgufSource:
    stored = {name: _Place(*place, 0) for name, place in _all_tensors(headers).items()}
    places = {
        name: place
        for name, place in stored.items()
        if place.tensor.type_name in VALUE_DTYPES or place.tensor.type_name in DEQUANTIZABLE
    }
    blobs = {"config.json": json.dumps({"architectures": [architecture], "model_type": architecture}).encode()}
    tokenizer, notes = rebuild_tokenizer(headers[0])
    blobs |= {"generation_config.json": rebuild_generation_config(headers[0])} | tokenizer
    notes = [*_notes(places, blobs), *notes]
    if others := [f"{name} ({place.tensor.type_name})" for name, place in stored.items() if name not in places]:
        notes.append(f"Left out, as such a type has no values to convert: {', '.join(others[:4])}.")
    return GgufSource(path, headers=headers, places=places, blobs=blobs, notes=notes)


def _open_parts(path: Path) -> list[GgufHeader]:
    """Headers of the file, or of all parts of a split model in their order."""
    first = GgufHeader(MappedFile(path))
    n_parts = first.integer("split.count", 1)
    if n_parts <= 1:
        return [first]
    match = SPLIT.fullmatch(path.name)
    if n_parts > MAX_SPLITS or match is None or int(match[3]) != n_parts:
        raise first.error("split.count", f"{n_parts} parts, but the file is not named like -00001-of-{n_parts:05}.gguf")
    names = [f"{match[1]}-{i + 1:05}-of-{n_parts:05}.gguf" for i in range(n_parts)]
    if path.name != names[0]:
        raise InputError(f"{path}: one part of a split model; name the first one, {names[0]}")
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        raise InputError(
            f"{path}: {len(missing)} of {n_parts} parts are missing, the first is {missing[0]}; fetch them"
        )
    headers = [first, *(GgufHeader(MappedFile(path.with_name(name))) for name in names[1:])]
    for i, header in enumerate(headers):
        if (header.integer("split.no"), header.integer("split.count")) != (i, n_parts):
            raise header.error("split.no", f"expected part {i} of {n_parts}: the parts do not belong together")
    n_tensors = sum(len(header.tensors) for header in headers)
    if first.integer("split.tensors.count", n_tensors) != n_tensors:
        raise first.error("split.tensors.count", f"the parts hold {n_tensors} tensors: they do not belong together")
    return headers


def _all_tensors(headers: list[GgufHeader]) -> dict[str, tuple[MappedFile, GgufTensor]]:
    out: dict[str, tuple[MappedFile, GgufTensor]] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in out:
                raise InputError(f"{header.path}: {name} is in two parts")
            out[name] = header.file, tensor
    return out


def _row(name: str, file: MappedFile, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    if tensor.type_name != "F32" or len(tensor.shape) != 1:
        raise InputError(f"{file.path}: {name}: expected one row of F32")
    return np.frombuffer(file.view(tensor.offset, tensor.nbytes).tobytes(), np.dtype("<f4"))


def _named(
    architecture: Architecture, header: GgufHeader, stored: Mapping[str, tuple[MappedFile, GgufTensor]]
) -> dict[str, _Place]:
    """Tensors by their Hugging Face names. Raises InputError for a tensor that has none."""
    heads = {"attn_q": 0, "attn_k": 0}
    if architecture.interleaved:
        prefix = f"{architecture.name}.attention."
        heads["attn_q"] = header.integer(f"{prefix}head_count")
        heads["attn_k"] = header.integer(f"{prefix}head_count_kv", heads["attn_q"])
    out: dict[str, _Place] = {}
    joined = {part: own for own, parts in architecture.joined.items() for part in parts}
    for name, (file, tensor) in stored.items():
        match = BLOCK.fullmatch(name)
        own = joined.get(f"{match[2]}.{match[3]}") if match else None
        module = architecture.blocks.get(match[2]) if match else None
        n_heads = heads.get(match[2], 0) if match else 0
        if match and own:
            new = f"model.layers.{match[1]}.{own}"
        elif match and module:
            new = f"model.layers.{match[1]}.{module}.{match[3]}"
        elif name in TOP_NAMES:
            new = TOP_NAMES[name]
        else:
            raise InputError(
                f"{file.path}: {name}: a {architecture.name} model has no such tensor, or it is not supported"
            )
        if tensor.type_name not in VALUE_DTYPES and tensor.type_name not in DEQUANTIZABLE:
            raise InputError(f"{file.path}: {name}: its type {tensor.type_name} cannot be dequantized")
        if n_heads and (n_heads < 0 or tensor.shape[0] % (2 * n_heads)):
            raise InputError(f"{file.path}: {name}: {tensor.shape[0]} rows are not {n_heads} heads of an even size")
        if match and own:
            parts = [f"blk.{match[1]}.{part}" for part in architecture.joined[own]]
            if name == parts[0]:
                out[new] = _joined_place(header, stored, parts, alternating=architecture.alternating)
        elif "{}" in new:
            out |= {new.format(i): _Place(file, one, 0) for i, one in enumerate(_experts(file, tensor))}
        else:
            out[new] = _Place(file, tensor, n_heads, architecture.norm_offset if "norm" in name else 0.0)
    if "model.embed_tokens.weight" not in out:
        raise InputError(f"{header.path}: token_embd.weight is missing")
    return out


def _joined_place(
    header: GgufHeader, stored: Mapping[str, tuple[MappedFile, GgufTensor]], parts: list[str], *, alternating: bool
) -> _Place:
    """A tensor of the checkpoint out of one of the file, or of two."""
    first, *rest = parts
    file, tensor = stored[first]
    if not rest:
        return _Place(file, tensor, 0)
    other = stored.get(rest[0])
    if other is None or (other[1].shape, other[1].type_name) != (tensor.shape, tensor.type_name):
        state = "is missing" if other is None else f"is {other[1].type_name} of shape {other[1].shape}"
        raise InputError(
            f"{header.path}: {rest[0]} {state}, but {first} is {tensor.type_name} of shape {tensor.shape}; they have "
            "to be alike"
        )
    return _Place(file, tensor, 0, second=_Place(*other, 0), alternating=alternating)


def _experts(file: MappedFile, tensor: GgufTensor) -> list[GgufTensor]:
    """The matrices of all experts, which lie one after another in one tensor."""
    if len(tensor.shape) != 3 or not 0 < tensor.shape[0] <= MAX_EXPERTS:
        raise InputError(f"{file.path}: {tensor.name}: shape {tensor.shape}, expected a matrix for each expert")
    nbytes = tensor.nbytes // tensor.shape[0]
    return [
        replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + i * nbytes, nbytes=nbytes)
        for i in range(tensor.shape[0])
    ]


def _dequantized(
    raw: npt.NDArray[np.uint8], tensor: GgufTensor, shape: tuple[int, ...], where: str
) -> npt.NDArray[np.float32]:
    # Loaded here: opening and inspecting a file do without the package.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if raw.size == 0:
        return np.empty(shape, np.float32)
    try:
        with np.errstate(all="ignore"):  # a corrupt scale may be NaN or overflow; the caller checks the values
            out = dequantize(raw.reshape(-1, tensor.row_nbytes), GGMLQuantizationType(tensor.type_id))
    except (NotImplementedError, ValueError) as error:
        raise InputError(
            f"{where}: the installed gguf package cannot dequantize {tensor.type_name}: {error}"
        ) from error
    return np.ascontiguousarray(out, dtype=np.float32).reshape(shape)


def _main_dtype(places: Mapping[str, _Place]) -> str:
    """The word for config.json: what the weights were before they were quantized is not recorded, F16 is usual."""
    types = {place.tensor.type_name for place in places.values() if len(place.tensor.shape) > 1}
    if "BF16" in types:
        return "bfloat16"
    return "float32" if types == {"F32"} else "float16"


def _notes(places: Mapping[str, _Place], blobs: Mapping[str, bytes]) -> list[str]:
    rebuilt = " and ".join(name for name in ("config.json", "tokenizer.json") if name in blobs)
    notes = [f"Rebuilt from GGUF metadata: {rebuilt}."]
    counts = Counter(place.tensor.type_name for place in places.values())
    quantized = [
        f"{name} ({n} tensor{'s' if n > 1 else ''})" for name, n in counts.most_common() if name not in VALUE_DTYPES
    ]
    if quantized:
        notes.append(f"Quantized already, as {', '.join(quantized)}: what that quantization lost is not restored.")
    return notes
