"""Source: a checkpoint as a set of named tensors, read one at a time (or a block of rows at a time)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.codes import VALUE_DTYPES, pack_matrix
from w4conv.scheme import TILE_ROWS, QuantScheme

TOOL_TEMPLATE: Final = "chat_template.tool_use.jinja"  # in a directory: additional_chat_templates/tool_use.jinja
PLAIN: Final = ("F16", "BF16", "F32")
BLOCK_NBYTES: Final = 1 << 25  # of values held at a time


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of a matrix in its `coding`; of a stack, matrices, with one axis more.

    codes: (n_rows, n_columns) uint8 0..15, or int8. scales: (n_rows, n_groups) float16 or float32.
    zero_points: (n_rows, n_groups) uint8 for int4z, else None. offsets: like scales for int4o, else None.
    """

    codes: npt.NDArray[np.generic]
    scales: npt.NDArray[np.generic]
    zero_points: npt.NDArray[np.uint8] | None = None
    offsets: npt.NDArray[np.generic] | None = None

    def matrix(self, i: int, rows: slice = slice(None)) -> CodedRows:
        """Some rows of one matrix of a stack."""
        zeros, offsets = self.zero_points, self.offsets
        return CodedRows(
            self.codes[i, rows],
            self.scales[i, rows],
            None if zeros is None else zeros[i, rows],
            None if offsets is None else offsets[i, rows],
        )

    def stacked(self, n_rows: int) -> CodedRows:
        """A matrix as a stack of matrices of so many rows."""

        def cut(a: Any) -> Any:
            return None if a is None else a.reshape(-1, n_rows, a.shape[1])

        return CodedRows(cut(self.codes), cut(self.scales), cut(self.zero_points), cut(self.offsets))

    def joined(self, other: CodedRows, join: Callable[[Any, Any], Any]) -> CodedRows:
        """Each array joined with that of the other."""

        def both(a: Any, b: Any) -> Any:
            return None if a is None else join(a, b)

        return CodedRows(
            both(self.codes, other.codes),
            both(self.scales, other.scales),
            both(self.zero_points, other.zero_points),
            both(self.offsets, other.offsets),
        )

    def parts(self, scheme: QuantScheme) -> dict[str, npt.NDArray[np.generic]]:
        """As the container has them."""
        return pack_matrix(scheme, self.codes, self.scales, self.zero_points, self.offsets)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a checkpoint, under its Hugging Face name.

    dtype: "F16", "BF16" or "F32": what `Source.read` returns.
    stored_as: the checkpoint's own word for its coding, such as "F16" or "Q4_1".
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
        """Whether the checkpoint itself holds rounded values."""
        return self.stored_as not in PLAIN


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
        row_nbytes = max(n_columns * VALUE_DTYPES[stored.dtype.lower()].itemsize, 1)
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
