"""Calibrated rounding in numpy: the definitions that native code equals bit for bit.

Notation: W (n_rows, n_columns) weights, H = X^T X the second moments of the inputs. The error of a rounding W' is
sum over rows of e H e^T, e = w - w'. With H = L L^T and M = L / diag(L) (unit lower triangle), that error is
sum_j d_j (e M)_j^2, d_j = L_jj^2. Going through the columns from the last to the first, column j is therefore best
rounded at w_j + sum_{k > j} e_k M_kj: the solution of GPTQ (Frantar et al. 2022) in the form of QuIP's LDLQ (Chee et
al. 2023), which needs no inverse of H. Columns are brought into an order in which the last matter most.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32Array = npt.NDArray[np.float32]


def cholesky(a: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
    """Lower factor of a symmetric matrix (n, n); None where a pivot is not positive."""
    n = len(a)
    left, out = np.tril(a), np.zeros_like(a)
    for k in range(n):
        if not left[k, k] > 0:
            return None
        out[k, k] = np.sqrt(left[k, k])
        out[k + 1 :, k] = left[k + 1 :, k] / out[k, k]
        for j in range(k + 1, n):
            left[j:, j] -= out[j:, k] * out[j, k]
    return out


def code_of(x: F32Array, scale: F32Array, bits: int) -> F32Array:
    """x / scale rounded half to even and clipped to [-2^(bits-1), 2^(bits-1) - 1]; 0 where the scale is 0."""
    top = np.float32(1 << (bits - 1))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        q = np.rint(np.clip(x / scale, -top, top - 1))
    return np.where(scale == 0, np.float32(0), q).astype(np.float32)


def round_with_feedback(w: F32Array, scales: F32Array, factor: F32Array, bits: int) -> npt.NDArray[np.int8]:
    """Codes (n_rows, n_columns) of w; scales: of each value, as w; factor: M (n_columns, n_columns)."""
    fed, q = np.zeros_like(w), np.zeros_like(w)
    for j in reversed(range(w.shape[1])):
        q[:, j] = code_of(w[:, j] + fed[:, j], scales[:, j], bits)
        error = w[:, j] - q[:, j] * scales[:, j]
        fed[:, :j] += error[:, None] * factor[j, :j]
    return q.astype(np.int8)


def substitute(x: F32Array, factor: F32Array) -> F32Array:
    """y of y M = x for rows x (n_rows, n_columns); factor: M, unit lower triangular."""
    y, fed = x.copy(), np.zeros_like(x)
    for j in reversed(range(x.shape[1])):
        y[:, j] -= fed[:, j]
        fed[:, :j] += y[:, j, None] * factor[j, :j]
    return y


def refine(
    w: F32Array, q: npt.NDArray[np.int8], scales: npt.NDArray[np.float16], h: F32Array, size: int, bits: int,
    n_rounds: int,
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:  # fmt: skip
    """Better codes (n_rows, n_columns) and scales (n_rows, n_groups) for w, groups of `size` columns.

    Descent by coordinates on e h e^T, e = w - q scale, whose slope along column k is (e h)_k: in each round every scale
    takes its best value given all else, rounded to FP16 (as it was where that is no finite value but 0); then every
    code, from the last to the first. h: symmetric, its diagonal positive.
    """
    n = w.shape[1]
    code, scale, groups = q.astype(np.float32), scales.astype(np.float32), np.arange(n) // size
    slope, error = np.zeros_like(w), w - code * scale[:, groups]
    for j in reversed(range(n)):
        slope += error[:, j, None] * h[j]
    for _ in range(n_rounds):
        for g in range(scale.shape[1]):
            columns = np.flatnonzero(groups == g)
            along = np.zeros_like(w)
            for j in columns[::-1].tolist():
                along += code[:, j, None] * h[j]
            gain, curvature = np.zeros(len(w), np.float32), np.zeros(len(w), np.float32)
            for j in columns.tolist():
                gain += code[:, j] * slope[:, j]
                curvature += code[:, j] * along[:, j]
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                best = (scale[:, g] + gain / curvature).astype(np.float16).astype(np.float32)
            best = np.where((curvature > 0) & np.isfinite(best) & (best != 0), best, scale[:, g])
            slope += (scale[:, g] - best)[:, None] * along
            scale[:, g] = best
        for j in reversed(range(n)):
            of_j = scale[:, groups[j]]
            best = code_of(code[:, j] * of_j + slope[:, j] / h[j, j], of_j, bits)
            slope += ((code[:, j] - best) * of_j)[:, None] * h[j]
            code[:, j] = best
    return code.astype(np.int8), scale.astype(np.float16)


def search_scales(
    w: F32Array, factor: F32Array, pivots: F32Array, multipliers: F32Array, bits: int
) -> tuple[npt.NDArray[np.float16], F32Array]:
    """Scale of one group (n_rows, n) and its error, each (n_rows,).

    Of the candidates base * multiplier, base being the scale of round-to-nearest before it is rounded to FP16, the
    first with the least sum_j pivots[j] r_j^2; r_j is what is left of column j when the group is rounded with feedback.
    Candidates beyond FP16 are left out.
    """
    largest, smallest = w.max(axis=1), w.min(axis=1)
    base = np.where(largest > -smallest, largest, smallest) / np.float32(-(1 << (bits - 1)))
    best, least = np.zeros(len(w), np.float32), np.full(len(w), np.inf, np.float32)
    for multiplier in multipliers:
        with np.errstate(over="ignore"):
            scale = (base * multiplier).astype(np.float16).astype(np.float32)
        fed, error = np.zeros_like(w), np.zeros(len(w), np.float32)
        finite = np.isfinite(scale)
        scale[~finite] = 0
        for j in reversed(range(w.shape[1])):
            wanted = w[:, j] + fed[:, j]
            restored = code_of(wanted, scale, bits) * scale
            error += (wanted - restored) * (wanted - restored) * pivots[j]
            fed[:, :j] += (w[:, j] - restored)[:, None] * factor[j, :j]
        better = (error < least) & finite
        best[better], least[better] = scale[better], error[better]
    best[best == 0] = 0
    return best.astype(np.float16), least
