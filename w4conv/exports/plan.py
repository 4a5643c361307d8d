"""The plan of an export, made before its first byte is written."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from w4conv import codes
from w4conv.arrays import VALUE_DTYPES, Array, F32Array
from w4conv.container import TensorInfo
from w4conv.errors import InputError
from w4conv.exports.model import ExportModel, row_blocks
from w4conv.progress import Progress

FLOAT_WORDS = {word.lower(): word for word in VALUE_DTYPES}
_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": math.inf}


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options. dtype: None for the default of the format."""

    to: str
    dtype: str | None
    max_shard_nbytes: int


@dataclass(slots=True)
class Rounding:
    """Largest difference that rounding made to a tensor, found while it is written; None until then."""

    max_abs_error: float | None = None

    def add(self, before: F32Array, after: F32Array) -> None:
        error = float(np.max(np.abs(before - after), initial=0.0))
        self.max_abs_error = max(self.max_abs_error or 0.0, error)


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of the output. dtype: the format's word. blocks: gives its bytes in order, a block at a time."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: Callable[[], Iterator[Array]]


@dataclass(frozen=True, slots=True)
class Exported:
    """How one tensor of the container is exported.

    becomes: for people, such as "Q4_0" or "4-bit/g64". rounding: None when it is exact by construction.
    """

    info: TensorInfo
    becomes: str
    outputs: tuple[Output, ...]
    rounding: Rounding | None = None


@dataclass(frozen=True, slots=True)
class FileSize:
    """A file of the output."""

    name: str
    nbytes: int


class Plan(ABC):
    """An export ready to be written. notes: a sentence each of what the user should know."""

    format: str
    architecture: str
    tensors: Sequence[Exported]
    files: Sequence[FileSize]
    notes: Sequence[str]

    @abstractmethod
    def check(self, out: Path, *, overwrite: bool) -> None:
        """Raise OutputError when `out` cannot take the files."""

    @abstractmethod
    def write(self, out: Path, *, overwrite: bool, progress: Progress) -> None:
        """Write everything; nothing is left behind when it fails."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


@dataclass(slots=True)
class FloatWriter:
    """Tensors of the container as floats of one type, with the rounding measured."""

    model: ExportModel
    dtype: str
    itemsize: int = field(init=False)

    def __post_init__(self) -> None:
        self.itemsize = VALUE_DTYPES[FLOAT_WORDS[self.dtype]].itemsize

    def export(
        self,
        info: TensorInfo,
        *,
        name: str | None = None,
        order: npt.NDArray[np.int64] | None = None,
        offset: float = 0.0,
        transposed: bool = False,
    ) -> Exported:
        """The whole tensor dequantized. order: rows of the container in the order of the output, or None. offset: added
        to a vector's values. transposed: each matrix of a stack, inputs first."""
        rounding = Rounding() if offset else self.rounding(info)
        word = FLOAT_WORDS[self.dtype]
        nbytes = info.n_values * self.itemsize
        shape = (*info.shape[:-2], info.shape[-1], info.shape[-2]) if transposed else info.shape

        def blocks() -> Iterator[Array]:
            made = self._blocks(info, order, offset, rounding)
            return (np.swapaxes(block, -2, -1) for block in made) if transposed else made

        output = Output(name or info.name, word, shape, nbytes, blocks)
        return Exported(info, word, (output,), rounding)

    def rounding(self, info: TensorInfo) -> Rounding | None:
        """Where the rounding of a tensor is noted; None where nothing is rounded."""
        return None if self.dtype in ("f32", info.scheme.kind) else Rounding()

    def stack_blocks(
        self, info: TensorInfo, order: npt.NDArray[np.int64], rounding: Rounding | None
    ) -> Iterator[Array]:
        """Some rows of each matrix of a stack, of each row of a matrix some values, or of a vector."""
        if len(info.shape) < 2:
            yield self._rounded(info, self.model.container.dequantize(info.name)[order], rounding)
            return
        for rows in row_blocks(info):
            yield self._rounded(info, self.model.container.dequantize(info.name, rows)[:, order], rounding)

    def _blocks(
        self, info: TensorInfo, order: npt.NDArray[np.int64] | None, offset: float, rounding: Rounding | None
    ) -> Iterator[Array]:
        if len(info.shape) < 2 or order is not None:
            before = self.model.container.dequantize(info.name)
            values = before + np.float32(offset)
            if rounding is not None and offset:
                rounding.add(before, values - np.float32(offset))
            yield self._rounded(info, values if order is None else values[order], rounding)
            return
        for rows in row_blocks(info):
            yield self._rounded(info, self.model.container.dequantize(info.name, rows), rounding)

    def _rounded(self, info: TensorInfo, values: F32Array, rounding: Rounding | None) -> Array:
        largest = np.max(np.abs(values), initial=0.0)
        if not largest <= _LARGEST[self.dtype] or math.isinf(largest):  # NaN too
            raise InputError(
                f"{self.model.container.path}: {info.name}: a value of magnitude {largest} does not fit "
                f"{FLOAT_WORDS[self.dtype]}. Choose --dtype f32, or verify the container"
            )
        if self.dtype == "f32":
            out: Array = values
            back = values
        elif self.dtype == "f16":
            out = values.astype(np.float16)
            back = out.astype(np.float32)
        else:
            bits = codes.f32_to_bf16(values)
            out, back = bits, codes.bf16_to_f32(bits)
        if rounding is not None:
            rounding.add(values, back)
        return out
