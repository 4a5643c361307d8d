"""Checkpoints that are laid out unusually but mean what they say: in, checked, and out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import packed
import pytest
from exports import converted, same, schemes, values
from helpers import llama_tensors, make_llama_dir, tiny_tokenizer, write_safetensors
from numpy.typing import NDArray

import w4conv
from w4conv.commands.export import export

Raw = dict[str, tuple[str, NDArray[Any]]]
SHAPE = {"hidden": 64, "inner": 96, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def gptq_tensors() -> Raw:
    """Linear layers in GPTQ, the rest in F16."""
    rng = np.random.default_rng(0)
    out: Raw = {}
    for name, array in llama_tensors(**SHAPE, vocab=300, tied=False, biases=(), seed=0).items():
        if "_proj" not in name:
            out[name] = "F16", array.astype(np.float16)
            continue
        module, (n_out, n_in) = name.removesuffix(".weight"), array.shape
        out[f"{module}.qweight"] = "I32", rng.integers(-(2**31), 2**31, (n_in // 8, n_out)).astype(np.int32)
        out[f"{module}.qzeros"] = "I32", np.full((n_in // 32, n_out // 8), 0x77777777, np.int32)
        out[f"{module}.scales"] = "F16", (rng.random((n_in // 32, n_out)) * 0.1).astype(np.float16)
        out[f"{module}.g_idx"] = "I32", (np.arange(n_in) // 32).astype(np.int32)
    return out


def write_shards(directory: Path, tensors: Raw) -> None:
    """Every tensor in a file of its own."""
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{i + 1:05}-of-{len(tensors):05}.safetensors" for i, name in enumerate(tensors)}
    for name, file in files.items():
        write_safetensors(directory / file, {name: tensors[name]})
    total = sum(array.nbytes for _, array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_one_tensor_a_shard(tmp_path: Path) -> None:
    """Parts of a packed matrix lie in different files."""
    raw = gptq_tensors()
    one = make_llama_dir(tmp_path / "one", **SHAPE, config={"quantization_config": GPTQ})
    write_safetensors(one / "model.safetensors", raw)
    many = make_llama_dir(tmp_path / "many", **SHAPE, config={"quantization_config": GPTQ})
    write_shards(many, raw)
    for directory in (one, many):
        w4conv.quantize(directory, directory.with_suffix(".w4"), effort=0)
    expected, found = values(tmp_path / "one.w4"), values(tmp_path / "many.w4")
    assert expected.keys() == found.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    name = "model.layers.0.mlp.down_proj"
    assert same(found[f"{name}.weight"], packed.gptq({n: a for n, (_, a) in raw.items()}, name))
    assert w4conv.verify(tmp_path / "many.w4", against=many).ok


@pytest.mark.parametrize("scheme", ["keep", "w4a16"])
def test_mixed_types(tmp_path: Path, scheme: str) -> None:
    """Each tensor keeps its own type, or is rounded from its own."""
    directory = make_llama_dir(tmp_path / "m", **SHAPE)
    weights = llama_tensors(**SHAPE, vocab=300, tied=False, biases=(), seed=0)
    types = ("F16", "BF16", "F32")
    raw: Raw = {}
    for i, (name, array) in enumerate(weights.items()):
        dtype = types[i % 3]
        bits = (array.view(np.uint32) >> 16).astype(np.uint16)
        raw[name] = dtype, {"F16": array.astype(np.float16), "BF16": bits, "F32": array}[dtype]
    write_safetensors(directory / "model.safetensors", raw)
    out = tmp_path / "m.w4"
    w4conv.quantize(directory, out, scheme=scheme, group_size=None if scheme == "keep" else 32, effort=0)
    found = schemes(out)
    for i, name in enumerate(weights):
        if scheme == "keep" or weights[name].ndim == 1:
            assert found[name].kind == types[i % 3].lower()
    assert w4conv.verify(out, against=directory).ok
    for to in ("gguf", "safetensors"):
        export(out, tmp_path / to, to=to)
        assert w4conv.verify(tmp_path / to, against=out).ok


def test_extras_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Buffers, biases of zeros, a stored head of a tied model: left out, with a note."""
    raw = gptq_tensors()
    raw["lm_head.weight"] = raw["model.embed_tokens.weight"]
    raw["model.layers.0.self_attn.rotary_emb.inv_freq"] = "F32", np.ones(8, np.float32)
    raw["model.layers.0.mlp.up_proj.bias"] = "F16", np.zeros(96, np.float16)
    directory = make_llama_dir(tmp_path / "m", **SHAPE, tied=True, config={"quantization_config": GPTQ})
    write_safetensors(directory / "model.safetensors", raw)
    notes = w4conv.quantize(directory, tmp_path / "m.w4", effort=0, scheme="w4a16").notes
    for words in ("lm_head.weight equals model.embed_tokens.weight and is stored once", "inv_freq", "up_proj.bias"):
        assert any(words in note for note in notes), words
    assert not {"lm_head.weight", "model.layers.0.mlp.up_proj.bias"} & values(tmp_path / "m.w4").keys()
    assert w4conv.verify(tmp_path / "m.w4", against=directory).ok


@pytest.mark.parametrize("to", ["gguf", "compressed-tensors", "gptq", "awq", "mlx", "safetensors"])
def test_a_padded_vocabulary_goes_out(tmp_path: Path, to: str) -> None:
    """Rows of the embedding without a token stay; GGUF names them."""
    path = converted(tmp_path, vocab=320)
    tiny_tokenizer(300).save(str(tmp_path / "in/tokenizer.json"))
    w4conv.quantize(tmp_path / "in", path, group_size=32, overwrite=True, effort=0, scheme="w4a16")
    export(path, tmp_path / "out", to=to)
    assert w4conv.verify(tmp_path / "out", against=path).ok
    if to == "gguf":
        fields = gguf.GGUFReader(tmp_path / "out").fields
        assert len(fields["tokenizer.ggml.tokens"].data) == 320
    w4conv.quantize(tmp_path / "out", tmp_path / "again.w4", scheme="keep", effort=0)
    assert values(tmp_path / "again.w4")["model.embed_tokens.weight"].shape == (320, 64)
