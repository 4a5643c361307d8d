"""Prompt lookup: what is drafted, and that drafting changes nothing but the number of passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import trained

import w4conv
from w4conv.errors import UsageError
from w4conv.runtime.engine import Model
from w4conv.runtime.generation import Generation, TextStream, generate_text
from w4conv.runtime.lookup import NGRAM, PromptLookup
from w4conv.runtime.sampling import Sampling
from w4conv.runtime.tokenizer import Tokenizer


def by_search(tokens: list[int], n: int) -> list[int]:
    """The definition, by looking at every place."""
    last = tokens[-NGRAM:]
    for end in range(len(tokens) - 1, NGRAM - 1, -1):
        if tokens[end - NGRAM : end] == last and len(tokens) >= NGRAM:
            return tokens[end : end + n]
    return []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 8))
def test_drafts_follow_the_latest_recurrence(tokens: list[int], n: int) -> None:
    lookup = PromptLookup(n)
    lookup.extend(tokens)
    assert lookup.draft(99) == by_search(tokens, n)
    assert lookup.draft(2) == by_search(tokens, min(n, 2))


@pytest.mark.parametrize("n", [-1, 65])
def test_a_draft_of_another_size_is_refused(n: int) -> None:
    with pytest.raises(UsageError, match=str(n)):
        PromptLookup(n)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lookup") / "stories.w4"
    w4conv.quantize(trained(), path, group_size=32, effort=0, scheme="w4a16")
    return path


def generate(path: Path, lookup: int, *, temperature: float, max_tokens: int) -> Generation:
    with Model(path, threads=1) as model:
        tokenizer = Tokenizer(model.container.blobs)
        story = "Once upon a time, there was a cat. The cat was big. The cat was red. Once upon a time, there"
        sampling = Sampling(temperature=temperature, seed=3)
        stream = TextStream(
            model, tokenizer, tokenizer.encode(story), max_tokens=max_tokens, sampling=sampling, lookup=lookup
        )
        return generate_text(stream, on_piece=lambda _: None)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
def test_the_output_is_the_same_with_lookup(stories: Path, temperature: float, max_tokens: int) -> None:
    plain = generate(stories, 0, temperature=temperature, max_tokens=max_tokens)
    drafted = generate(stories, 5, temperature=temperature, max_tokens=max_tokens)
    same = ("text", "finish", "n_prompt", "n_generated", "n_decoded")
    assert [getattr(plain, f) for f in same] == [getattr(drafted, f) for f in same]
    assert (plain.n_drafted, plain.n_accepted) == (0, 0)
    assert 0 <= drafted.n_accepted <= drafted.n_drafted
    if max_tokens == 1000 and temperature == 0:  # a small model repeats itself before its context is full
        assert plain.finish == "context"
        assert drafted.n_accepted > 50


def test_logits_after_drafts_are_those_of_single_steps(stories: Path) -> None:
    with Model(stories, threads=2) as model:
        one, many = model.session(), model.session()
        tokens = list(range(5, 45))
        for token in tokens:
            one.append([token])
        for start in range(0, 40, 7):
            many.append([*tokens[start : start + 7], 9, 9], all_logits=True)
            many.truncate(min(start + 7, 40))
        np.testing.assert_array_equal(many.append([1]), one.append([1]))
