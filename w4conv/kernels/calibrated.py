"""Kernels of calibrated rounding: GEMM, factorization, GPTQ, scale search. Oracle: quantization/reference_gptq.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from w4conv import _native, codes
from w4conv.arrays import F32Array
from w4conv.kernels.convert import pack_float
from w4conv.kernels.multiply import matmul
from w4conv.kernels.pool import native_pool
from w4conv.scheme import F32, TILE_ROWS

_NATIVE_LEVELS = 16  # of a codebook


def gemm_nt(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], *, threads: int | None = None) -> F32Array:
    """GEMM a b^T: a (m, k), b (n, k) -> (m, n) float32; the same bits on every tier and for any number of threads."""
    lines = pack_float(np.ascontiguousarray(b), "F32", F32, threads=threads)
    return matmul(F32, (b.shape[0], b.shape[1]), {"values": lines}, a, threads=threads)


def gemm_tn(a: F32Array, b: F32Array, out: F32Array, *, upper: bool = False, threads: int | None = None) -> None:
    """GEMM out += a^T b: a (k, m), b (k, n), out (m, n). Bit for bit `quantization.reference_gptq.gemm_tn`.

    upper: the result is symmetric (a is b: SYRK). The upper triangle is computed, the rest of `out` is undefined.
    """
    _native.gemm(native_pool(threads), a, b, upper, out)


def factor(
    h: F32Array, columns: npt.NDArray[np.int64], diagonal: F32Array, *, threads: int | None = None
) -> tuple[F32Array, F32Array] | int:
    """U^T D U of h[columns, columns] with the given diagonal; h symmetric. Returns (U, D), or where a pivot is not
    positive its column.

    U: (n, n), ones on the diagonal, its transpose below; D: (n,). Bit for bit `quantization.reference_gptq.factor`.
    """
    n = len(columns)
    unit, pivots = np.empty((n, n), np.float32), np.empty(n, np.float32)
    bad = _native.factor(native_pool(threads), h, columns, diagonal, unit, pivots)
    return (unit, pivots) if bad < 0 else bad


def gptq_round(
    w: F32Array,
    group: npt.NDArray[np.int32],
    scales: F32Array,
    q_min: F32Array,
    factor: F32Array | None,
    *,
    grid: codes.Grid,
    threads: int | None = None,
) -> npt.NDArray[np.int8]:
    """Round columns with GPTQ's column update: q (n_tiles, n_columns, 16). Bit for bit `reference_gptq.gptq_round`.

    w: (n_tiles, n_columns, 16); group: (n_columns,), the group of each column; scales, q_min (the lowest integer of a
    group, or its shift): (n_tiles, n_groups, 16); factor: (n_columns, n_columns), as `factor` gives it, or None: each
    column is rounded to nearest.
    """
    q = np.empty(w.shape, np.int8)
    if factor is None:
        factor = np.empty((0, w.shape[1]), np.float32)
    pool = native_pool(threads)
    _native.gptq_round(pool, w, group, scales, q_min, factor, _native_grid(grid), q)
    return q


def solve_rows(x: F32Array, factor: F32Array, pivots: F32Array, *, threads: int | None = None) -> None:
    """Solve y H = x in place, x (n_tiles, n_columns, 16). Bit for bit `quantization.reference_gptq.solve`.

    factor, pivots: of H, as `factor` gives them.
    """
    _native.solve_rows(native_pool(threads), x, factor, pivots)


def refine(
    w: F32Array,
    q: npt.NDArray[np.int8],
    scales: F32Array,
    q_min: F32Array,
    h: F32Array,
    group_size: int,
    *,
    grid: codes.Grid,
    n_rounds: int,
    steps: F32Array | None = None,
    threads: int | None = None,
) -> None:
    """Coordinate descent on the output error: improve q (n_tiles, n_columns, 16) and scales (n_tiles, n_groups, 16) in
    place, for weights w and second moments h. steps: (n_tiles, 16), of which scales are multiples; without, they are
    FP16 numbers.

    Bit for bit `quantization.reference_gptq.refine`.
    """
    pool = native_pool(threads)
    _native.refine(pool, w, group_size, h, _native_grid(grid), n_rounds, _native_steps(steps), scales, q_min, q)


def search_scales(
    w: F32Array,
    group_size: int,
    factors: F32Array | None,
    pivots: F32Array,
    multipliers: F32Array,
    *,
    grid: codes.Grid,
    steps: F32Array | None = None,
    threads: int | None = None,
) -> tuple[F32Array, F32Array, F32Array]:
    """Scales, q_min and errors, each (n_tiles, n_groups, 16). Bit for bit `reference_gptq.search_scales`.

    w: (n_tiles, n_columns, 16); factors: (n_groups, group_size, group_size) as `factor` gives them, or None; pivots:
    (n_columns,); multipliers: (n_candidates, 2); steps: as in `refine`. A last group of n < group_size columns has its
    factor (n, n) in the first n * n values.
    """
    if factors is None:
        factors = np.empty((0, group_size, group_size), np.float32)
    shape = (w.shape[0], -(-w.shape[1] // group_size), TILE_ROWS)
    scales, q_min, errors = (np.empty(shape, np.float32) for _ in range(3))
    _native.search_scales(
        native_pool(threads), w, group_size, factors, pivots, multipliers, _native_grid(grid), _native_steps(steps),
        scales, q_min, errors,
    )  # fmt: skip
    return scales, q_min, errors


def _native_steps(steps: F32Array | None) -> F32Array:
    return np.empty((0, TILE_ROWS), np.float32) if steps is None else steps


def _native_grid(grid: codes.Grid) -> _native.Grid:
    levels = grid.levels
    if 0 < len(levels) < _NATIVE_LEVELS:  # the last one again changes nothing: of equals the first is taken
        levels = np.concatenate([levels, np.full(_NATIVE_LEVELS - len(levels), levels[-1])])
    return _native.Grid(grid.span, grid.is_asymmetric, levels)
