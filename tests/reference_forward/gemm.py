"""Sections 2 and 3 of docs/numerics.md: a matrix of the container times rows of activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from reference_forward.arithmetic import F32, f32, fma
from w4conv import codes
from w4conv.container import Container
from w4conv.scheme import QuantScheme

INTEGER_KINDS = ("int4", "int4z", "int4o", "int8", "int8o")
# Of codebooks: what makes levels whole, and whether they are too wide for activation blocks of 128.
CODEBOOKS = {
    "e2m1": (2, False), "iq4nl": (1, False), "nl4": (1, False), "nl3": (1, False),
    "nf4": (2048, True), "fp4": (192, True),
}  # fmt: skip
SHIFTS = {"nl4": (8, -12), "nl3": (12, -18)}  # step, and the lowest
SUPER_COLUMNS = 256
ONE = f32(1)


@dataclass(frozen=True)
class Matrix:
    """levels: (n_rows, n_columns), int64 of integer kinds, else float32. scales, offsets: (n_rows, n_groups)
    float32."""

    kind: str
    group_size: int
    levels: npt.NDArray[np.generic]
    scales: F32
    offsets: F32 | None

    @property
    def block(self) -> int:
        return min(self.group_size, 32 if self.kind in CODEBOOKS and CODEBOOKS[self.kind][1] else 128)

    def group_of(self, column: int) -> int:
        return column // self.group_size

    def rows(self, ids: npt.NDArray[np.integer]) -> F32:
        """Values by w4-codes 5: level * scale, + offset, in float32."""
        levels = self.levels[ids].astype(f32)
        if not self.scales.size:
            return levels
        groups = np.arange(levels.shape[1]) // self.group_size
        values: F32 = levels * self.scales[ids][:, groups]
        return values if self.offsets is None else values + self.offsets[ids][:, groups]


def read_matrices(container: Container, name: str) -> list[Matrix]:
    """The matrix of a tensor, or those of a stack."""
    info = container.tensors[name]
    scheme: QuantScheme = info.scheme
    parts: Mapping[str, npt.NDArray[np.uint8]] = {part.kind: container.bytes_of(part) for part in info.parts}
    n_matrices, n_rows, n_columns = codes.matrix_shape(info.shape)
    n_lines, n_tiles = scheme.n_lines(n_columns), -(-n_rows // 16)
    kind = "values" if scheme.is_float else "codes"
    dwords = np.ascontiguousarray(parts[kind]).view("<u4").reshape(n_matrices, n_tiles, n_lines, 16)
    stored = codes.unpack(scheme, dwords, n_rows, n_columns)
    if scheme.is_float:
        values = (stored.astype(np.uint32) << 16).view(f32) if scheme.kind == "bf16" else stored.astype(f32)
        none = np.empty((n_rows, 0), f32)
        return [Matrix(scheme.kind, n_columns, v, none, None) for v in values]

    def of_groups(part: str, dtype: str) -> npt.NDArray[np.generic]:
        tiled = np.ascontiguousarray(parts[part]).view(dtype).reshape(n_matrices, n_tiles, -1, 16)
        return codes.unpack_rows(tiled, n_rows)

    group_size = scheme.group_size or n_columns

    def numbers(part: str) -> F32:
        """Scales or offsets; of two levels (w4-codes 2.5) the product of both."""
        if scheme.scale_dtype == "s6":  # w4-codes 2.6
            sub_scales = (of_groups(part, "u1").astype(np.int64) + 32) % 64 - 32
            return sub_scales.astype(f32) * of_groups(f"super_{part}", "<f2").astype(f32)
        found = of_groups(part, {"f16": "<f2", "f32": "<f4", "i8": "i1"}[scheme.scale_dtype]).astype(f32)
        if scheme.scale_dtype != "i8":
            return found
        runs = np.arange(found.shape[2]) * group_size // SUPER_COLUMNS
        return found * of_groups(f"super_{part}", "<f2").astype(f32)[..., runs]

    scales = numbers("scales")
    offsets = numbers("offsets") if scheme.kind in ("int4o", "int8o") else [None] * n_matrices
    levels: npt.NDArray[np.generic]
    if scheme.kind == "int4":
        levels = stored.astype(np.int64) - 8
    elif scheme.kind == "int4z":
        points = of_groups("zero_points", "u1").astype(np.int64)
        levels = stored.astype(np.int64) - np.repeat(points, group_size, axis=2)[..., :n_columns]
    elif scheme.kind in CODEBOOKS:
        levels = codes.CODEBOOKS[scheme.kind][stored]
        if scheme.kind in SHIFTS:
            step, lowest = SHIFTS[scheme.kind]
            shifts = step * (of_groups("scales", "u1").astype(np.int64) // 64) + lowest
            levels = levels + np.repeat(shifts, group_size, axis=2)[..., :n_columns].astype(f32)
    else:
        levels = stored.astype(np.int64)
    return [Matrix(scheme.kind, group_size, *each) for each in zip(levels, scales, offsets, strict=True)]


def multiply(matrix: Matrix, x: F32, *, top: int) -> F32:
    """x: (n_tokens, n_columns). top: 32767, or 127 with activations of 8 bits. (n_tokens, n_rows)."""
    if matrix.kind in INTEGER_KINDS:
        return multiply_integers(matrix, x, top)
    return multiply_levels(matrix, x, top) if matrix.kind in CODEBOOKS else multiply_floats(matrix, x)


# ---- 2 Integer weights ---------------------------------------------------------------------------------------------


def integers(x: F32, top: int) -> tuple[F32, npt.NDArray[np.int64]]:
    """Runs of the last axis as a scale (..., 1) and whole numbers; also of keys and values (5.2)."""
    highest = np.abs(x).max(axis=-1, keepdims=True)
    bad = ~np.isfinite(highest)
    scale = np.where(bad, f32(0), highest) / f32(top)
    scale = np.where(scale >= f32(2**-126), scale, f32(0))
    quotients = np.where(scale > 0, x, f32(0)) / np.where(scale > 0, scale, f32(1))
    return np.where(bad, f32(np.nan), scale), np.rint(quotients).astype(np.int64)


def multiply_levels(w: Matrix, x: F32, top: int) -> F32:
    """The levels of a codebook times a number, as integers; activation scales over that number."""
    times, is_wide = CODEBOOKS[w.kind]
    levels = np.rint(times * w.levels.astype(np.float64)).astype(np.int64)
    return multiply_integers(replace(w, levels=levels), x, 32767 if is_wide else top, f32(1) / f32(times))


def multiply_integers(w: Matrix, x: F32, top: int, factor: np.float32 = ONE) -> F32:
    y = np.zeros((len(x), len(w.levels)), f32)
    for column in range(0, x.shape[1], w.block):
        columns = slice(column, column + w.block)
        a_scale, a = integers(x[:, columns], top)
        isum = a @ w.levels[:, columns].astype(np.int64).T
        group = w.group_of(column)
        y = y + isum.astype(f32) * (w.scales[:, group] * (a_scale * factor))
        if w.offsets is not None:
            y = y + a.sum(axis=1, keepdims=True).astype(f32) * (w.offsets[:, group] * a_scale)
    return y


# ---- 3 Float weights -----------------------------------------------------------------------------------------------


def multiply_floats(w: Matrix, x: F32) -> F32:
    y = np.zeros((len(x), len(w.levels)), f32)
    for k in range(x.shape[1]):
        y = fma(w.levels[:, k], x[:, k, None], y)
    return y
