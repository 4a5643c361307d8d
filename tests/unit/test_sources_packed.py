"""Checkpoints quantized already: hand-made tensors in each layout, against decoders written apart and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import packed
import pytest
from exports import converted, same, schemes, values
from helpers import llama_tensors, make_llama_dir, write_safetensors
from numpy.typing import NDArray

import w4conv
from w4conv.commands.inspect import inspect
from w4conv.errors import InputError, UsageError
from w4conv.sources import open_source
from w4conv.sources.packed.fp8 import E4M3

Raw = dict[str, tuple[str, NDArray[Any]]]
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
Q = "model.layers.0.self_attn.q_proj"
RNG = np.random.default_rng


def word(*codes: int) -> int:
    """Eight nibbles, the first lowest."""
    return sum(code << (4 * i) for i, code in enumerate(codes))


def write(
    directory: Path,
    settings: Mapping[str, Any],
    encode: Callable[[str, NDArray[np.float32], int], Raw],
    *,
    key: str = "quantization_config",
    change: Callable[[Raw], object] | None = None,
) -> Path:
    """A tiny model whose linear layers `encode` stores: it gets module, values, and a seed, and gives raw tensors."""
    make_llama_dir(directory, hidden=64, inner=96, layers=1, config={key: dict(settings)})
    weights = llama_tensors(
        hidden=64, inner=96, layers=1, heads=4, kv_heads=2, head_dim=16, vocab=300, tied=False, biases=(), seed=0
    )
    raw: Raw = {}
    for i, (name, array) in enumerate(weights.items()):
        if "_proj" in name:
            raw |= encode(name.removesuffix(".weight"), array, i)
        else:
            raw[name] = "F16", array.astype(np.float16)
    if change:
        change(raw)
    write_safetensors(directory / "model.safetensors", raw)
    return directory


def words(rng: np.random.Generator, *shape: int) -> NDArray[np.int32]:
    return rng.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)


def gptq(*, group: int = 32, zeros: int | None = 0x77777777, bits: int = 4, order: bool = False) -> Any:
    def encode(module: str, array: NDArray[np.float32], seed: int) -> Raw:
        rng, (n_rows, n_columns) = RNG(seed), array.shape
        n_groups, per_word = -(-n_columns // group), 32 // bits
        stored = np.full((n_groups, n_rows // per_word), zeros or 0, np.uint32).view(np.int32)
        if zeros is None:
            stored = words(rng, n_groups, n_rows // per_word) & 0x77777777
        idx = (np.arange(n_columns) // group).astype(np.int32)
        return {
            f"{module}.qweight": ("I32", words(rng, n_columns // per_word, n_rows)),
            f"{module}.qzeros": ("I32", stored),
            f"{module}.scales": ("F16", rng.standard_normal((n_groups, n_rows)).astype(np.float16)),
            f"{module}.g_idx": ("I32", rng.permutation(idx) if order else idx),
        }

    return encode


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def linears(directory: Path) -> list[str]:
    return [name for name in values_of(directory) if "_proj" in name]


def values_of(directory: Path) -> dict[str, NDArray[np.float32]]:
    with open_source(directory) as source:
        return {n: source.read(n).astype(np.float32) for n in source.tensors}


def check(directory: Path, decode: Callable[[dict[str, Any], str], NDArray[np.float32]], scheme: str) -> None:
    """The source reads what `decode` decodes, rows alone too; converting keeps it in `scheme`; verify agrees."""
    raw = packed.load(directory)
    found = values_of(directory)
    assert linears(directory)
    for name in linears(directory):
        assert same(found[name], decode(raw, name.removesuffix(".weight"))), name
        with open_source(directory) as source:
            assert same(source.read(name, slice(3, 21)), found[name][3:21])
    out = directory.with_suffix(".w4")
    w4conv.quantize(directory, out, scheme="keep", overwrite=True, effort=0)
    kept = values(out)
    assert all(same(kept[name], found[name]) for name in found)
    assert {str(schemes(out)[name]) for name in linears(directory)} == {scheme}
    report = w4conv.verify(out, against=directory)
    assert report.ok
    assert report.round_trip is not None
    assert report.round_trip.overall.rmse == 0


def test_gptq_by_hand(tmp_path: Path) -> None:
    """Column q = 0..7 of output 0, zero point 8 stored as 7, scale 0.5."""

    def change(raw: Raw) -> None:
        raw[f"{Q}.qweight"][1][0, 0] = word(*range(8))
        raw[f"{Q}.scales"][1][0, 0] = 0.5

    found = values_of(write(tmp_path / "m", GPTQ, gptq(), change=change))[f"{Q}.weight"]
    assert found[0, :8].tolist() == [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5]


@pytest.mark.parametrize(("group", "kept"), [(16, 16), (32, 32), (48, 16), (64, 64)])
def test_gptq_symmetric(tmp_path: Path, group: int, kept: int) -> None:
    """The rows of down_proj have 96 columns: a group of 64 and one of 32. Groups of 48 are cut."""
    check(write(tmp_path / "m", {**GPTQ, "group_size": group}, gptq(group=group)), packed.gptq, f"int4/g{kept}")


def test_gptq_with_zero_points(tmp_path: Path) -> None:
    check(write(tmp_path / "m", {**GPTQ, "sym": True}, gptq(zeros=None)), packed.gptq, "int4z/g32")


@pytest.mark.parametrize("zeros", [0x88888888, 0x11111111, 0xFFFFFFFF])
def test_gptq_v2(tmp_path: Path, zeros: int) -> None:
    directory = write(tmp_path / "m", {**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(zeros=zeros))
    scheme = "int4/g32" if zeros == 0x88888888 else "int4z/g32"
    check(directory, lambda t, m: packed.gptq(t, m, v2=True), scheme)


def test_gptq_reordered_columns_are_exact_as_floats_only(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", GPTQ, gptq(order=True))
    with pytest.raises(UsageError, match="no 4-bit scheme holds its values exactly"):
        w4conv.quantize(directory, tmp_path / "o.w4", effort=0)
    assert not (tmp_path / "o.w4").exists()
    check(directory, packed.gptq, "f32")
    report = w4conv.quantize(directory, tmp_path / "o.w4", requantize=True, effort=0)
    assert any("rounded a second time: 7 tensors, gptq_4bit_g32_reordered as nl4/g32" in note for note in report.notes)


def test_gptq_8_bits(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", {**GPTQ, "bits": 8}, gptq(bits=8, zeros=0x7F7F7F7F))

    def decode(t: dict[str, Any], module: str) -> NDArray[np.float32]:
        q = packed.along_columns(np.ascontiguousarray(t[f"{module}.qweight"].T), 8) - 128
        return q.astype(np.float32) * packed.grouped(t[f"{module}.scales"].T, q.shape[1])

    check(directory, decode, "int8/g32")


def test_gptq_zero_15_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", GPTQ, gptq(zeros=0x7777777F))
    with pytest.raises(InputError, match=r"qzeros holds 15, which some programs read"):
        open_source(directory)


@pytest.mark.parametrize(("zero15", "scheme"), [(0, "int4z/g32"), (16, "f32")])
def test_gptq_zero_15_by_choice(tmp_path: Path, zero15: int, scheme: str) -> None:
    """The first output of eight has a stored 15; 16 is no zero point of int4z, so the values come as float32."""
    directory = write(tmp_path / "m", GPTQ, gptq(zeros=0x7777777F))
    w4conv.quantize(directory, tmp_path / "m.w4", scheme="keep", gptq_zero15=zero15, effort=0)
    raw, found = packed.load(directory), values(tmp_path / "m.w4")
    for name in [name for name in found if "_proj" in name]:
        module = name.removesuffix(".weight")
        assert str(schemes(tmp_path / "m.w4")[name]) == scheme
        q = packed.along_columns(np.ascontiguousarray(raw[f"{module}.qweight"].T))
        zeros = np.where(np.arange(len(q)) % 8 == 0, zero15, 8)[:, None]
        assert same(found[name], (q - zeros).astype(np.float32) * packed.grouped(raw[f"{module}.scales"].T, q.shape[1]))
    assert w4conv.verify(tmp_path / "m.w4", against=directory).ok, "the container says how it was read"


def test_gptq_zero_15_is_for_gptq(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", AWQ, awq(zeros=None))
    with pytest.raises(UsageError, match="gptq-zero15 says how GPTQ checkpoints are read"):
        w4conv.quantize(directory, tmp_path / "o.w4", gptq_zero15=0, effort=0)
    with pytest.raises(UsageError, match="gptq-zero15 is 8, expected 16 or 0"):
        w4conv.quantize(directory, tmp_path / "o.w4", gptq_zero15=8, effort=0)


def test_auto_round(tmp_path: Path) -> None:
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
    check(write(tmp_path / "m", settings, gptq()), packed.gptq, "int4/g32")


def awq(*, zeros: int | None) -> Any:
    def encode(module: str, array: NDArray[np.float32], seed: int) -> Raw:
        rng, (n_rows, n_columns) = RNG(seed), array.shape
        stored = words(rng, n_columns // 32, n_rows // 8)
        if zeros is not None:
            stored[:] = np.uint32(zeros).view(np.int32)
        return {
            f"{module}.qweight": ("I32", words(rng, n_columns, n_rows // 8)),
            f"{module}.qzeros": ("I32", stored),
            f"{module}.scales": ("F16", rng.standard_normal((n_columns // 32, n_rows)).astype(np.float16)),
        }

    return encode


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(("zeros", "scheme"), [(None, "int4z/g32"), (0x88888888, "int4/g32")])
def test_awq(tmp_path: Path, zeros: int | None, scheme: str) -> None:
    check(write(tmp_path / "m", AWQ, awq(zeros=zeros)), packed.awq, scheme)


def test_awq_by_hand(tmp_path: Path) -> None:
    """The word 0x75316420 holds outputs 0 to 7 in order."""

    def change(raw: Raw) -> None:
        raw[f"{Q}.qweight"][1][0, 0] = 0x75316420
        raw[f"{Q}.scales"][1][0, :8] = 1

    found = values_of(write(tmp_path / "m", AWQ, awq(zeros=0x88888888), change=change))[f"{Q}.weight"]
    assert found[:8, 0].tolist() == [q - 8 for q in range(8)]


def compressed(*, zeros: bool = False, dtype: str = "BF16", groups: int | None = None) -> Any:
    def encode(module: str, array: NDArray[np.float32], seed: int) -> Raw:
        rng, (n_rows, n_columns) = RNG(seed), array.shape
        n_groups = groups or n_columns // 32
        scales = rng.standard_normal((n_rows, n_groups)).astype(np.float32)
        stored = scales.astype(np.float16) if dtype == "F16" else scales
        if dtype == "BF16":
            stored = (scales.view(np.uint32) >> 16).astype(np.uint16)
        out: Raw = {
            f"{module}.weight_packed": ("I32", words(rng, n_rows, n_columns // 8)),
            f"{module}.weight_scale": (dtype, stored),
            f"{module}.weight_shape": ("I64", np.array([n_rows, n_columns])),
        }
        if zeros:
            out[f"{module}.weight_zero_point"] = "I32", words(rng, n_rows // 8, n_groups)
        return out

    return encode


CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}


def decode_compressed(t: dict[str, Any], module: str) -> NDArray[np.float32]:
    scale = t[f"{module}.weight_scale"]
    if scale.dtype == np.uint16:
        t = {**t, f"{module}.weight_scale": (scale.astype(np.uint32) << 16).view(np.float32)}
    return packed.compressed(t, module)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("zeros", [False, True])
def test_compressed_tensors(tmp_path: Path, dtype: str, zeros: bool) -> None:
    directory = write(tmp_path / "m", CT, compressed(zeros=zeros, dtype=dtype))
    check(directory, decode_compressed, "int4z/g32" if zeros else "int4/g32")
    found = schemes(tmp_path / "m.w4")[f"{Q}.weight"].scale_dtype
    assert found == ("f32" if dtype == "F32" else "f16"), "BF16 scales of common size are FP16 numbers"


def test_compressed_tensors_by_channel(tmp_path: Path) -> None:
    check(write(tmp_path / "m", CT, compressed(groups=1, dtype="F16")), decode_compressed, "int4/row")


def mlx(*, whole: bool) -> Any:
    def encode(module: str, array: NDArray[np.float32], seed: int) -> Raw:
        rng, (n_rows, n_columns) = RNG(seed), array.shape
        scales = rng.standard_normal((n_rows, n_columns // 32)).astype(np.float16)
        return {
            f"{module}.weight": ("U32", words(rng, n_rows, n_columns // 8).view(np.uint32)),
            f"{module}.scales": ("F16", scales),
            f"{module}.biases": ("F16", -8 * scales if whole else rng.standard_normal(scales.shape).astype(np.float16)),
        }

    return encode


@pytest.mark.parametrize(("whole", "scheme"), [(True, "int4/g32"), (False, "int4o/g32")])
def test_mlx(tmp_path: Path, whole: bool, scheme: str) -> None:
    directory = write(tmp_path / "m", {"group_size": 32, "bits": 4}, mlx(whole=whole), key="quantization")
    check(directory, packed.mlx, scheme)


def test_fp8(tmp_path: Path) -> None:
    def encode(module: str, array: NDArray[np.float32], seed: int) -> Raw:
        rng, (n_rows, n_columns) = RNG(seed), array.shape
        codes = rng.integers(0, 256, array.shape).astype(np.uint8)
        codes[(codes & 127) == 127] = 0
        blocks = -(-n_rows // 48), -(-n_columns // 40)
        return {
            f"{module}.weight": ("F8_E4M3", codes),
            f"{module}.weight_scale_inv": ("F32", rng.standard_normal(blocks).astype(np.float32)),
        }

    def decode(t: dict[str, Any], module: str) -> NDArray[np.float32]:
        codes, scales = t[f"{module}.weight"], t[f"{module}.weight_scale_inv"]
        spread = np.repeat(np.repeat(scales, 48, axis=0), 40, axis=1)[: codes.shape[0], : codes.shape[1]]
        return E4M3[codes] * spread

    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40]}
    directory = write(tmp_path / "m", settings, encode)
    check(directory, decode, "f32")
    with pytest.raises(UsageError, match="F8_E4M3"):
        w4conv.quantize(directory, tmp_path / "o.w4", effort=0)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_scales_of_activations_are_left_out(tmp_path: Path, method: str) -> None:
    def encode(module: str, array: NDArray[np.float32], seed: int) -> Raw:
        ending, shape = ("weight_scale_inv", (1, 1)) if method == "fp8" else ("weight_scale", (1,))
        return {
            f"{module}.weight": ("F8_E4M3", RNG(seed).integers(0, 127, array.shape).astype(np.uint8)),
            f"{module}.{ending}": ("F32", np.full(shape, 0.5, np.float32)),
            f"{module}.input_scale": ("F32", np.ones(1, np.float32)),
        }

    settings = {"quant_method": method, "weight_block_size": [128, 128], "format": "float-quantized"}
    directory = write(tmp_path / "m", settings, encode)
    with open_source(directory) as source:
        raw = packed.load(directory)
        assert same(source.read(f"{Q}.weight"), E4M3[raw[f"{Q}.weight"]] * np.float32(0.5))
        assert any("activations are not rounded to 8 bits here" in note for note in source.notes)
        assert any("input_scale and 3 more" in note for note in source.notes)


def test_e4m3_values() -> None:
    known = {0x00: 0.0, 0x01: 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x40: 2.0, 0x7E: 448.0, 0xB8: -1.0, 0xFE: -448.0}
    assert {code: float(E4M3[code]) for code in known} == known
    assert np.isnan(E4M3[[0x7F, 0xFF]]).all()
    assert np.isfinite(E4M3).sum() == 254


def bnb(kind: str, *, nested: bool, block: int = 64) -> Any:
    def encode(module: str, array: NDArray[np.float32], seed: int) -> Raw:
        from w4conv import codes as definitions

        rng = RNG(seed)
        name, n_blocks = f"{module}.weight", -(-array.size // block)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": list(array.shape)}
        out: Raw = {
            name: ("U8", rng.integers(0, 256, (array.size // 2, 1)).astype(np.uint8)),
            f"{name}.quant_map": ("F32", definitions.CODEBOOKS[kind]),
            f"{name}.absmax": ("F32", rng.random(n_blocks).astype(np.float32)),
        }
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0421875}
            out[f"{name}.absmax"] = "U8", rng.integers(0, 256, n_blocks).astype(np.uint8)
            out[f"{name}.nested_absmax"] = "F32", rng.random(-(-n_blocks // 256)).astype(np.float32)
            out[f"{name}.nested_quant_map"] = "F32", np.linspace(-1, 1, 256, dtype=np.float32)
        data = np.frombuffer(json.dumps(state).encode(), np.uint8)
        out[f"{name}.quant_state.bitsandbytes__{kind}"] = "U8", data
        return out

    return encode


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("nested", "block"), [(False, 64), (True, 64), (False, 32), (True, 512)])
def test_bitsandbytes(tmp_path: Path, kind: str, nested: bool, block: int) -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    directory = write(tmp_path / "m", settings, bnb(kind, nested=nested, block=block))
    raw, found = packed.load(directory), values_of(directory)
    for name in linears(directory):
        state = json.loads(raw[f"{name}.quant_state.bitsandbytes__{kind}"].tobytes())
        flat = []
        for i, byte in enumerate(raw[name].reshape(-1)[:200].tolist()):
            for j, code in enumerate((byte >> 4, byte & 15)):  # the first in the high half
                b = (2 * i + j) // block
                scale = raw[f"{name}.absmax"][b]
                if nested:
                    scale = raw[f"{name}.nested_quant_map"][scale] * raw[f"{name}.nested_absmax"][b // 256]
                    scale = np.float32(scale + np.float32(state["nested_offset"]))
                flat.append(raw[f"{name}.quant_map"][code] * scale)
        assert np.array_equal(found[name].reshape(-1)[:400], np.array(flat, np.float32))
    w4conv.quantize(directory, tmp_path / "m.w4", effort=0)
    kept = values(tmp_path / "m.w4")
    assert all(same(kept[name], found[name]) for name in found)
    assert {schemes(tmp_path / "m.w4")[name].kind for name in linears(directory)} == {kind}
    assert w4conv.verify(tmp_path / "m.w4", against=directory).ok
    w4conv.quantize(directory, tmp_path / "f.w4", scheme="f32", effort=0)
    # Levels of nf4 in products are within 2^-12 of the exact ones (docs/numerics.md 2); those of fp4 are exact.
    tolerance = {"nf4": 5e-3, "fp4": 1e-3}[kind]
    with w4conv.Model(tmp_path / "m.w4") as coded, w4conv.Model(tmp_path / "f.w4") as plain:
        np.testing.assert_allclose(coded.logits([1, 2, 3]), plain.logits([1, 2, 3]), rtol=1e-3, atol=tolerance)


EXPERTS = "model.layers.0.mlp.experts"


def mxfp4(*, blocks: tuple[int, ...] = (2, 4, 2, 16), scale: int = 127) -> Raw:
    return {
        f"{EXPERTS}.down_proj_blocks": ("U8", np.arange(np.prod(blocks), dtype=np.uint8).reshape(blocks)),
        f"{EXPERTS}.down_proj_scales": ("U8", np.full(blocks[:3], scale, np.uint8)),
    }


def test_mxfp4_by_hand(tmp_path: Path) -> None:
    """Expert 1, row 3: bytes 0xE0, 0xE1, .. hold the codes 0, 14, 1, 14, 2, 14, ..."""

    def change(raw: Raw) -> None:
        raw.clear()
        raw.update(mxfp4(scale=128))

    directory = write(tmp_path / "m", {"quant_method": "mxfp4"}, lambda *_: {}, change=change)
    found = values_of(directory)[f"{EXPERTS}.down_proj"]
    assert found.shape == (2, 4, 64)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = [2 * value for code in range(8) for value in (e2m1[code], -4)]
    assert found[1, 3, :16].tolist() == expected
    with open_source(directory) as source:
        assert str(source.tensors[f"{EXPERTS}.down_proj"].coding) == "e2m1/g32"
    report = inspect(directory)
    assert {t.scheme for t in report.tensors} == {"mxfp4"}
    assert sum(t.nbytes or 0 for t in report.tensors) == 2 * 4 * 2 * 17


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (mxfp4(scale=253), "an exponent above 252"),
        (mxfp4(blocks=(2, 4, 2, 8)), r"expected \(experts, out, groups, 16\)"),
        ({n: a for n, a in mxfp4().items() if "_scales" not in n}, "down_proj_scales is missing"),
    ],
)
def test_faults_of_mxfp4(tmp_path: Path, raw: Raw, message: str) -> None:
    directory = write(tmp_path / "m", {"quant_method": "mxfp4"}, lambda *_: {}, change=lambda old: old.update(raw))
    with pytest.raises(InputError, match=message):
        open_source(directory)


def test_inspect_names_the_format(tmp_path: Path) -> None:
    found = inspect(write(tmp_path / "m", GPTQ, gptq()))
    assert found.kind == "gptq"
    linear = next(t for t in found.tensors if t.name == f"{Q}.weight")
    assert linear.scheme == "gptq_4bit_g32"
    # 64 by 64: codes, 2 groups of scales and zero points, and the group of each column
    assert linear.nbytes == 64 * 64 // 2 + 2 * 64 * 2 + 2 * 64 // 2 + 64 * 4
    assert found.bits_per_weight is not None


def test_default_scheme(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", GPTQ, gptq())
    report = w4conv.quantize(directory, tmp_path / "a.w4", effort=0)
    assert (report.scheme, report.method) == ("keep", "keep")
    assert not report.notes
    again = w4conv.quantize(directory, tmp_path / "b.w4", scheme="w4a16", effort=0)
    assert any("rounded a second time: 7 tensors, gptq_4bit_g32 as int4/g128" in note for note in again.notes)
    assert w4conv.quantize(directory, tmp_path / "c.w4", group_size=64, effort=0).scheme == "nl4", (
        "an option that rounds"
    )
    plain = converted(tmp_path / "p")
    assert w4conv.quantize(tmp_path / "p/in", plain, overwrite=True, effort=0).scheme == "nl4"
    with w4conv.Model(tmp_path / "a.w4") as model:
        assert np.isfinite(model.logits([1, 2, 3])).all()


def drop(name: str) -> Callable[[Raw], object]:
    return lambda raw: raw.pop(name)


def put(name: str, dtype: str, array: NDArray[Any]) -> Callable[[Raw], object]:
    return lambda raw: raw.update({name: (dtype, array)})


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"quant_method": "qqq"}, None, "quant_method 'qqq' is not supported"),
        ({}, None, "no quant_method"),
        ({"bits": 4}, None, "no quant_method"),
        ({**GPTQ, "bits": 3}, None, "3 bits is not supported"),
        ({**GPTQ, "bits": "4"}, None, "bits is '4', expected an integer"),
        ({**GPTQ, "group_size": 10**9}, None, "group_size"),
        ({**GPTQ, "checkpoint_format": "marlin"}, None, "'marlin' is not supported"),
        (GPTQ, drop(f"{Q}.scales"), "q_proj.scales is missing"),
        (GPTQ, drop(f"{Q}.qzeros"), "q_proj.qzeros is missing"),
        (GPTQ, drop(f"{Q}.qweight"), "belongs to a quantized checkpoint"),
        (GPTQ, put(f"{Q}.scales", "F16", np.zeros((3, 64), np.float16)), "q_proj.scales has shape"),
        (GPTQ, put(f"{Q}.g_idx", "I32", np.full(64, 2, np.int32)), "names a group outside"),
        (GPTQ, put(f"{Q}.qweight", "F32", np.zeros((8, 64), np.float32)), "is F32, expected I32"),
        (GPTQ, put(f"{Q}.weight", "F16", np.zeros((64, 64), np.float16)), "stored twice"),
        ({**GPTQ, "quant_method": "awq", "version": "gemv"}, None, "'gemv' is not supported"),
        ({**CT, "format": "nvfp4-pack-quantized"}, None, "'nvfp4-pack-quantized' is not supported"),
        ({"quant_method": "bitsandbytes"}, None, "no tensor is stored so"),
        ({"quant_method": "fp8", "weight_block_size": 128}, None, "weight_block_size"),
        ({"quant_method": "auto-round", "packing_format": "x"}, None, "packing_format 'x'"),
    ],
)
def test_faults(tmp_path: Path, settings: dict[str, Any], change: Any, message: str) -> None:
    settings = settings or {"some": "word"}
    directory = write(tmp_path / "m", settings, gptq(), change=change)
    with pytest.raises(InputError, match=message):
        open_source(directory)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    def change(raw: Raw) -> None:
        raw[f"{Q}.scales"][1][1, 5] = np.inf

    directory = write(tmp_path / "m", GPTQ, gptq(), change=change)
    with pytest.raises(InputError, match=r"q_proj\.weight: the scale of group 1 of row 5 is NaN or infinite"):
        w4conv.quantize(directory, tmp_path / "o.w4", effort=0)
    assert not (tmp_path / "o.w4").exists()
