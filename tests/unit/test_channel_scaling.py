"""AWQ: channels scaled for the sake of rounding, recorded, and what `verify` makes of the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import WORDS, as_dtype, llama_tensors, make_llama_dir, write_safetensors

from w4conv.commands.diff import diff
from w4conv.commands.quantize import quantize
from w4conv.commands.verify import verify
from w4conv.container import open_container
from w4conv.errors import InputError
from w4conv.models import parse_config
from w4conv.quantization.folding import FoldedSource, Folding
from w4conv.sources import open_source

OPTIONS: dict[str, Any] = {"calibration_tokens": 512, "calibration_ctx": 32, "group_size": 32, "method": "awq"}
SHAPE: dict[str, Any] = {"hidden": 64, "inner": 96, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 300, "seed": 0}
LOUD = (5, 40)  # channels of the hidden states that the norms make large
NORMS = ("input_layernorm", "post_attention_layernorm")


def make_loud(folder: Path) -> Path:
    """A model whose inputs of linear layers have most of their power in a few channels."""
    make_llama_dir(folder, dtype="BF16", hidden=64)
    tensors = llama_tensors(**SHAPE, head_dim=16, tied=False, biases=())
    for i in range(2):
        for norm in NORMS:
            tensors[f"model.layers.{i}.{norm}.weight"][list(LOUD)] = 12
    write_safetensors(folder / "model.safetensors", {n: ("BF16", as_dtype(a, "BF16")) for n, a in tensors.items()})
    return folder


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_loud(tmp_path_factory.mktemp("in") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS * 60)
    return path


@pytest.fixture(scope="module")
def converted(loud: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "awq.w4"
    report = quantize(loud, out, calibration=text, **OPTIONS, scheme="w4a16")
    assert report.method == "awq"
    assert any("places of 2 layers" in note for note in report.notes)
    return out


def folding_of(path: Path) -> Folding:
    with open_container(path) as container:
        spec = parse_config(json.loads(container.blobs["config.json"]))
        return Folding.parse(container.provenance["folding"], spec, "here")


def test_loud_channels_are_scaled_up(converted: Path) -> None:
    found = folding_of(converted).exponents
    assert {(0, "qkv"), (1, "qkv"), (0, "gate_up"), (1, "gate_up")} <= set(found)
    for (_, place), e in found.items():
        if place in ("qkv", "gate_up"):
            assert min(e[list(LOUD)]) > np.delete(e, LOUD).max()


def test_outputs_are_nearer_than_without(converted: Path, loud: Path, text: Path, tmp_path: Path) -> None:
    from w4conv.runtime.engine import Model
    from w4conv.runtime.tokenizer import Tokenizer

    quantize(loud, tmp_path / "keep.w4", scheme="keep", effort=0)
    quantize(loud, tmp_path / "search.w4", calibration=text, **(OPTIONS | {"method": "search"}), scheme="w4a16")
    logits = {}
    for path in (tmp_path / "keep.w4", tmp_path / "search.w4", converted):
        with Model(path) as m:
            logits[path.stem] = m.logits(Tokenizer(m.container.blobs).encode(WORDS))
    error = {name: np.square(found - logits["keep"]).mean() for name, found in logits.items()}
    assert error["awq"] < 0.9 * error["search"]


def test_verify_and_diff_read_the_source_as_it_was_scaled(converted: Path, loud: Path) -> None:
    report = verify(converted, against=loud, min_sqnr=14)
    assert report.ok, report.failures
    assert report.round_trip is not None
    same = {t.name: t.same_codes for t in report.round_trip.tensors}
    assert same[f"model.layers.0.{NORMS[0]}.weight"] is True
    assert same["model.layers.0.mlp.up_proj.weight"] is None
    with open_source(loud) as source, open_container(converted) as container:
        name = f"model.layers.0.{NORMS[0]}.weight"
        folded = FoldedSource(source, folding_of(converted)).read(name)
        assert np.array_equal(container.part(name, "values").view(np.uint16), folded)
        assert not np.array_equal(folded, source.read(name))
    found = diff(converted, loud)
    assert found.n_equal == 5  # the norms
    assert min(t.b_from_a.sqnr_db or 99 for t in found.tensors if t.b_from_a) > 14
    with_source = diff(converted, converted, source=loud)
    assert with_source.a_from_source is not None
    assert with_source.a_from_source.rmse == found.b_from_a.rmse  # as the source of the other


def test_another_checkpoint_is_none_of_its(converted: Path, tmp_path: Path) -> None:
    other = make_llama_dir(tmp_path / "other", dtype="BF16", hidden=64, seed=3)
    assert not verify(converted, against=other).ok


def test_resumed(converted: Path, loud: Path, text: Path, tmp_path: Path) -> None:
    class Stop:
        n = 24  # after the fourteen that are scaled, some are rounded

        def start(self, total_nbytes: int) -> None:
            pass

        def advance(self, nbytes: int, name: str) -> None:
            self.n -= 1
            if not self.n:
                raise KeyboardInterrupt

    out = tmp_path / "out.w4"
    with pytest.raises(KeyboardInterrupt):
        quantize(loud, out, calibration=text, resume=True, progress=Stop(), **OPTIONS, scheme="w4a16")
    assert any(
        note.startswith("resumed")
        for note in quantize(loud, out, calibration=text, resume=True, **OPTIONS, scheme="w4a16").notes
    )
    assert out.read_bytes() == converted.read_bytes()


def test_a_bias_that_would_be_rounded_keeps_its_channel_as_it_is(text: Path, tmp_path: Path) -> None:
    """The smallest numbers of FP16 have few bits: 3 * 2^-24 has no half."""
    model = make_llama_dir(tmp_path / "in", architecture="Qwen2ForCausalLM", hidden=64)
    tensors = llama_tensors(**SHAPE, head_dim=16, tied=False, biases=("q_proj", "k_proj", "v_proj"))
    for i in range(2):
        prefix = f"model.layers.{i}.self_attn.v_proj"
        tensors[f"{prefix}.weight"][[3, 20]] *= 12
        tensors[f"{prefix}.bias"][3] = 3 * 2.0**-24
    write_safetensors(model / "model.safetensors", {n: ("F16", as_dtype(a, "F16")) for n, a in tensors.items()})
    quantize(model, tmp_path / "o.w4", calibration=text, **OPTIONS, scheme="w4a16")
    scaled = [e for (_, place), e in folding_of(tmp_path / "o.w4").exponents.items() if place == "o"]
    assert scaled
    assert all(e[20] > 0 and e[3] == 0 for e in scaled)
    assert verify(tmp_path / "o.w4", against=model).ok


def test_matrices_whose_neighbours_are_not_rounded_so_are_not_scaled(loud: Path, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[tensors]\n"*.k_proj.weight" = {scheme = "bf16"}\n"*.up_proj.weight" = {method = "gptq"}\n')
    quantize(loud, tmp_path / "o.w4", calibration=text, recipe=str(recipe), **OPTIONS, scheme="w4a16")
    assert {place for _, place in folding_of(tmp_path / "o.w4").exponents} <= {"o"}
    assert verify(tmp_path / "o.w4", against=loud).ok


@pytest.mark.parametrize(
    "record", [{"0.qkv": "m" * 63}, {"0.qkv": "Z" * 64}, {"2.qkv": "m" * 64}, {"0.x": "m" * 64}, {"0.o": 5}, [], "m"]
)
def test_records_that_fit_no_model(record: Any, loud: Path) -> None:
    spec = parse_config(json.loads((loud / "config.json").read_text()))
    with pytest.raises(InputError, match="record of folded channels"):
        Folding.parse(record, spec, "x.w4")
