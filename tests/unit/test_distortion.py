"""Distortion: sums over blocks against the formulas applied to the whole tensor at once."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w4conv import kernels
from w4conv.measure.distortion import DistortionMeter


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 70)),
    group_size=st.sampled_from([0, 32]),
    block=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_blocks_give_what_the_whole_gives(shape: tuple[int, int], group_size: int, block: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    y = (x + rng.standard_normal(shape) * 0.1).astype(np.float32)
    meter = DistortionMeter(group_size)
    for start in range(0, len(x), block):
        meter.add(x[start : start + block], y[start : start + block])
    got = meter.result()

    a, b = x.astype(np.float64), y.astype(np.float64)
    assert got.n_values == a.size
    assert got.max_abs_error == pytest.approx(np.abs(a - b).max())
    assert got.rmse == pytest.approx(math.sqrt(np.mean((a - b) ** 2)))
    assert got.sqnr_db == pytest.approx(10 * math.log10((a**2).sum() / ((a - b) ** 2).sum()))
    assert got.cosine == pytest.approx((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))
    size = group_size or shape[1]
    ratios = {
        (row, start // size): (a[row, start : start + size] ** 2).sum()
        / ((a - b)[row, start : start + size] ** 2).sum()
        for row in range(shape[0])
        for start in range(0, shape[1], size)
    }
    worst = got.worst_group
    assert worst is not None
    assert (worst.row, worst.group) == min(ratios, key=lambda k: ratios[k])
    assert worst.sqnr_db == pytest.approx(10 * math.log10(min(ratios.values())))


@pytest.mark.parametrize("shape", [(1, 1), (17, 75), (40, 256), (3, 1000)])
@pytest.mark.parametrize("group_size", [32, 128, 1000])
def test_the_order_of_the_sums_is_fixed(shape: tuple[int, int], group_size: int) -> None:
    """dequantize.h in numpy: 16 lanes, then a tree; the same bits for any threads."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))).astype(np.float32)
    y = (x * 1.01).astype(np.float32)
    step, n_groups = -(-group_size // 16) * 16, -(-shape[1] // group_size)
    a, e = np.zeros((2, shape[0], n_groups, step))
    for g in range(n_groups):
        part = slice(g * group_size, min(shape[1], (g + 1) * group_size))
        a[:, g, : part.stop - part.start] = x[:, part]
        e[:, g, : part.stop - part.start] = y[:, part].astype(np.float64) - x[:, part]

    def total(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        lanes = np.zeros((shape[0], n_groups, 16))
        for k in range(0, step, 16):
            lanes += values[..., k : k + 16]
        for width in (8, 4, 2, 1):
            lanes = lanes[..., :width] + lanes[..., width:]
        return lanes[..., 0]

    for threads in (1, 2):
        got = kernels.compare(x, y, group_size, threads=threads)
        for sums, values in zip(got.sums, (a * a, e * e, a * e), strict=True):
            np.testing.assert_array_equal(sums, total(values))
        assert got.largest == np.abs(e).max()


def test_nan_is_not_lost() -> None:
    x = np.zeros((2, 20), np.float32)
    y = x.copy()
    y[1, 3] = np.nan
    y[1, 19] = 1
    got = kernels.compare(x, y, 20)
    assert math.isnan(got.largest)
    assert np.isnan(got.sums[1, 1, 0])
    assert not got.equal


def test_exact_values_have_no_error_to_report() -> None:
    x = np.array([[1.5, -2.0], [0.0, 0.0]], np.float32)
    meter = DistortionMeter()
    meter.add(x, x)
    got = meter.result()
    assert (got.max_abs_error, got.rmse, got.sqnr_db, got.worst_group) == (0, 0, None, None)
    assert got.cosine == pytest.approx(1)


def test_zeros() -> None:
    zeros, ones = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    meter = DistortionMeter()
    meter.add(zeros, zeros)
    assert meter.result().cosine is None
    meter.add(zeros, ones)
    got = meter.result()
    assert got.sqnr_db == -math.inf
    assert got.worst_group is not None
    assert (got.worst_group.row, got.worst_group.sqnr_db) == (1, -math.inf)


def test_merge_pools_tensors() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 8)).astype(np.float32)
    y = (x * 1.01).astype(np.float32)
    whole, pooled = DistortionMeter(), DistortionMeter()
    whole.add(x, y)
    for rows in (slice(0, 2), slice(2, 6)):
        part = DistortionMeter()
        part.add(x[rows], y[rows])
        pooled.merge(part)
    a, b = whole.result(), pooled.result()
    assert (a.n_values, a.max_abs_error) == (b.n_values, b.max_abs_error)
    assert (a.rmse, a.sqnr_db, a.cosine) == pytest.approx((b.rmse, b.sqnr_db, b.cosine))
