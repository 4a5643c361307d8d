"""Sampler: one token id out of one row of logits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from w4conv import elementary
from w4conv.arguments import count, real, shown
from w4conv.arrays import F64Array
from w4conv.errors import UsageError


class Sampler:
    """Greedy at temperature 0 (the first of equal maxima); else a draw, the same for the same seed and logits.

    The steps of a draw, each on the result of the one before: softmax of logits / temperature; the `top_k`
    most probable tokens (0: all); the fewest tokens whose share reaches `top_p`; tokens with at least `min_p` times the
    largest probability. Of equal probabilities the lower token id counts as the larger. A draw takes one number of
    numpy's PCG64.
    """

    def __init__(
        self, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
    ) -> None:
        """Raises UsageError for values out of range, and for filters at temperature 0, where they have no effect."""
        temperature = _real(temperature, "temperature", "0 (greedy) or more", lambda x: x >= 0)
        top_k = count(top_k, "top-k")
        top_p = _real(top_p, "top-p", "above 0 and at most 1 (off)", lambda x: 0 < x <= 1)
        min_p = _real(min_p, "min-p", "0 (off) to 1", lambda x: 0 <= x <= 1)
        seed = count(seed, "seed", high=(1 << 128) - 1)
        if temperature == 0 and (top_k or top_p < 1 or min_p):
            raise UsageError("top-k, top-p and min-p have no effect at temperature 0 (greedy); set a temperature too")
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self._seed = seed

    def __call__(self, logits: npt.NDArray[np.float32]) -> int:
        """logits: (vocab_size,) float32. Returns a token id."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        p = self.probabilities(logits)
        kept = np.flatnonzero(p)
        cumulative = np.cumsum(p[kept])
        index = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(kept[min(index, len(kept) - 1)])

    @functools.cached_property
    def _random(self) -> np.random.Generator:  # greedy choice does without the import
        return np.random.Generator(np.random.PCG64(self._seed))

    def probabilities(self, logits: npt.NDArray[np.float32]) -> F64Array:
        """(vocab_size,) float64 that a draw uses: zero where a filter took the token out; the rest sums to 1."""
        x = logits.astype(np.float64)
        p: F64Array = elementary.exp((x - x.max()) / self.temperature)
        p /= elementary.total(p)
        if 0 < self.top_k < len(p):
            p = _keep_largest(p, self.top_k)
        if self.top_p < 1:
            descending = np.sort(p)[::-1]
            reached = np.cumsum(descending) >= self.top_p * elementary.total(p)
            p = _keep_largest(p, int(np.argmax(reached)) + 1 if reached.any() else len(p))
        if self.min_p > 0:
            p = np.where(p >= self.min_p * p.max(), p, 0.0)
        p /= elementary.total(p)
        return p


def _keep_largest(p: F64Array, n: int) -> F64Array:
    """`p` with all but its n largest entries set to zero; of equal ones the first are kept."""
    if n >= len(p):
        return p
    threshold = np.partition(p, len(p) - n)[len(p) - n]
    out = np.where(p > threshold, p, 0.0)
    ties = np.flatnonzero(p == threshold)[: n - np.count_nonzero(p > threshold)]
    out[ties] = threshold
    return out


def _real(value: float, name: str, expected: str, holds: Callable[[float], bool]) -> float:
    number = real(value, name, expected)
    if not holds(number):
        raise UsageError(f"{name} is {shown(value)}; it must be {expected}")
    return number
