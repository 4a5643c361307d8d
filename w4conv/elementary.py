"""exp, log, cosine and sine, and sums, in float64: the same bits on every machine.

numpy's differ in last bits with the vector instructions of the processor, and libm's with the library. These are made
of operations that IEEE 754 defines to the last bit: sums, products and quotients, one after another.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F64Array

# ln 2 in two parts; the first has 33 bits, so that its products with whole numbers up to 2^20 are exact.
_LN2_HIGH: Final = float.fromhex("0x1.62e42feep-1")
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
_STEPS: Final = 512  # of an octave
_PER_STEP: Final = float.fromhex("0x1.71547652b82fep+0") * _STEPS  # 1 / ln 2
_ROUNDS: Final = float(3 << 51)  # adding it rounds to a whole number, half to even, which the low bits then hold
_LEAST, _MOST = -708.0, 709.78  # beyond, a power of two leaves the normal range
_BLOCK: Final = 4096  # values whose intermediate results stay in the cache


def _powers_of_two() -> npt.NDArray[np.int64]:
    """The bits of 2^(i / _STEPS), i = 0.._STEPS - 1, from integers of 200 binary places."""
    one = 1 << 200
    root = 2 * one
    for _ in range(_STEPS.bit_length() - 1):
        root = math.isqrt(root * one)
    powers = [one]
    while len(powers) < _STEPS:
        powers.append(powers[-1] * root // one)
    return np.array([power / one for power in powers]).view(np.int64)  # quotients of integers are rounded once


_POWERS: Final = _powers_of_two()


def exp(x: npt.ArrayLike) -> F64Array:
    """Error below one unit in the last place. 0 below -708, infinity above 709.78."""
    x = np.asarray(x, np.float64, order="C")
    out = np.empty(x.shape)
    flat_in, flat_out = x.reshape(-1), out.reshape(-1)
    for start in range(0, x.size, _BLOCK):
        part, to = flat_in[start : start + _BLOCK], flat_out[start : start + _BLOCK]
        if part.min() >= _LEAST and part.max() <= _MOST:
            _exp(part, to)
        else:  # or there is a NaN
            _exp(np.clip(part, _LEAST, _MOST), to)
            to[part < _LEAST] = 0.0
            to[part > _MOST] = np.inf
    return out


def _exp(x: F64Array, out: F64Array) -> None:
    # x = n ln 2 / 512 + r; exp(x) = 2^(n / 512) (1 + p), p = r + r^2 / 2 + r^3 / 6 + r^4 / 24
    n = x * _PER_STEP
    n += _ROUNDS
    bits = n.view(np.int64).copy()
    n -= _ROUNDS
    r = x - n * (_LN2_HIGH / _STEPS)
    n *= _LN2_LOW / _STEPS
    r -= n
    p = r * (1 / 24)
    p += 1 / 6
    p *= r
    p += 1 / 2
    p *= r
    p *= r
    p += r
    power = _POWERS[bits & (_STEPS - 1)]
    bits >>= _STEPS.bit_length() - 1
    bits <<= 52
    power += bits
    p *= power.view(np.float64)
    np.add(power.view(np.float64), p, out=out)


_LOG: Final = tuple(1 / (2 * i + 1) for i in range(11, 0, -1))


def log(x: float) -> float:
    """Of a number above 0; error below two units in the last place."""
    m, n = math.frexp(x)
    if m < math.sqrt(0.5):
        m, n = 2 * m, n - 1
    # ln m = 2 artanh f, f = (m - 1) / (m + 1)
    f = (m - 1) / (m + 1)
    z = f * f
    p = 0.0
    for coefficient in _LOG:
        p = (p + coefficient) * z
    return n * _LN2_HIGH + (2 * f + (2 * f * p + n * _LN2_LOW))


_TWO_OVER_PI: Final = float.fromhex("0x1.45f306dc9c883p-1")
_HALF_PI_HIGH: Final = float.fromhex("0x1.921fb544p+0")
_HALF_PI_LOW: Final = float.fromhex("0x1.0b4611a626331p-34")


def cos_sin(x: npt.ArrayLike) -> tuple[F64Array, F64Array]:
    """Of |x| < 2^20; absolute error below 1e-14."""
    x = np.asarray(x, np.float64)
    n = np.rint(x * _TWO_OVER_PI)
    r = (x - n * _HALF_PI_HIGH) - n * _HALF_PI_LOW
    z = r * r
    s, c = np.zeros(x.shape), np.zeros(x.shape)
    for i in range(8, 0, -1):
        s = s * z + (-1) ** i / math.factorial(2 * i + 1)
        c = c * z + (-1) ** i / math.factorial(2 * i)
    s, c = r + r * z * s, 1 + z * c
    quarter = n.astype(np.int64) & 3
    return np.choose(quarter, [c, -s, -c, s]), np.choose(quarter, [s, c, -s, -c])


def total(x: npt.NDArray[np.floating]) -> float:
    """Sum of all values in float64, one after another."""
    return float(np.cumsum(x, dtype=np.float64)[-1]) if x.size else 0.0


def mean(x: F64Array) -> float:
    """The sum is rounded once. Infinite, or not a number, where a value is, or where the sum is beyond float64."""
    try:
        return math.fsum(x.ravel().tolist()) / x.size
    except (OverflowError, ValueError):
        with np.errstate(invalid="ignore", over="ignore"):
            return total(x) / x.size


def variance(x: F64Array) -> float:
    """Mean square of the differences from the mean."""
    return mean(np.square(x - mean(x)))
