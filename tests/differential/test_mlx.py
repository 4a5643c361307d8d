"""MLX, both ways: it dequantizes what is exported to our values, and we read what it quantizes as it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exports import config, converted, same, schemes, values
from helpers import llama_tensors, make_llama_dir

import w4conv
from w4conv.commands.export import export
from w4conv.sources import open_source

mx = pytest.importorskip("mlx.core", reason="mlx is the consumer; mlx[cpu] installs where there is a wheel")


def dequantized(tensors: dict, module: str, group_size: int, bits: int, mode: str = "affine") -> np.ndarray:
    """By MLX, in float32."""
    if mode == "mxfp4":
        found = mx.dequantize(tensors[f"{module}.weight"], tensors[f"{module}.scales"], mode=mode, dtype=mx.float32)
        return np.array(found)
    scales, biases = (tensors[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(tensors[f"{module}.weight"], scales, biases, group_size=group_size, bits=bits))


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_export(tmp_path: Path, group_size: int) -> None:
    path = converted(tmp_path, group_size=group_size, hidden=128, inner=256)
    export(path, tmp_path / "out", to="mlx")
    tensors, settings = mx.load(str(tmp_path / "out/model.safetensors")), config(tmp_path / "out")["quantization"]
    n_coded = 0
    for name, expected in values(path).items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" in tensors:
            own = settings.get(module, settings)
            assert same(dequantized(tensors, module, own["group_size"], own["bits"]), expected), name
            n_coded += 1
        else:
            assert same(np.array(tensors[name].astype(mx.float32)), expected), name
    assert n_coded == 16


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_import(tmp_path: Path, group_size: int, bits: int) -> None:
    """Its own quantizer seldom gives biases that are whole multiples of scales: in 4 bits they are kept as offsets, and
    go back as they came; in 8 bits the values come as float32."""
    shape = {"hidden": 128, "inner": 256, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 32}
    settings = {"group_size": group_size, "bits": bits, "mode": "affine"}
    make_llama_dir(tmp_path / "m", **shape, config={"quantization": settings, "quantization_config": settings})
    tensors, expected = {}, {}
    weights = llama_tensors(**shape, vocab=300, tied=False, biases=(), seed=1)
    for name, array in weights.items():
        module, plain = name.removesuffix(".weight"), mx.array(array).astype(mx.float16)
        tensors[name] = plain
        if array.ndim == 2:
            tensors[name], tensors[f"{module}.scales"], tensors[f"{module}.biases"] = mx.quantize(
                plain, group_size=group_size, bits=bits
            )
            expected[name] = dequantized(tensors, module, group_size, bits)
    mx.save_safetensors(str(tmp_path / "m/model.safetensors"), tensors)
    with open_source(tmp_path / "m") as source:
        for name, value in expected.items():
            assert same(source.read(name), value), name
    w4conv.quantize(tmp_path / "m", tmp_path / "m.w4", scheme="keep" if bits == 8 else None, effort=0)
    kept = values(tmp_path / "m.w4")
    assert all(same(kept[name], value) for name, value in expected.items())
    kinds = {schemes(tmp_path / "m.w4")[name].kind for name in expected}
    assert w4conv.verify(tmp_path / "m.w4", against=tmp_path / "m").ok
    if bits == 8:
        assert kinds <= {"f32", "int8"}
        return
    assert "int4o" in kinds
    assert kinds <= {"int4", "int4z", "int4o"}
    assert export(tmp_path / "m.w4", tmp_path / "back", to="mlx").exact
    again = mx.load(str(tmp_path / "back/model.safetensors"))
    assert again.keys() == tensors.keys()
    assert all(mx.array_equal(again[name], array).item() for name, array in tensors.items())
    ids = np.arange(40)
    with w4conv.Model(tmp_path / "m.w4", kv="f32") as model:
        ours = model.logits(ids)
    w4conv.quantize(tmp_path / "m", tmp_path / "f32.w4", scheme="f32", effort=0)
    with w4conv.Model(tmp_path / "f32.w4", kv="f32") as model:
        theirs = model.logits(ids)
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


def test_mxfp4(tmp_path: Path) -> None:
    """Its own mode of that name, there and back; the head is left to the other mode."""
    shape = {"hidden": 64, "inner": 96, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16}
    common = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    settings = common | {"lm_head": {"group_size": 32, "bits": 4, "mode": "affine"}}
    make_llama_dir(tmp_path / "m", **shape, config={"quantization": settings, "quantization_config": settings})
    tensors, expected = {}, {}
    for name, array in llama_tensors(**shape, vocab=300, tied=False, biases=(), seed=1).items():
        module, plain = name.removesuffix(".weight"), mx.array(array).astype(mx.float16)
        tensors[name] = plain
        if array.ndim == 2:
            own = settings.get(module, common)
            tensors[name], *rest = mx.quantize(plain, **own)
            tensors |= {f"{module}.{part}": a for part, a in zip(("scales", "biases"), rest, strict=False)}
            expected[name] = dequantized(tensors, module, **own)
    mx.save_safetensors(str(tmp_path / "m/model.safetensors"), tensors)
    w4conv.quantize(tmp_path / "m", tmp_path / "m.w4", effort=0)
    kept = values(tmp_path / "m.w4")
    assert all(same(kept[name], value) for name, value in expected.items())
    assert {str(schemes(tmp_path / "m.w4")[name]) for name in expected} == {"e2m1/g32", "int4o/g32"}
    assert export(tmp_path / "m.w4", tmp_path / "back", to="mlx").exact
    again = mx.load(str(tmp_path / "back/model.safetensors"))
    assert again.keys() == tensors.keys()
    assert all(mx.array_equal(again[name], array).item() for name, array in tensors.items())
    assert config(tmp_path / "back")["quantization"] == settings
