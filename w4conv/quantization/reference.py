"""Round-to-nearest quantization in numpy: the definition that native code equals bit for bit (w4-codes 6)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from w4conv.scheme import QuantScheme


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
    if not np.isfinite(values).all():
        raise FloatingPointError("a value is NaN or infinite")
    n_rows, n_columns = values.shape
    group_size = scheme.group_size or n_columns
    n_groups = scheme.n_groups(n_columns)
    padded = np.zeros((n_rows, n_groups * group_size), np.float32)
    padded[:, :n_columns] = values
    groups = padded.reshape(n_rows, n_groups, group_size)  # a zero changes neither extreme of its group but to zero

    largest, smallest = groups.max(axis=2), groups.min(axis=2)
    extreme = np.where(largest > -smallest, largest, smallest)
    top = np.float32(1 << (scheme.bits - 1))
    with np.errstate(over="ignore"):
        scales = (extreme / -top).astype(np.float16)
    if np.isinf(scales).any():
        raise FloatingPointError("a scale does not fit FP16")
    scales[scales == 0] = 0  # +0, also for groups of zeros and for scales that underflow

    divisor = scales.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.rint(groups / divisor)
    q = np.where(divisor == 0, 0, np.clip(q, -top, top - 1)).astype(np.int8)
    return Quantized(np.ascontiguousarray(q.reshape(n_rows, -1)[:, :n_columns]), scales)
