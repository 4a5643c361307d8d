"""Models of no known family: converted, described, verified; not run."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers import as_dtype, make_llama_dir, make_llama_gguf, write_safetensors

import w4conv
from w4conv.commands.inspect import inspect
from w4conv.commands.quantize import quantize
from w4conv.errors import InputError, UsageError

SHAPES = {
    "transformer.wte.weight": (48, 64),
    "transformer.wpe.weight": (16, 64),
    "transformer.h.0.attn.c_attn.weight": (192, 64),
    "transformer.h.0.attn.c_attn.bias": (192,),
    "transformer.h.0.conv.weight": (7, 2, 5),
    "transformer.h.0.ln_1.weight": (64,),
    "lm_head.weight": (48, 64),
}


def gpt2_dir(directory: Path) -> dict[str, np.ndarray]:
    directory.mkdir()
    rng = np.random.default_rng(5)
    values = {name: (rng.standard_normal(shape) * 0.1).astype(np.float32) for name, shape in SHAPES.items()}
    write_safetensors(directory / "model.safetensors", {n: ("F16", as_dtype(v, "F16")) for n, v in values.items()})
    (directory / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    return values


def test_any_checkpoint_of_matrices_is_converted_and_holds(tmp_path: Path) -> None:
    values = gpt2_dir(tmp_path / "in")
    with pytest.raises(InputError, match=r"GPT2LMHeadModel is not supported.*\. With --architecture generic it is"):
        quantize(tmp_path / "in", tmp_path / "out.w4", effort=0, scheme="w4a16")
    report = quantize(
        tmp_path / "in", tmp_path / "out.w4", group_size=32, architecture="generic", effort=0, scheme="w4a16"
    )
    assert report.architecture == "GPT2LMHeadModel"
    assert any(note.startswith("architecture generic") for note in report.notes)
    with w4conv.open(tmp_path / "out.w4") as container:
        assert container.provenance["architecture"] == "generic"
        schemes = {name: str(info.scheme) for name, info in container.tensors.items()}
        assert schemes == dict.fromkeys(SHAPES, "f16") | {
            "transformer.wte.weight": "int8/g32",
            "transformer.wpe.weight": "int8/g32",
            "transformer.h.0.attn.c_attn.weight": "int4/g32",
            "lm_head.weight": "int8/g32",
        }
        for name in SHAPES:
            kept = values[name].astype(np.float16).astype(np.float32)
            got = container.dequantize(name)
            assert got.shape == kept.shape
            if schemes[name] == "f16":
                np.testing.assert_array_equal(got, kept)
            else:
                np.testing.assert_allclose(got, kept, atol=0.05)
    checked = w4conv.verify(tmp_path / "out.w4", against=tmp_path / "in", min_sqnr=15)
    assert checked.ok
    assert checked.round_trip is not None
    assert checked.round_trip.same_codes is True


def test_it_says_that_it_cannot_be_run(tmp_path: Path) -> None:
    """Even where w4conv knows the family."""
    directory = make_llama_dir(tmp_path / "in", vocab=310)
    quantize(directory, tmp_path / "out.w4", architecture="generic", effort=0, scheme="w4a16")
    found = inspect(tmp_path / "out.w4")
    assert found.model is None
    assert any("converted with --architecture generic" in note for note in found.notes)
    with pytest.raises(InputError, match="converted with --architecture generic"):
        w4conv.verify(tmp_path / "out.w4", ppl=True)


def test_a_gguf_file_of_an_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "falcon")
    rng = np.random.default_rng(3)
    matrix = rng.standard_normal((64, 64)).astype(np.float32)
    writer.add_tensor("token_embd.weight", matrix)
    for name, kind in (("attn_qkv", "Q8_0"), ("ffn_up", "Q4_1")):
        qtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"blk.0.{name}.weight", gguf.quants.quantize(matrix, qtype), raw_dtype=qtype)
    writer.add_tensor("blk.0.attn_norm.bias", matrix[0])
    writer.add_tensor("blk.0.positions", np.arange(4, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found = inspect(path)
    assert (found.kind, found.architecture, found.model) == ("gguf", "falcon", None)
    assert {t.name: t.kind for t in found.tensors} == {
        "token_embd.weight": "embedding",
        "blk.0.attn_qkv.weight": "attention",
        "blk.0.ffn_up.weight": "mlp",
        "blk.0.attn_norm.bias": "norm",
    }
    assert any("'falcon' is not supported" in note and "--architecture generic" in note for note in found.notes)
    assert any("Left out" in note and "blk.0.positions (I32)" in note for note in found.notes)

    with pytest.raises(InputError, match="'falcon' is not supported"):
        quantize(path, tmp_path / "out.w4", effort=0, scheme="w4a16")
    quantize(path, tmp_path / "out.w4", architecture="generic", scheme="keep", effort=0)
    with w4conv.open(tmp_path / "out.w4") as container:
        np.testing.assert_array_equal(container.dequantize("token_embd.weight"), matrix)
        assert str(container.tensors["blk.0.attn_qkv.weight"].scheme) == "int8/g32"
    assert w4conv.verify(tmp_path / "out.w4", against=path).ok


def test_a_gguf_file_with_tensors_that_its_architecture_does_not_have_is_described(tmp_path: Path) -> None:
    extra = np.zeros((2, 64), np.float32)
    path = make_llama_gguf(tmp_path / "m.gguf", edit=lambda w: w.add_tensor("blk.0.ssm_in.weight", extra))
    found = inspect(path)
    assert "blk.0.ssm_in.weight" in {t.name for t in found.tensors}
    assert any("a llama model has no such tensor" in note for note in found.notes)


def test_what_is_refused(tmp_path: Path) -> None:
    directory = make_llama_dir(tmp_path / "in")
    with pytest.raises(UsageError, match="'gpt2' is not generic"):
        quantize(directory, tmp_path / "out.w4", architecture="gpt2", effort=0, scheme="w4a16")
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UsageError, match="calibration runs the model"):
        quantize(
            directory, tmp_path / "out.w4", architecture="generic", calibration=tmp_path / "text.txt", scheme="w4a16"
        )
    with pytest.raises(InputError, match="no such file"):
        inspect(tmp_path / "absent.gguf")
