"""Calibrated rounding in numpy: the definitions that native code equals bit for bit.

Notation: W (n_rows, n_columns) weights, H = X^T X the second moments of the inputs. The error of a rounding W' is
sum over rows of e H e^T, e = w - w'. With H = U^T D U, U unit upper triangular, that error is sum_j d_j (e U^T)_j^2.
Going through the columns from the last to the first, column j is therefore best rounded at w_j + sum_{k > j} e_k U_jk:
the solution of GPTQ (Frantar et al. 2022) in the form of QuIP's LDLQ (Chee et al. 2023), which needs no inverse of H.
Columns are brought into an order in which the last matter most.

All sums are chains of fused multiply-adds in float32, in the order in which they stand here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from w4conv.codes import Grid

F32Array = npt.NDArray[np.float32]


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


def products(a: F32Array, b: F32Array, out: F32Array) -> None:
    """out (m, n) += a^T b, a (n_k, m), b (n_k, n): the sum of the products first."""
    total = np.zeros_like(out)
    for row_a, row_b in zip(a, b, strict=True):
        total = fma(row_a[:, None], row_b, total)
    out += total


def solve(b: F32Array, unit: F32Array, pivots: F32Array) -> F32Array:
    """x of x H = b for rows b (n_rows, n_columns); unit, pivots: of H."""
    n = b.shape[1]
    x, fed = b.copy(), np.zeros_like(b)
    for j in range(n):
        x[:, j] -= fed[:, j]
        fed[:, j + 1 :] = fma(x[:, j, None], unit[j, j + 1 :], fed[:, j + 1 :])
    x, fed = x / pivots, np.zeros_like(b)
    for j in reversed(range(n)):
        x[:, j] -= fed[:, j]
        fed[:, :j] = fma(x[:, j, None], unit[:j, j], fed[:, :j])
    return x


def level_of(x: F32Array, scale: F32Array, low: F32Array, grid: Grid) -> F32Array:
    """The level nearest to x / scale: integers half to even, from `low` on; of a codebook x * (1 / scale), and of two
    equally near the lower. 0 where the scale is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if grid.is_codebook:
            level = grid.levels[np.searchsorted(_middles(grid), x * (np.float32(1) / scale), side="left")]
        else:
            level = np.rint(np.clip(x / scale, low, low + np.float32(grid.span)))
    return np.where(scale == 0, np.float32(0), level).astype(np.float32)


def codes_of(levels: F32Array, grid: Grid) -> npt.NDArray[np.int8]:
    """Levels of a codebook are counted from the lowest; of two that are equal, the first. Integers are their own."""
    found = np.searchsorted(_middles(grid), levels, side="left") if grid.is_codebook else levels
    return found.astype(np.int8)


def levels_of(q: npt.NDArray[np.int8], grid: Grid) -> F32Array:
    """Inverse of `codes_of`."""
    return grid.levels[q] if grid.is_codebook else q.astype(np.float32)


def _middles(grid: Grid) -> F32Array:
    return (grid.levels[:-1] + grid.levels[1:]) / np.float32(2)


def round_with_feedback(
    w: F32Array, scales: F32Array, lows: F32Array, unit: F32Array, grid: Grid
) -> npt.NDArray[np.int8]:
    """Codes (n_rows, n_columns) of w; scales, lows: of each value, as w; unit: U (n_columns, n_columns)."""
    fed, levels = np.zeros_like(w), np.zeros_like(w)
    for j in reversed(range(w.shape[1])):
        levels[:, j] = level_of(w[:, j] + fed[:, j], scales[:, j], lows[:, j], grid)
        error = w[:, j] - levels[:, j] * scales[:, j]
        fed[:, :j] = fma(error[:, None], unit[:j, j], fed[:, :j])
    return codes_of(levels, grid)


