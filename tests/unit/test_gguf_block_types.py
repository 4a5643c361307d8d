"""GGUF's types: which schemes hold their blocks, bit for bit as the gguf package reads them, and what is chosen."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from exports import converted, recoded, same, schemes, values
from gguf_blocks import HALVES, random_blocks
from helpers import gguf_name, make_llama_gguf
from w4files import SCHEMES_OF_1_1, as_bytes

import w4conv
from w4conv import codes, kernels
from w4conv.commands.export import export
from w4conv.container import open_container
from w4conv.errors import InputError
from w4conv.scheme import QuantScheme
from w4conv.sources.gguf_blocks import coded, coding_of
from w4conv.sources.gguf_tensors import DEQUANTIZABLE

EXACT = {
    "Q4_0": "int4/g32", "Q4_1": "int4o/g32", "Q5_0": "int8/g32", "Q5_1": "int8o/g32", "Q8_0": "int8/g32",
    "MXFP4": "e2m1/g32", "NVFP4": "e2m1/g16", "TQ1_0": "int4/g256", "TQ2_0": "int4/g256", "IQ4_NL": "iq4nl/g32",
    "IQ4_XS": "iq4nl/g32/i8", "Q2_K": "int4o/g16/i8", "Q3_K": "int4/g16/i8", "Q4_K": "int4o/g32/i8",
    "Q5_K": "int8o/g32/i8", "Q6_K": "int8/g16/i8", "IQ1_S": "int8/g32", "IQ1_M": "int8/g16", "IQ2_XXS": "int8/g32",
    "IQ2_XS": "int8/g16", "IQ2_S": "int8/g16", "IQ3_XXS": "int8/g32", "IQ3_S": "int8/g32",
}  # fmt: skip
MIXTURES = {  # as llama.cpp's own presets mix them
    "Q4_K_M": ("Q4_K", "Q6_K"), "Q4_K_S": ("Q4_K", "Q5_K"), "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q3_K_M": ("Q3_K", "Q4_K", "Q5_K", "Q6_K"), "Q2_K": ("Q2_K", "Q3_K", "Q6_K"), "Q6_K": ("Q6_K", "Q8_0"),
    "Q8_0": ("Q8_0",), "Q4_K_M of narrow rows": ("Q5_0", "Q8_0"), "IQ4_XS": ("IQ4_XS", "Q5_K", "Q6_K"),
    "IQ4_NL": ("IQ4_NL", "Q5_1"), "TQ2_0": ("TQ2_0", "Q4_K", "Q6_K"), "F16 too": ("F16", "Q4_K"),
    "IQ3_M": ("IQ3_S", "IQ4_NL", "Q4_K", "Q6_K"), "IQ2_M": ("IQ2_S", "IQ3_S", "IQ2_XS"),
    "IQ1_S": ("IQ1_S", "IQ1_M", "IQ2_XXS"),
}  # fmt: skip


def decoded(raw: npt.NDArray[np.uint8], qtype: str) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[qtype]).astype(np.float32)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e-6, 0.0, 60000.0], ids=["small", "one", "subnormal", "zero", "large"])
@pytest.mark.parametrize("qtype", EXACT)
def test_blocks_are_held_exactly(qtype: str, size: float) -> None:
    """In numpy and by the kernels, from the first to the last bit of a value."""
    n_rows, n_columns = 37, 1280
    size = min(size, 10000.0)  # the largest of a thousand normal numbers is below six times as much
    raw = random_blocks(qtype, n_rows, n_columns, size=size, seed=7)
    coding = coding_of(qtype, n_rows, raw.shape[1], lambda start, stop: raw[start:stop].reshape(-1))
    assert coding is not None
    if size:  # offsets of zero are whole zero points
        assert str(coding) == EXACT[qtype]
    parts = {kind: as_bytes(part) for kind, part in coded(raw, qtype, coding, "there").parts(coding).items()}
    want = decoded(raw, qtype)
    assert np.isfinite(want).all()
    assert same(codes.dequantize(coding, (n_rows, n_columns), parts), want)
    assert same(kernels.dequantize(coding, (n_rows, n_columns), parts), want)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x55, 0x80, 0x7F])
@pytest.mark.parametrize("qtype", EXACT)
def test_blocks_of_one_byte(qtype: str, byte: int) -> None:
    """The ends of codes and sub-scales, under scales that are numbers."""
    raw = random_blocks(qtype, 16, 512)
    numbers = random_blocks(qtype, 16, 512)
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]]
    raw[:] = byte
    cells, kept = raw.reshape(-1, nbytes), numbers.reshape(-1, nbytes)
    for at in HALVES[qtype]:
        cells[:, at : at + 2] = kept[:, at : at + 2]
    if qtype == "MXFP4":
        cells[:, 0] = 120
    if qtype == "IQ1_M":
        cells[:, 49::2] = cells[:, 49::2] & 15 | kept[:, 49::2] & 0xF0
    coding = coding_of(qtype, 16, raw.shape[1], lambda start, stop: raw[start:stop].reshape(-1))
    assert coding is not None
    parts = {kind: as_bytes(part) for kind, part in coded(raw, qtype, coding, "there").parts(coding).items()}
    assert same(codes.dequantize(coding, (16, 512), parts), decoded(raw, qtype))


def mixed(path: Path, types: tuple[str, ...], embedding: str = "Q8_0") -> tuple[Path, dict[str, npt.NDArray[np.uint8]]]:
    """A file whose linear weights take turns; and what each tensor holds, by its name in the file."""
    stored: dict[str, npt.NDArray[np.uint8]] = {}

    def blocks(name: str, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.uint8], str]:
        own = types[len(stored) % len(types)] if "layers" in name else embedding
        n = len(stored)
        if own == "F16":
            stored[gguf_name(name)] = np.random.default_rng(n).standard_normal(shape).astype(np.float16).view(np.uint8)
            return stored[gguf_name(name)].view(np.float16), own
        stored[gguf_name(name)] = random_blocks(own, *shape, seed=n, size=1e-3)
        return stored[gguf_name(name)], own

    return make_llama_gguf(path, hidden=256, inner=512, layers=2, vocab=300, blocks=blocks), stored


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_file_whose_weights_can_be_kept_is_kept(tmp_path: Path, mixture: str) -> None:
    path, _ = mixed(tmp_path / "m.gguf", MIXTURES[mixture])
    report = w4conv.quantize(path, tmp_path / "m.w4", effort=0)
    assert report.scheme == "keep"
    assert not any("second time" in note for note in report.notes)
    assert w4conv.verify(tmp_path / "m.w4", against=path).ok
    found, chosen = values(tmp_path / "m.w4"), schemes(tmp_path / "m.w4")
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            qtype = tensor.tensor_type.name
            want = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            name = "model.layers.1.mlp.down_proj.weight"
            assert same(found[name], want.reshape(found[name].shape))
            assert str(chosen[name]) == EXACT.get(qtype, "f16")
    n_parameters = sum(v.size for v in found.values())
    assert (tmp_path / "m.w4").stat().st_size < 0.7 * 2 * n_parameters + 50_000, "of FP16, and the tokenizer"
    with w4conv.Model(tmp_path / "m.w4") as model:
        assert np.isfinite(model.logits([1, 2, 3])).all()


def test_every_type_that_can_be_read_is_held() -> None:
    assert {*EXACT} == DEQUANTIZABLE


@pytest.mark.parametrize("option", [{"scheme": "w4a16"}, {"group_size": 64}, {"requantize": True}])
def test_what_is_asked_for_comes_first(tmp_path: Path, option: dict[str, object]) -> None:
    path, _ = mixed(tmp_path / "m.gguf", MIXTURES["Q4_K_M"])
    report = w4conv.quantize(path, tmp_path / "m.w4", **option, effort=0)
    assert report.scheme == option.get("scheme", "nl4")
    assert any("rounded a second time" in note for note in report.notes)


@pytest.mark.parametrize(
    ("qtype", "at"), [("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 208), ("Q3_K", 108), ("IQ4_XS", 0), ("Q5_1", 2)]
)
@pytest.mark.parametrize("bits", [0x7C00, 0xFE01], ids=["infinity", "NaN"])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, qtype: str, at: int, bits: int) -> None:
    def blocks(name: str, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.uint8], str]:
        raw = random_blocks(qtype, *shape, size=1e-3)
        if name == "model.layers.1.mlp.up_proj.weight":
            raw[17, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
        return raw, qtype

    path = make_llama_gguf(tmp_path / "m.gguf", hidden=256, inner=512, blocks=blocks)
    with pytest.raises(InputError, match=r"up_proj.weight: the .* 0 of row 17 is NaN or infinite"):
        w4conv.quantize(path, tmp_path / "m.w4", effort=0)
    assert not (tmp_path / "m.w4").exists()


@pytest.mark.parametrize(("types", "minor"), [(("Q4_0", "Q8_0"), 0), (("Q4_1",), 0), (("Q4_K",), 1), (("IQ4_NL",), 1)])
def test_the_version_is_the_lowest_that_suffices(tmp_path: Path, types: tuple[str, ...], minor: int) -> None:
    path, _ = mixed(tmp_path / "m.gguf", types)
    w4conv.quantize(path, tmp_path / "m.w4", effort=0)
    assert (tmp_path / "m.w4").read_bytes()[8:12] == bytes([1, 0, minor, 0])
    with open_container(tmp_path / "m.w4") as container:
        container.check()


@pytest.mark.parametrize("mixture", [m for m in MIXTURES if "narrow" not in m])
def test_there_and_back(tmp_path: Path, mixture: str) -> None:
    """Exported again, every tensor has its type and its bytes; where the type changes, its values."""
    path, _ = mixed(tmp_path / "m.gguf", MIXTURES[mixture])
    w4conv.quantize(path, tmp_path / "m.w4", effort=0)
    report = export(tmp_path / "m.w4", tmp_path / "again.gguf", to="gguf")
    assert report.exact
    again = {t.name: t for t in gguf.GGUFReader(tmp_path / "again.gguf").tensors}
    for tensor in gguf.GGUFReader(path).tensors:
        found, qtype = again[tensor.name], tensor.tensor_type.name
        if qtype.startswith(("TQ", "IQ1", "IQ2", "IQ3")):
            assert found.tensor_type.name == ("Q4_0" if qtype.startswith("TQ") else "F32")
            assert same(gguf.quants.dequantize(found.data, found.tensor_type), decoded(tensor.data, qtype))
            continue
        assert found.tensor_type == tensor.tensor_type
        assert np.array_equal(found.data, tensor.data), tensor.name
    assert w4conv.verify(tmp_path / "again.gguf", against=tmp_path / "m.w4").ok


@pytest.mark.parametrize("coding", SCHEMES_OF_1_1[::3], ids=repr)
@pytest.mark.parametrize("to", ["gguf", "safetensors", "onnx"])
def test_codes_beyond_a_type_go_out_as_floats(tmp_path: Path, coding: QuantScheme, to: str) -> None:
    """Any bytes for codes and scales: exact values all the same."""
    path = recoded(
        converted(tmp_path, hidden=64, inner=96),
        lambda name, shape: coding if name.endswith("up_proj.weight") else QuantScheme("f16"),
    )
    has_type = to == "gguf" and coding == QuantScheme("iq4nl", 32, "f16")
    report = export(path, tmp_path / "out", to=to, dtype=None if has_type else "f32")
    assert report.exact
    kind = {t.becomes for t in report.tensors if t.scheme == str(coding)}
    assert kind <= {"F32", "IQ4_NL"}, kind


@pytest.mark.parametrize("coding", SCHEMES_OF_1_1[::6], ids=repr)
@pytest.mark.parametrize("to", ["compressed-tensors", "gptq", "awq", "mlx"])
def test_formats_that_have_no_place_for_them(tmp_path: Path, coding: QuantScheme, to: str) -> None:
    path = recoded(
        converted(tmp_path, hidden=64, inner=96),
        lambda name, shape: coding if "layers" in name else QuantScheme("f16"),
    )
    with pytest.raises(InputError, match="Export to safetensors or gguf"):
        export(path, tmp_path / "out", to=to)


@pytest.mark.parametrize("qtype", EXACT)
def test_matrices_of_a_stack(qtype: str) -> None:
    """As those of experts: cut out of a stack, and joined of two halves of their rows."""
    first, second = (random_blocks(qtype, 3 * 16, 512, seed=seed, size=1e-2) for seed in (1, 2))
    coding = coding_of(qtype, len(first), first.shape[1], lambda start, stop: first[start:stop].reshape(-1))
    assert coding is not None
    stacks = [coded(raw, qtype, coding, "there").stacked(16) for raw in (first, second)]
    joined = stacks[0].joined(stacks[1], lambda a, b: np.concatenate([a, b], axis=1))
    for i in range(3):
        raw = np.concatenate([first[16 * i : 16 * (i + 1)], second[16 * i : 16 * (i + 1)]])
        parts = {kind: as_bytes(part) for kind, part in joined.matrix(i).parts(coding).items()}
        assert same(codes.dequantize(coding, (32, 512), parts), decoded(raw, qtype))
