"""Rotary position embeddings: the settings in a config.json, and the frequencies that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F64Array
from w4conv.models.config import MAX_HEAD_DIM, MAX_POSITIONS, Config

SCALINGS: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ALIASES: Final = {"su": "longrope"}


class RopeTable(NamedTuple):
    """frequencies: (n_rows, n_pairs) float32, radians a position. Position p takes row p + 1 - n_plain, or the first or
    last one where that lies outside. magnitude: factor of cos and sin."""

    frequencies: npt.NDArray[np.float32]
    n_plain: int
    magnitude: float


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, share of a head that is rotated, and scaling.

    scaling: one of SCALINGS. The fields after it hold what that scaling needs, under the names of config.json;
    magnitude is its `attention_factor`, the factor of cos and sin.
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    partial: float = 1.0
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """How many values at the front of a head are rotated."""
        return int(head_dim * self.partial)

    def reach(self) -> int:
        """Positions that the scaling extends the original ones to; 0 where that says nothing."""
        return int(self.factor * self.original_max_positions) if self.scaling in ("yarn", "dynamic") else 0

    def tables(self, head_dim: int, n_positions: int) -> tuple[RopeTable, ...]:
        """What the engine rotates by, for sequences of at most n_positions. Two for "longrope": one for sequences of up
        to original_max_positions, one for longer ones; else one."""
        if self.scaling == "longrope":
            plain = self._plain(head_dim)
            sets = (plain / np.array(factors) for factors in (self.short_factors, self.long_factors))
            return tuple(RopeTable(_rows(f), 0, self.magnitude) for f in sets)
        rows = _rows(np.array(self.inverse_frequencies(head_dim)))
        if self.scaling == "dynamic" and n_positions > self.original_max_positions:
            rows = np.concatenate([rows, self.rows(head_dim, self.original_max_positions + 1, n_positions + 1)])
        return (RopeTable(rows, self.original_max_positions, self.magnitude),)

    def rows(self, head_dim: int, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Of "dynamic": what a table holds for sequences of `start` to `stop` - 1 positions, all more than the original
        ones, (stop - start, n_pairs)."""
        return _rows(self._dynamic(head_dim, np.arange(start, stop)))

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Angular frequencies in radians a position, one for each pair (i, i + rotary_dim / 2); of a short sequence,
        where they depend on its length."""
        plain = self._plain(head_dim)
        if self.scaling == "linear":
            plain /= self.factor
        elif self.scaling == "llama3":
            plain = np.array([self._llama3(f) for f in plain.tolist()])
        elif self.scaling == "yarn":
            plain = self._yarn(plain)
        elif self.scaling == "longrope":
            plain /= np.array(self.short_factors)
        return tuple(plain.tolist())

    def _plain(self, head_dim: int) -> F64Array:
        n = self.rotary_dim(head_dim)
        return np.array([self.theta ** (-2 * i / n) for i in range(n // 2)])

    def _dynamic(self, head_dim: int, lengths: npt.NDArray[np.int64]) -> F64Array:
        """(len(lengths), n_pairs): the base grows with the length of the sequence ("NTK-aware" scaling)."""
        n = self.rotary_dim(head_dim)
        growth = self.factor * lengths / self.original_max_positions - (self.factor - 1)
        # Number by number: numpy's powers of arrays differ in last bits with the processor.
        thetas = [self.theta * g ** (n / (n - 2)) for g in growth.tolist()]
        return np.array([[theta ** (-2 * i / n) for i in range(n // 2)] for theta in thetas])

    def _llama3(self, frequency: float) -> float:
        # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.
        turns = self.original_max_positions * frequency / (2 * math.pi)
        if turns > self.high_freq_factor:
            return frequency
        if turns < self.low_freq_factor:
            return frequency / self.factor
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - blend) * frequency / self.factor + blend * frequency

    def _yarn(self, plain: F64Array) -> F64Array:
        # YaRN (Peng et al. 2023): pairs that turn less than beta_slow times in the original context are stretched by
        # `factor`, those that turn more than beta_fast times kept, those between blended by their index.
        n = 2 * len(plain)

        def index_of(turns: float) -> float:
            return n * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, n - 1)
        if low == high:
            high += 0.001
        stretched = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
        out: F64Array = plain / self.factor * stretched + plain * (1 - stretched)
        return out


def _rows(frequencies: F64Array) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(np.atleast_2d(frequencies), np.float32)


def parse_rope(config: Config, max_positions: int, head_dim: int) -> RopeSpec:
    """Rotary settings, in the older form (`rope_theta` and `rope_scaling`) or the newer one (`rope_parameters`).

    `rope_scaling` wins where both are given, and a value inside the object wins over the one beside it, as in
    transformers. Raises InputError naming the key.
    """
    key = "rope_parameters" if config.section("rope_scaling").empty() else "rope_scaling"
    settings = config.section(key)
    if settings.has_objects():
        raise config.error(key, "settings that differ between kinds of layers are not supported")
    return rope_of(settings, config, max_positions, head_dim, theta=config.number("rope_theta", 10000.0))


def rope_of(settings: Config, config: Config, max_positions: int, head_dim: int, *, theta: float) -> RopeSpec:
    """The rope of one object of settings; theta: where it has none. config: the whole, for what may stand beside it."""
    rope = _rope_of(settings, config, max_positions, head_dim, theta)
    with np.errstate(all="ignore"):
        tables = rope.tables(head_dim, max_positions)
    if not all(np.isfinite(table.frequencies).all() and np.isfinite(table.magnitude) for table in tables):
        raise settings.error("rope_type", f"the frequencies of this {rope.scaling} scaling are not finite")
    return rope


def _rope_of(settings: Config, config: Config, max_positions: int, head_dim: int, theta: float) -> RopeSpec:
    theta = settings.number("rope_theta", theta)
    partial = settings.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    n = int(head_dim * partial)
    if partial > 1 or n < 2 or n % 2:
        raise config.error("partial_rotary_factor", f"{partial:g} of a head of {head_dim} is no even number of values")
    word = settings.text("rope_type", settings.text("type", "default"))
    scaling = ALIASES.get(word, word)
    if scaling not in SCALINGS:
        raise settings.error("rope_type", f"{word!r} is not supported; known are {', '.join(SCALINGS)}")
    if scaling == "default":
        return RopeSpec(theta, partial=partial)
    original = settings.whole("original_max_position_embeddings", max_positions, high=MAX_POSITIONS)
    original = config.integer("original_max_position_embeddings", original, high=MAX_POSITIONS)
    if scaling == "longrope":
        return _longrope(settings, theta, partial, n, original, max_positions)
    factor = settings.number("factor", max_positions / original if scaling == "yarn" else None)
    if factor * original > MAX_POSITIONS and scaling in ("dynamic", "yarn"):
        raise settings.error("factor", f"{factor:g} times {original} positions are more than {MAX_POSITIONS}")
    if scaling == "linear":
        return RopeSpec(theta, scaling, factor, partial=partial)
    if scaling == "dynamic":
        if factor < 1 or n < 4:
            raise settings.error("factor", f"{factor:g} is below 1, or fewer than two pairs of a head are rotated")
        return RopeSpec(theta, scaling, factor, original_max_positions=max_positions, partial=partial)
    if scaling == "yarn":
        return _yarn(settings, theta, partial, factor, original)
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if low >= high:
        raise settings.error("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
    return RopeSpec(theta, scaling, factor, low, high, original, partial)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What cos and sin are multiplied by where the context is extended by a factor (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(settings: Config, theta: float, partial: float, factor: float, original: int) -> RopeSpec:
    magnitude = yarn_magnitude(factor)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        weights = [settings.number(key) for key in ("mscale", "mscale_all_dim")]
        magnitude = yarn_magnitude(factor, weights[0]) / yarn_magnitude(factor, weights[1])
    if theta <= 1:
        raise settings.error("rope_theta", f"{theta:g} is not above 1, as yarn needs it")
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original_max_positions=original,
        partial=partial,
        magnitude=settings.number("attention_factor", magnitude),
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        truncate=settings.flag("truncate", True),
    )


def _longrope(settings: Config, theta: float, partial: float, n: int, original: int, max_positions: int) -> RopeSpec:
    factor = settings.number("factor", max_positions / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    factors = {}
    for key in ("short_factor", "long_factor"):
        factors[key] = settings.numbers(key, high=MAX_HEAD_DIM)
        if len(factors[key]) != n // 2:
            raise settings.error(key, f"expected {n // 2} numbers, one for each pair, got {len(factors[key])}")
    return RopeSpec(
        theta,
        "longrope",
        factor,
        original_max_positions=original,
        partial=partial,
        magnitude=settings.number("attention_factor", magnitude),
        short_factors=factors["short_factor"],
        long_factors=factors["long_factor"],
    )