def refine(
    w: F32Array, q: npt.NDArray[np.int8], scales: npt.NDArray[np.float16], lows: F32Array, h: F32Array, size: int,
    grid: Grid, n_rounds: int,
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:  # fmt: skip
    """Codes (n_rows, n_columns) and scales (n_rows, n_groups) better than they were, of groups of `size` columns.

    Descent by coordinates on e h e^T, e = w - level * scale, whose slope along column k is (e h)_k. In each round,
    group by group: the scale takes its best value given all else, rounded to FP16 (as it was where that is no finite
    value but 0); then each code its best one, from the last to the first. lows: the lowest integers, as scales. h:
    symmetric, its diagonal positive.
    """
    n = w.shape[1]
    level, scale = levels_of(q, grid), scales.astype(np.float32)
    slope = np.zeros_like(w)

    def add(errors: F32Array, start: int, n_columns: int = n) -> None:
        """errors: of columns from `start` on; the last comes first."""
        for j in reversed(range(errors.shape[1])):
            slope[:, :n_columns] = fma(errors[:, j, None], h[start + j, :n_columns], slope[:, :n_columns])

    add(w - level * np.repeat(scale, size, axis=1)[:, :n], 0)
    for n_left in reversed(range(n_rounds)):
        for g in reversed(range(scale.shape[1])):
            part = slice(g * size, min((g + 1) * size, n))
            own, of, before = h[part, part], level[:, part], scale[:, g]
            near, along = slope[:, part].copy(), np.zeros_like(of)
            for j in reversed(range(of.shape[1])):
                along = fma(of[:, j, None], own[j], along)
            gain, curvature = np.zeros(len(w), np.float32), np.zeros(len(w), np.float32)
            for j in range(of.shape[1]):
                gain, curvature = fma(of[:, j], near[:, j], gain), fma(of[:, j], along[:, j], curvature)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                best = (before + gain / curvature).astype(np.float16).astype(np.float32)
            best = np.where((curvature > 0) & np.isfinite(best) & (best != 0), best, before)
            near = fma((before - best)[:, None], along, near)
            changed = of * before[:, None]
            for j in reversed(range(of.shape[1])):
                new = level_of(of[:, j] * best + near[:, j] / own[j, j], best, lows[:, g], grid)
                near[:, :j] = fma(((of[:, j] - new) * best)[:, None], own[j, :j], near[:, :j])
                of[:, j] = new
            scale[:, g] = best
            changed -= of * best[:, None]
            add(changed, part.start, n if n_left else part.start)  # at last, only what is still to come matters
    return codes_of(level, grid), scale.astype(np.float16)


def search_scales(
    w: F32Array, unit: F32Array | None, pivots: F32Array, multipliers: F32Array, grid: Grid
) -> tuple[npt.NDArray[np.float16], F32Array, F32Array]:
    """Scale of one group (n_rows, n), its lowest integer and its error, each (n_rows,).

    Of the candidates that the multipliers (n_candidates, 2) make, the first with the least sum_j pivots[j] r_j^2; r_j
    is what is left of column j when the group is rounded with feedback, or to the nearest level, without `unit`. They
    are the scale of round-to-nearest before it is rounded to FP16, times the first multiplier; on a shifted grid what
    round-to-nearest makes of the largest value times the first and the smallest times the second. Those beyond FP16 are
    left out.
    """
    largest, smallest = w.max(axis=1), w.min(axis=1)
    extreme = np.where(largest > -smallest, largest, smallest)
    base = np.abs(extreme) if grid.is_codebook else extreme / np.float32(grid.low)
    best, least = np.zeros(len(w), np.float32), np.full(len(w), np.inf, np.float32)
    lows = np.full(len(w), grid.low, np.float32)
    for first, second in multipliers:
        low = np.full(len(w), grid.low, np.float32)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if grid.is_shifted:
                above, under = np.maximum(largest, 0) * first, np.minimum(smallest, 0) * second
                scale = ((above - under) / np.float32(grid.span)).astype(np.float16).astype(np.float32)
                low = np.where(scale == 0, low, -np.rint(np.clip(-under / scale, 0, grid.span))).astype(np.float32)
            else:
                scale = (base * first).astype(np.float16).astype(np.float32)
        fed, error = np.zeros_like(w), np.zeros(len(w), np.float32)
        finite = np.isfinite(scale)
        scale[~finite] = 0
        for j in reversed(range(w.shape[1])):
            wanted = w[:, j] + fed[:, j]
            restored = level_of(wanted, scale, low, grid) * scale
            error = fma((wanted - restored) * (wanted - restored), pivots[j], error)
            if unit is not None:
                fed[:, :j] = fma((w[:, j] - restored)[:, None], unit[:j, j], fed[:, :j])
        better = (error < least) & finite
        best[better], lows[better], least[better] = scale[better], low[better], error[better]
    best[best == 0] = 0
    return best.astype(np.float16), lows, least
