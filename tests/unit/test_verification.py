"""verify: the round trip against arithmetic of its own, containers that were altered, and perplexity end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_llama_dir, tiny_tokenizer
from stories import trained

import w4conv
from w4conv import kernels
from w4conv.commands.verify import verify
from w4conv.container import open_container
from w4conv.errors import InputError, UsageError
from w4conv.measure import round_trip
from w4conv.sources import open_source

TEXT = "The king and the queen of the land went to the inn in the evening.\n" * 9


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def convert(tmp_path: Path, *, scheme: str = "w4a16", group_size: int | str = 128, **options: Any) -> tuple[Path, Path]:
    source = make_llama_dir(tmp_path / "in", **options)
    out = tmp_path / "out.w4"
    w4conv.quantize(source, out, scheme=scheme, group_size=group_size, effort=0)
    return source, out


def as_f32(values: Any, dtype: str) -> Any:
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values.astype(np.float32)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize(("scheme", "group_size"), [("w4a16", 32), ("w8a16", "row"), ("bf16", 128), ("keep", 128)])
def test_round_trip_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, scheme: str, group_size: int | str
) -> None:
    monkeypatch.setattr(round_trip, "_BLOCK_VALUES", 64 * 16)  # so that tensors take several blocks
    source, out = convert(tmp_path, scheme=scheme, group_size=group_size, dtype=dtype, hidden=72, inner=100, vocab=301)
    trip = verify(out, against=source).round_trip
    assert trip is not None
    assert (trip.same_codes, trip.changed_files, trip.method) == (True, (), "rtn")
    errors, signal = 0.0, 0.0
    with open_container(out) as container, open_source(source) as opened:
        assert [t.name for t in trip.tensors] == list(container.tensors)
        for t in trip.tensors:
            x = as_f32(opened.read(t.name), dtype).astype(np.float64)
            e = container.dequantize(t.name).astype(np.float64) - x
            errors, signal = errors + (e**2).sum(), signal + (x**2).sum()
            assert t.distortion.max_abs_error == np.abs(e).max()
            assert t.distortion.rmse == pytest.approx(math.sqrt((e**2).mean()))
            if e.any():
                assert t.distortion.sqnr_db == pytest.approx(10 * math.log10((x**2).sum() / (e**2).sum()))
            else:
                assert t.distortion.sqnr_db is None
            worst = t.distortion.worst_group
            if worst is not None:
                size = container.tensors[t.name].scheme.group_size or x.shape[-1]
                group = np.s_[worst.row, worst.group * size : (worst.group + 1) * size]
                x2, e2 = np.atleast_2d(x)[group], np.atleast_2d(e)[group]
                assert worst.sqnr_db == pytest.approx(10 * math.log10((x2**2).sum() / (e2**2).sum()))
    assert (trip.overall.sqnr_db is None) == (scheme == "keep" or scheme.lower() == dtype.lower())
    if trip.overall.sqnr_db is not None:
        assert trip.overall.sqnr_db == pytest.approx(10 * math.log10(signal / errors))
    assert (trip.quantized is None) == (scheme in ("bf16", "keep"))


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_codes_of_another_method_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """One bit off in one place, under digests that are right: only making them again can tell."""
    source = make_llama_dir(tmp_path / "in")
    original, calls = kernels.quantize_rtn, []

    def altered(*args: Any, **options: Any) -> Any:
        packed = original(*args, **options)
        calls.append(1)
        if len(calls) == 4:
            getattr(packed, part).view(np.uint16)[0, 0, 6] ^= 1
        return packed

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "quantize_rtn", altered)
        w4conv.quantize(source, tmp_path / "out.w4", effort=0, scheme="w4a16")
    report = verify(tmp_path / "out.w4", against=source)
    assert report.intact
    assert not report.ok
    assert report.round_trip is not None
    assert report.round_trip.same_codes is False
    wrong = [t.name for t in report.round_trip.tensors if not t.same_codes]
    assert len(wrong) == 1
    assert report.failures[0].startswith(wrong[0])


def test_a_method_that_cannot_be_repeated_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama_dir(tmp_path / "in")
    original, calls = kernels.quantize_rtn, []

    def altered(*args: Any, **options: Any) -> Any:
        packed = original(*args, **options)
        calls.append(1)
        if len(calls) == 4:
            packed.scales.view(np.uint16)[0, 0, 6] ^= 1
        return packed

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "quantize_rtn", altered)
        w4conv.quantize(source, tmp_path / "out.w4", effort=0, scheme="w4a16")
    monkeypatch.setattr(round_trip, "REPEATABLE_METHOD", "another")
    monkeypatch.setattr(round_trip, "METHODS", ("another",))
    report = verify(tmp_path / "out.w4", against=source)
    assert report.ok
    assert report.round_trip is not None
    assert report.round_trip.same_codes is None
    assert sorted(str(t.same_codes) for t in report.round_trip.tensors).count("None") == 1


def test_a_resaved_source_with_the_same_weights_is_accepted(tmp_path: Path) -> None:
    _, out = convert(tmp_path)
    resaved = make_llama_dir(tmp_path / "resaved", shards=2)
    report = verify(out, against=resaved)
    assert report.ok
    assert report.round_trip is not None
    assert report.round_trip.same_codes
    assert "model.safetensors" in report.round_trip.changed_files
    assert "model-00001-of-00002.safetensors" in report.round_trip.changed_files
    assert "config.json" not in report.round_trip.changed_files


def test_every_flipped_byte_of_the_weights_is_a_failure(tmp_path: Path) -> None:
    _, out = convert(tmp_path)
    data = out.read_bytes()
    for place in range(len(data) // 2, len(data) - 2000, 7001):
        bad = bytearray(data)
        bad[place] ^= 0x10
        (tmp_path / "bad.w4").write_bytes(bad)
        report = verify(tmp_path / "bad.w4")
        assert (report.intact, report.ok, len(report.failures)) == (False, False, 1)


def test_perplexity_of_a_lossless_container_is_its_source(tmp_path: Path, text: Path) -> None:
    source, out = convert(tmp_path, scheme="keep")
    p = verify(out, against=source, ppl=True, text=text, ctx=16).perplexity
    assert p is not None
    assert p.source == p.container
    assert p.increase is not None
    assert (p.increase.difference, p.increase.ratio) == (0, 1)
    assert p.text == "text.txt"


def test_perplexity_with_activations_of_8_bits(tmp_path: Path, text: Path) -> None:
    source, out = convert(tmp_path)
    with pytest.raises(UsageError, match=r"activations.*--ppl"):
        verify(out, activations="int8")
    wide, narrow = (verify(out, ppl=True, text=text, ctx=16, activations=a).perplexity for a in ("int16", "int8"))
    layered = verify(out, against=source, kld=True, text=text, ctx=16, activations="int8").perplexity
    assert wide is not None
    assert narrow is not None
    assert layered is not None
    assert (wide.activations, narrow.activations) == ("int16", "int8")
    assert narrow.container.value != wide.container.value
    assert narrow.container.value == pytest.approx(wide.container.value, rel=0.01)
    assert layered.container == narrow.container


@pytest.mark.parametrize("convention", ["llama.cpp", "gptq"])
def test_perplexity_by_hand(tmp_path: Path, text: Path, convention: str) -> None:
    """From Model.logits over whole windows, with the windows cut here."""
    _, out = convert(tmp_path)
    p = verify(out, ppl=True, text=text, ctx=20, convention=convention, chunks=3).perplexity
    assert p is not None
    words = TEXT if convention == "llama.cpp" else "\n\n".join(TEXT.splitlines(keepends=True))
    ids = tiny_tokenizer().encode(words).ids
    assert (p.text_tokens, p.n_windows) == (len(ids), 3)
    nlls = []
    with w4conv.Model(out) as model:
        for start in (0, 20, 40):
            window = ids[start : start + 20]
            if convention == "llama.cpp":
                window[0] = 256
            x = model.logits(window).astype(np.float64)
            log_p = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
            first = 11 if convention == "llama.cpp" else 1
            nlls += [-log_p[i - 1, window[i]] for i in range(first, 20)]
    assert p.n_scored == len(nlls)
    assert p.container.value == pytest.approx(math.exp(np.mean(nlls)), rel=1e-10)


def test_default_ctx_follows_the_convention(tmp_path: Path) -> None:
    """2048 for gptq, 512 for llama.cpp: known by the limit of a model with 256 positions."""
    _, out = convert(tmp_path)
    for convention, ctx in (("gptq", 2048), ("llama.cpp", 512), (None, 512)):
        with pytest.raises(UsageError, match=f"ctx {ctx} is not between 1 and 256"):
            verify(out, ppl=True, text=tmp_path / "any", convention=convention)


def test_another_architecture_or_shape_is_named(tmp_path: Path) -> None:
    source, out = convert(tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["MistralForCausalLM"]}))
    with pytest.raises(InputError, match="its architecture is MistralForCausalLM, the container's is LlamaForCausalLM"):
        verify(out, against=source)


def test_a_real_trained_model_loses_little(tmp_path: Path) -> None:
    stories = trained("bf16")
    w4conv.quantize(stories, tmp_path / "s.w4", scheme="w8a16", effort=0)
    text = tmp_path / "story.txt"
    text.write_text((trained() / "sample_greedy.txt").read_text() * 4)
    report = verify(tmp_path / "s.w4", against=stories, ppl=True, text=text, ctx=32, max_ppl_increase="5%", min_sqnr=35)
    assert report.ok, report.failures
    assert report.perplexity is not None
    assert report.perplexity.container.value < 12, "a story-like text is likely to a model of stories"
