"""Packed checkpoints, names and settings that say one thing and hold another, and harmless oddities of names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import same
from helpers import make_llama_dir, write_safetensors
from safetensors import safe_open
from test_sources_packed import GPTQ, MODULES, Q, gptq, values_of, write

import w4conv
from w4conv.commands.inspect import inspect
from w4conv.errors import InputError
from w4conv.sources import open_source


def drop(*endings: str) -> Any:
    return lambda raw: [raw.pop(name) for name in list(raw) if name.endswith(endings)]


def group_of(value: int) -> Any:
    return lambda raw: raw[f"{Q}.g_idx"][1].__setitem__(slice(None), value)


@pytest.mark.parametrize(
    ("settings", "encode", "change", "words"),
    [
        (
            {},
            gptq(zeros=0x88888888),
            None,
            "holds 8 throughout, which in checkpoint_format gptq means 9, but sym says 8",
        ),
        ({"checkpoint_format": "gptq_v2"}, gptq(), None, "gptq_v2 means 7, but sym says 8"),
        ({"bits": 8}, gptq(bits=8, zeros=0x80808080), None, "gptq means 129, but sym says 128"),
        ({"desc_act": True}, gptq(), drop(".g_idx"), "g_idx is missing, but desc_act says"),
        ({"desc_act": True}, gptq(order=True), drop("q_proj.g_idx"), "q_proj.g_idx is missing, but desc_act says"),
        ({}, gptq(), group_of(2), "names a group outside of 0 to 1"),
        ({}, gptq(), group_of(-1), "names a group outside of 0 to 1"),
        ({}, gptq(), group_of(0), "gives a group more columns than the 32"),
        ({"bits": 8}, gptq(), None, "has shape"),
        ({"group_size": 64}, gptq(), None, "has shape"),
        ({"group_size": -1}, gptq(), None, "has shape"),
    ],
)
def test_gptq_that_contradicts_itself(tmp_path: Path, settings: Any, encode: Any, change: Any, words: str) -> None:
    directory = write(tmp_path / "m", {**GPTQ, **settings}, encode, change=change)
    with pytest.raises(InputError, match=words):
        open_source(directory)
    found = inspect(directory)
    assert found.kind == "gptq"
    assert {t.scheme for t in found.tensors} >= {"I32", "F16"}
    assert any(words in note for note in found.notes)


@pytest.mark.parametrize(("settings", "encode", "words"), [
    ({"sym": True}, gptq(zeros=None), "says sym, but zero points are stored"),
    ({"desc_act": False}, gptq(order=True), "says desc_act false, but g_idx orders columns"),
])  # fmt: skip
def test_what_is_stored_counts_and_is_said(tmp_path: Path, settings: Any, encode: Any, words: str) -> None:
    directory = write(tmp_path / "m", {**GPTQ, **settings}, encode)
    report = w4conv.quantize(directory, tmp_path / "m.w4", scheme="keep", effort=0)
    assert any(words in warning for warning in report.warnings)


def test_quantize_config_beside_the_weights(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", GPTQ, gptq())
    want = values_of(directory)
    config = json.loads((directory / "config.json").read_text())
    own = {key: value for key, value in config.pop("quantization_config").items() if key != "quant_method"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "quantize_config.json").write_text(json.dumps(own))
    found = values_of(directory)
    assert all(same(found[name], want[name]) for name in want)


@pytest.mark.parametrize("pattern", ["+:.*q_proj.*", ".*q_proj", r"+:model\.layers\.0\.self_attn\.q_.*"])
def test_gptq_dynamic(tmp_path: Path, pattern: str) -> None:
    def encode(module: str, array: Any, seed: int) -> Any:
        return (gptq(bits=8, zeros=0x7F7F7F7F) if module == Q else gptq())(module, array, seed)

    directory = write(tmp_path / "m", {**GPTQ, "dynamic": {"-:.*lm_head": {}, pattern: {"bits": 8}}}, encode)
    with open_source(directory) as source:
        assert source.tensors[f"{Q}.weight"].stored_as == "gptq_8bit_g32"
        assert source.tensors[f"{Q.replace('q_proj', 'k_proj')}.weight"].stored_as == "gptq_4bit_g32"
        assert len(MODULES) == 4


RENAMED = {
    "module": lambda n: f"module.{n}",
    "orig_mod": lambda n: f"_orig_mod.{n}",
    "base_model": lambda n: f"base_model.model.{n}",
    "module and orig_mod": lambda n: f"module._orig_mod.{n}",
    "fsdp": lambda n: f"_fsdp_wrapped_module.module.{n}",
    "three": lambda n: f"_orig_mod.base_model.model.module.{n}",
    "backbone": lambda n: n.removeprefix("model."),
    "wrapped backbone": lambda n: f"module.{n.removeprefix('model.')}",
}
BUFFERS = [
    "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.masked_bias",
    "model.layers.0.self_attn.bias", "model.layers.1.attn.bias", "model.rotary_emb.inv_freq", "model.position_ids",
    "model.layers.0.self_attn.rotary_emb.cos_cached", "model.causal_mask", "model.rotary_emb.original_inv_freq",
    "model.layers.0.attn.masked_bias",
]  # fmt: skip
ADAPTERS = [
    "{}.lora_A.weight", "{}.lora_B.default.weight", "{}.base_layer.weight", "{}.lora_magnitude_vector.weight",
    "{}.modules_to_save.default.weight", "{}.original_module.weight", "{}.lora_embedding_A",
]  # fmt: skip


Tensors = dict[str, Any]


def loaded(directory: Path) -> Tensors:
    with safe_open(directory / "model.safetensors", "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping


def rewritten(directory: Path, change: Any) -> None:
    tensors = change(loaded(directory))
    write_safetensors(directory / "model.safetensors", {name: ("F16", a) for name, a in tensors.items()})


@pytest.mark.parametrize("how", RENAMED)
def test_wrapped_names(tmp_path: Path, how: str) -> None:
    directory = make_llama_dir(tmp_path / "m")
    want = w4conv.quantize(directory, tmp_path / "a.w4", effort=0, scheme="w4a16")
    rewritten(directory, lambda tensors: {RENAMED[how](name): a for name, a in tensors.items()})
    w4conv.quantize(directory, tmp_path / "b.w4", effort=0, scheme="w4a16")
    with w4conv.open(tmp_path / "a.w4") as a, w4conv.open(tmp_path / "b.w4") as b:
        assert list(a.tensors) == list(b.tensors)
        assert all(same(a.dequantize(name), b.dequantize(name)) for name in a.tensors)
    assert want.n_tensors == len(a.tensors)


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers(tmp_path: Path, name: str) -> None:
    directory = make_llama_dir(tmp_path / "m")
    rewritten(directory, lambda tensors: tensors | {name: np.ones((4, 4), np.float16)})
    report = w4conv.quantize(directory, tmp_path / "m.w4", effort=0, scheme="w4a16")
    assert any("follow from the config" in note and name in note for note in report.notes)


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_are_named(tmp_path: Path, name: str, wrapped: bool) -> None:
    directory = make_llama_dir(tmp_path / "m")
    prefix = "base_model.model." if wrapped else ""
    own = name.format(f"{prefix}model.layers.0.self_attn.q_proj")
    rewritten(directory, lambda tensors: tensors | {own: np.ones((8, 64), np.float16)})
    with pytest.raises(InputError, match=r"adapter .LoRA. that is not merged"):
        w4conv.quantize(directory, tmp_path / "m.w4", effort=0, scheme="w4a16")


@pytest.mark.parametrize("method", ["hqq", "aqlm", "exl2", "torchao", "eetq", "quanto", "vptq", "unknown"])
def test_inspect_describes_what_quantize_refuses(tmp_path: Path, method: str) -> None:
    directory = make_llama_dir(tmp_path / "m", config={"quantization_config": {"quant_method": method, "bits": 3}})
    names = {"model.layers.0.self_attn.q_proj.qweight": ("I32", np.zeros((6, 64), np.int32))}
    write_safetensors(directory / "model.safetensors", names)
    with pytest.raises(InputError, match=method):
        w4conv.quantize(directory, tmp_path / "m.w4", effort=0, scheme="w4a16")
    found = inspect(directory)
    assert (found.kind, [t.scheme for t in found.tensors]) == (method, ["I32"])
    assert any("bits 3" in note for note in found.notes)
    assert any("cannot convert" in note for note in found.notes)


def test_the_architecture_comes_first(tmp_path: Path) -> None:
    directory = make_llama_dir(tmp_path / "m", config={"architectures": ["FooForCausalLM"]})
    (directory / "tokenizer.json").write_text("{")
    (directory / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(InputError, match="FooForCausalLM is not supported"):
        w4conv.quantize(directory, tmp_path / "m.w4", effort=0, scheme="w4a16")


@pytest.mark.parametrize(("config", "words"), [
    ({"torch_dtype": "bfloat16"}, "weights are bfloat16, but matrices are stored as F16"),
    ({"dtype": "float16", "torch_dtype": "float32"}, "dtype float16 and torch_dtype float32"),
    ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, "rope_type linear, type dynamic"),
    ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "rope_theta 10000.0, its rope_parameters 500000.0"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5.0}}, "which differ"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, "factor 4.0"),
])  # fmt: skip
def test_configs_that_spell_things_twice(tmp_path: Path, config: Any, words: str) -> None:
    directory = make_llama_dir(tmp_path / "m", config=config)
    report = w4conv.quantize(directory, tmp_path / "m.w4", effort=0, scheme="w4a16")
    assert any(words in warning for warning in report.warnings), report.warnings
