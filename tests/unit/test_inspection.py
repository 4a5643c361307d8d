"""inspect: totals against sums made here, and what it says of odd files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from helpers import make_llama_dir, real_configs

import w4conv
from w4conv.commands.inspect import Inspection, inspect, inspect_stream, kind_of
from w4conv.errors import FormatError


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"), ("lm_head.weight", "head"), ("model.norm.weight", "norm"),
        ("model.layers.0.input_layernorm.weight", "norm"), ("model.layers.9.self_attn.q_norm.weight", "norm"),
        ("model.layers.0.self_attn.q_proj.bias", "attention"), ("model.layers.0.mlp.up_proj.weight", "mlp"),
        ("something.else", "other"),
    ],
)  # fmt: skip
def test_kind_of_a_tensor(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def sums(found: Inspection) -> None:
    for totals in (found.by_kind, found.by_scheme):
        assert sum(t.n_tensors for t in totals) == len(found.tensors)
        assert sum(t.n_parameters for t in totals) == found.n_parameters
        assert sum(t.nbytes or 0 for t in totals) == sum(t.nbytes or 0 for t in found.tensors)


def test_container_and_its_source(tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in", dtype="BF16", shards=3)
    report = w4conv.quantize(source, tmp_path / "o.w4", group_size=32, effort=0, scheme="w4a16")
    found, before = inspect(tmp_path / "o.w4"), inspect(source)
    sums(found)
    sums(before)
    assert found.n_parameters == before.n_parameters == report.n_parameters
    assert found.bits_per_weight == pytest.approx(report.bits_per_weight)
    assert (found.digest, found.nbytes) == (report.digest, report.output_nbytes)
    assert before.bits_per_weight == 16
    assert before.nbytes == report.input_nbytes
    assert found.model == before.model
    assert [t.what for t in found.by_kind] == ["embedding", "head", "attention", "mlp", "norm"]
    linear = {t.what: t for t in found.by_scheme}["int4/g32"]
    assert linear.bits_per_weight == pytest.approx(4.5)
    with (tmp_path / "o.w4").open("rb") as stream:
        streamed = inspect_stream(stream)
        assert stream.tell() < 1 << 20
    assert (streamed.tensors, streamed.digest) == (found.tensors, None)


def test_no_weight_is_needed(tmp_path: Path) -> None:
    """A stream may end after the files inside; one that ends before is refused."""
    w4conv.quantize(make_llama_dir(tmp_path / "in"), tmp_path / "o.w4", effort=0, scheme="w4a16")
    with w4conv.open(tmp_path / "o.w4") as container:
        first = min(p.offset for t in container.tensors.values() for p in t.parts)
    data = (tmp_path / "o.w4").read_bytes()
    assert inspect_stream(io.BytesIO(data[:first])).n_parameters > 0
    with pytest.raises(FormatError):
        inspect_stream(io.BytesIO(data[:4000]))


def test_real_configs_are_described_whatever_they_are(tmp_path: Path) -> None:
    """The weights do not fit the config here; inspect describes the model or says why not, and never fails."""
    source = make_llama_dir(tmp_path / "in")
    for config in real_configs().values():
        (source / "config.json").write_text(json.dumps(config))
        found = inspect(source)
        assert found.architecture == config["architectures"][0]
        assert (found.model is None) == any("cannot convert this model" in note for note in found.notes)


def test_odd_tokenizers_are_summed_up(tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in", config={"eos_token_id": [257, 5]})
    for text in ("{", "[]", '{"model": 3}', '{"model": {"vocab": ["a"]}, "added_tokens": [1, {"id": "x"}]}'):
        (source / "tokenizer.json").write_text(text)
        inspect(source)
    (source / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 257}}}')
    (source / "tokenizer_config.json").write_text("{}")
    summary = inspect(source).tokenizer
    assert summary is not None
    assert (summary.n_tokens, summary.eos_token, summary.bos_token) == (1, "a", None)
