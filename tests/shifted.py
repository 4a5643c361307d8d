"""Round-to-nearest of nl4 and nl3, w4-codes 6.7 written down plainly."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = np.float32
LEVELS = {
    "nl4": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F32),
    "nl3": np.array([-127, -72, -40, -13, 11, 34, 64, 103], F32),
}
SHIFTS = {"nl4": (-12, -4, 4, 12), "nl3": (-18, -6, 6, 18)}


def candidates(group: npt.NDArray[np.float32], multiples: list[float], kind: str) -> list[tuple[Any, int]]:
    e = np.abs(group).max() / F32(127)
    return [(e * F32(sign * m), shift) for m in multiples for shift in SHIFTS[kind] for sign in (1, -1)]


def coded(group: npt.NDArray[np.float32], scale: Any, shift: int, kind: str) -> tuple[Any, npt.NDArray[np.intp]]:
    """(sum of squares, codes)."""
    levels = LEVELS[kind]
    middles = (levels[:-1] + levels[1:]) / F32(2)
    if scale == 0:
        q, restored = np.searchsorted(middles, np.full(len(group), F32(-shift))), np.zeros_like(group)
    else:
        q = np.searchsorted(middles, group * (F32(1) / scale) - F32(shift))
        restored = (levels[q] + F32(shift)) * scale
    total = F32(0)
    for e in (group - restored)[::-1]:
        total = total + e * e
    return total, q


def least(
    group: npt.NDArray[np.float32], found: list[tuple[Any, int]], kind: str
) -> tuple[Any, int, npt.NDArray[np.intp]]:
    best: tuple[Any, Any, int, npt.NDArray[np.intp]] | None = None
    for scale, shift in found:
        total, q = coded(group, scale, shift, kind)
        if best is None or total < best[0]:
            best = total, scale, shift, q
    assert best is not None
    return best[1:]


def by_the_text(w: npt.NDArray[np.float32], kind: str, size: int) -> tuple[Any, Any, Any]:
    """codes (n_rows, n_columns), bytes (n_rows, n_groups), super-scales (n_rows,)."""
    n_rows, n_columns = w.shape
    all_codes, all_bytes, supers = np.zeros(w.shape, np.uint8), [], []
    for row, values in enumerate(w):
        groups = [values[i : i + size] for i in range(0, n_columns, size)]
        coarse = [[(F32(np.float16(s)), d) for s, d in candidates(g, [1.15, 0.95, 0.75], kind)] for g in groups]
        top = max(abs(least(g, found, kind)[0]) for g, found in zip(groups, coarse, strict=True))
        step = F32(np.float16(top / F32(31)))
        for i, group in enumerate(groups):
            fine = []
            for scale, shift in candidates(group, [(124 - 8 * k) / 100 for k in range(9)], kind):
                whole = np.rint(np.clip(scale / step, F32(-31), F32(31))) if step > 0 else F32(0)
                fine.append((F32(whole * step), shift))
            scale, shift, q = least(group, fine, kind)
            sub_scale = int(np.rint(scale / step)) if step > 0 else 0
            all_bytes.append((sub_scale & 63) | SHIFTS[kind].index(shift) << 6 if sub_scale else 0)
            all_codes[row, i * size : i * size + len(group)] = q
        supers.append(step)
    return all_codes, np.array(all_bytes, np.uint8).reshape(n_rows, -1), np.array(supers)
