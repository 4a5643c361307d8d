"""Second moments of the inputs of a linear layer, gathered in one fixed order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from w4conv import kernels

F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]

_COLUMNS = 512  # of a product at a time: what lies above the diagonal is mostly left out


class Moments:
    """H = sum over tokens of x x^T, (n_columns, n_columns); the same bits on every ISA tier and for any threads.

    Products of one block of tokens are float32 sums; blocks are added in float64. Give blocks of some hundred tokens.
    """

    def __init__(self, n_columns: int) -> None:
        self.n_tokens = 0
        self._lower = np.zeros((n_columns, n_columns))

    def add(self, x: F32Array, *, threads: int | None = None) -> None:
        """x: (n_tokens, n_columns), the next tokens."""
        transposed = np.ascontiguousarray(x.T)
        n = len(transposed)
        for start in range(0, n, _COLUMNS):
            end = min(start + _COLUMNS, n)
            self._lower[start:, start:end] += kernels.product(
                transposed[start:], transposed[start:end], threads=threads
            )
        self.n_tokens += len(x)

    def matrix(self) -> F64Array:
        """Mean over the tokens of x x^T, symmetric."""
        lower = np.tril(self._lower) / max(self.n_tokens, 1)
        lower += np.tril(lower, -1).T
        return lower


class CrossMoments:
    """Sum over tokens of y x^T, (n_rows, n_columns), gathered as `Moments` are."""

    def __init__(self, n_rows: int, n_columns: int) -> None:
        self.n_tokens = 0
        self._sum = np.zeros((n_rows, n_columns))

    def add(self, y: F32Array, x: F32Array, *, threads: int | None = None) -> None:
        """y: (n_tokens, n_rows) and x: (n_tokens, n_columns) of the next tokens."""
        self._sum += kernels.product(np.ascontiguousarray(y.T), np.ascontiguousarray(x.T), threads=threads)
        self.n_tokens += len(x)

    def matrix(self) -> F32Array:
        """Mean over the tokens of y x^T."""
        return (self._sum / max(self.n_tokens, 1)).astype(np.float32)
