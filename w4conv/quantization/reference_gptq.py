"""Calibrated rounding in numpy: the definitions that native code equals bit for bit.

Weights W (n_rows, n_columns), second moments of the inputs H = X^T X. The error of a rounding W' is the sum over rows
of e H e^T, e = w - w'. With H = U^T D U, U unit upper triangular, it is sum_j d_j (e U^T)_j^2. Columns are rounded from
the last to the first, and the best target of column j is w_j + sum_{k > j} e_k U_jk: GPTQ's column update (Frantar et
al. 2022) in the form of QuIP's LDLQ (Chee et al. 2023), which needs no inverse of H. The caller orders the columns so
that the last have the largest mean squares.

All sums are chains of float32 fused multiply-adds in the order written here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F32Array
from w4conv.codes import Grid
from w4conv.scheme import TOP_SCALE


def fma(a: F32Array | np.float32, b: F32Array | np.float32, c: F32Array | np.float32) -> F32Array:
    """a * b + c, rounded once."""
    product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)  # exact
    total = np.asarray(product + addend)
    shift = total - product
    lost = (product - (total - shift)) + (addend - shift)  # what rounding to float64 took off (Knuth)
    # Rounding to odd instead lets the rounding to float32 fall as if it had been the only one (Boldo and Melquiond).
    even = (total.view(np.int64) & 1) == 0
    odd = np.where((lost != 0) & even, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


def factor(a: F32Array) -> tuple[F32Array, F32Array] | None:
    """U (n, n) and the diagonal of D, (n,), of a symmetric matrix; None where a pivot is not positive."""
    n = len(a)
    left, unit, pivots = np.triu(a), np.eye(n, dtype=np.float32), np.empty(n, np.float32)
    for k in range(n):
        pivots[k] = left[k, k]
        if not pivots[k] > 0:
            return None
        unit[k, k + 1 :] = left[k, k + 1 :] / pivots[k]
        for i in range(k + 1, n):
            left[i, i:] = fma(-unit[k, i], left[k, i:], left[i, i:])
    return unit, pivots


def gemm_tn(a: F32Array, b: F32Array, out: F32Array) -> None:
    """GEMM out += a^T b: a (k, m), b (k, n), out (m, n). a^T b is summed first, then added to out."""
    total = np.zeros_like(out)
    for row_a, row_b in zip(a, b, strict=True):
        total = fma(row_a[:, None], row_b, total)
    out += total


def solve(b: F32Array, unit: F32Array, pivots: F32Array) -> F32Array:
    """Solve x H = b for x; b, x: (n_rows, n_columns); unit, pivots: of H."""
    n = b.shape[1]
    x, update = b.copy(), np.zeros_like(b)
    for j in range(n):
        x[:, j] -= update[:, j]
        update[:, j + 1 :] = fma(x[:, j, None], unit[j, j + 1 :], update[:, j + 1 :])
    x, update = x / pivots, np.zeros_like(b)
    for j in reversed(range(n)):
        x[:, j] -= update[:, j]
        update[:, :j] = fma(x[:, j, None], unit[:j, j], update[:, :j])
    return x


def level_of(x: F32Array, scale: F32Array, q_min: F32Array, grid: Grid) -> F32Array:
    """The level nearest to x / scale. 0 where the scale is 0.

    Integers: half to even, clipped to q_min .. q_min + span. Codebook: x * (1 / scale), the lower of two equally near;
    q_min is added to the levels: the shift of the group, else 0.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if grid.is_codebook:
            level = grid.levels[np.searchsorted(_middles(grid), x * (np.float32(1) / scale) - q_min)] + q_min
        else:
            level = np.rint(np.clip(x / scale, q_min, q_min + np.float32(grid.span)))
    return np.where(scale == 0, np.float32(0), level).astype(np.float32)


def codes_of(levels: F32Array, q_min: F32Array, grid: Grid) -> npt.NDArray[np.int8]:
    """Of a codebook, the index of the level, the first of equals; of integers, the integer."""
    found = np.searchsorted(_middles(grid), levels - q_min, side="left") if grid.is_codebook else levels
    return found.astype(np.int8)


def levels_of(q: npt.NDArray[np.int8], q_min: F32Array, grid: Grid) -> F32Array:
    """Inverse of `codes_of`."""
    return grid.levels[q] + q_min if grid.is_codebook else q.astype(np.float32)


def stored_scale(scale: F32Array, steps: F32Array | None) -> F32Array:
    """A scale of each row as it is stored: FP16; or with steps the nearest multiple, up to TOP_SCALE, of its step."""
    if steps is None:
        return scale.astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found = np.rint(np.clip(scale / steps, -TOP_SCALE, TOP_SCALE)).astype(np.float32) * steps
    return np.where(steps == 0, np.float32(0), found).astype(np.float32)


def _middles(grid: Grid) -> F32Array:
    return (grid.levels[:-1] + grid.levels[1:]) / np.float32(2)


def gptq_round(w: F32Array, scales: F32Array, q_min: F32Array, unit: F32Array, grid: Grid) -> npt.NDArray[np.int8]:
    """GPTQ: codes (n_rows, n_columns) of w, with a column update after each column.

    scales, q_min: of each value, as w; unit: U (n_columns, n_columns).
    """
    update, levels = np.zeros_like(w), np.zeros_like(w)
    for j in reversed(range(w.shape[1])):
        levels[:, j] = level_of(w[:, j] + update[:, j], scales[:, j], q_min[:, j], grid)
        error = w[:, j] - levels[:, j] * scales[:, j]
        update[:, :j] = fma(error[:, None], unit[:j, j], update[:, :j])
    return codes_of(levels, q_min, grid)


