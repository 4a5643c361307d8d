"""Sampler: filters against a plain sort-based definition, draws against the probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w4conv.errors import UsageError
from w4conv.runtime.sampling import Sampler

LOGITS = np.array([1.0, 3.0, 3.0, -2.0, 0.5, 2.0], np.float32)


def test_greedy_takes_the_first_maximum() -> None:
    assert Sampler()(LOGITS) == 1


def defined(
    logits: npt.NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """The docstring of Sampler, step by step over (probability, id) pairs."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    pairs = sorted(((w, i) for i, w in enumerate(weights / weights.sum())), key=lambda p: (-p[0], p[1]))
    if top_k:
        pairs = pairs[:top_k]
    if top_p < 1:
        total, reached, kept = sum(w for w, _ in pairs), 0.0, []
        for w, i in pairs:
            kept.append((w, i))
            reached += w
            if reached >= top_p * total:
                break
        pairs = kept
    pairs = [(w, i) for w, i in pairs if w >= min_p * pairs[0][0]]
    out = np.zeros(len(logits))
    for w, i in pairs:
        out[i] = w
    return out / out.sum()


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.sampled_from([-4.0, -1.0, 0.0, 0.25, 1.0, 1.0, 2.0, 5.0]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.1, 0.33, 0.6, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)
def test_filters_follow_their_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = np.array(logits, np.float32)
    got = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).probabilities(row)
    np.testing.assert_allclose(got, defined(row, temperature, top_k, top_p, min_p), rtol=1e-12, atol=0)


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    options = {"temperature": 1.3, "top_k": 4}
    first, again, other = (Sampler(**options, seed=seed) for seed in (5, 5, 6))  # type: ignore[arg-type]  # mixed options
    draws = [first(LOGITS) for _ in range(4000)]
    assert draws == [again(LOGITS) for _ in range(4000)]
    assert draws != [other(LOGITS) for _ in range(4000)]
    shares = np.bincount(draws, minlength=len(LOGITS)) / len(draws)
    np.testing.assert_allclose(shares, first.probabilities(LOGITS), atol=0.03)
    assert not shares[3], "outside the four most probable"


def test_extreme_logits_stay_finite() -> None:
    row = np.array([1e30, -1e30, -np.inf, 1e30], np.float32)
    p = Sampler(temperature=1e-3, top_p=0.9).probabilities(row)
    np.testing.assert_array_equal(p, [0.5, 0, 0, 0.5])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1),
        ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1), ("min_p", 1.1), ("seed", -1),
    ],
)  # fmt: skip
def test_values_out_of_range(option: str, value: float) -> None:
    with pytest.raises(UsageError, match=option.replace("_", "-")):
        Sampler(**{option: value})  # type: ignore[arg-type]  # one option at a time


@pytest.mark.parametrize("option", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_without_a_temperature_are_refused(option: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="temperature"):
        Sampler(**option)  # type: ignore[arg-type]  # one option at a time
