"""Section 4.4 of docs/numerics.md: rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_forward.arithmetic import F32, f32

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """frequencies(length): of the n / 2 pairs, for a text of so many tokens. factor: of cosines and sines.

    long: the same for texts of more than `limit` tokens ("longrope"), by which their first tokens are rotated too.
    """

    frequencies: Callable[[int], F32]
    factor: float = 1.0
    limit: int = 0
    long: Rope | None = None
    cache: dict[int, tuple[F32, F32]] = field(default_factory=dict)

    def cos_sin(self, position: int) -> tuple[F32, F32]:
        if position not in self.cache:
            cos, sin = cos_sin((f32(position) * self.frequencies(position + 1)).astype(np.float64))
            self.cache[position] = cos.astype(f32) * f32(self.factor), sin.astype(f32) * f32(self.factor)
        return self.cache[position]

    def rotate(self, x: F32, position: int) -> F32:
        """x: (n_heads, head_dim)."""
        cos, sin = self.cos_sin(position)
        n = len(cos)
        a, b = x[:, :n], x[:, n : 2 * n]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[:, 2 * n :]], axis=1)


# ---- cosine and sine -----------------------------------------------------------------------------------------------

TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
HALF_PI_HIGH, HALF_PI_LOW = float.fromhex("0x1.921fb544p+0"), float.fromhex("0x1.0b4611a626331p-34")


def cos_sin(x: F64) -> tuple[F64, F64]:
    n = np.rint(x * TWO_OVER_PI)
    r = (x - n * HALF_PI_HIGH) - n * HALF_PI_LOW
    z = r * r
    s, c = np.zeros_like(x), np.zeros_like(x)
    for k in range(8, 0, -1):
        s = s * z + (-1) ** k / math.factorial(2 * k + 1)
        c = c * z + (-1) ** k / math.factorial(2 * k)
    s = r + r * z * s
    c = 1 + z * c
    quarter = n.astype(np.int64) & 3
    return np.choose(quarter, [c, -s, -c, s]), np.choose(quarter, [s, c, -s, -c])


# ---- frequencies ---------------------------------------------------------------------------------------------------


def plain(theta: float, n: int) -> list[float]:
    return [math.pow(theta, -2 * i / n) for i in range(n // 2)]


def llama3(f: float, settings: dict[str, Any]) -> float:
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    turns = settings["original_max_position_embeddings"] * f / (2 * math.pi)
    if turns > high:
        return f
    if turns < low:
        return f / settings["factor"]
    blend = (turns - low) / (high - low)
    return (1 - blend) * f / settings["factor"] + blend * f


def yarn(frequencies: list[float], theta: float, n: int, settings: dict[str, Any]) -> list[float]:
    def index_of(turns: float) -> float:
        original = settings["original_max_position_embeddings"]
        return n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(settings.get("beta_fast") or 32), index_of(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    if low == high:
        high += 0.001
    out = []
    for i, f in enumerate(frequencies):
        share = min(max((i - low) / (high - low), 0), 1)
        out.append(f / settings["factor"] * share + f * (1 - share))
    return out


def yarn_factor(settings: dict[str, Any]) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(settings["factor"]) + 1 if settings["factor"] > 1 else 1.0

    weights = settings.get("mscale"), settings.get("mscale_all_dim")
    found = of(weights[0]) / of(weights[1]) if weights[0] and weights[1] else of(1.0)
    return settings.get("attention_factor") or found


def longrope_factor(settings: dict[str, Any], original: int, max_positions: int) -> float:
    factor = settings.get("factor") or max_positions / original
    found = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return settings.get("attention_factor") or found


def make_rope(settings: dict[str, Any], head_dim: int, max_positions: int) -> Rope:
    """settings: an object `rope_parameters`."""
    theta, kind = settings["rope_theta"], settings.get("rope_type", "default")
    n = int(head_dim * settings.get("partial_rotary_factor", 1.0))
    frequencies = plain(theta, n)
    original = settings.get("original_max_position_embeddings") or max_positions

    def fixed(values: list[float]) -> Callable[[int], F32]:
        rounded = np.array(values).astype(f32)
        return lambda length: rounded

    if kind == "dynamic":

        def of_length(length: int) -> F32:
            if length <= max_positions:
                return np.array(frequencies).astype(f32)
            growth = settings["factor"] * length / max_positions - (settings["factor"] - 1)
            return np.array(plain(theta * math.pow(growth, n / (n - 2)), n)).astype(f32)

        return Rope(of_length)
    if kind == "longrope":
        factor = longrope_factor(settings, original, max_positions)
        short, long = (
            fixed([f / g for f, g in zip(frequencies, settings[key], strict=True)])
            for key in ("short_factor", "long_factor")
        )
        return Rope(short, factor, limit=original, long=Rope(long, factor))
    if kind == "linear":
        return Rope(fixed([f / settings["factor"] for f in frequencies]))
    if kind == "llama3":
        return Rope(fixed([llama3(f, settings) for f in frequencies]))
    if kind == "yarn":
        return Rope(fixed(yarn(frequencies, theta, n, settings)), yarn_factor(settings))
    assert kind == "default", kind
    return Rope(fixed(frequencies))
