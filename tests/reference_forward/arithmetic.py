"""Sections 0, 4.1 and 4.2 of docs/numerics.md: fma, sums over a row, RMSNorm, exp, tanh, soft caps. All float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
f32 = np.float32


def hexadecimal(text: str) -> np.float32:
    """A float32 constant as the page writes it; exact."""
    value = float.fromhex(text)
    assert float(f32(value)) == value
    return f32(value)


# ---- 0 Words -------------------------------------------------------------------------------------------------------


def fma(a: Any, b: Any, c: Any) -> F32:
    """a * b + c of float32, rounded once, half to even.

    The product of two float32 is exact in float64. The sum is rounded to odd in float64: of the two numbers next to an
    inexact one, to that whose last bit is set. Rounding it to float32 then rounds the exact sum (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = np.asarray(np.add(product, c, dtype=np.float64))
    # TwoSum (Knuth): total + error is the exact sum
    other = total - product
    error = (product - (total - other)) + (np.asarray(c, np.float64) - other)
    bits = total.view(np.int64).copy()
    to_odd = (np.abs(error) > 0) & (bits & 1 == 0)  # a NaN is not above 0
    away = (error > 0) == (total > 0)  # from zero: the next bits up
    bits += np.where(to_odd, np.where(away, 1, -1), 0)
    return bits.view(np.float64).astype(f32)


# ---- 4.1 Sums and norms --------------------------------------------------------------------------------------------


def lanes(x: F32) -> F32:
    """(..., n) -> (..., n / 16, 16), zeros behind the last one."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)]
    return np.pad(x, padding).reshape(*x.shape[:-1], -1, 16)


def tree(sums: F32) -> F32:
    """(..., 16) -> (...): lanes 0..7 plus 8..15, then 0..3 plus 4..7, and so on."""
    for width in (8, 4, 2, 1):
        sums = sums[..., :width] + sums[..., width : 2 * width]
    return sums[..., 0]


def sum16(x: F32) -> F32:
    """Sum over the last axis."""
    rows = lanes(x)
    sums = np.zeros((*rows.shape[:-2], 16), f32)
    for i in range(rows.shape[-2]):
        sums = sums + rows[..., i, :]
    return tree(sums)


def rmsnorm(x: F32, weight: F32, eps: float) -> F32:
    """Over the last axis, whose length is that of weight."""
    rows = lanes(x)
    squares = np.zeros((*rows.shape[:-2], 16), f32)
    for i in range(rows.shape[-2]):
        squares = fma(rows[..., i, :], rows[..., i, :], squares)
    r = f32(1) / np.sqrt(tree(squares) / f32(x.shape[-1]) + f32(eps))
    return x * r[..., None] * weight


# ---- 4.2 exp, tanh, soft caps --------------------------------------------------------------------------------------

LOW, HIGH = hexadecimal("-0x1.5d3334p+6"), f32(88)
MAGIC = f32(2**23 + 2**22)
LOG2_E = hexadecimal("0x1.715476p+0")
MINUS_LN2_HIGH, MINUS_LN2_LOW = hexadecimal("-0x1.62e400p-1"), hexadecimal("-0x1.7f7d1cp-20")
COEFFICIENTS = tuple(
    hexadecimal(c)
    for c in (
        "0x1.a0d2cep-13", "0x1.6e879cp-10", "0x1.11121p-7", "0x1.555382p-5", "0x1.555554p-3", "0x1p-1",
    )
)  # fmt: skip


def exp(x: F32) -> F32:
    x = np.asarray(x, f32)
    c = np.where(x < LOW, LOW, x)
    c = np.where(c > HIGH, HIGH, c)
    n = fma(c, LOG2_E, MAGIC) - MAGIC
    r = fma(n, MINUS_LN2_HIGH, c)
    r = fma(n, MINUS_LN2_LOW, r)
    p = np.broadcast_to(COEFFICIENTS[0], x.shape)
    for coefficient in COEFFICIENTS[1:]:
        p = fma(p, r, coefficient)
    p = fma(p, r * r, r + f32(1))
    power = np.ldexp(f32(1), np.where(np.isnan(n), 0, n).astype(np.int32))
    return np.where(x < LOW, f32(0), p * power)


def tanh(x: F32) -> F32:
    return f32(1) - f32(2) / (exp(x + x) + f32(1))


def softcap(x: F32, cap: float) -> F32:
    return f32(cap) * tanh(x / f32(cap)) if cap else x
