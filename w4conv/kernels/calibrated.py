"""Calibrated rounding, bit for bit quantization/reference_gptq.py: second moments, factors, GPTQ, scale search."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from w4conv import _native, codes
from w4conv.kernels.convert import pack_float
from w4conv.kernels.multiply import matmul
from w4conv.kernels.pool import native_pool
from w4conv.scheme import F32, TILE_ROWS

F32Array = npt.NDArray[np.float32]


def product(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], *, threads: int | None = None) -> F32Array:
    """a (m, k) times the transpose of b (n, k): (m, n) float32, the same bits on every tier and for any threads."""
    lines = pack_float(np.ascontiguousarray(b), "F32", F32, threads=threads)
    return matmul(F32, (b.shape[0], b.shape[1]), {"values": lines}, a, threads=threads)


def add_products(a: F32Array, b: F32Array, out: F32Array, *, upper: bool = False, threads: int | None = None) -> None:
    """Add a^T b, a (n_k, m), b (n_k, n), to out (m, n), bit for bit `quantization.reference_gptq.products`.

    upper: of a square `out`, only what lies on and above the diagonal, and some of what lies below.
    """
    _native.gemm(native_pool(threads), a, b, upper, out)


def factor(
    h: F32Array, columns: npt.NDArray[np.int64], diagonal: F32Array, *, threads: int | None = None
) -> tuple[F32Array, F32Array] | int:
    """Of some rows and columns of the symmetric h, with another diagonal, U^T D U: U (n, n), its transpose below the
    diagonal of ones, and D (n,). Bit for bit `quantization.reference_gptq.factor`.

    Or the first column whose pivot is not positive.
    """
    n = len(columns)
    unit, pivots = np.empty((n, n), np.float32), np.empty(n, np.float32)
    bad = _native.factor(native_pool(threads), h, columns, diagonal, unit, pivots)
    return (unit, pivots) if bad < 0 else bad


def round_with_feedback(
    w: F32Array,
    group: npt.NDArray[np.int32],
    scales: F32Array,
    lows: F32Array,
    factor: F32Array,
    *,
    grid: codes.Grid,
    threads: int | None = None,
) -> npt.NDArray[np.int8]:
    """q (n_tiles, n_columns, 16), bit for bit `quantization.reference_gptq.round_with_feedback`.

    w: (n_tiles, n_columns, 16); group: (n_columns,) whose scale each column has; scales, lows (the lowest integers):
    (n_tiles, n_groups, 16); factor: (n_columns, n_columns), as `factor` gives it.
    """
    q = np.empty(w.shape, np.int8)
    pool = native_pool(threads)
    _native.gptq_round(pool, w, group, scales, lows, factor, _native_grid(grid), q)
    return q


def solve_rows(x: F32Array, factor: F32Array, pivots: F32Array, *, threads: int | None = None) -> None:
    """x (n_tiles, n_columns, 16) becomes the y of y H = x, bit for bit `quantization.reference_gptq.solve`.

    factor, pivots: of H, as `factor` gives them.
    """
    _native.solve_rows(native_pool(threads), x, factor, pivots)


def refine(
    w: F32Array,
    q: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float16],
    lows: F32Array,
    h: F32Array,
    group_size: int,
    *,
    grid: codes.Grid,
    n_rounds: int,
    threads: int | None = None,
) -> None:
    """Make q (n_tiles, n_columns, 16) and scales (n_tiles, n_groups, 16) better for w under h, in place.

    Bit for bit `quantization.reference_gptq.refine`.
    """
    pool = native_pool(threads)
    _native.refine(pool, w, group_size, h, _native_grid(grid), n_rounds, scales.view(np.uint16), lows, q)


def search_scales(
    w: F32Array,
    group_size: int,
    factors: F32Array | None,
    pivots: F32Array,
    multipliers: F32Array,
    *,
    grid: codes.Grid,
    threads: int | None = None,
) -> tuple[npt.NDArray[np.float16], F32Array, F32Array]:
    """Scales, lowest integers and their errors (n_tiles, n_groups, 16), bit for bit
    `quantization.reference_gptq.search_scales`.

    w: (n_tiles, n_columns, 16); factors: (n_groups, group_size, group_size) as `factor` gives them, or None; pivots:
    (n_columns,); multipliers: (n_candidates, 2). The matrix of a last group of fewer columns fills the front of its
    place.
    """
    if factors is None:
        factors = np.empty((0, group_size, group_size), np.float32)
    shape = (w.shape[0], -(-w.shape[1] // group_size), TILE_ROWS)
    scales, lows, errors = np.empty(shape, np.uint16), np.empty(shape, np.float32), np.empty(shape, np.float32)
    pool = native_pool(threads)
    _native.search_scales(pool, w, group_size, factors, pivots, multipliers, _native_grid(grid), scales, lows, errors)
    return scales.view(np.float16), lows, errors


def _native_grid(grid: codes.Grid) -> _native.Grid:
    return _native.Grid(grid.span, grid.is_shifted, grid.levels)
