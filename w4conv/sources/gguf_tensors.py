"""Tensors of a GGUF file as tensors of the checkpoint: under Hugging Face names, in Hugging Face row order."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import VALUE_DTYPES
from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile
from w4conv.scheme import QuantScheme
from w4conv.sources.base import CodedRows, SourceTensor
from w4conv.sources.gguf_architectures import TOP_NAMES, Architecture
from w4conv.sources.gguf_blocks import coded, coding_of
from w4conv.sources.gguf_header import GgufHeader, GgufTensor
from w4conv.sources.reading import row_range, values

# What the gguf package can dequantize.
DEQUANTIZABLE: Final = {
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS",
}  # fmt: skip
BLOCK: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z_]+)\.(weight|bias)")
MAX_EXPERTS: Final = 1024


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint, as the file stores it: read in the checkpoint's order of rows.

    n_heads: heads whose rows are stored interleaved, 0 where the rows are in order. offset: what the file's values have
    over the checkpoint's. second: the tensor with the other half of the rows, of each matrix of a stack; alternating:
    the rows of the halves take turns.
    """

    file: MappedFile
    tensor: GgufTensor
    n_heads: int = 0
    offset: float = 0.0
    second: StoredTensor | None = None
    alternating: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        n_matrices, *rest = self.tensor.shape
        return self.tensor.shape if self.second is None else (n_matrices, 2 * rest[0], *rest[1:])

    def _whole(self, first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(n_matrices, n_rows / 2, ...) of both halves -> (n_matrices, n_rows, ...)."""
        if not self.alternating:
            return np.concatenate([first, second], axis=1)
        return np.stack([first, second], axis=2).reshape(first.shape[0], -1, *first.shape[2:])

    def has_values(self) -> bool:
        """Whether the values can be computed."""
        return self.tensor.type_name in VALUE_DTYPES or self.tensor.type_name in DEQUANTIZABLE

    def source_tensor(self, name: str) -> SourceTensor:
        """Its description, under the checkpoint's name."""
        type_name = self.tensor.type_name
        dtype = type_name if type_name in VALUE_DTYPES else "F32"
        codings = {half._coding() for half in (self, self.second) if half is not None}
        return SourceTensor(name, self.shape, dtype, type_name, codings.pop() if len(codings) == 1 else None)

    def read(self, rows: slice | None) -> npt.NDArray[np.generic]:
        """As `Source.read`."""
        first = self._read(rows)
        return first if self.second is None else self._whole(first, self.second._read(rows))

    def read_coded(self, rows: slice, coding: QuantScheme) -> CodedRows:
        """As `Source.read_coded`."""
        first = self._read_coded(rows, coding)
        return first if self.second is None else first.joined(self.second._read_coded(rows, coding), self._whole)

    def _read(self, rows: slice | None) -> npt.NDArray[np.generic]:
        tensor = self.tensor
        start, stop = row_range(rows, tensor.shape)
        shape = (stop - start, *tensor.shape[1:])
        raw = self._raw(start, stop)
        if self.offset:
            if tensor.type_name != "F32":
                raise InputError(f"{self.file.path}: {tensor.name}: a norm of type {tensor.type_name}, expected F32")
            weights: npt.NDArray[np.float32] = values(raw, "F32", shape).astype(np.float32) - np.float32(self.offset)
            return weights
        if tensor.type_name in VALUE_DTYPES:
            return values(raw, tensor.type_name, shape)
        return _dequantized(raw, tensor, shape, f"{self.file.path}: {tensor.name}")

    def _read_coded(self, rows: slice, coding: QuantScheme) -> CodedRows:
        shape = self.tensor.shape
        start, stop = row_range(rows, shape)
        raw = self._raw(start, stop).reshape((stop - start) * math.prod(shape[1:-1]), -1)
        found = coded(raw, self.tensor.type_name, coding, f"{self.file.path}: {self.tensor.name}")
        return found if len(shape) == 2 else found.stacked(shape[1])

    def _raw(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of the rows [start, stop) of the checkpoint."""
        tensor = self.tensor
        n_bytes = tensor.nbytes // tensor.shape[0]
        if self.n_heads and start < stop:
            # Rows of a head stay within the head, so the bytes touched are those of the heads that are touched.
            order = stored_rows(tensor.shape[0] // self.n_heads, start, stop)
            first, last = int(order.min()), int(order.max()) + 1
            raw = self.file.view(tensor.offset + first * n_bytes, (last - first) * n_bytes)
            return raw.reshape(last - first, n_bytes)[order - first].reshape(-1)
        return self.file.view(tensor.offset + start * n_bytes, (stop - start) * n_bytes)

    def _coding(self) -> QuantScheme | None:
        tensor = self.tensor
        if len(tensor.shape) not in (2, 3) or not tensor.nbytes:
            return None
        n_rows = math.prod(tensor.shape[:-1])
        row_nbytes = tensor.nbytes // n_rows

        def read(start: int, stop: int) -> npt.NDArray[np.uint8]:  # in whatever order
            return self.file.view(tensor.offset + start * row_nbytes, (stop - start) * row_nbytes)

        return coding_of(tensor.type_name, n_rows, row_nbytes, read)


def named_tensors(
    architecture: Architecture, header: GgufHeader, stored: Mapping[str, tuple[MappedFile, GgufTensor]]
) -> dict[str, StoredTensor]:
    """Tensors by their Hugging Face names. Raises InputError for a tensor that has none."""
    heads = {"attn_q": 0, "attn_k": 0}
    if architecture.interleaved:
        prefix = f"{architecture.name}.attention."
        heads["attn_q"] = header.integer(f"{prefix}head_count")
        heads["attn_k"] = header.integer(f"{prefix}head_count_kv", heads["attn_q"])
    out: dict[str, StoredTensor] = {}
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
        if not StoredTensor(file, tensor).has_values():
            raise InputError(f"{file.path}: {name}: its type {tensor.type_name} cannot be dequantized")
        if n_heads and (n_heads < 0 or tensor.shape[0] % (2 * n_heads)):
            raise InputError(f"{file.path}: {name}: {tensor.shape[0]} rows are not {n_heads} heads of an even size")
        if match and own:
            parts = [f"blk.{match[1]}.{part}" for part in architecture.joined[own]]
            if name == parts[0]:
                out[new] = _joined(header, stored, parts, alternating=architecture.alternating)
        elif "{}" in new:
            out |= {new.format(i): StoredTensor(file, one) for i, one in enumerate(_experts(file, tensor))}
        else:
            out[new] = StoredTensor(file, tensor, n_heads, architecture.norm_offset if "norm" in name else 0.0)
    if "model.embed_tokens.weight" not in out:
        raise InputError(f"{header.path}: token_embd.weight is missing")
    return out


def _joined(
    header: GgufHeader, stored: Mapping[str, tuple[MappedFile, GgufTensor]], parts: list[str], *, alternating: bool
) -> StoredTensor:
    """A tensor of the checkpoint out of one of the file, or of two."""
    first, *rest = parts
    file, tensor = stored[first]
    if not rest:
        return StoredTensor(file, tensor)
    other = stored.get(rest[0])
    if other is None or (other[1].shape, other[1].type_name) != (tensor.shape, tensor.type_name):
        state = "is missing" if other is None else f"is {other[1].type_name} of shape {other[1].shape}"
        raise InputError(
            f"{header.path}: {rest[0]} {state}, but {first} is {tensor.type_name} of shape {tensor.shape}; they have "
            "to be alike"
        )
    return StoredTensor(file, tensor, second=StoredTensor(*other), alternating=alternating)


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


def stored_rows(head_dim: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Rows of the file that hold the rows [start, stop) of the checkpoint.

    A file of the `llama` architecture stores the rows of a head as pairs (i, i + head_dim / 2), pair after pair; a
    Hugging Face checkpoint stores the first halves of all pairs, then the second.
    """
    head, row = np.divmod(np.arange(start, stop), head_dim)
    half = head_dim // 2
    return head * head_dim + np.where(row < half, 2 * row, 2 * (row - half) + 1)
