"""exp, log, cosine, sine and sums are near the true values."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np

from w4conv import elementary


def error(got: float, want: Decimal) -> float:
    """In units of the last place."""
    return float(abs(Decimal(got) - want) / Decimal(math.ulp(got)))


def test_exp_is_within_a_unit_of_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.uniform(-708, 709.78, 500), [709.78], rng.uniform(-1, 1, 500), 10.0 ** rng.uniform(-20, 0, 200), [0.0]]
    )
    with localcontext(prec=50):
        errors = [error(y, Decimal(v).exp()) for v, y in zip(x.tolist(), elementary.exp(x).tolist(), strict=True)]
    assert max(errors) < 1


def test_log_is_within_two_units_of_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(0.5, 2, 500), 2.0 ** rng.uniform(-1000, 1000, 500), [1.0, 5e-324]])
    with localcontext(prec=50):
        assert max(error(elementary.log(v), Decimal(v).ln()) for v in x.tolist() if v != 1) < 2
    assert elementary.log(1.0) == 0


def test_exp_beyond_its_range() -> None:
    x = np.array([-np.inf, -1e300, -709.0, 710.0, np.inf, np.nan, -0.0])
    np.testing.assert_array_equal(elementary.exp(x), [0, 0, 0, np.inf, np.inf, np.nan, 1])
    assert elementary.exp(0.0).shape == ()
    assert elementary.exp(np.zeros((0, 3))).shape == (0, 3)


def test_exp_of_many_values_is_that_of_each() -> None:
    x = np.random.default_rng(0).uniform(-800, 5, (3, 5001))
    want = [float(elementary.exp(v)) for v in x[:, ::97].ravel()]
    np.testing.assert_array_equal(elementary.exp(x)[:, ::97].ravel(), want)


def test_cosine_and_sine_are_those_of_libm() -> None:
    x = np.random.default_rng(0).uniform(-(2**20), 2**20, 5000)
    cos, sin = elementary.cos_sin(x)
    np.testing.assert_allclose(cos, np.cos(x), rtol=0, atol=1e-14)
    np.testing.assert_allclose(sin, np.sin(x), rtol=0, atol=1e-14)


def test_sums_and_means() -> None:
    x = np.array([[1e16, 1.0, -1e16], [3.0, 4.0, 5.0]])
    assert elementary.mean(x) == 13 / 6  # rounded once
    assert elementary.variance(x[1]) == 2 / 3
    assert elementary.total(x[1]) == 12
    assert elementary.total(x[:0]) == 0
    assert elementary.mean(np.array([np.inf, 1.0])) == np.inf
    assert math.isnan(elementary.mean(np.array([np.inf, -np.inf])))
