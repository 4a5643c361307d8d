"""Quantized checkpoints whose config.json says one thing and whose tensors are another: refused with both named, or
read as the format's own library reads them, with a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import packed
import pytest
from exports import same
from helpers import make_llama_dir, make_llama_gguf, write_safetensors
from safetensors import safe_open
from test_gguf_block_types import mixed
from test_sources_packed import GPTQ, Q, awq, bnb, compressed, gptq, mlx, values_of, write

import w4conv
from w4conv.commands.export import export
from w4conv.commands.inspect import inspect
from w4conv.errors import InputError, UsageError
from w4conv.sources import open_source
from w4conv.sources.packed.fp8 import E4M3

AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
MLX = {"bits": 4, "group_size": 32}
PER_ROW = {"strategy": "channel", "group_size": None}


def ct(*, ignore: Any = (), targets: Any = ("Linear",), also: Any = None, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors that fit `compressed()`, but for what is given."""
    own = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
    groups = {"group_0": {"targets": list(targets), "weights": own | weights}, **(also or {})}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups,
        "ignore": list(ignore),
    }  # fmt: skip


def fp8(*, scale: Any = None, shape: tuple[int, int] | None = None, dtype: str = "F8_E4M3") -> Any:
    def encode(module: str, array: Any, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        blocks = shape or (-(-array.shape[0] // 32), -(-array.shape[1] // 32))
        out = {f"{module}.weight": (dtype, rng.integers(0, 126, array.shape).astype(np.uint8))}
        if scale != "absent":
            out[f"{module}.weight_scale_inv"] = ("F32", rng.random(blocks).astype(np.float32))
        return out

    return encode


def drop(*endings: str) -> Any:
    return lambda raw: [raw.pop(name) for name in list(raw) if name.endswith(endings)]


def state(**changed: Any) -> Any:
    """Change the quant_state that bitsandbytes stores with each matrix."""

    def change(raw: Any) -> None:
        for name in [n for n in raw if "quant_state" in n]:
            own = json.loads(raw[name][1].tobytes()) | changed
            raw[name] = "U8", np.frombuffer(json.dumps(own).encode(), np.uint8)

    return change


def other_map(raw: Any) -> None:
    from w4conv import codes

    for name in [n for n in raw if n.endswith("quant_map")]:
        raw[name] = "F32", codes.CODEBOOKS["fp4"]


NF4, NESTED, FP4 = bnb("nf4", nested=False), bnb("nf4", nested=True), bnb("fp4", nested=False)
REFUSED = {
    "asymmetric without zero points": (ct(symmetric=False), compressed(), None, "zero_point is missing.*c false"),
    "symmetric with zero points": (ct(), compressed(zeros=True), None, "has zero points.*says symmetric"),
    "asymmetric per row without": (
        ct(symmetric=False, **PER_ROW), compressed(groups=1), None, "zero_point is missing.*symmetric false",
    ),
    "asymmetric by name": (
        ct(also={"group_1": {"targets": [Q], "weights": {"num_bits": 4, "symmetric": False}}}), compressed(), None,
        f"{Q}.weight_zero_point is missing",
    ),
    "asymmetric by pattern": (
        ct(also={"g": {"targets": ["re:.*q_proj$"], "weights": {"symmetric": False}}}), compressed(), None,
        f"{Q}.weight_zero_point is missing",
    ),
    "actorder group": (ct(actorder="group"), compressed(), None, "weight_g_idx is missing.*actorder group"),
    "actorder true": (ct(actorder=True), compressed(), None, "weight_g_idx is missing.*actorder true"),
    "actorder dynamic": (ct(actorder="dynamic"), compressed(), None, "weight_g_idx is missing.*actorder dynamic"),
    "other bits": (ct(num_bits=8), compressed(), None, "weight_packed has 8 words for 64 columns.*num_bits 8"),
    "other groups": (ct(group_size=16), compressed(), None, "weight_scale has 2 groups for 64 columns.*group_size 16"),
    "groups, not rows": (ct(**PER_ROW), compressed(), None, "weight_scale has 2 groups a row.*strategy channel"),
    "rows, not groups": (ct(), compressed(groups=1), None, "weight_scale has 1 groups for 64 columns.*group_size 32"),
    "ignored by name": (ct(ignore=["lm_head", Q]), compressed(), None, "is stored quantized.*says ignore"),
    "ignored by pattern": (ct(ignore=["re:.*k_proj"]), compressed(), None, "is stored quantized.*says ignore"),
    "scale of FP8 absent": (FP8, fp8(), drop("q_proj.weight_scale_inv"), "q_proj.weight.*F8_E4M3.*no scale"),
    "all scales of FP8 absent": (FP8, fp8(scale="absent"), None, "no tensor is stored so|no scale"),
    "scale of FP8 of another shape": (FP8, fp8(shape=(3, 2)), None, r"shape \(3, 2\), but blocks of 32 by 32"),
    "FP8 blocks by default": (
        {"quant_method": "fp8"}, fp8(shape=(2, 2)), None, r"shape \(2, 2\), but blocks of 128 by 128",
    ),
    "FP8 in E5M2": (FP8, fp8(dtype="F8_E5M2"), None, "is F8_E5M2, expected F8_E4M3"),
    "bnb: map of fp4 under nf4": (BNB, NF4, other_map, "codebook of fp4, but its quant_state says nf4"),
    "bnb: fp4 under the name nf4": (BNB, NF4, state(quant_type="fp4"), "named nf4, but says quant_type fp4"),
    "bnb: blocksize too small": (BNB, NF4, state(blocksize=32), r"absmax has shape.*blocksize 32"),
    "bnb: blocksize too large": (BNB, bnb("fp4", nested=True), state(blocksize=128), r"absmax has.*blocksize 128"),
    "bnb: 8 bits declared": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, NF4, None,
        "says load_in_8bit, but 4-bit weights",
    ),
    "bnb: another shape": (BNB, NF4, state(shape=[64, 32]), "has shape.*expected 1024 bytes"),
    "MLX: false, quantized": ({**MLX, Q: False}, mlx(whole=True), None, "stored quantized, but config.json says"),
    "MLX: other bits": ({**MLX, "bits": 8}, mlx(whole=True), None, "scales has shape"),
    "AWQ without zero points": ({**AWQ, "zero_point": False}, awq(zeros=None), drop(".qzeros"), "qzeros is missing"),
    "GPTQ: dynamic": ({**GPTQ, "dynamic": {"-:.*q_proj": {}}}, gptq(), None, "dynamic.*says that it is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_described(tmp_path: Path, case: str) -> None:
    settings, encode, change, words = REFUSED[case]
    key = "quantization" if case.startswith("MLX") else "quantization_config"
    directory = write(tmp_path / "m", settings, encode, change=change, key=key)
    with pytest.raises(InputError, match=words) as caught:
        open_source(directory)
    assert "Fetch" not in str(caught.value)
    assert inspect(directory).tensors


def plain(name: str) -> Any:
    """One matrix is stored as it is."""

    def change(raw: Any) -> None:
        drop(f"{name}.weight", f"{name}.scales", f"{name}.biases")(raw)
        raw[f"{name}.weight"] = "F16", np.ones((64, 64), np.float16)

    return change


READ = {
    "AWQ: zero_point false": ({**AWQ, "zero_point": False}, awq(zeros=None), None, "says zero_point false, but zero"),
    "AWQ: zero_point true, all 8": ({**AWQ, "zero_point": True}, awq(zeros=0x88888888), None, ""),
    "AWQ: zero_point false, all 8": ({**AWQ, "zero_point": False}, awq(zeros=0x88888888), None, ""),
    "AutoRound: sym": (
        {**AWQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "sym": True},
        awq(zeros=None), None, "says sym, but zero",
    ),
    "bnb: nf4 declared, fp4 stored": (
        {**BNB, "bnb_4bit_quant_type": "nf4"}, FP4, None, "says nf4, but weights",
    ),
    "bnb: fp4 declared, nf4 stored": (
        {**BNB, "bnb_4bit_quant_type": "fp4"}, NESTED, None, "says fp4, but weights",
    ),
    "bnb: nested declared, plain stored": (
        {**BNB, "bnb_4bit_use_double_quant": True}, NF4, None, "bnb_4bit_use_double_quant true",
    ),
    "bnb: plain declared, nested stored": (
        {**BNB, "bnb_4bit_use_double_quant": False}, NESTED, None, "bnb_4bit_use_double_quant false",
    ),
    "bnb: as declared": (
        {**BNB, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, NESTED, None, "",
    ),
    "actorder weight": (ct(actorder="weight"), compressed(), None, ""),
    "asymmetric": (ct(symmetric=False), compressed(zeros=True), None, ""),
    "asymmetric by class, symmetric by name": (
        ct(symmetric=False, also={"g": {"targets": [Q], "weights": {"num_bits": 4, "symmetric": True}}}),
        lambda module, array, seed: compressed(zeros=module != Q)(module, array, seed), None, "",
    ),
    "FP8: one scale for blocks": (FP8, fp8(shape=(1, 1)), None, "weight_block_size 32, 32, but one scale is stored"),
    "FP8: as declared": (FP8, fp8(), None, ""),
    "MLX: false and plain": ({**MLX, Q: False}, mlx(whole=True), plain(Q), ""),
    "MLX: declared and plain": ({**MLX, Q: {"bits": 8, "group_size": 32}}, mlx(whole=True), plain(Q), ""),
    "MLX: multimodal false and plain": ({**MLX, f"language_model.{Q}": False}, mlx(whole=True), plain(Q), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_read_as_the_library_does(tmp_path: Path, case: str) -> None:
    settings, encode, change, words = READ[case]
    key = "quantization" if case.startswith("MLX") else "quantization_config"
    directory = write(tmp_path / "m", settings, encode, change=change, key=key)
    report = w4conv.quantize(directory, tmp_path / "m.w4", scheme="keep", effort=0)
    said = [warning for warning in report.warnings if "config" in warning]
    assert any(words in warning for warning in said) if words else not said, said
    raw, found = packed.load(directory), values_of(directory)
    decode = {"AWQ": packed.awq, "Aut": packed.awq, "MLX": packed.mlx}.get(case[:3])
    if decode is not None:
        for name in found:
            module = name.removesuffix(".weight")
            if "_proj" in name and raw[name if name in raw else f"{module}.qweight"].dtype != np.float16:
                assert same(found[name], decode(raw, module))
    if case.startswith("FP8"):
        scale = raw[f"{Q}.weight_scale_inv"]
        size = (64 // scale.shape[0], 64 // scale.shape[1])  # as transformers takes them from the scales
        assert same(found[f"{Q}.weight"], E4M3[raw[f"{Q}.weight"]] * np.kron(scale, np.ones(size, np.float32)))
    checked = w4conv.verify(tmp_path / "m.w4", against=directory)
    assert checked.ok
    assert checked.round_trip is not None
    assert checked.round_trip.overall.rmse == 0


def test_blocks_and_rows_in_one_checkpoint(tmp_path: Path) -> None:
    """Each module has the scales that the group which targets it says."""

    def encode(module: str, array: Any, seed: int) -> Any:
        rng, (n_rows, n_columns) = np.random.default_rng(seed), array.shape
        shape = (n_rows // 32, n_columns // 32) if "mlp" in module else (n_rows, 1)
        return {
            f"{module}.weight": ("F8_E4M3", rng.integers(0, 126, array.shape).astype(np.uint8)),
            f"{module}.weight_scale": ("F32", rng.random(shape).astype(np.float32)),
        }

    blocks = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32], "symmetric": True}
    settings = ct(num_bits=8, type="float", strategy="channel", group_size=None)
    settings |= {"format": "float-quantized"}
    settings["config_groups"]["group_1"] = {"targets": ["re:.*mlp.*"], "weights": blocks}
    directory = write(tmp_path / "m", settings, encode)
    raw, found = packed.load(directory), values_of(directory)
    for name in [name for name in found if "_proj" in name]:
        scale = raw[f"{name}_scale"]
        size = (raw[name].shape[0] // scale.shape[0], raw[name].shape[1] // scale.shape[1])
        assert same(found[name], E4M3[raw[name]] * np.kron(scale, np.ones(size, np.float32)))


def stored(directory: Path) -> dict[str, Any]:
    with safe_open(directory / "model.safetensors", "numpy") as file:
        return {name: ("F16", file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  # not a mapping


def sharded(directory: Path, index: str, shard: str) -> None:
    tensors = stored(directory)
    (directory / "model.safetensors").unlink()
    names = list(tensors)
    parts = {shard.format(1): names[: len(names) // 2], shard.format(2): names[len(names) // 2 :]}
    for file, own in parts.items():
        write_safetensors(directory / file, {name: tensors[name] for name in own})
    weight_map = {name: file for file, own in parts.items() for name in own}
    (directory / index).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("how", [
    "model.fp16.safetensors", "model.bf16.safetensors", "pytorch_model.safetensors", "consolidated.safetensors",
    ("model.safetensors.index.fp16.json", "model.fp16-0000{}-of-00002.safetensors"),
    ("model.safetensors.index.fp16.json", "model-0000{}-of-00002.fp16.safetensors"),
    ("model.fp16.safetensors.index.json", "model.fp16-0000{}-of-00002.safetensors"),
    ("consolidated.safetensors.index.json", "consolidated-0000{}-of-00002.safetensors"),
])  # fmt: skip
def test_weights_under_another_name(tmp_path: Path, how: Any) -> None:
    directory = make_llama_dir(tmp_path / "m")
    want = values_of(directory)
    if isinstance(how, str):
        (directory / "model.safetensors").rename(directory / how)
    else:
        sharded(directory, *how)
    with open_source(directory) as source:
        name = how if isinstance(how, str) else how[0]
        assert f"There is no model.safetensors: the weights are those of {name}." in source.notes
    found = values_of(directory)
    assert all(same(found[name], want[name]) for name in want)


def test_two_variants_are_a_question(tmp_path: Path) -> None:
    directory = make_llama_dir(tmp_path / "m")
    (directory / "model.bf16.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    (directory / "model.safetensors").rename(directory / "model.fp16.safetensors")
    with pytest.raises(InputError, match=r"which weights are meant\? There are model.bf16.safetensors, model.fp16"):
        open_source(directory)


def bits3(module: str, array: Any, seed: int) -> Any:
    del seed
    n_rows, n_columns = array.shape
    return {
        f"{module}.qweight": ("I32", np.ones((n_columns * 3 // 32, n_rows), np.int32)),
        f"{module}.qzeros": ("I32", np.ones((n_columns // 32, n_rows * 3 // 32), np.int32)),
        f"{module}.scales": ("F16", np.ones((n_columns // 32, n_rows), np.float16)),
        f"{module}.g_idx": ("I32", (np.arange(n_columns) // 32).astype(np.int32)),
    }


def int8(module: str, array: Any, seed: int) -> Any:
    del seed
    return {
        f"{module}.weight": ("I8", np.ones(array.shape, np.int8)),
        f"{module}.SCB": ("F32", np.ones(array.shape[0], np.float32)),
        f"{module}.weight_format": ("U8", np.zeros((), np.uint8)),
    }


def mlx3(module: str, array: Any, seed: int) -> Any:
    del seed
    n_rows, n_columns = array.shape
    scales = "F16", np.ones((n_rows, n_columns // 32), np.float16)
    return {
        f"{module}.weight": ("U32", np.ones((n_rows, n_columns * 3 // 32), np.uint32)),
        f"{module}.scales": scales, f"{module}.biases": scales,
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "encode", "word", "stored", "said"), [
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}, int8, "8 bits", "I8", "load_in_8bit True"),
    ("bitsandbytes", {"quant_method": "bitsandbytes"}, int8, "8 bits", "I8", "quant_method bitsandbytes"),
    ("gptq", {**GPTQ, "bits": 3}, bits3, "GPTQ with 3 bits", "I32", "bits 3, group_size 32"),
    ("gptq", {**GPTQ, "bits": 2}, bits3, "GPTQ with 2 bits", "I32", "bits 2"),
    ("gptq", {**GPTQ, "checkpoint_format": "marlin"}, gptq(), "marlin", "I32", "checkpoint_format marlin"),
    ("awq", {**AWQ, "version": "gemv"}, awq(zeros=None), "gemv", "I32", "version gemv"),
    ("awq", {**AWQ, "bits": 3}, awq(zeros=None), "3 bits", "I32", "bits 3"),
    ("mlx", {"bits": 3, "group_size": 32}, mlx3, "3 bits", "U32", "bits 3"),
    ("mlx", {**MLX, "mode": "nvfp4"}, mlx(whole=True), "nvfp4", "U32", "mode nvfp4"),
    ("hqq", {"quant_method": "hqq"}, bits3, "hqq", "I32", "quant_method hqq"),
])  # fmt: skip
def test_inspect_describes(
    tmp_path: Path, kind: str, settings: Any, encode: Any, word: str, stored: str, said: str
) -> None:
    key = "quantization" if kind == "mlx" else "quantization_config"
    directory = write(tmp_path / "m", settings, encode, key=key)
    with pytest.raises(InputError, match=word):
        w4conv.quantize(directory, tmp_path / "m.w4", architecture="generic", effort=0)
    found = inspect(directory)
    assert found.kind == kind
    assert stored in {total.what for total in found.by_scheme}
    why = next(note for note in found.notes if "cannot convert" in note)
    assert word in why
    assert "generic" not in why, "it would not help"
    assert any(said in note for note in found.notes)


@pytest.mark.parametrize("name", ["h.0.mlp.dense", "encoder.block.0.wi", "dec.attn.q", "experts.7.w1", "visual.merger"])
def test_generic_keeps_what_has_4_bits(tmp_path: Path, name: str) -> None:
    def change(raw: Any) -> None:
        raw.clear()
        raw.update(gptq()(name, np.zeros((64, 64), np.float32), 1))
        raw["some.embed_tokens.weight"] = "F16", np.ones((300, 64), np.float16)

    directory = write(tmp_path / "m", GPTQ, gptq(), change=change)
    report = w4conv.quantize(directory, tmp_path / "m.w4", architecture="generic", effort=0)
    assert report.scheme == "keep"
    assert w4conv.verify(tmp_path / "m.w4", against=directory).ok


def test_generic_where_only_the_embedding_is_quantized(tmp_path: Path) -> None:
    def change(raw: Any) -> None:
        raw.clear()
        raw.update(gptq()("embed_tokens", np.zeros((64, 64), np.float32), 1))
        raw["h.0.dense.weight"] = "F16", np.ones((64, 64), np.float16)

    directory = write(tmp_path / "m", GPTQ, gptq(), change=change)
    with pytest.raises(UsageError, match=r"linear weights are not. Give --scheme w4a16 --embeddings keep"):
        w4conv.quantize(directory, tmp_path / "m.w4", architecture="generic", effort=0)
    report = w4conv.quantize(
        directory, tmp_path / "m.w4", architecture="generic", scheme="w4a16", embeddings="keep", effort=0
    )
    assert not any("second time" in note for note in report.notes)


@pytest.mark.parametrize("head", [None, "stored", "tied"])
@pytest.mark.parametrize("embedding", ["F16", "Q8_0", "Q6_K", "Q4_K", "IQ4_XS"])
def test_heads_of_gguf(tmp_path: Path, embedding: str, head: str | None) -> None:
    """output.weight counts where it is, as in llama.cpp; --head tied leaves it out."""
    path, _ = mixed(tmp_path / "m.gguf", ("Q4_K",), embedding)
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    report = w4conv.quantize(path, tmp_path / "m.w4", head=head, effort=0)
    assert any("differs from" in warning for warning in report.warnings) == (head == "tied")
    with w4conv.open(tmp_path / "m.w4") as container:
        assert ("lm_head.weight" in container.tensors) == (head != "tied")
        for name, own in {"lm_head.weight": "output.weight", "model.embed_tokens.weight": "token_embd.weight"}.items():
            if name in container.tensors:
                assert same(container.dequantize(name), stored[own].astype(np.float32))
    assert w4conv.verify(tmp_path / "m.w4", against=path).ok
    export(tmp_path / "m.w4", tmp_path / "back.gguf", to="gguf")
    assert ("output.weight" in {t.name for t in gguf.GGUFReader(tmp_path / "back.gguf").tensors}) == (head != "tied")
    assert w4conv.verify(tmp_path / "back.gguf", against=tmp_path / "m.w4").ok


@pytest.mark.parametrize("head", [None, "tied"])
def test_gguf_without_a_head(tmp_path: Path, head: str | None) -> None:
    path = make_llama_gguf(tmp_path / "m.gguf", tied=True)
    report = w4conv.quantize(path, tmp_path / "m.w4", head=head, effort=0)
    assert not report.warnings
    with pytest.raises(UsageError, match=r"has no lm_head.weight"):
        w4conv.quantize(path, tmp_path / "n.w4", head="stored", effort=0)
