"""Shared by the 4-bit formats of Hugging Face directories: which tensors stay coded, in which groups, as words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import Array
from w4conv.container import TensorInfo
from w4conv.errors import InputError, UsageError
from w4conv.exports.model import ExportModel, Scales
from w4conv.exports.plan import Exported, FloatWriter, Options, Output
from w4conv.models.spec import TensorSpec
from w4conv.sources.packed.mxfp4 import BIAS, SIGN

Words = npt.NDArray[np.uint32]

GROUP_MULTIPLE: Final = 32  # groups of all schemes are multiples of it, so repeating scales fits any row that is


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix that stays coded. module: its name without ".weight"."""

    module: str
    info: TensorInfo

    @property
    def bits(self) -> int:
        return self.info.scheme.bits


def can_stay(info: TensorInfo, kinds: Sequence[str], *, row_multiple: int = 1) -> bool:
    """Whether a tensor is a matrix of one of `kinds` with whole groups and a multiple of `row_multiple` rows."""
    if len(info.shape) != 2 or info.scheme.kind not in kinds or info.scheme.scale_dtype != "f16" or info.scheme.minor:
        return False
    return info.shape[1] % GROUP_MULTIPLE == 0 and info.shape[0] % row_multiple == 0


def coded_linears(model: ExportModel, kinds: Sequence[str], *, row_multiple: int = 1) -> list[Coded]:
    """The linear layers that stay coded. Raises InputError when there is none."""
    found = [
        Coded(module_of(tensor), info)
        for tensor, info in model.tensors
        if tensor.role == "linear" and can_stay(info, kinds, row_multiple=row_multiple)
    ]
    if not found:
        raise InputError(
            f"{model.container.path}: no linear layer is in a scheme that this format holds ({', '.join(kinds)} with "
            "FP16 scales and rows of a multiple of 32). Export to safetensors or gguf"
        )
    return found


def module_of(tensor: TensorSpec) -> str:
    return tensor.name.removesuffix(".weight")


def common_group(coded: Sequence[Coded]) -> int:
    """The largest group that divides all groups and rows; 0 when every tensor has one group a row."""
    if all(c.info.scheme.group_size == 0 for c in coded):
        return 0
    return math.gcd(*(c.info.shape[1] for c in coded), *(c.info.scheme.group_size for c in coded))


def spread(per_group: Array, info: TensorInfo, group_size: int) -> Array:
    """(n_rows, n_groups) of the container -> (n_rows, n_columns / group_size), each scale repeated as needed."""
    n_columns = info.shape[-1]
    if group_size == 0:
        return per_group
    repeats = (info.scheme.group_size or n_columns) // group_size
    return np.repeat(per_group, repeats, axis=1)[:, : n_columns // group_size]


def float_dtype(options: Options) -> str:
    """Type of what does not stay coded. BF16 would round the scales of what does."""
    if options.dtype == "bf16":
        raise UsageError(
            f"dtype bf16 would round the FP16 scales when an engine loads {options.to}. Choose f16 (default) or f32"
        )
    return options.dtype or "f16"


def export_all(
    model: ExportModel, options: Options, coded: Sequence[Coded], encode: Callable[[Coded], Exported]
) -> list[Exported]:
    """Every tensor of the model in its order: `coded` by `encode`, the others as floats."""
    floats = FloatWriter(model, float_dtype(options))
    by_name = {c.info.name: c for c in coded}
    return [encode(by_name[info.name]) if info.name in by_name else floats.export(info) for _, info in model.tensors]


def dense_linears(model: ExportModel, coded: Sequence[Coded]) -> list[str]:
    """Modules of linear layers, and of routers to experts, that do not stay coded."""
    names = {c.module for c in coded}
    return [module_of(t) for t, _ in model.tensors if t.role in ("linear", "router") and module_of(t) not in names]


def words(codes: npt.NDArray[np.uint8], bits: int) -> Words:
    """(..., n) codes of `bits` bits -> (..., ceil(n * bits / 32)) uint32, the first code lowest, missing ones zero."""
    per_word = 32 // bits
    n = codes.shape[-1]
    padded = np.zeros((*codes.shape[:-1], -(-n // per_word) * per_word), np.uint32)
    padded[..., :n] = codes
    grouped = padded.reshape(*codes.shape[:-1], -1, per_word)
    out = np.zeros(grouped.shape[:-1], np.uint32)
    for i in range(per_word):
        out |= grouped[..., i] << np.uint32(bits * i)
    return out


def unsigned(codes: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Codes as 0 .. 2^bits - 1: those of 4 bits as they are, int8 with 128 added."""
    if bits == 4:
        return codes.view(np.uint8)
    return np.ascontiguousarray(codes).view(np.uint8) ^ np.uint8(0x80)


def offsets(scales: Scales, info: TensorInfo) -> npt.NDArray[np.float16] | None:
    """What is added to code * scale in each group, as float16: -zero * scale, zero being the code of the value 0, or
    the offsets of int4o. None where one is no float16."""
    if scales.offsets is not None:
        return scales.offsets.astype(np.float16) if info.scheme.scale_dtype == "f16" else None
    zeros = np.float32(128) if info.scheme.kind == "int8" else scales.zero_points.astype(np.float32)
    exact: npt.NDArray[np.float32] = -zeros * scales.scales.astype(np.float32)
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float16)
    return rounded if np.array_equal(rounded.astype(np.float32), exact) else None


def exponents(scales: Array) -> npt.NDArray[np.uint8] | None:
    """Of scales that are powers of two, as E8M0; a scale of zero has none, and gets 0. None where one is neither."""
    fractions, found = np.frexp(scales.astype(np.float32))
    if not np.isin(fractions, (0.0, 0.5)).all():
        return None
    return np.where(fractions == 0, 0, found - 1 + BIAS).astype(np.uint8)


def signed_zeros(codes: npt.NDArray[np.uint8], scales: Array) -> npt.NDArray[np.uint8]:
    """(n_rows, n_groups, columns) codes of e2m1; where the scale is 0, which no exponent says, zeros of their sign."""
    return np.where(scales[..., None] != 0, codes, codes & np.uint8(SIGN)).astype(np.uint8)


def output(name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], Array | Iterator[Array]]) -> Output:
    """An Output whose array, or blocks of it, `make` gives when it is due."""
    itemsize = {"I32": 4, "U32": 4, "I64": 8, "F16": 2, "U8": 1}[dtype]

    def blocks() -> Iterator[Array]:
        made = make()
        return iter((made,)) if isinstance(made, np.ndarray) else made

    return Output(name, dtype, shape, math.prod(shape) * itemsize, blocks)
