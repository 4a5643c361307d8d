"""Calibrated rounding of one matrix: what each method makes of it, judged by the output error on held-out tokens.

W (n_rows, n_columns) times inputs with second moments H makes outputs whose mean square error over tokens is
trace(E H E^T), E = W' - W. H holds the mean of the inputs too, so that errors that add up count as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from w4conv import codes, kernels
from w4conv.quantization.reference_gptq import code_of
from w4conv.scheme import TILE_ROWS, QuantScheme

F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]
Scalar = TypeVar("Scalar", bound=np.generic)

# What each method tries; the one with the least error on the held-out tokens stays, the earlier of equals.
METHODS: Final = {
    "rtn": ("rtn",),
    "search": ("rtn", "search"),
    "gptq": ("rtn", "gptq"),
    "best": ("rtn", "search", "gptq"),
}
DAMPING_PERCENT: Final = 30  # of the diagonal's mean, added to the diagonal; ten times as much after each failure
# Scales tried, in steps of 5 % of round-to-nearest's, each with both signs: which end of the codes is the longer one.
MULTIPLIERS: Final = tuple(sign * (100 - 5 * i) / 100 for i in range(9) for sign in (1, -1))
JUDGED_ROWS: Final = 1024  # of a matrix, spread over it, on which candidates are compared


class ScaleError(ValueError):
    """A group of which no scale fits FP16. row, column: where it begins."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"a scale beyond FP16 at row {row}, column {column}")
        self.reason, self.row, self.column = "a scale beyond FP16", row, column


@dataclass(frozen=True, slots=True)
class Inputs:
    """Second moments (n_columns, n_columns) of the inputs: of the tokens to fit, and of those held out to judge by."""

    fit: F64Array
    held_out: F64Array


@dataclass(frozen=True, slots=True)
class Solution:
    """codes: (n_tiles, n_lines, 16) uint32 and scales: (n_tiles, n_groups, 16) float16, as the container has them.

    error: mean square of the outputs' error over that of the outputs, on the held-out tokens, of JUDGED_ROWS rows.
    n_underflowed: groups of nonzero values whose scale is zero.
    """

    method: str
    codes: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float16]
    error: float
    n_underflowed: int


def solve(w: F32Array, inputs: Inputs, scheme: QuantScheme, method: str, *, threads: int | None = None) -> Solution:
    """w: finite (n_rows, n_columns). method: a key of METHODS. Raises ScaleError."""
    problem = _Problem(w, inputs, scheme, threads)
    best: tuple[float, str, _Rounding] | None = None
    for name in METHODS[method]:
        found = problem.run(name)
        error = problem.error(found)
        if best is None or error < best[0]:
            best = error, name, found
    assert best is not None
    error, name, found = best
    q = untiled(found.q, len(w))
    stored = (q + 8).astype(np.uint8) if scheme.bits == 4 else q
    power = problem.power()
    return Solution(
        method=name,
        codes=codes.pack(scheme, stored[None])[0],
        scales=found.scales,
        error=error / power if power > 0 else 0.0,
        n_underflowed=problem.n_underflowed(found),
    )


@dataclass(frozen=True, slots=True)
class _Rounding:
    """q: (n_tiles, n_columns, 16) int8; scales: (n_tiles, n_groups, 16) float16."""

    q: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float16]


