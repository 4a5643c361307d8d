"""Sampling: bit for bit as docs/numerics.md 8 says; as transformers filters; draws against their probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_forward import sampling as reference

from w4conv import kernels
from w4conv.errors import InputError, UsageError
from w4conv.runtime.sampling import Sampler, Sampling, choose, logprob, token_logprobs

F32 = npt.NDArray[np.float32]
LOGITS = np.array([1.0, 3.0, 3.0, -2.0, 0.5, 2.0], np.float32)
FLAT = st.sampled_from([-4.0, -1.0, -0.0, 0.0, 0.25, 1.0, 1.0, 2.0, 5.0, -math.inf])


def shuffled(n: int, seed: int, *, scale: float = 3.0, digits: int | None = None) -> F32:
    row = np.random.default_rng(seed).standard_normal(n) * scale
    return (row if digits is None else row.round(digits)).astype(np.float32)


def test_greedy_takes_the_first_maximum() -> None:
    assert Sampler(Sampling())(LOGITS) == 1


@pytest.fixture(params=kernels.isa_tiers())
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("W4CONV_ISA", request.param)
    return str(request.param)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_text_is_drawn_as_the_page_says(data: st.DataObject) -> None:
    """Token after token, with all options at once; rows with many ties, and of every length beside the blocks of 64."""
    n = data.draw(st.integers(1, 12) | st.integers(60, 70) | st.integers(120, 300))
    make = st.lists(FLAT, min_size=n, max_size=n).filter(lambda row: max(row) > -math.inf)
    filters = {
        "temperature": data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.5, 1e-20, 1e20])),
        "top_k": data.draw(st.sampled_from([0, 0, 1, 2, 5, 63, 64, 65, 1000])),
        "top_p": data.draw(st.sampled_from([1.0, 1.0, 1e-9, 0.1, 0.33, 0.6, 0.95, 1 - 1e-12])),
        "min_p": data.draw(st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0])),
    }
    if filters["temperature"] == 0:
        filters |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    tokens = st.integers(0, n - 1)
    number = st.sampled_from([0.0, 0.5, -0.7, 100.0])
    bias = data.draw(st.dictionaries(tokens, number, max_size=3))
    penalties = {
        "repetition": data.draw(st.sampled_from([1.0, 1.3, 0.5])),
        "presence": data.draw(number),
        "frequency": data.draw(number),
    }
    prompt, answer = data.draw(st.lists(tokens, max_size=5)), []
    seed, choice = data.draw(st.sampled_from([0, 7, (1 << 128) - 1])), data.draw(st.integers(0, 3))
    sampling = Sampling(
        **filters, seed=seed, logit_bias=bias, **{f"{name}_penalty": value for name, value in penalties.items()}
    )
    sampler = Sampler(sampling, prompt_ids=prompt, choice=choice)
    for _ in range(4):
        row = np.array(data.draw(make), np.float32)
        expected = reference.choose(
            row, prompt, answer, seed=seed, choice=choice, filters=filters, penalties={"bias": bias, **penalties}
        )
        assert sampler(row) == expected
        answer.append(expected)


@pytest.mark.parametrize(
    "filters",
    [
        {}, {"top_k": 40}, {"top_k": 700}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 900, "top_p": 0.5, "min_p": 0.01},
        {"temperature": 40.0, "top_p": 0.999},
    ],
)  # fmt: skip
@pytest.mark.parametrize("digits", [None, 1])
def test_long_rows_on_every_tier(tier: str, filters: dict[str, Any], digits: int | None) -> None:
    options = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    rows = np.stack([shuffled(20011, i, digits=digits) for i in range(3)])
    samplers = [Sampler(Sampling(**options, seed=9), prompt_ids=range(i), choice=i) for i in range(3)]
    expected = [
        reference.draw(reference.weights(row, **options), reference.random_word(9, i, i)) for i, row in enumerate(rows)
    ]
    assert choose(rows, samplers, threads=2) == expected
    alone = [Sampler(Sampling(**options, seed=9), prompt_ids=range(i), choice=i)(row) for i, row in enumerate(rows)]
    assert alone == expected, "what else runs makes no difference"


def transformers_keeps(row: F32, *warpers: Any, prompt: tuple[int, ...] = (0,)) -> npt.NDArray[np.float32]:
    torch = pytest.importorskip("torch")
    scores = torch.tensor(row)[None]
    for warper in warpers:
        scores = warper(torch.tensor([prompt]), scores)
    return scores[0].numpy()


def test_filters_and_penalties_are_those_of_transformers() -> None:
    generation = pytest.importorskip("transformers.generation")
    row = shuffled(5000, 4)
    t, k, p, m = 0.7, 200, 0.8, 0.03
    prompt = (5, 17, 17, 4000)
    row[[5, 17]] = 4.0, -1.0
    steps = [
        generation.RepetitionPenaltyLogitsProcessor(1.3),
        generation.TemperatureLogitsWarper(t),
        generation.TopKLogitsWarper(k),
        generation.TopPLogitsWarper(p),
        generation.MinPLogitsWarper(m),
    ]
    seen = transformers_keeps(row, steps[0], prompt=prompt)
    own = reference.changed(row, prompt, (), bias={}, repetition=1.3, presence=0, frequency=0)
    np.testing.assert_array_equal(seen, own)
    for n in range(2, 6):
        filters = {
            "temperature": t,
            "top_k": k if n > 2 else 0,
            "top_p": p if n > 3 else 1.0,
            "min_p": m if n > 4 else 0,
        }
        theirs = transformers_keeps(row, *steps[:n], prompt=prompt).astype(np.float64)
        share = np.exp(theirs - theirs.max())
        ours = np.array(reference.weights(own, **filters), np.float64)
        np.testing.assert_allclose(ours / ours.sum(), share / share.sum(), rtol=2e-6, atol=1e-10)
        np.testing.assert_array_equal(ours[share > 1e-9] > 0, True)
        np.testing.assert_array_equal(ours[share == 0], 0)


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    sampling = Sampling(temperature=1.3, top_k=4, seed=5)
    n = 4000
    first, again = Sampler(sampling), Sampler(sampling)
    draws = [first(LOGITS) for _ in range(n)]
    assert draws == [again(LOGITS) for _ in range(n)]
    others = [Sampler(Sampling(temperature=1.3, top_k=4, seed=6)), Sampler(sampling, choice=1)]
    for other in others:
        assert draws != [other(LOGITS) for _ in range(n)]
    weights = np.exp(LOGITS[[1, 2, 5, 0]].astype(np.float64) / 1.3)
    expected = np.zeros(len(LOGITS))
    expected[[1, 2, 5, 0]] = weights / weights.sum()
    shares = np.bincount(draws, minlength=len(LOGITS)) / n
    deviations = np.sqrt(expected * (1 - expected) / n)
    assert (np.abs(shares - expected) <= 4.5 * deviations).all()


def test_a_text_that_is_continued_goes_on_as_it_did() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    rows = [shuffled(500, i) for i in range(8)]
    whole = Sampler(sampling, prompt_ids=[1, 2])
    tokens = [whole(row) for row in rows]
    later = Sampler(sampling, prompt_ids=[1, 2, *tokens[:5]])
    assert [later(row) for row in rows[5:]] == tokens[5:]


def test_extreme_logits() -> None:
    row = np.array([1e30, -1e30, -np.inf, 1e30], np.float32)
    sampler = Sampler(Sampling(temperature=1e-3, top_p=0.9))
    assert {sampler(row) for _ in range(50)} == {0, 3}
    ruled_out = Sampler(Sampling(temperature=1.0, logit_bias={0: -math.inf}))
    assert {ruled_out(row) for _ in range(20)} == {3}
    huge = np.array([3e38, -3e38, 0], np.float32)
    assert Sampler(Sampling(temperature=1.0))(huge) == 0


@pytest.mark.parametrize(
    ("row", "what"),
    [([1, math.nan, 2], "not a number"), ([1, math.inf], "infinite"), ([-math.inf, -math.inf], "every logit")],
)
@pytest.mark.parametrize("n", [0, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_largest_logit(row: list[float], what: str, n: int, temperature: float) -> None:
    logits = np.array(row * 40 + [-math.inf] * n, np.float32)
    with pytest.raises(InputError, match=what):
        Sampler(Sampling(temperature=temperature))(logits)
    with pytest.raises(InputError, match=what):
        logprob(logits, 0)


def test_a_batch_that_fails_moves_no_sampler_on() -> None:
    sampling = Sampling(temperature=1.0, seed=1)
    good, plain = Sampler(sampling), Sampler(sampling)
    rows = np.stack([shuffled(300, 1), np.full(300, math.nan, np.float32)])
    with pytest.raises(InputError, match="row 1"):
        choose(rows, [good, Sampler(sampling)])
    assert good(rows[0]) == plain(rows[0])
    with pytest.raises(ValueError, match="twice"):
        choose(rows, [good, good])


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_logprobs_are_those_of_torch(tier: str, scale: float) -> None:
    torch = pytest.importorskip("torch")
    rows = np.stack([shuffled(30001, i, scale=scale) for i in range(3)])
    expected = torch.log_softmax(torch.tensor(rows, dtype=torch.float64), dim=-1)
    tokens = [5, 777, 30000]
    got = token_logprobs(rows, tokens, threads=2)
    np.testing.assert_allclose(
        [p for p, _ in got], [float(e[t]) for e, t in zip(expected, tokens, strict=True)], atol=1e-6
    )
    best = rows.argmax(axis=1)
    assert all(first for _, first in token_logprobs(rows, best.tolist()))
    assert not any(first for _, first in token_logprobs(rows, rows.argmin(axis=1).tolist()))
    one = logprob(rows[1], 777, n_top=5)
    assert (one.id, one.logprob) == (777, got[1][0])
    values, ids = expected[1].topk(5)
    assert [i for i, _ in one.top] == ids.tolist()
    np.testing.assert_allclose([p for _, p in one.top], values.numpy(), atol=1e-6)


def test_alternatives_among_equals_rise() -> None:
    row = np.zeros(200, np.float32)
    row[150] = 1
    assert [i for i, _ in logprob(row, 3, n_top=4).top] == [150, 0, 1, 2]
    assert len(logprob(row[:3], 0, n_top=10).top) == 3


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", 1e-40),
        ("temperature", 1e39), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", -1), ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("presence_penalty", 1e39),
        ("frequency_penalty", float("nan")), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: float("nan")}), ("logit_bias", {1.5: 1.0}), ("logit_bias", [1]), ("logit_bias", {1: 1e39}),
    ],
)  # fmt: skip
def test_values_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option.replace("_", "-")):
        Sampling(**{option: value})


@pytest.mark.parametrize("option", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_without_a_temperature_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="temperature"):
        Sampling(**option)
