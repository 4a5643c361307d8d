"""Quantized checkpoints written by the libraries of their formats: our values are theirs, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from exports import parts, same, schemes, values
from helpers import llama_tensors, make_llama_dir, write_safetensors

import w4conv
from w4conv.commands.export import export
from w4conv.sources import open_source

torch = pytest.importorskip("torch", reason="torch is the oracle; install the oracle dependency group")

SHAPE: dict[str, Any] = {"hidden": 128, "inner": 256, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 32}


def weights() -> dict[str, np.ndarray]:
    return llama_tensors(**SHAPE, vocab=300, tied=False, biases=(), seed=3)


def write(directory: Path, settings: dict[str, Any], raw: dict[str, tuple[str, np.ndarray]]) -> Path:
    make_llama_dir(directory, **SHAPE, config={"quantization_config": settings})
    write_safetensors(directory / "model.safetensors", raw)
    return directory


def check(directory: Path, expected: dict[str, np.ndarray], kind: str) -> None:
    with open_source(directory) as source:
        for name, value in expected.items():
            assert same(source.read(name).astype(np.float32), value), name
    out = directory.with_suffix(".w4")
    w4conv.quantize(directory, out, scheme="keep", effort=0)
    kept = values(out)
    assert all(same(kept[name], value) for name, value in expected.items())
    assert {schemes(out)[name].kind for name in expected} == {kind}
    assert w4conv.verify(out, against=directory).ok


@pytest.mark.filterwarnings("default")  # of the package's own
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(tmp_path: Path, kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the oracle here")
    raw: dict[str, tuple[str, np.ndarray]] = {}
    expected = {}
    for name, array in weights().items():
        if "_proj" not in name:
            raw[name] = "F16", array.astype(np.float16)
            continue
        data, state = functional.quantize_4bit(
            torch.from_numpy(array), blocksize=64, compress_statistics=nested, quant_type=kind
        )
        raw[name] = "U8", data.numpy()
        for part, tensor in state.as_dict(packed=True).items():
            array_ = tensor.numpy()
            raw[f"{name}.{part}"] = {"uint8": "U8", "float32": "F32"}[str(array_.dtype)], array_
        expected[name] = functional.dequantize_4bit(data, state).numpy()
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    check(write(tmp_path / "m", settings, raw), expected, kind)


@pytest.mark.filterwarnings("default")  # of the package's own
@pytest.mark.parametrize(("symmetric", "bits"), [(True, 4), (False, 4), (True, 8)])
@pytest.mark.parametrize("group_size", [32, 128, None])
def test_compressed_tensors(tmp_path: Path, symmetric: bool, bits: int, group_size: int | None) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is the oracle; install the oracle group")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    raw: dict[str, tuple[str, np.ndarray]] = {}
    expected = {}
    dtypes = {"int32": "I32", "int64": "I64", "float32": "F32", "float16": "F16"}
    for name, array in weights().items():
        if "_proj" not in name:
            raw[name] = "F16", array.astype(np.float16)
            continue
        groups = array.reshape(array.shape[0], -1, group_size or array.shape[1])
        low, high = groups.min(axis=2), groups.max(axis=2)
        top = 2**bits - 1
        scale = (2 * np.maximum(high, -low) / top if symmetric else (high - low) / top).astype(np.float16)
        zero = np.clip(np.rint(-low / scale), 0, top).astype(np.int64) - 2 ** (bits - 1)
        state = {"weight": torch.from_numpy(array), "weight_scale": torch.from_numpy(scale.astype(np.float32))}
        if not symmetric:
            state["weight_zero_point"] = torch.from_numpy(zero.astype(np.int8))
        packed = PackedQuantizationCompressor.compress(state, scheme)
        expected[name] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"].numpy()
        for part, tensor in packed.items():
            raw[f"{name.removesuffix('weight')}{part}"] = dtypes[str(tensor.numpy().dtype)], tensor.numpy()
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    directory = write(tmp_path / "m", settings, raw)
    check(directory, expected, "int8" if bits == 8 else "int4" if symmetric else "int4z")
    sizes = {schemes(directory.with_suffix(".w4"))[name].group_size for name in expected}
    assert sizes == {group_size or 0}


@pytest.mark.filterwarnings("default")  # of the package's own
def test_mxfp4(tmp_path: Path) -> None:
    """A tiny gpt-oss whose experts are in MXFP4: transformers dequantizes them to (experts, in, out), we keep rows."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=300, num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).float()
    rng = np.random.default_rng(4)
    raw: dict[str, tuple[str, np.ndarray]] = {}
    expected = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            raw[name] = "F32", parameter.numpy()
            continue
        n_experts, n_in, n_out = parameter.shape
        blocks = rng.integers(0, 256, (n_experts, n_out, n_in // 32, 16), np.uint8)
        scales = rng.integers(118, 122, blocks.shape[:3], np.uint8)
        scales[:, ::5] = 100
        blocks[scales < 103] &= 0x88  # zeros of either sign, under a scale that is no FP16 number
        raw[f"{name}_blocks"], raw[f"{name}_scales"] = ("U8", blocks), ("U8", scales)
        whole = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
        parameter.copy_(whole)
        expected[name] = whole.numpy().transpose(0, 2, 1)
    directory = tmp_path / "m"
    directory.mkdir()
    document = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(document | {"quantization_config": {"quant_method": "mxfp4"}}))
    write_safetensors(directory / "model.safetensors", raw)
    with open_source(directory) as source:
        assert source.kind == "mxfp4"
        for name, value in expected.items():
            assert str(source.tensors[name].coding) == "e2m1/g32"
            assert same(source.read(name), value), name
            assert same(source.read(name, slice(1, 2)), value[1:2])
    w4conv.quantize(directory, tmp_path / "m.w4", effort=0)
    kept = values(tmp_path / "m.w4")
    assert len(expected) == 4
    assert all(same(kept[name], value) for name, value in expected.items())
    assert {str(schemes(tmp_path / "m.w4")[name]) for name in expected} == {"e2m1/g32"}
    report = w4conv.verify(tmp_path / "m.w4", against=directory)
    assert report.ok
    assert report.round_trip is not None
    assert report.round_trip.overall.sqnr_db is None
    ids = rng.integers(0, 300, 12).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    with w4conv.Model(tmp_path / "m.w4", kv="f32") as engine:
        assert np.abs(engine.logits(ids) - theirs).max() < 1e-3 * np.abs(theirs).max()

    # To GGUF, where gate and up are tensors of their own, and back.
    assert export(tmp_path / "m.w4", tmp_path / "m.gguf", to="gguf").exact
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for layer in range(2):
        gate_up = expected[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        down = expected[f"model.layers.{layer}.mlp.experts.down_proj"]
        for part, value in (("gate", gate_up[:, 0::2]), ("up", gate_up[:, 1::2]), ("down", down)):
            found = stored[f"blk.{layer}.ffn_{part}_exps.weight"]
            assert found.tensor_type.name == "MXFP4"
            assert same(gguf.dequantize(found.data, found.tensor_type), np.ascontiguousarray(value))
    w4conv.quantize(tmp_path / "m.gguf", tmp_path / "again.w4", scheme="keep", effort=0)
    assert parts(tmp_path / "again.w4") == parts(tmp_path / "m.w4")
    assert w4conv.verify(tmp_path / "again.w4", against=tmp_path / "m.gguf").ok
    assert w4conv.verify(tmp_path / "m.gguf", against=tmp_path / "m.w4").ok
