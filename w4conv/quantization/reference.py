"""Nearest codes in numpy: the definition that native code equals bit for bit (w4-codes 6)."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F32Array
from w4conv.codes import CODEBOOKS, pad_code
from w4conv.scheme import QuantScheme

Scalar = TypeVar("Scalar", bound=np.generic)

# The codes of each codebook by rising level. A value in the middle of two levels takes the lower one.
ORDERS = {"nf4": tuple(range(16)), "fp4": (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)}


class Quantized(NamedTuple):
    """q: (n_rows, n_columns) int8, the signed code; scales: (n_rows, n_groups) float16."""

    q: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float16]


def quantize_rtn(values: npt.NDArray[np.float32], scheme: QuantScheme) -> Quantized:
    """Symmetric int4 or int8 of (n_rows, n_columns) float32, n_columns > 0.

    Per group: the signed extreme maps to -2^(bits-1), so scale = extreme / -2^(bits-1), rounded to FP16 before codes
    are computed; where the largest and the smallest value tie in magnitude, the smallest is the extreme.
    q = values / scale in float32, rounded half to even, clipped to [-2^(bits-1), 2^(bits-1) - 1]. A scale of zero gives
    codes of zero.

    Raises FloatingPointError for NaN, infinity, or a scale beyond FP16.
    """
    if scheme.kind not in ("int4", "int8") or scheme.scale_dtype != "f16":
        raise ValueError(f"{scheme} is not a symmetric integer scheme with FP16 scales")
    groups = _groups(values, scheme)
    largest, smallest = groups.max(axis=2), groups.min(axis=2)
    extreme = np.where(largest > -smallest, largest, smallest)
    top = np.float32(1 << (scheme.bits - 1))
    scales = _as_f16(extreme / -top)
    divisor = scales.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.rint(groups / divisor)
    q = np.where(divisor == 0, 0, np.clip(q, -top, top - 1)).astype(np.int8)
    return Quantized(_rows(q, values.shape[1]), scales)


class QuantizedCodes(NamedTuple):
    """codes: (n_rows, n_columns) uint8, 0..15; scales: (n_rows, n_groups) float16; zero_points: uint8 of that shape for
    int4z, else None."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    zero_points: npt.NDArray[np.uint8] | None


def quantize_codes(values: F32Array, scheme: QuantScheme) -> QuantizedCodes:
    """nf4, fp4 or int4z of (n_rows, n_columns) float32, n_columns > 0.

    Codebooks: scale = largest magnitude of the group, rounded to FP16; x * (1 / scale), both rounded to float32, takes
    the nearest level, of two equally near the lower. Where the largest magnitude is exact in FP16, the codes are those
    of bitsandbytes.
    int4z: with low and high the extremes of the group and zero, scale = (high - low) / 15, rounded to FP16; the zero
    point is -low / scale, the code x / scale plus the zero point, each rounded half to even and limited to 0..15.
    A scale of zero gives levels of zero (and the zero point 8).

    Raises FloatingPointError for NaN, infinity, or a scale beyond FP16.
    """
    if scheme.kind not in ("nf4", "fp4", "int4z") or scheme.scale_dtype != "f16":
        raise ValueError(f"{scheme} is neither a codebook nor int4z with FP16 scales")
    groups = _groups(values, scheme)
    if scheme.kind == "int4z":
        low, high = groups.min(axis=2, initial=0), groups.max(axis=2, initial=0)
        with np.errstate(over="ignore"):
            scales = _as_f16((high - low) / np.float32(15))
        divisor = scales.astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            points = np.clip(np.rint(-low / divisor), 0, 15)
            codes = np.clip(np.rint(groups / divisor[..., None]) + points[..., None], 0, 15)
        zero_points = np.where(divisor == 0, pad_code(scheme), points).astype(np.uint8)
    else:
        order = np.array(ORDERS[scheme.kind])
        levels = CODEBOOKS[scheme.kind][order]
        scales = _as_f16(np.abs(groups).max(axis=2))
        divisor = scales.astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = groups * (1 / divisor)[..., None]
        codes = order[np.searchsorted((levels[:-1] + levels[1:]) / 2, scaled, side="left")].astype(np.float32)
        zero_points = None
    codes = np.where(divisor[..., None] == 0, pad_code(scheme), codes).astype(np.uint8)
    return QuantizedCodes(_rows(codes, values.shape[1]), scales, zero_points)


def _groups(values: F32Array, scheme: QuantScheme) -> F32Array:
    """(n_rows, n_groups, group_size); zeros fill the last group, which change neither of its extremes but to zero."""
    if not np.isfinite(values).all():
        raise FloatingPointError("a value is NaN or infinite")
    n_rows, n_columns = values.shape
    group_size = scheme.group_size or n_columns
    n_groups = scheme.n_groups(n_columns)
    padded = np.zeros((n_rows, n_groups * group_size), np.float32)
    padded[:, :n_columns] = values
    return padded.reshape(n_rows, n_groups, group_size)


def _rows(groups: npt.NDArray[Scalar], n_columns: int) -> npt.NDArray[Scalar]:
    """Inverse of `_groups`."""
    return np.ascontiguousarray(groups.reshape(len(groups), -1)[:, :n_columns])


def _as_f16(scales: F32Array) -> npt.NDArray[np.float16]:
    """Half to even; a scale of zero is +0."""
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16)
    if np.isinf(rounded).any():
        raise FloatingPointError("a scale does not fit FP16")
    rounded[rounded == 0] = 0
    return rounded
