"""Divergence between models: against a direct computation, and what holds by definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import data_dir, make_llama_dir

from w4conv.commands.quantize import quantize
from w4conv.commands.verify import verify
from w4conv.errors import InputError, UsageError
from w4conv.measure.divergence import compare_models
from w4conv.measure.layerwise import ScoredBlock, layered_nlls
from w4conv.measure.perplexity import Windows, token_nlls

VOCAB = 50


class Table:
    """A model whose logits after a token are a row of a table."""

    def __init__(self, seed: int, spread: float = 3.0) -> None:
        self.table = (np.random.default_rng(seed).standard_normal((VOCAB, VOCAB)) * spread).astype(np.float32)

    def session(self) -> Table:
        return self

    def append(self, token_ids: Any, *, all_logits: bool = False) -> Any:
        return self.table[token_ids if all_logits else token_ids[-1:]]


def blocks(windows: Windows, *models: Table) -> Iterator[ScoredBlock]:
    """As the engine gives them, in blocks of 7 tokens."""
    for i, window in enumerate(windows.tokens):
        for start in range(windows.first_target - 1, len(window) - 1, 7):
            tokens = window[start : min(start + 7, len(window) - 1)]
            yield ScoredBlock(i, start, tuple(model.table[tokens] for model in models))


@pytest.fixture
def windows() -> Windows:
    return Windows(np.random.default_rng(0).integers(0, VOCAB, (3, 150)), 76, 450)


def test_against_a_direct_computation(windows: Windows) -> None:
    model, base = Table(1), Table(2)
    found = compare_models(blocks(windows, model, base), windows)
    contexts, targets = windows.tokens[:, 75:-1].ravel(), windows.tokens[:, 76:].ravel()
    q, p = (
        np.exp(t.astype(np.float64)) / np.exp(t.astype(np.float64)).sum(1, keepdims=True)
        for t in (model.table, base.table)
    )
    klds = (p * np.log(p / q)).sum(1)[contexts]
    np.testing.assert_allclose(found.klds.ravel(), klds, rtol=1e-9)
    d = found.divergence()
    assert d.n_scored == 3 * 74
    assert d.mean == pytest.approx(klds.mean())
    assert d.stderr == pytest.approx(klds.std(ddof=1) / np.sqrt(len(klds)))
    assert d.maximum == pytest.approx(klds.max())
    assert {x.percent: x.value for x in d.percentiles}[50.0] == pytest.approx(np.median(klds))
    deltas = (q - p)[contexts, targets]
    assert (d.mean_delta_p, d.rms_delta_p) == (
        pytest.approx(deltas.mean()), pytest.approx(np.sqrt((deltas**2).mean()))
    )  # fmt: skip
    same = (q.argmax(1) == p.argmax(1))[contexts]
    assert d.same_top == pytest.approx(same.mean())
    np.testing.assert_allclose(found.nlls, token_nlls(model, windows), rtol=1e-12)
    np.testing.assert_allclose(found.base_nlls, token_nlls(base, windows), rtol=1e-12)
    np.testing.assert_array_equal(layered_nlls(blocks(windows, base), windows), token_nlls(base, windows))


def test_a_model_does_not_diverge_from_itself(windows: Windows) -> None:
    d = compare_models(blocks(windows, Table(1), Table(1)), windows).divergence()
    assert (d.mean, d.stderr, d.maximum, d.same_top, d.rms_delta_p) == (0, 0, 0, 1, 0)


def test_logits_that_are_not_finite(windows: Windows) -> None:
    broken = Table(1)
    broken.table[:] = np.nan
    with pytest.raises(InputError, match="not finite"):
        compare_models(blocks(windows, Table(1), broken), windows)
    with pytest.raises(InputError, match="not finite"):
        layered_nlls(blocks(windows, broken), windows)


def test_verify_measures_it(tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in")
    text = tmp_path / "t.txt"
    text.write_text("the thing and the end of it. " * 40)
    options: dict[str, Any] = {"against": source, "text": text, "ctx": 32, "chunks": 4}
    quantize(source, tmp_path / "keep.w4", scheme="keep", effort=0)
    report = verify(tmp_path / "keep.w4", kld=True, **options).perplexity
    assert report is not None
    assert report.divergence is not None
    assert (report.divergence.mean, report.divergence.same_top) == (0, 1)
    quantize(source, tmp_path / "int4.w4", effort=0, scheme="w4a16")
    both = verify(tmp_path / "int4.w4", kld=True, **options).perplexity
    plain = verify(tmp_path / "int4.w4", ppl=True, **options).perplexity
    assert both is not None
    assert plain is not None
    assert both.divergence is not None
    assert both.divergence.mean > 0
    assert plain.divergence is None
    assert both.container.value == pytest.approx(plain.container.value, rel=1e-9)
    assert both.source is not None
    assert plain.source is not None
    assert both.source.value == pytest.approx(plain.source.value, rel=1e-9)
    with pytest.raises(UsageError, match="--against"):
        verify(tmp_path / "int4.w4", kld=True, text=text)


def test_beside_llama_perplexity(tmp_path: Path) -> None:
    """What `llama-perplexity --kl-divergence` printed of the same weights in F32, with `-fa off` over 8 windows
    (tests/bench/against_llama_perplexity.py). Keys and values are in FP16 there too, the base's log-probabilities in
    16 bits."""
    source = data_dir("hf", "stories260K-f32")
    text = tmp_path / "text.txt"
    text.write_bytes(data_dir("wikitext-2-raw", "wiki.test.raw").read_bytes()[:16384])
    quantize(source, tmp_path / "o.w4", group_size=32, effort=0, scheme="w4a16")
    report = verify(tmp_path / "o.w4", against=source, text=text, chunks=8, kld=True).perplexity
    assert report is not None
    assert report.divergence is not None
    d = report.divergence
    found = {p.percent: p.value for p in d.percentiles}
    assert d.n_scored == 2040
    assert report.container.value == pytest.approx(130.060113, rel=1e-3)
    assert d.mean == pytest.approx(0.249486, rel=1e-3)
    assert d.stderr == pytest.approx(0.007004, rel=5e-3)
    assert [found[p] for p in (99.0, 95.0, 90.0, 50.0, 10.0, 5.0)] == pytest.approx(
        [1.545694, 0.859336, 0.577833, 0.143397, 0.041232, 0.025779], rel=2e-2
    )
    assert 100 * d.rms_delta_p == pytest.approx(10.206, rel=2e-3)
    assert 100 * d.mean_delta_p == pytest.approx(-1.132, rel=5e-3)
    assert 100 * d.same_top == pytest.approx(65.0, abs=0.2)
