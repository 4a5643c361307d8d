"""Checkpoints that are whole as files and lack what the model needs: the error says what they look like."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_llama_dir, make_llama_gguf
from test_contradictions import Tensors, loaded, rewritten

import w4conv
from w4conv.errors import InputError

Change = Any


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {re.sub(old, new, name): array for name, array in tensors.items()}


def without(pattern: str) -> Change:
    return lambda tensors: {name: array for name, array in tensors.items() if not re.search(pattern, name)}


def fused(one: str, parts: tuple[str, ...]) -> Change:
    def change(tensors: Tensors) -> Tensors:
        out = without("|".join(parts))(tensors)
        for layer in range(2):
            stem = f"model.layers.{layer}.{'mlp' if 'gate' in one else 'self_attn'}."
            out[f"{stem}{one}.weight"] = np.concatenate([tensors[f"{stem}{part}.weight"] for part in parts])
        return out

    return change


def experts(name: str) -> Change:
    def change(tensors: Tensors) -> Tensors:
        out = without(r"\.mlp\.")(tensors)
        return out | {f"model.layers.{i}.{name}": np.ones((4, 64, 64), np.float16) for i in range(2)}

    return change


CASES: dict[str, tuple[Any, Change, str]] = {
    "another prefix": ({}, renamed(r"^model\.", "decoder."), r"under other names: decoder\.NAME, expected model\.NAME"),
    "a wrapper's prefix": ({}, renamed("^", "policy."), r"under other names: policy\.model\.NAME, expected"),
    "a part of a larger model": (
        {}, renamed(r"^model\.", "thinker.model."), r"under other names: thinker\.model\.NAME, expected model\.NAME",
    ),
    "fused queries": ({}, fused("qkv_proj", ("q_proj", "k_proj", "v_proj")), "stored in another layout: .*qkv_proj"),
    "fused queries, W_pack": ({}, fused("W_pack", ("q_proj", "k_proj", "v_proj")), "in another layout: .*W_pack"),
    "fused gates": ({}, fused("gate_up_proj", ("gate_proj", "up_proj")), "in another layout: .*gate_up_proj"),
    "experts that the config does not have": ({}, experts("mlp.experts.gate_up_proj"), "The weights have experts"),
    "experts under block_sparse_moe": (
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
        experts("mlp.experts.gate_up_proj"), "Experts are stored in another layout",
    ),
    "no experts": (
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
        None, "has experts by its config.json, the weights have none",
    ),
    "fewer layers": ({"num_hidden_layers": 5}, None, "end with layer 1, but config.json asks for 5 layers"),
    "the upper layers lost": ({}, without(r"layers\.1\."), "end with layer 0, but config.json asks for 2 layers"),
    "another architecture": (
        {}, lambda _: {f"transformer.h.{i}.attn.c_proj.weight": np.ones((64, 64), np.float16) for i in range(2)},
        "those of another architecture than LlamaForCausalLM",
    ),
    "the state of a training run": (
        {}, lambda t: without("norm")(t) | {"optimizer.step": np.ones((2, 2), np.float16)}, "state of a training run",
    ),
    "a norm lost": ({}, without(r"model\.norm"), "saved without them, or config.json belongs to another model"),
    "norms": (
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}, None, "to another model",
    ),
    "no head": ({"tie_word_embeddings": False}, without("lm_head"), "bare backbone"),
    "nothing": ({}, lambda _: {}, "hold no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_it_looks_like(tmp_path: Path, case: str) -> None:
    config, change, words = CASES[case]
    directory = make_llama_dir(tmp_path / "m", hidden=64, inner=96, layers=2, tied=False)
    settings = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False} | config
    (directory / "config.json").write_text(json.dumps(settings))
    if change is not None:
        rewritten(directory, change)
    with pytest.raises(InputError, match=words) as caught:
        w4conv.quantize(directory, tmp_path / "m.w4", effort=0, scheme="w4a16")
    assert "etch" not in str(caught.value), "all files are complete"


def test_gguf_of_other_layers(tmp_path: Path) -> None:
    path = make_llama_gguf(tmp_path / "m.gguf", edit=lambda writer: writer.add_block_count(3))
    with pytest.raises(InputError, match=r"end with layer 1, but .* asks for 3 layers"):
        w4conv.quantize(path, tmp_path / "m.w4", effort=0, scheme="w4a16")


@pytest.mark.parametrize("prefix", ["model.", "backbone.", ""])
def test_what_is_there_is_found(tmp_path: Path, prefix: str) -> None:
    """Names that one rule knows are read; the error is for the others."""
    directory = make_llama_dir(tmp_path / "m", tied=True)
    assert any(name.startswith("model.") for name in loaded(directory))
    rewritten(directory, renamed(r"^model\.", prefix))
    if prefix == "backbone.":
        with pytest.raises(InputError, match="under other names"):
            w4conv.quantize(directory, tmp_path / "m.w4", effort=0, scheme="w4a16")
    else:
        assert w4conv.quantize(directory, tmp_path / "m.w4", effort=0, scheme="w4a16").n_tensors
