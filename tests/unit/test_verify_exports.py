"""verify between containers and exports of them, both ways: equal values hold whatever holds them, others do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import packed
import pytest
from exports import converted, recoded
from helpers import make_llama_dir, write_safetensors

import w4conv
from w4conv.commands.export import export
from w4conv.errors import InputError, UsageError
from w4conv.measure.exported import GGUF_ROUNDED, _alike
from w4conv.scheme import QuantScheme

FORMATS = ("gguf", "compressed-tensors", "gptq", "awq", "mlx", "safetensors")
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("to", FORMATS)
def test_both_ways(tmp_path: Path, to: str, architecture: str) -> None:
    path = converted(tmp_path, architecture=architecture, group_size=64)
    exact = export(path, tmp_path / "out", to=to).exact
    report = w4conv.verify(tmp_path / "out", against=path)
    assert report.ok, report.failures
    trip = report.round_trip
    assert trip is not None
    assert (trip.source_kind, trip.method) == ("w4", "export")
    assert (trip.overall.sqnr_db is None) == exact, "the report of the export and the check agree"
    assert bool(trip.notes) == (not exact)
    if exact:
        back = w4conv.verify(path, against=tmp_path / "out")
        assert back.ok, back.failures
        assert back.round_trip is not None
        assert back.round_trip.overall.sqnr_db is None
        assert any("F32 there, f16 here" in note for note in back.round_trip.notes) == (to in ("gguf", "safetensors"))


def test_settings_of_llama3_survive_gguf(tmp_path: Path) -> None:
    path = converted(tmp_path, config={"rope_scaling": LLAMA3, "max_position_embeddings": 131072})
    export(path, tmp_path / "m.gguf", to="gguf")
    assert w4conv.verify(tmp_path / "m.gguf", against=path).ok


def test_the_scale_of_gemma_s_embedding_survives_gguf(tmp_path: Path) -> None:
    """It is rounded to the type of the weights, which GGUF does not record; another scale is noticed. Norms too."""
    made = make_llama_dir(tmp_path / "in", dtype="F32", hidden=128, head_dim=32, inner=256, tied=True)
    norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    raw = packed.load(made) | {
        f"model.layers.{i}.{norm}.weight": np.zeros(128, np.float32) for i in range(2) for norm in norms
    }
    write_safetensors(made / "model.safetensors", {name: ("F32", array) for name, array in raw.items()})
    settings = json.loads((made / "config.json").read_text())
    settings |= {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "query_pre_attn_scalar": 32}
    settings |= {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "sliding_window": 64}
    (made / "config.json").write_text(json.dumps(settings))
    w4conv.quantize(made, tmp_path / "m.w4", group_size=32, effort=0, scheme="w4a16")
    made_of = export(tmp_path / "m.w4", tmp_path / "m.gguf", to="gguf")
    report = w4conv.verify(tmp_path / "m.gguf", against=tmp_path / "m.w4")
    assert report.ok, report.failures
    assert made_of.exact is False, "norms are stored with 1 added, which rounds these"
    assert report.round_trip is not None
    assert report.round_trip.notes == ("5 tensors are rounded, as 1 is added to norms in F32",)
    assert _alike(11.3125, 11.3137, GGUF_ROUNDED["embedding_scale"])
    assert not _alike(11.3125, 12.0, GGUF_ROUNDED["embedding_scale"])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rounding_to_nearest_holds_and_any_other_does_not(tmp_path: Path, dtype: str) -> None:
    path = converted(tmp_path)
    export(path, tmp_path / "out", to="safetensors", dtype=dtype)
    report = w4conv.verify(tmp_path / "out", against=path)
    assert report.ok
    assert report.round_trip is not None
    assert report.round_trip.overall.max_abs_error > 0
    file = tmp_path / "out/model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    raw = packed.load(tmp_path / "out")
    values = raw[name].copy()
    values.view(np.uint16)[3, 4] ^= 1  # the last bit of one value
    write_safetensors(file, {n: (_word(a), values if n == name else a) for n, a in raw.items()})
    report = w4conv.verify(tmp_path / "out", against=path)
    assert report.failures == (f"{name}: the values are not those of {path}",)


def _word(array: np.ndarray[Any, Any]) -> str:
    return {"<f2": "F16", "<u2": "BF16", "<f4": "F32"}[array.dtype.str]


def test_a_scale_of_gguf_that_is_off(tmp_path: Path) -> None:
    path = converted(tmp_path)
    export(path, tmp_path / "m.gguf", to="gguf")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[len(data) * 3 // 4] ^= 0x10
    (tmp_path / "bad.gguf").write_bytes(data)
    report = w4conv.verify(tmp_path / "bad.gguf", against=path)
    assert len(report.failures) == 1
    assert "the values are not those of" in report.failures[0]
    assert not w4conv.verify(path, against=tmp_path / "bad.gguf").ok


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"rms_norm_eps": 1e-6}, "norm_eps is 1e-06, the container's is 1e-05"),
        ("config.json", {"rope_theta": 5e5}, "rope is"),
        ("tokenizer.json", {"truncation": 1}, "tokenizer.json is not that of the container"),
    ],
)
def test_settings_that_differ(tmp_path: Path, file: str, change: dict[str, Any], message: str) -> None:
    path = converted(tmp_path)
    export(path, tmp_path / "out", to="compressed-tensors")
    document = json.loads((tmp_path / "out" / file).read_text())
    (tmp_path / "out" / file).write_text(json.dumps(document | change))
    report = w4conv.verify(tmp_path / "out", against=path)
    assert len(report.failures) == 1
    assert message in report.failures[0]


def test_min_sqnr_counts_for_exports_too(tmp_path: Path) -> None:
    path = converted(tmp_path)
    export(path, tmp_path / "out", to="safetensors", dtype="bf16")
    assert w4conv.verify(tmp_path / "out", against=path, min_sqnr=30).ok
    assert "SQNR is below 90" in w4conv.verify(tmp_path / "out", against=path, min_sqnr=90).failures[0]


def test_refusals(tmp_path: Path) -> None:
    path = converted(tmp_path)
    export(path, tmp_path / "out", to="gguf")
    with pytest.raises(UsageError, match="name the one that it was exported from"):
        w4conv.verify(tmp_path / "out")
    with pytest.raises(UsageError, match=r"perplexity is measured of \.w4 files"):
        w4conv.verify(tmp_path / "out", against=path, ppl=True)
    with pytest.raises(InputError, match="is no export of"):
        w4conv.verify(tmp_path / "out", against=converted(tmp_path / "b", layers=3))


def test_a_damaged_container_is_told(tmp_path: Path) -> None:
    path = converted(tmp_path)
    export(path, tmp_path / "out", to="gguf")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = w4conv.verify(tmp_path / "out", against=path)
    assert (report.ok, report.intact) == (False, False)


def test_codes_of_other_groups(tmp_path: Path) -> None:
    """Exports cut groups and repeat scales; the values stay."""
    path = recoded(converted(tmp_path), lambda n, s: QuantScheme("int4", 0, "f16") if "layers" in n else None)
    export(path, tmp_path / "out", to="gguf")
    assert w4conv.verify(tmp_path / "out", against=path).ok
    back = w4conv.verify(path, against=tmp_path / "out")
    assert back.ok
    assert back.round_trip is not None
    assert any("Q4_0 there, int4/row here" in note for note in back.round_trip.notes)
