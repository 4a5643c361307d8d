"""Section 8 of docs/numerics.md: choosing a token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_forward.arithmetic import exp, f32

F32 = npt.NDArray[np.float32]
UNIT = 1 << 40


def random_word(seed: int, position: int, choice: int) -> int:
    """numpy's Philox adds 1 to its counter, a number of 256 bits, before it draws."""
    counter = (position + (choice << 64) - 1) % (1 << 256)
    words = [counter >> 64 * i & (1 << 64) - 1 for i in range(4)]
    key = [seed & (1 << 64) - 1, seed >> 64]
    bits = np.random.Philox(key=np.array(key, np.uint64), counter=np.array(words, np.uint64))
    return int(bits.random_raw())


def changed(
    logits: F32, prompt: Sequence[int], answer: Sequence[int], *, bias: Mapping[int, float], repetition: float,
    presence: float, frequency: float,
) -> F32:  # fmt: skip
    """Steps 1 to 3."""
    z = logits.copy()
    for token, value in bias.items():
        z[token] += f32(value)
    if (repetition, presence, frequency) == (1, 0, 0):
        return z
    for token in {*prompt, *answer}:
        z[token] = z[token] / f32(repetition) if z[token] > 0 else z[token] * f32(repetition)
    for token, count in Counter(answer).items():
        z[token] -= f32(frequency) * f32(count)
        z[token] -= f32(presence)
    return z


def weights(z: F32, *, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Steps 5 to 8: the whole weight of every token, 0 for tokens that do not remain."""
    kept = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if top_k:
        kept = kept[:top_k]
    w = exp((z - z.max()) / f32(temperature))
    whole = [round(float(x) * UNIT) for x in w]  # Python rounds half to even
    if top_p < 1:
        total = sum(whole[i] for i in kept)
        need = min(max(math.ceil(float(total) * top_p), 1), total)
        kept.sort(key=lambda i: (-w[i], i))
        n, reached = 0, 0
        while reached < need:
            reached += whole[kept[n]]
            n += 1
        kept = kept[:n]
    out = [0] * len(z)
    for i in kept:
        if w[i] >= f32(min_p):
            out[i] = whole[i]
    return out


def draw(whole: Sequence[int], word: int) -> int:
    """Step 9."""
    at = word * sum(whole) >> 64
    for token, weight in enumerate(whole):
        if at < weight:
            return token
        at -= weight
    raise AssertionError


def choose(
    logits: F32, prompt: Sequence[int], answer: Sequence[int], *, seed: int, choice: int, filters: Mapping[str, Any],
    penalties: Mapping[str, Any],
) -> int:  # fmt: skip
    z = changed(logits, prompt, answer, **penalties)
    if filters["temperature"] == 0:
        return int(np.argmax(z))
    return draw(weights(z, **filters), random_word(seed, len(prompt) + len(answer), choice))
