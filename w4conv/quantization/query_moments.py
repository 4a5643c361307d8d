"""Second moments of queries, RoPE-averaged: the weights of key errors within a head.

The score of query m and key n <= m is (R q) . k, with R the RoPE rotation of m - n positions. The key errors of a head
are weighted by mean (R q)(R q)^T over all pairs of a sequence. A product of two values of R q is a sum of products of
two values of q, times products of cosines and sines. So the second moments of unrotated queries are enough.
"""

from __future__ import annotations

import numpy as np

from w4conv import elementary
from w4conv.arrays import F32Array
from w4conv.models.spec import ModelSpec

_DECIMALS = 9  # of mean products of cosines and sines: rounds off the differences between machines


class RopeAverage:
    """Averages over the RoPE rotations between queries and keys of a layer, in sequences of n_tokens."""

    def __init__(self, spec: ModelSpec, layer: int, n_tokens: int) -> None:
        index, d = spec.rope_index(layer), spec.head_dim
        rope = spec.ropes[index] if index >= 0 else None
        n = 0 if rope is None else rope.rotary_dim(d)
        frequencies = np.zeros(d // 2)
        if rope is not None:
            frequencies[: n // 2] = rope.inverse_frequencies(d)
        # Pairs of values that are rotated together: i and i + n / 2. The rest are not rotated.
        first = np.concatenate([np.arange(n // 2), np.arange(n, n + (d - n) // 2)])
        self._order = np.concatenate([first, first + np.where(first < n, n // 2, (d - n) // 2)])
        reach = min(spec.window(layer) or n_tokens, n_tokens)
        self._angles = np.arange(reach)[:, None] * frequencies
        self._share = (n_tokens - np.arange(reach)) / (n_tokens - np.arange(reach)).sum()  # of pairs at each distance

    def mean(self, moments: F32Array) -> F32Array:
        """Second moments (head_dim, head_dim) of rotated queries, from those of unrotated ones."""
        cos_sin = np.concatenate(elementary.cos_sin(self._angles), axis=1)
        means = np.zeros((cos_sin.shape[1], cos_sin.shape[1]))
        for row, share in zip(cos_sin, self._share, strict=True):  # summed in order
            means += np.multiply.outer(row * share, row)
        half = len(self._order) // 2
        (cc, cs), (sc, ss) = (np.split(rows, 2, axis=1) for rows in np.split(np.round(means, _DECIMALS), 2))
        m = moments[np.ix_(self._order, self._order)].astype(np.float64)
        ff, fs, sf, of_second = m[:half, :half], m[:half, half:], m[half:, :half], m[half:, half:]
        rotated = [
            [cc * ff - cs * fs - sc * sf + ss * of_second, cs * ff + cc * fs - ss * sf - sc * of_second],
            [sc * ff - ss * fs + cc * sf - cs * of_second, ss * ff + sc * fs + cs * sf + cc * of_second],
        ]
        out = moments.copy()
        out[np.ix_(self._order, self._order)] = np.block(rotated)
        return out
