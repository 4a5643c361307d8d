"""Calibrated rounding: native code against the numpy definitions bit for bit, and those against brute force."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from w4conv import kernels
from w4conv.codes import Grid, grid
from w4conv.quantization import reference_gptq as reference
from w4conv.quantization.moments import Moments
from w4conv.scheme import scheme_of

F32Array = npt.NDArray[np.float32]
TIERS = kernels.isa_tiers()
GRIDS = {kind: grid(scheme_of(kind, 32)) for kind in ("int4", "int8", "int4z", "nf4", "fp4", "nl4", "nl3")}


def some_steps(grid: Grid, n_rows: int) -> F32Array | None:
    """Of rows, where the grid has shifts; 0 in row 4."""
    if not grid.shifts:
        return None
    steps = np.random.default_rng(8).uniform(0.0002, 0.002, n_rows).astype(np.float16).astype(np.float32)
    steps[4] = 0
    return steps


def some_scales(grid: Grid, n_rows: int, n_groups: int) -> F32Array:
    """Of both signs, and zeros in row 3."""
    top = np.abs(grid.levels).max() / 8 if grid.is_codebook else 1
    scales = (np.random.default_rng(2).uniform(-0.3, 0.3, (n_rows, n_groups)) / top).astype(np.float32)
    scales[3] = 0
    steps = some_steps(grid, n_rows)
    return np.stack([reference.stored_scale(column, steps) for column in scales.T], axis=1)


def tiled_steps(steps: F32Array | None) -> F32Array | None:
    return None if steps is None else np.ascontiguousarray(tiled(steps[:, None])[:, 0])


def some_q_min(grid: Grid, shape: tuple[int, ...]) -> F32Array:
    if grid.shifts:
        return np.random.default_rng(9).choice(np.array(grid.shifts, np.float32), shape)
    if not grid.is_asymmetric:
        return np.full(shape, grid.q_min, np.float32)
    return -np.random.default_rng(9).integers(0, 16, shape).astype(np.float32)


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("W4CONV_ISA", request.param)
    return str(request.param)


def moments(n: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Second moments of correlated inputs with a mean, made definite."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3 * n, n)) @ rng.standard_normal((n, n)) + rng.standard_normal(n)
    h = x.T @ x / len(x)
    out = (h + h.T) / 2 + 0.01 * np.diag(h).mean() * np.eye(n)
    return np.asarray(out)


def factored(h: npt.NDArray[np.float64]) -> tuple[F32Array, F32Array]:
    found = reference.factor(h.astype(np.float32))
    assert found is not None
    return found


def mirrored(unit: F32Array) -> F32Array:
    return unit + np.triu(unit, 1).T


def tiled(rows: F32Array) -> F32Array:
    """(n_rows, n_columns), n_rows a multiple of 16 -> (n_tiles, n_columns, 16)."""
    return np.ascontiguousarray(rows.reshape(-1, 16, rows.shape[1]).transpose(0, 2, 1))


def untiled(tiles: Any) -> Any:
    return tiles.transpose(0, 2, 1).reshape(-1, tiles.shape[1])


def test_fused_multiply_adds() -> None:
    """Against exact fractions: sums that lie beside the middle of two float32 numbers by less than float64 can tell."""
    rng = np.random.default_rng(0)
    half = np.float32(1 + 2**-12) * np.float32(1 + 2**-12)  # rounded; as a product it needs 25 bits
    a = np.concatenate([rng.standard_normal(200), [1 + 2**-12, 1 + 2**-12, 3e-20, 1.5]]).astype(np.float32)
    b = np.concatenate([rng.standard_normal(200), [1 + 2**-12, 1 + 2**-12, 3e-20, 0]]).astype(np.float32)
    c = np.concatenate([rng.standard_normal(200), [2**-60, -(2**-60), half, -0.0]]).astype(np.float32)
    for x, y, z, got in zip(a, b, c, reference.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        candidates = [got, np.nextafter(got, np.float32(np.inf)), np.nextafter(got, np.float32(-np.inf))]
        gaps = [abs(Fraction(float(f)) - exact) for f in candidates]
        assert gaps[0] == min(gaps)
        assert gaps.count(gaps[0]) == 1 or got.view(np.uint32) % 2 == 0


@pytest.mark.parametrize("n", [1, 47, 48, 97, 210])
def test_factor(tier: str, n: int) -> None:
    h = moments(n)
    columns = np.random.default_rng(3).permutation(n)
    wanted = h[np.ix_(columns, columns)] + np.eye(n)
    unit, pivots = factored(wanted)
    np.testing.assert_allclose(
        unit.T.astype(np.float64) * pivots @ unit, wanted, rtol=1e-4, atol=1e-4 * np.diag(h).mean()
    )
    for threads in (1, 2):
        found = kernels.factor(h.astype(np.float32), columns, np.diag(wanted).astype(np.float32), threads=threads)
        assert not isinstance(found, int)
        assert np.array_equal(found[0], mirrored(unit))
        assert np.array_equal(found[1], pivots)


@pytest.mark.parametrize("column", [0, 31, 40, 69, 129])
def test_factor_names_the_column_without_a_positive_pivot(tier: str, column: int) -> None:
    h = moments(130).astype(np.float32)
    h[column, :] = h[:, column] = 0
    assert reference.factor(h) is None
    assert kernels.factor(h, np.arange(130), np.diag(h).copy(), threads=2) == column


@pytest.mark.parametrize(("n_k", "m", "n"), [(1, 1, 1), (100, 50, 200), (1000, 48, 49)])
def test_gemm_tn_and_syrk(tier: str, n_k: int, m: int, n: int) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((n_k, width)).astype(np.float32) for width in (m, n))
    before = rng.standard_normal((m, n)).astype(np.float32)
    expected = before.copy()
    reference.gemm_tn(a, b, expected)
    np.testing.assert_allclose(expected, before + a.T.astype(np.float64) @ b, rtol=1e-4, atol=1e-3)
    for threads in (1, 2):
        found = before.copy()
        kernels.gemm_tn(a, b, found, threads=threads)
        assert np.array_equal(found, expected)
        square, wanted = np.zeros((n, n), np.float32), np.zeros((n, n), np.float32)
        kernels.gemm_tn(b, b, square, upper=True, threads=threads)
        reference.gemm_tn(b, b, wanted)
        assert np.array_equal(np.triu(square), np.triu(wanted))


@pytest.mark.parametrize(
    ("n", "size", "kind"), [(16, 16, "int4"), (130, 130, "int4"), *((67, 32, kind) for kind in GRIDS)]
)
def test_gptq_round(tier: str, n: int, size: int, kind: str) -> None:
    grid = GRIDS[kind]
    unit, _ = factored(moments(n))
    w = np.random.default_rng(1).standard_normal((80, n)).astype(np.float32)
    scales = some_scales(grid, 80, -(-n // size))
    q_min = some_q_min(grid, scales.shape)
    wide_scales, wide_q_min = (np.repeat(a, size, axis=1)[:, :n] for a in (scales, q_min))
    expected = reference.gptq_round(w, wide_scales, wide_q_min, unit, grid)
    group = (np.arange(n) // size).astype(np.int32)
    for threads in (1, 2):
        q = kernels.gptq_round(tiled(w), group, tiled(scales), tiled(q_min), mirrored(unit), grid=grid, threads=threads)
        assert np.array_equal(untiled(q), expected)
    nearest = kernels.gptq_round(tiled(w), group, tiled(scales), tiled(q_min), None, grid=grid)
    levels = reference.level_of(w, wide_scales, wide_q_min, grid)
    assert np.array_equal(untiled(nearest), reference.codes_of(levels, wide_q_min, grid))


@pytest.mark.parametrize("n", [16, 67])
def test_solution_of_rows(tier: str, n: int) -> None:
    h = moments(n)
    unit, pivots = factored(h)
    b = np.random.default_rng(1).standard_normal((48, n)).astype(np.float32)
    expected = reference.solve(b, unit, pivots)
    np.testing.assert_allclose(expected @ h, b, rtol=1e-2, atol=1e-2)
    for threads in (1, 2):
        x = tiled(b)
        kernels.solve_rows(x, mirrored(unit), pivots, threads=threads)
        assert np.array_equal(untiled(x), expected)


@pytest.mark.parametrize(
    ("n", "size", "kind"),
    [(16, 16, "int4"), (130, 130, "int4"), (150, 70, "int8"), *((67, 32, kind) for kind in GRIDS)],
)
def test_refinement(tier: str, n: int, size: int, kind: str) -> None:
    grid = GRIDS[kind]
    rng = np.random.default_rng(1)
    h, w = moments(n).astype(np.float32), rng.standard_normal((80, n)).astype(np.float32)
    scales = some_scales(grid, 80, -(-n // size))
    q_min = some_q_min(grid, scales.shape)
    lowest = 0 if grid.is_codebook else np.repeat(q_min, size, axis=1)[:, :n]
    q = (rng.integers(0, grid.span + 1, w.shape) + lowest).astype(np.int8)
    q[5] = reference.codes_of(np.zeros(n, np.float32), np.zeros(n, np.float32), grid)
    steps = some_steps(grid, 80)
    expected_q, expected_scales = reference.refine(w, q, scales, q_min, h, size, grid, 2, steps)
    for threads in (1, 2):
        tiles, tile_scales = tiled(q.copy()), tiled(scales.copy())
        kernels.refine(
            tiled(w), tiles, tile_scales, tiled(q_min), h, size, grid=grid, n_rounds=2, steps=tiled_steps(steps),
            threads=threads,
        )  # fmt: skip
        assert np.array_equal(untiled(tiles), expected_q)
        assert np.array_equal(untiled(tile_scales).view(np.uint32), expected_scales.view(np.uint32))
    if steps is not None:  # whole numbers of them
        whole = expected_scales[steps > 0] / steps[steps > 0][:, None]
        assert (whole == np.rint(whole)).all()
        assert np.abs(whole).max() == 31
        assert (expected_scales[4] == 0).all()


def test_refinement_ends_where_no_code_and_no_scale_alone_can_gain() -> None:
    h, n, size = moments(24), 24, 8
    w = np.random.default_rng(4).standard_normal((8, n)).astype(np.float32)
    scales = np.full((8, 3), 0.25, np.float32)
    q = np.clip(np.rint(w / 0.25), -8, 7).astype(np.int8)

    def error(q: Any, scales: Any) -> Any:
        e = w - q * np.repeat(scales.astype(np.float64), size, axis=1)
        return np.einsum("ri,ij,rj->r", e, h, e)

    before = error(q, scales)
    q_min = np.full(scales.shape, -8, np.float32)
    q, scales = reference.refine(w, q, scales, q_min, h.astype(np.float32), size, GRIDS["int4"], 20)
    after = error(q, scales)
    assert (after < 0.9 * before).all()
    for j, step in itertools.product(range(n), (-1, 1)):
        other = q.copy()
        other[:, j] = np.clip(other[:, j] + step, -8, 7)
        assert (error(other, scales) >= after * (1 - 1e-5)).all()
    for g, factor in itertools.product(range(3), (0.998, 1.002)):
        changed = scales.copy()
        changed[:, g] = (changed[:, g] * factor).astype(np.float16)
        assert (error(q, changed) >= after * (1 - 1e-4)).all()


@pytest.mark.parametrize(
    ("n", "size", "kind", "stepped"),
    [
        (32, 32, "int4", False), (130, 130, "int4", False), (32, 32, "nl4", True),
        *((75, 32, kind, stepped) for kind in GRIDS for stepped in (False, True) if GRIDS[kind].shifts or not stepped),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rounded", [True, False])
def test_search_of_scales(tier: str, n: int, size: int, rounded: bool, kind: str, stepped: bool) -> None:
    grid = GRIDS[kind]
    steps = some_steps(grid, 32) if stepped else None
    rng = np.random.default_rng(3)
    w = rng.standard_normal((32, n)).astype(np.float32)
    w[5] = 0
    top = np.abs(grid.levels).max(initial=0)
    w[6, :size] = 1.1 * 65504 * (top if grid.is_codebook else grid.span if grid.is_asymmetric else -grid.q_min)
    w[7] = np.abs(w[7])  # the scale of row 6 is beyond FP16, half of it is not
    h = moments(n)
    multipliers = np.array([(1, 1), (-1, -1), (0.8, 1), (1, 0.8), (0.5, 0.5), (-0.7, -0.7)], np.float32)
    multipliers = np.abs(multipliers) if grid.is_asymmetric else multipliers
    if grid.is_codebook:  # scales, and shifts
        multipliers[:, 1] = np.resize(grid.shifts or (0,), len(multipliers))
    n_groups = -(-n // size)
    factors, pivots = np.zeros((n_groups, size, size), np.float32), np.zeros(n, np.float32)
    expected = []
    for g in range(n_groups):
        part = slice(g * size, min(n, (g + 1) * size))
        unit, pivots[part] = factored(np.ascontiguousarray(h[part, part]))
        factors[g].reshape(-1)[: unit.size] = mirrored(unit).ravel()
        found = reference.search_scales(w[:, part], unit if rounded else None, pivots[part], multipliers, grid, steps)
        expected.append(found)
    scales, q_min, errors = kernels.search_scales(
        tiled(w),
        size,
        factors if rounded else None,
        pivots,
        multipliers,
        grid=grid,
        steps=tiled_steps(steps),
        threads=2,
    )
    wanted_scales, wanted_q_min, wanted_errors = (np.stack(found, 1) for found in zip(*expected, strict=True))
    assert np.array_equal(untiled(scales).view(np.uint32), wanted_scales.view(np.uint32))
    assert np.array_equal(untiled(q_min), wanted_q_min)
    assert np.array_equal(untiled(errors), wanted_errors)
    assert (untiled(scales)[5] == 0).all()
    if not grid.is_codebook:
        assert (untiled(q_min)[7] == 0).all() == grid.is_asymmetric


def test_error_of_the_search_is_the_output_error() -> None:
    h, n = moments(12), 12
    unit, pivots = factored(h)
    w = np.random.default_rng(4).standard_normal((8, n)).astype(np.float32)
    grid, multipliers = GRIDS["int4z"], np.array([(1, 1), (0.9, 1), (0.9, 0.9)], np.float32)
    scales, q_min, errors = reference.search_scales(w, unit, pivots, multipliers, grid)
    wide, wide_q_min = (np.repeat(a.astype(np.float32)[:, None], n, axis=1) for a in (scales, q_min))
    e = w - reference.gptq_round(w, wide, wide_q_min, unit, grid) * wide
    np.testing.assert_allclose(np.einsum("ri,ij,rj->r", e, h, e), errors, rtol=1e-3)


def test_column_updates_against_every_assignment_of_codes() -> None:
    """Of all choices of codes for four columns: never better than the best, and mostly better than nearest codes."""
    n, scale = 4, np.float32(0.25)
    codes = np.array(list(itertools.product(range(-8, 8), repeat=n)), np.float32)
    better = 0
    for seed in range(20):
        h = moments(n, seed)
        order = np.argsort(np.diag(h))
        h = np.ascontiguousarray(h[np.ix_(order, order)])
        unit, _ = factored(h)
        w = (np.random.default_rng(seed).standard_normal((1, n)) * 0.6).astype(np.float32)
        wide = np.full_like(w, scale)

        def error(q: Any, w: F32Array = w, h: Any = h) -> float:
            e = w - q * scale
            return float(np.einsum("ri,ij,rj->r", e, h, e).min())

        q_min = np.full_like(w, -8)
        least, nearest = error(codes), error(reference.level_of(w, wide, q_min, GRIDS["int4"]))
        rounded = error(reference.gptq_round(w, wide, q_min, unit, GRIDS["int4"]))
        assert least <= rounded * (1 + 1e-5)
        better += rounded < nearest
        assert rounded <= 4 * nearest
    assert better >= 8


def test_column_updates_are_those_of_the_textbook_with_the_inverse() -> None:
    """GPTQ as published: the first column first, errors spread by the Cholesky factor of the inverse."""
    n, scale = 24, np.float32(0.3)
    h = moments(n, 7)
    w = np.random.default_rng(8).standard_normal((16, n)).astype(np.float32)
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    left, textbook = w.astype(np.float64), np.zeros((16, n))
    for j in range(n):
        textbook[:, j] = np.clip(np.rint(left[:, j] / scale), -8, 7)
        e = (left[:, j] - textbook[:, j] * scale) / upper[j, j]
        left[:, j:] -= np.outer(e, upper[j, j:])
    unit, _ = factored(np.ascontiguousarray(h[::-1, ::-1]))
    wide = np.full_like(w, scale)
    q_min = np.full_like(w, -8)
    q = reference.gptq_round(np.ascontiguousarray(w[:, ::-1]), wide, q_min, unit, GRIDS["int4"])[:, ::-1]
    assert np.mean(q != textbook) < 0.01  # float32 against float64: a tie may fall to the other side


@pytest.mark.parametrize("n_columns", [40, 600])
def test_moments(tier: str, n_columns: int) -> None:
    rng = np.random.default_rng(5)
    blocks = [rng.standard_normal((n, n_columns)).astype(np.float32) for n in (64, 7)]
    found = []
    for threads in (1, 2):
        m = Moments(n_columns)
        for block in blocks:
            m.add(block, threads=threads)
        found.append(m.matrix())
    x = np.concatenate(blocks).astype(np.float64)
    np.testing.assert_allclose(found[0], x.T @ x / len(x), rtol=1e-4, atol=1e-4)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[0].T)
    assert m.n_tokens == 71
