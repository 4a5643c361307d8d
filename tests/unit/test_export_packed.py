"""Exports to the 4-bit layouts of Hugging Face directories, decoded nibble by nibble."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import packed
import pytest
from exports import config, converted, recoded, same, values
from numpy.typing import NDArray

from w4conv.commands.export import export
from w4conv.errors import InputError, UsageError
from w4conv.exports.awq import _ordered
from w4conv.exports.packed import words
from w4conv.scheme import QuantScheme

LAYER = "model.layers.1."
LINEARS = [
    *(f"{LAYER}self_attn.{part}_proj" for part in "qkvo"),
    *(f"{LAYER}mlp.{part}_proj" for part in ("gate", "up", "down")),
]
INT4Z = QuantScheme("int4z", 32, "f16")


def eight(*codes: int) -> NDArray[np.uint8]:
    return np.array([codes], np.uint8)


def test_published_words() -> None:
    """Words that the descriptions of the formats give."""
    assert words(eight(*range(8)), 4)[0, 0] == 0x76543210
    assert words(eight(0, 1, 2, 3, 4), 4)[0, 0] == 0x00043210
    assert words(eight(1, 2, 3, 4), 8)[0, 0] == 0x04030201
    assert _ordered(eight(*range(8)))[0, 0] == 0x75316420


@pytest.mark.parametrize("group_size", [32, 64, 128, "row"])
def test_compressed_tensors(tmp_path: Path, group_size: int | str) -> None:
    path = converted(tmp_path, group_size=group_size, dtype="F16")
    report = export(path, tmp_path / "out", to="compressed-tensors")
    tensors, expected = packed.load(tmp_path / "out"), values(path)
    for module in LINEARS:
        assert same(packed.compressed(tensors, module), expected[f"{module}.weight"]), module
        assert f"{module}.weight" not in tensors
    assert same(tensors["model.norm.weight"].astype(np.float32), expected["model.norm.weight"])
    settings = config(tmp_path / "out")
    quantization = settings["quantization_config"]
    assert settings["torch_dtype"] == "float16"
    assert quantization["ignore"] == ["lm_head"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["symmetric"]) == (4, True)
    if group_size == "row":
        assert weights["strategy"] == "channel"
        assert "group_size" not in weights
    else:
        assert (
            weights["group_size"]
            == tensors[f"{LAYER}mlp.down_proj.weight_shape"][1]
            // tensors[f"{LAYER}mlp.down_proj.weight_scale"].shape[1]
        )
    assert {t.becomes: t.n_exact for t in report.tensors if "-bit" in t.becomes}.popitem()[1] == 14
    assert export(path, tmp_path / "f32", to="compressed-tensors", dtype="f32").exact


def test_compressed_tensors_of_several_schemes(tmp_path: Path) -> None:
    def choose(name: str, shape: tuple[int, ...]) -> QuantScheme | None:
        return INT4Z if "q_proj" in name else QuantScheme("int8", 32, "f16") if "up_proj" in name else None

    path = recoded(converted(tmp_path), choose)
    export(path, tmp_path / "out", to="compressed-tensors")
    tensors, expected = packed.load(tmp_path / "out"), values(path)
    for module in LINEARS:
        found = packed.compressed(tensors, module, 8 if "up_proj" in module else 4)
        assert same(found, expected[f"{module}.weight"]), module
    groups = config(tmp_path / "out")["quantization_config"]["config_groups"]
    assert [(g["weights"]["num_bits"], g["weights"]["symmetric"]) for g in groups.values()] == [
        (4, True),
        (4, False),
        (8, True),
    ]
    assert groups["group_1"]["targets"] == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]


@pytest.mark.parametrize("kind", ["int4", "int4z"])
def test_gptq(tmp_path: Path, kind: str) -> None:
    path = converted(tmp_path)
    if kind == "int4z":
        path = recoded(path, lambda n, s: INT4Z if "layers" in n else None)
    export(path, tmp_path / "out", to="gptq")
    tensors, expected = packed.load(tmp_path / "out"), values(path)
    settings = config(tmp_path / "out")["quantization_config"]
    v2 = settings["checkpoint_format"] == "gptq_v2"
    assert v2 == (kind == "int4z"), "random zero points hold a 0, which the first version cannot"
    assert settings["sym"] == (kind == "int4")
    for module in LINEARS:
        assert same(packed.gptq(tensors, module, v2=v2), expected[f"{module}.weight"]), module
    if kind == "int4":
        assert set(tensors[f"{LINEARS[0]}.qzeros"].view(np.uint32).ravel().tolist()) == {0x77777777}
    assert json.loads((tmp_path / "out/quantize_config.json").read_text()) == settings


@pytest.mark.parametrize("kind", ["int4", "int4z"])
def test_awq(tmp_path: Path, kind: str) -> None:
    path = converted(tmp_path)
    if kind == "int4z":
        path = recoded(path, lambda n, s: INT4Z if "layers" in n else None)
    export(path, tmp_path / "out", to="awq")
    tensors, expected = packed.load(tmp_path / "out"), values(path)
    for module in LINEARS:
        assert same(packed.awq(tensors, module), expected[f"{module}.weight"]), module


@pytest.mark.parametrize("group_size", [32, 128, "row"])
def test_mlx(tmp_path: Path, group_size: int | str) -> None:
    path = converted(tmp_path, group_size=group_size)
    report = export(path, tmp_path / "out", to="mlx")
    assert report.exact, "int8 stays coded too"
    tensors, expected = packed.load(tmp_path / "out"), values(path)
    settings = config(tmp_path / "out")["quantization"]
    for module in LINEARS:
        assert same(packed.mlx(tensors, module), expected[f"{module}.weight"]), module
    for module in ("model.embed_tokens", "lm_head"):
        assert same(packed.mlx(tensors, module, 8), expected[f"{module}.weight"])
        assert settings[module]["bits"] == 8
    assert settings["bits"] == 4
    for module in [*LINEARS, "lm_head"]:
        size = settings.get(module, settings)["group_size"]
        assert tensors[f"{module}.scales"].shape[1] == expected[f"{module}.weight"].shape[1] // size


def test_mlx_keeps_what_its_offsets_cannot_hold_as_floats(tmp_path: Path) -> None:
    path = recoded(converted(tmp_path), lambda n, s: INT4Z if "q_proj" in n else None)
    export(path, tmp_path / "out", to="mlx", dtype="f32")
    assert config(tmp_path / "out")["quantization"]["model.layers.0.self_attn.q_proj"] is False
    name = "model.layers.0.self_attn.q_proj.weight"
    assert same(packed.load(tmp_path / "out")[name], values(path)[name])


@pytest.mark.parametrize("to", ["compressed-tensors", "gptq", "awq"])
def test_rows_that_are_no_whole_groups_become_floats(tmp_path: Path, to: str) -> None:
    path = converted(tmp_path, inner=104)
    export(path, tmp_path / "out", to=to, dtype="f32")
    tensors = packed.load(tmp_path / "out")
    name = "model.layers.1.mlp.down_proj"
    assert same(tensors[f"{name}.weight"], values(path)[f"{name}.weight"])
    quantization = config(tmp_path / "out")["quantization_config"]
    listed = quantization.get("ignore") or quantization.get("modules_to_not_convert") or list(quantization["dynamic"])
    assert any(name.split(".")[-1] in entry for entry in listed)


@pytest.mark.parametrize("to", ["compressed-tensors", "gptq", "awq"])
def test_refusals(tmp_path: Path, to: str) -> None:
    with pytest.raises(UsageError, match="bf16 would round"):
        export(converted(tmp_path), tmp_path / "out", to=to, dtype="bf16")
    floats = converted(tmp_path / "f", scheme="f16")
    with pytest.raises(InputError, match="no linear layer is in a scheme"):
        export(floats, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()
