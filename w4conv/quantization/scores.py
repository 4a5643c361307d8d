"""What keys are multiplied with: second moments by which the errors of the keys of a head count together.

The score of query m and key n <= m is (R q) . k, R the rotation by the m - n positions between them. Averaged over the
pairs of a sequence, products of two values of R q are products of values of q times mean products of cosines and sines:
the second moments of queries before the rotation are all that is needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from w4conv import elementary
from w4conv.models.spec import ModelSpec

F32Array = npt.NDArray[np.float32]

_DECIMALS = 9  # of mean cosines, so that the last bits of a machine's do not show


class Turns:
    """The turns between the queries and keys of a layer, in sequences of n_tokens."""

    def __init__(self, spec: ModelSpec, layer: int, n_tokens: int) -> None:
        index, d = spec.rope_index(layer), spec.head_dim
        rope = spec.ropes[index] if index >= 0 else None
        n = 0 if rope is None else rope.rotary_dim(d)
        frequencies = np.zeros(d // 2)
        if rope is not None:
            frequencies[: n // 2] = rope.inverse_frequencies(d)
        # Pairs of values that turn together: i and i + n / 2; the rest stay as they are.
        first = np.concatenate([np.arange(n // 2), np.arange(n, n + (d - n) // 2)])
        self._order = np.concatenate([first, first + np.where(first < n, n // 2, (d - n) // 2)])
        reach = min(spec.window(layer) or n_tokens, n_tokens)
        self._angles = np.arange(reach)[:, None] * frequencies
        self._share = (n_tokens - np.arange(reach)) / (n_tokens - np.arange(reach)).sum()  # of pairs so far apart

    def mean(self, moments: F32Array) -> F32Array:
        """Second moments (head_dim, head_dim) of queries, as keys meet them."""
        turns = np.concatenate(elementary.cos_sin(self._angles), axis=1)
        means = np.zeros((turns.shape[1], turns.shape[1]))
        for row, share in zip(turns, self._share, strict=True):  # one after another
            means += np.multiply.outer(row * share, row)
        half = len(self._order) // 2
        (cc, cs), (sc, ss) = (np.split(rows, 2, axis=1) for rows in np.split(np.round(means, _DECIMALS), 2))
        m = moments[np.ix_(self._order, self._order)].astype(np.float64)
        ff, fs, sf, of_second = m[:half, :half], m[:half, half:], m[half:, :half], m[half:, half:]
        turned = [
            [cc * ff - cs * fs - sc * sf + ss * of_second, cs * ff + cc * fs - ss * sf - sc * of_second],
            [sc * ff - ss * fs + cc * sf - cs * of_second, ss * ff + sc * fs + cs * sf + cc * of_second],
        ]
        out = moments.copy()
        out[np.ix_(self._order, self._order)] = np.block(turned)
        return out
