"""Source: a checkpoint as a set of named tensors, read one at a time (or a block of rows at a time)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import VALUE_DTYPES
from w4conv.codes import pack_matrix
from w4conv.scheme import TILE_ROWS, QuantScheme

TOOL_TEMPLATE: Final = "chat_template.tool_use.jinja"  # in a directory: additional_chat_templates/tool_use.jinja
BLOCK_NBYTES: Final = 1 << 25  # of values held at a time


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of a matrix in its `coding`; of a stack, matrices, with one axis more.

    codes: (n_rows, n_columns) uint8 0..15, or int8. scales: (n_rows, n_groups) float16, float32, or int8 for schemes
    of two levels. zero_points: (n_rows, n_groups) uint8 for int4z, else None. offsets: like scales for int4o and int8o,
    else None. super_scales, super_offsets: (n_rows, n_supers) float16 for schemes of two levels, else None.
    """

    codes: npt.NDArray[np.generic]
    scales: npt.NDArray[np.generic]
    zero_points: npt.NDArray[np.uint8] | None = None
    offsets: npt.NDArray[np.generic] | None = None
    super_scales: npt.NDArray[np.float16] | None = None
    super_offsets: npt.NDArray[np.float16] | None = None

    def _arrays(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]

    def _each(self, change: Callable[[Any], Any]) -> CodedRows:
        changed: list[Any] = [None if array is None else change(array) for array in self._arrays()]
        return CodedRows(*changed)

    def matrix(self, i: int, rows: slice = slice(None)) -> CodedRows:
        """Some rows of one matrix of a stack."""
        return self._each(lambda array: array[i, rows])

    def stacked(self, n_rows: int) -> CodedRows:
        """A matrix as a stack of matrices of so many rows."""
        return self._each(lambda array: array.reshape(-1, n_rows, array.shape[1]))

    def joined(self, other: CodedRows, join: Callable[[Any, Any], Any]) -> CodedRows:
        """Each array joined with that of the other."""
        pairs = zip(self._arrays(), other._arrays(), strict=True)
        joined: list[Any] = [None if a is None else join(a, b) for a, b in pairs]
        return CodedRows(*joined)

    def parts(self, scheme: QuantScheme) -> dict[str, npt.NDArray[np.generic]]:
        """As the container has them."""
        return pack_matrix(scheme, *self._arrays())


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a checkpoint, under its Hugging Face name.

    dtype: "F16", "BF16" or "F32": what `Source.read` returns.
    stored_as: the checkpoint's name for its coding, such as "F16" or "Q4_1".
    coding: the scheme in which `Source.read_coded` gives a matrix exactly as the checkpoint has it; None where it has
        plain values, or codes that no scheme holds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored_as: str
    coding: QuantScheme | None = None
    nbytes: int | None = None  # with scales, where the checkpoint's own word does not say it

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint holds quantized values."""
        return self.stored_as not in VALUE_DTYPES


class Source(ABC):
    """A checkpoint opened for reading. Opening reads headers only; `read` touches just the bytes it returns.

    kind: "safetensors", "gguf", or of a quantized Hugging Face directory its method, such as "gptq".
    path: what the user named.
    files: the weight files and the sidecar files used, for digests, in a fixed order.
    tensors: name -> SourceTensor, names as in Hugging Face checkpoints whatever the file format.
    blobs: name -> bytes of what travels verbatim: "config.json" always; "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.tool_use.jinja" where
        they exist.
    notes: one sentence each, of what the user should know (files left aside, parts rebuilt, tensors ignored).
    warnings: those of the notes that say where a declaration and a value contradict each other.
    gptq_zero15: how a stored zero point of 15 was read, where the user had to say it.
    """

    kind: str
    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, SourceTensor]
    blobs: Mapping[str, bytes]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    gptq_zero15: int | None = None

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.generic]:
        """Values of one tensor, C order, original shape: float16, float32, or uint16 holding BF16 bits.

        rows: a slice of the first axis without a step; only its bytes are read. Raises InputError when the file has
        shrunk since it was opened.
        """

    def read_coded(self, name: str, rows: slice) -> CodedRows:
        """Some rows of a matrix, or matrices of a stack, whose `coding` is not None, as codes and scales that mean just
        what `read` gives."""
        raise NotImplementedError(f"{self.kind}: {name} has no coding")

    def row_blocks(self, name: str) -> Iterator[slice]:
        """Slices of the rows of a matrix, or of each matrix of a stack: whole tiles of bounded size."""
        stored = self.tensors[name]
        n_rows, n_columns = stored.shape[-2:]
        row_nbytes = max(n_columns * VALUE_DTYPES[stored.dtype].itemsize, 1)
        step = max(BLOCK_NBYTES // row_nbytes // TILE_ROWS, 1) * TILE_ROWS
        return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))

    def rename(self, old: str, new: str) -> None:
        """Give a tensor another name."""
        raise NotImplementedError(f"{self.kind}: tensors keep their names")

    @abstractmethod
    def close(self) -> None:
        """Release the mappings; arrays that `read` returned stay valid."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
