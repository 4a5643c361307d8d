"""Second moments and cross moments of activations, summed in one fixed order."""

from __future__ import annotations

import numpy as np

from w4conv import kernels
from w4conv.arrays import F32Array

_COLUMNS = 512  # copied across the diagonal at a time


class Moments:
    """H = sum over tokens of x x^T, (n_columns, n_columns); the same bits on every ISA tier and for any threads.

    Each block of tokens is summed first, then added to the total. Give blocks of some hundred tokens.
    """

    def __init__(self, n_columns: int) -> None:
        self.n_tokens = 0
        self._upper = np.zeros((n_columns, n_columns), np.float32)

    def add(self, x: F32Array, *, threads: int | None = None) -> None:
        """x: (n_tokens, n_columns), the next tokens."""
        x = np.ascontiguousarray(x)
        kernels.gemm_tn(x, x, self._upper, upper=True, threads=threads)
        self.n_tokens += len(x)

    def matrix(self) -> F32Array:
        """Mean over the tokens of x x^T, symmetric. Ends the gathering."""
        h = self._upper
        h /= np.float32(max(self.n_tokens, 1))
        for start in range(0, len(h), _COLUMNS):
            part = slice(start, start + _COLUMNS)
            square = np.triu(h[part, part])
            h[part, part] = square + np.triu(square, 1).T
            h[part.stop :, part] = h[part, part.stop :].T
        return h


class CrossMoments:
    """Sum over tokens of y x^T, (n_rows, n_columns), gathered as `Moments` are."""

    def __init__(self, n_rows: int, n_columns: int) -> None:
        self.n_tokens = 0
        self._sum = np.zeros((n_rows, n_columns), np.float32)

    def add(self, y: F32Array, x: F32Array, *, threads: int | None = None) -> None:
        """y: (n_tokens, n_rows) and x: (n_tokens, n_columns) of the next tokens."""
        kernels.gemm_tn(np.ascontiguousarray(y), np.ascontiguousarray(x), self._sum, threads=threads)
        self.n_tokens += len(x)

    def matrix(self) -> F32Array:
        """Mean over the tokens of y x^T."""
        return self._sum / np.float32(max(self.n_tokens, 1))