def refine(
    w: F32Array, q: npt.NDArray[np.int8], scales: F32Array, q_min: F32Array, h: F32Array, size: int,
    grid: Grid, n_rounds: int, steps: F32Array | None = None,
) -> tuple[npt.NDArray[np.int8], F32Array]:  # fmt: skip
    """Coordinate descent: improved codes (n_rows, n_columns) and scales (n_rows, n_groups), groups of `size` columns.

    The objective is e h e^T, e = w - level * scale; its gradient along column k is (e h)_k. Each round goes through
    the groups. The scale takes its optimum with all else fixed, as it is stored; it stays where that is 0 or not
    finite. Then each code takes its optimum, from the last column to the first.
    q_min: (n_rows, n_groups), lowest integers or shifts. h: symmetric, with a positive diagonal. steps: (n_rows,) of
    scales, or None.
    """
    n = w.shape[1]
    wide_q_min = np.repeat(q_min, size, axis=1)[:, :n]
    level, scale = levels_of(q, wide_q_min, grid), scales.copy()
    gradient = np.zeros_like(w)

    def add(errors: F32Array, start: int, n_columns: int = n) -> None:
        """Add errors (n_rows, n) of columns `start` .. start + n, the last column first."""
        for j in reversed(range(errors.shape[1])):
            gradient[:, :n_columns] = fma(errors[:, j, None], h[start + j, :n_columns], gradient[:, :n_columns])

    add(w - level * np.repeat(scale, size, axis=1)[:, :n], 0)
    for n_left in reversed(range(n_rounds)):
        for g in reversed(range(scale.shape[1])):
            part = slice(g * size, min((g + 1) * size, n))
            block, of, before = h[part, part], level[:, part], scale[:, g]
            slope, along = gradient[:, part].copy(), np.zeros_like(of)
            for j in reversed(range(of.shape[1])):
                along = fma(of[:, j, None], block[j], along)
            gain, curvature = np.zeros(len(w), np.float32), np.zeros(len(w), np.float32)
            for j in range(of.shape[1]):
                gain, curvature = fma(of[:, j], slope[:, j], gain), fma(of[:, j], along[:, j], curvature)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                best = stored_scale(before + gain / curvature, steps)
            best = np.where((curvature > 0) & np.isfinite(best) & (best != 0), best, before)
            slope = fma((before - best)[:, None], along, slope)
            changed = of * before[:, None]
            for j in reversed(range(of.shape[1])):
                new = level_of(of[:, j] * best + slope[:, j] / block[j, j], best, q_min[:, g], grid)
                slope[:, :j] = fma(((of[:, j] - new) * best)[:, None], block[j, :j], slope[:, :j])
                of[:, j] = new
            scale[:, g] = best
            changed -= of * best[:, None]
            add(changed, part.start, n if n_left else part.start)  # in the last round later columns are not read again
    return codes_of(level, wide_q_min, grid), scale


def search_scales(
    w: F32Array, unit: F32Array | None, pivots: F32Array, multipliers: F32Array, grid: Grid,
    steps: F32Array | None = None,
) -> tuple[F32Array, F32Array, F32Array]:  # fmt: skip
    """Scale, q_min and error of one group (n_rows, n), each (n_rows,).

    Each pair of multipliers (n_candidates, 2) gives a candidate. Symmetric: the unrounded scale of round-to-nearest
    times the first, as it is stored; the second is the shift of a codebook. Asymmetric: round-to-nearest of the largest
    value times the first and the smallest times the second. Candidates beyond FP16 are left out. The first with the
    least sum_j pivots[j] r_j^2 wins; r_j is the error of column j at its target, with GPTQ's column update, or without
    `unit` to the nearest level.
    """
    largest, smallest = w.max(axis=1), w.min(axis=1)
    extreme = np.where(largest > -smallest, largest, smallest)
    top = np.abs(grid.levels).max() if grid.is_codebook else np.float32(grid.q_min)
    base = (np.abs(extreme) if grid.is_codebook else extreme) / top
    best, least = np.zeros(len(w), np.float32), np.full(len(w), np.inf, np.float32)
    q_min = np.full(len(w), grid.q_min, np.float32)
    for first, second in multipliers:
        lowest = np.full(len(w), grid.q_min, np.float32)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if grid.is_asymmetric:
                above, under = np.maximum(largest, 0) * first, np.minimum(smallest, 0) * second
                scale = stored_scale((above - under) / np.float32(grid.span), steps)
                lowest = np.where(scale == 0, lowest, -np.rint(np.clip(-under / scale, 0, grid.span))).astype(
                    np.float32
                )
            else:
                scale = stored_scale(base * first, steps)
                if grid.is_codebook:
                    lowest = np.full(len(w), second, np.float32)
        update, error = np.zeros_like(w), np.zeros(len(w), np.float32)
        finite = np.isfinite(scale)
        scale[~finite] = 0
        for j in reversed(range(w.shape[1])):
            target = w[:, j] + update[:, j]
            dequantized = level_of(target, scale, lowest, grid) * scale
            error = fma((target - dequantized) * (target - dequantized), pivots[j], error)
            if unit is not None:
                update[:, :j] = fma((w[:, j] - dequantized)[:, None], unit[:j, j], update[:, :j])
        better = (error < least) & finite
        best[better], q_min[better], least[better] = scale[better], lowest[better], error[better]
    best[best == 0] = 0
    return best, q_min, least