class _Problem:
    def __init__(self, w: F32Array, inputs: Inputs, scheme: QuantScheme, threads: int | None) -> None:
        self._w, self._inputs, self._scheme, self._threads = w, inputs, scheme, threads
        self._tiles = tiled(w)
        n_rows, n = w.shape
        n_judged = min(n_rows, JUDGED_ROWS)
        self._judged = np.arange(n_judged) * n_rows // n_judged
        self._size = min(scheme.group_size or n, n)
        self._group = (np.arange(n) // self._size).astype(np.int32)

    def run(self, candidate: str) -> _Rounding:
        if candidate == "rtn":
            return self._nearest(self._search(np.ones(1, np.float32), None))
        multipliers = np.array(MULTIPLIERS, np.float32)
        if candidate == "search":
            return self._nearest(self._search(multipliers, None))
        return self._fed_back(self._search(multipliers, self._inputs.fit))

    def error(self, r: _Rounding) -> float:
        restored = untiled(r.q * self._wide(r.scales), len(self._w))[self._judged]
        return self._error(restored - self._w[self._judged])

    def power(self) -> float:
        """What `error` is of a matrix of zeros."""
        return self._error(self._w[self._judged])

    def _error(self, e: F32Array) -> float:
        return output_error(e, self._inputs.held_out, threads=self._threads)

    def n_underflowed(self, r: _Rounding) -> int:
        lost = (self._tiles != 0) & (self._wide(r.scales) == 0)
        starts = np.arange(0, self._w.shape[1], self._size)
        return int(np.logical_or.reduceat(lost, starts, axis=1).sum())

    def _search(self, multipliers: F32Array, h: F64Array | None) -> npt.NDArray[np.float16]:
        """Scales by the error of nearest codes weighted by the inputs' mean squares; with h, by the whole output error
        of the group rounded with feedback."""
        n, size = self._w.shape[1], self._size
        factors = np.zeros((self._group[-1] + 1, size, size), np.float32)
        pivots = np.diag(self._inputs.fit).astype(np.float32)
        order = np.arange(n)
        if h is not None:
            for g in range(len(factors)):
                part = slice(g * size, min(n, (g + 1) * size))
                order[part] = part.start + _ascending(h[part, part])
                factor, pivots[part] = factor_of(h[np.ix_(order[part], order[part])], self._threads)
                factors[g].reshape(-1)[: factor.size] = factor.ravel()
        scales, errors = kernels.search_scales(
            np.ascontiguousarray(self._tiles[:, order]), size, factors, pivots, multipliers, bits=self._scheme.bits,
            threads=self._threads,
        )  # fmt: skip
        if np.isinf(errors).any():
            tile, group, row = np.argwhere(np.isinf(errors))[0].tolist()
            raise ScaleError(tile * TILE_ROWS + row, group * size)
        return scales

    def _nearest(self, scales: npt.NDArray[np.float16]) -> _Rounding:
        return _Rounding(code_of(self._tiles, self._wide(scales), self._scheme.bits).astype(np.int8), scales)

    def _fed_back(self, scales: npt.NDArray[np.float16]) -> _Rounding:
        order = _ascending(self._inputs.fit)
        factor, _ = factor_of(self._inputs.fit[np.ix_(order, order)], self._threads)
        q = np.empty(self._tiles.shape, np.int8)
        q[:, order] = kernels.round_with_feedback(
            np.ascontiguousarray(self._tiles[:, order]), self._group[order], scales.astype(np.float32), factor,
            bits=self._scheme.bits, threads=self._threads,
        )  # fmt: skip
        return _Rounding(q, scales)

    def _wide(self, scales: npt.NDArray[np.float16]) -> F32Array:
        """The scale of each value: (n_tiles, n_columns, 16)."""
        return np.repeat(scales.astype(np.float32), self._size, axis=1)[:, : self._w.shape[1]]


def _ascending(h: F64Array) -> npt.NDArray[np.intp]:
    """Order of columns: the largest mean square last, which is rounded first."""
    return np.argsort(np.diag(h), kind="stable")


def factor_of(h: F64Array, threads: int | None = None) -> tuple[F32Array, F32Array]:
    """(M, pivots) of the damped h (reference_gptq.py). Channels that were never active get the mean as their own."""
    n = len(h)
    diagonal = np.diag(h).copy()
    mean = float(diagonal.mean()) or 1.0
    damping = mean * DAMPING_PERCENT / 100
    while True:
        a = h.copy()
        a[np.arange(n), np.arange(n)] += np.where(diagonal > 0, damping, mean)
        if kernels.cholesky(a, threads=threads) < 0:
            break
        damping *= 10
    lengths = np.diag(a).copy()
    a /= lengths
    return a.astype(np.float32), np.square(lengths).astype(np.float32)


def output_error(e: F32Array, h: F64Array, *, threads: int | None = None) -> float:
    """trace(e h e^T), e (n_rows, n_columns); the same bits for any threads."""
    products = kernels.product(e, h.astype(np.float32), threads=threads).astype(np.float64) * e
    return float(np.cumsum(np.cumsum(products, axis=1)[:, -1])[-1])  # cumsum adds in order, sum as it likes


def tiled(w: F32Array) -> F32Array:
    """(n_rows, n_columns) -> (n_tiles, n_columns, 16), rows padded with zeros."""
    n_rows, n_columns = w.shape
    padded = np.zeros((codes.n_tiles(n_rows) * TILE_ROWS, n_columns), np.float32)
    padded[:n_rows] = w
    return np.ascontiguousarray(padded.reshape(-1, TILE_ROWS, n_columns).transpose(0, 2, 1))


def untiled(tiles: npt.NDArray[Scalar], n_rows: int) -> npt.NDArray[Scalar]:
    """Inverse of `tiled`."""
    return np.ascontiguousarray(tiles.transpose(0, 2, 1)).reshape(-1, tiles.shape[1])[:n_rows]
