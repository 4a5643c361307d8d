"""GGUF files: tensors, row order, dequantization, config, parts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from exports import same, schemes, values
from gguf.quants import dequantize, quantize
from helpers import as_dtype, bf16_bits, llama_tensors, make_llama_gguf

import w4conv
from w4conv import codes
from w4conv.errors import InputError
from w4conv.models import parse_config
from w4conv.scheme import QuantScheme
from w4conv.sources import gguf_blocks, open_source
from w4conv.sources.gguf_blocks import coded, coding_of
from w4conv.sources.gguf_header import TYPES
from w4conv.sources.gguf_tensors import DEQUANTIZABLE

SHAPE = {"hidden": 64, "inner": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 300}
QKV = ("q_proj", "k_proj", "v_proj")
EVERY = (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
Q = gguf.GGMLQuantizationType


def weights(*, biases=(), **shape) -> dict[str, np.ndarray]:
    return llama_tensors(**SHAPE | {"tied": False, "seed": 0} | shape, biases=biases)


def config_of(path: Path) -> dict:
    with open_source(path) as source:
        return json.loads(source.blobs["config.json"])


@pytest.mark.parametrize("qtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("arch", "biases"), [("llama", EVERY), ("llama", ()), ("qwen2", QKV)])
def test_float_tensors_come_back_exactly(tmp_path, qtype, arch, biases):
    with open_source(make_llama_gguf(tmp_path / "m.gguf", qtype=qtype, arch=arch, biases=biases)) as source:
        expected = weights(biases=biases)
        assert source.kind == "gguf"
        assert source.files == (tmp_path / "m.gguf",)
        assert set(source.tensors) == set(expected)
        for name, values in expected.items():
            dtype = qtype if values.ndim > 1 else "F32"
            tensor, values = source.tensors[name], as_dtype(values, dtype)
            assert (tensor.shape, tensor.dtype, tensor.stored_as) == (values.shape, dtype, dtype)
            got = source.read(name)
            assert got.dtype == values.dtype
            np.testing.assert_array_equal(got, values)
        assert source.notes == ("Rebuilt from GGUF metadata: config.json and tokenizer.json.",)


@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_quantized_tensors_are_the_package_s_values_in_checkpoint_order(tmp_path, qtype, arch):
    with open_source(make_llama_gguf(tmp_path / "m.gguf", qtype=qtype, arch=arch, biases=QKV)) as source:
        for name, values in weights(biases=QKV).items():
            if values.ndim > 1:  # rows are quantized each by itself, so their order does not matter to the values
                values = dequantize(quantize(values, Q[qtype]), Q[qtype])
                assert source.tensors[name].stored_as == qtype
            assert source.tensors[name].dtype == "F32"
            got = source.read(name)
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, values)
        lost = "what that quantization lost is not restored."
        assert source.notes[1] == f"Quantized already, as {qtype} (16 tensors): {lost}"


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("qtype", ["F16", "Q8_0"])
def test_row_slices_cross_heads(tmp_path, qtype, head_dim):
    path = make_llama_gguf(tmp_path / "m.gguf", qtype=qtype, head_dim=head_dim, biases=("q_proj",))
    with open_source(path) as source:
        for name in (
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.q_proj.bias",
            "mlp.up_proj.weight",
        ):
            name = f"model.layers.1.{name}"
            whole = source.read(name)
            for rows in (slice(0, 16), slice(16, 40), slice(7, 8), slice(5, 5), slice(20, 999), slice(-3, None)):
                np.testing.assert_array_equal(source.read(name, rows), whole[rows])


def test_type_table_is_the_format_s():
    computing_only = {"Q8_1", "Q8_K"}
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if kind.name not in computing_only:
            assert TYPES[kind.value] == (kind.name, *sizes)


@pytest.mark.parametrize("qtype", sorted(DEQUANTIZABLE))
def test_every_quantized_type(tmp_path, qtype):
    """Random blocks, wider than the model's own rows so that every block size fits."""
    if qtype not in Q.__members__:
        pytest.skip(f"the installed gguf package does not know {qtype}")
    kind = Q[qtype]
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (32, 256 // block * nbytes), dtype=np.uint8)

    def add(writer):
        writer.add_tensor("blk.2.attn_q.weight", rows, raw_dtype=kind)
        writer.add_tensor("blk.2.attn_v.weight", rows, raw_dtype=kind)

    with np.errstate(all="ignore"):
        expected = dequantize(rows, kind)
    with open_source(make_llama_gguf(tmp_path / "m.gguf", edit=add)) as source:
        got = source.read("model.layers.2.self_attn.v_proj.weight")
        np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
        got = source.read("model.layers.2.self_attn.q_proj.weight")  # 4 heads of 8 rows: 0 2 4 6 1 3 5 7
        order = [8 * h + i for h in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
        np.testing.assert_array_equal(got.view(np.uint32), expected[order].view(np.uint32))
        got = source.read("model.layers.2.self_attn.q_proj.weight", slice(6, 11))
        np.testing.assert_array_equal(got.view(np.uint32), expected[order[6:11]].view(np.uint32))


def test_types_that_cannot_be_dequantized(tmp_path):
    def add(writer):
        writer.add_tensor("blk.0.ssm_in.weight", np.zeros((4, 64), np.int32))

    with pytest.raises(InputError, match=r"blk\.0\.ssm_in\.weight: a llama model has no such tensor"):
        open_source(make_llama_gguf(tmp_path / "a.gguf", edit=add))

    def integers(writer):
        writer.add_tensor("blk.9.ffn_up.weight", np.zeros((4, 64), np.int32))

    with pytest.raises(InputError, match=r"blk\.9\.ffn_up\.weight: its type I32 cannot be dequantized"):
        open_source(make_llama_gguf(tmp_path / "b.gguf", edit=integers))


def test_config_of_a_llama(tmp_path):
    config = config_of(make_llama_gguf(tmp_path / "m.gguf"))
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"tied": True}, {"tie_word_embeddings": True}),
        ({"qtype": "BF16"}, {"torch_dtype": "bfloat16"}),
        ({"qtype": "F32"}, {"torch_dtype": "float32"}),
        ({"head_dim": 24}, {"head_dim": 24}),
        ({"biases": EVERY}, {"attention_bias": True, "mlp_bias": True}),
        ({"biases": EVERY[:4]}, {"attention_bias": True, "mlp_bias": False}),
        ({"arch": "qwen2", "biases": QKV}, {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}),
        ({"edit": lambda w: w.add_sliding_window(32)}, {"model_type": "mistral", "sliding_window": 32}),
        ({"edit": lambda w: w.add_eot_token_id(3)}, {"eos_token_id": 257}),
    ],
)
def test_config_follows_the_file_and_fits_the_tensors(tmp_path, options, keys):
    path = make_llama_gguf(tmp_path / "m.gguf", **options)
    config = config_of(path)
    assert {key: config[key] for key in keys} == keys
    with open_source(path) as source:
        assert {t.name: t.shape for t in parse_config(config).tensors()} == {
            name: tensor.shape for name, tensor in source.tensors.items()
        }


def test_generation_config(tmp_path):
    def edit(writer):
        writer.add_eot_token_id(3)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 257)

    with open_source(make_llama_gguf(tmp_path / "m.gguf", edit=edit)) as source:
        assert json.loads(source.blobs["generation_config.json"]) == {"eos_token_id": [257, 3], "bos_token_id": 256}


def llama3_factors(theta, head_dim, factor, context) -> np.ndarray:
    """As the published converter computes them, in float32."""
    freqs = np.float32(1) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    out = []
    for freq in freqs:
        wavelength = 2 * np.pi / float(freq)
        if wavelength < context / 4:
            out.append(1.0)
        elif wavelength > context:
            out.append(factor)
        else:
            smooth = (context / wavelength - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0, 3.5])
@pytest.mark.parametrize("context", [8192, 16384])
def test_llama3_scaling_is_recovered(tmp_path, factor, context):
    def edit(writer):
        writer.add_tensor("rope_freqs.weight", llama3_factors(10000.0, 64, factor, context))

    config = config_of(make_llama_gguf(tmp_path / "m.gguf", head_dim=64, edit=edit))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }
    rope = parse_config(config).rope
    plain = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(
        rope.inverse_frequencies(64), plain / llama3_factors(10000.0, 64, factor, context), rtol=1e-5
    )


def test_rope_factors_that_are_not_llama3(tmp_path):
    good = llama3_factors(10000.0, 64, 8.0, 8192)

    def with_factors(factors):
        return make_llama_gguf(
            tmp_path / "m.gguf", head_dim=64, edit=lambda w: w.add_tensor("rope_freqs.weight", factors)
        )

    assert config_of(with_factors(np.ones(32, np.float32)))["rope_scaling"] is None
    bent = good.copy()
    bent[20] *= np.float32(1.01)
    for factors, match in [
        (bent, "not those of a known llama3 rope scaling"),
        (good[:-1].copy(), "expected 32 finite factors, got 31"),
        (np.full(32, np.nan, np.float32), "expected 32 finite factors"),
        (good.reshape(2, 16), "expected one row of F32"),
    ]:
        with pytest.raises(InputError, match=f"rope_freqs.weight: .*{match}"):
            open_source(with_factors(factors))


def test_rope_scaling_keys(tmp_path):
    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def older(writer):
        writer.add_float32("llama.rope.scale_linear", 2.0)

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    def long(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    def other(writer):
        writer.add_string("llama.rope.scaling.type", "mrope")

    def half(writer):
        writer.add_rope_dimension_count(8)

    path = tmp_path / "m.gguf"
    assert config_of(make_llama_gguf(path, edit=linear))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config_of(make_llama_gguf(path, edit=older))["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config_of(make_llama_gguf(path, edit=yarn))["rope_scaling"] == expected
    assert config_of(make_llama_gguf(path, edit=half))["partial_rotary_factor"] == 0.5
    for edit, match in [
        (other, r"llama\.rope\.scaling\.type: 'mrope' is not supported; known are none, linear"),
        (long, r"llama\.rope\.scaling\.type: longrope without rope_factors_short.weight and rope_factors_long.weight"),
    ]:
        with pytest.raises(InputError, match=match):
            open_source(make_llama_gguf(path, edit=edit))


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda w: w.add_expert_count(8), r"llama\.expert_used_count: is missing"),
        (lambda w: w.add_rope_dimension_count(32), r"llama\.rope\.dimension_count: 32 is not between 1 and the head"),
        (
            lambda w: w.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((4, 64), np.float32)),
            r"blk\.0\.ffn_up_exps\.weight: shape \(4, 64\), expected a matrix for each expert",
        ),
        (lambda w: w.add_value_length(8), r"llama\.attention\.value_length: 8 differs from the head size 16"),
        (lambda w: w.add_type("adapter"), r"general\.type: 'adapter' is not a model; merge it into its base model"),
        (lambda w: w.add_type("mmproj"), r"general\.type: 'mmproj' is not a model$"),
        (lambda w: w.add_tensor("output.bias", np.zeros(300, np.float32)), r"output\.bias: a llama model has no such"),
        (
            lambda w: w.add_tensor("blk.01.ffn_up.weight", np.zeros(4, np.float32)),
            "blk.01.ffn_up.weight: a llama model",
        ),
        (
            lambda w: w.add_tensor("blk.5.attn_q.weight", np.zeros((4, 8), np.float32)),
            "4 rows are not 4 heads of an even",
        ),
    ],
)
def test_models_that_are_refused(tmp_path, edit, match):
    with pytest.raises(InputError, match=match):
        open_source(make_llama_gguf(tmp_path / "m.gguf", edit=edit))


def test_other_architectures_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"general\.architecture: 'gpt2' is not supported; known are llama, qwen2"):
        open_source(make_llama_gguf(tmp_path / "m.gguf", arch="gpt2"))


def test_a_file_without_tensors(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match="holds no tensors, only metadata"):
        open_source(tmp_path / "m.gguf")


def test_recognised_without_its_suffix_and_through_a_link(tmp_path):
    path = make_llama_gguf(tmp_path / "blob")
    (tmp_path / "link.gguf").symlink_to("blob")
    for name in ("blob", "link.gguf"):
        with open_source(tmp_path / name) as source:
            assert source.kind == "gguf"
            assert source.files == (tmp_path / name,)
    (tmp_path / "other.gguf").write_bytes(b"not a model")
    with pytest.raises(InputError, match="starts with b'not ', not with GGUF"):
        open_source(tmp_path / "other.gguf")
    assert path.exists()


def test_truncated_while_open(tmp_path):
    path = make_llama_gguf(tmp_path / "m.gguf")
    with open_source(path) as source:
        kept = source.read("model.norm.weight").copy()
        os.truncate(path, 4096)
        with pytest.raises(InputError, match=r"shrank from .* to 4096 bytes"):
            source.read("model.norm.weight")
    assert kept.shape == (64,)


def split_in_two(directory: Path, *, count: int = 2, no=(0, 1), total: int | None = None, same: bool = False) -> Path:
    """Two parts: the second holds the head (or, with `same`, what the first holds too)."""
    values = weights()

    def edit(i):
        def add(writer):
            writer.add_uint16("split.no", no[i])
            writer.add_uint16("split.count", count)
            writer.add_int32("split.tensors.count", total or len(values))

        return add

    first = directory / "m-00001-of-00002.gguf"
    make_llama_gguf(first, tied=True, edit=edit(0))
    writer = gguf.GGUFWriter(directory / "m-00002-of-00002.gguf", "llama")
    edit(1)(writer)
    name = "output_norm.weight" if same else "output.weight"
    writer.add_tensor(name, values["lm_head.weight"].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return first


def test_split_models(tmp_path):
    first = split_in_two(tmp_path)
    with open_source(first) as source:
        assert [f.name for f in source.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
        for name, values in weights(tied=True).items():
            dtype = "F16" if values.ndim > 1 else "F32"
            np.testing.assert_array_equal(source.read(name), as_dtype(values, dtype))
        assert source.tensors["lm_head.weight"].shape == (300, 64)
        assert json.loads(source.blobs["config.json"])["tie_word_embeddings"] is False
    with pytest.raises(InputError, match=r"one part of a split model; name the first one, m-00001-of-00002.gguf"):
        open_source(tmp_path / "m-00002-of-00002.gguf")
    split_in_two(tmp_path, no=(0, 0))
    with pytest.raises(InputError, match="expected part 1 of 2: the parts do not belong together"):
        open_source(first)
    split_in_two(tmp_path, total=99)
    with pytest.raises(InputError, match="the parts hold 21 tensors: they do not belong together"):
        open_source(first)
    split_in_two(tmp_path, same=True)
    with pytest.raises(InputError, match=r"output_norm.weight is in two parts"):
        open_source(first)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(InputError, match=r"1 of 2 parts are missing, the first is m-00002-of-00002.gguf; fetch them"):
        open_source(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(InputError, match="2 parts, but the file is not named like"):
        open_source(tmp_path / "renamed.gguf")


def test_bf16_helper_rounds_to_even():
    assert [hex(b) for b in bf16_bits(np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8]))] == ["0x3f80", "0x3f80", "0x3f82"]


@pytest.mark.parametrize(("arch", "biases"), [("llama", ()), ("qwen2", QKV)])
@pytest.mark.parametrize(
    ("qtype", "scheme"), [("Q4_0", "int4/g32"), ("Q8_0", "int8/g32"), ("MXFP4", "e2m1/g32"), ("Q4_1", "int4o/g32")]
)
def test_blocks_are_kept_as_codes(tmp_path, qtype, scheme, arch, biases):
    path = make_llama_gguf(tmp_path / "m.gguf", qtype=qtype, arch=arch, biases=biases)
    w4conv.quantize(path, tmp_path / "m.w4", scheme="keep", effort=0)
    expected, found = weights(biases=biases), values(tmp_path / "m.w4")
    for name, array in expected.items():
        if array.ndim > 1:
            assert str(schemes(tmp_path / "m.w4")[name]) == scheme
            assert same(found[name], dequantize(quantize(array, Q[qtype]), Q[qtype])), name
    assert w4conv.verify(tmp_path / "m.w4", against=path).ok


def test_mxfp4_codes():
    """Every code and exponent that FP16 holds, and a block of zeros under any exponent."""
    numbers = np.arange(16, dtype=np.uint8)
    blocks = np.stack([np.concatenate([[e], numbers | numbers[::-1] << 4]) for e in range(103, 143)]).astype(np.uint8)
    zeros = np.full((1, 17), 0x80, np.uint8)
    zeros[0, 0] = 3
    raw = np.concatenate([blocks, zeros])
    coding = QuantScheme("e2m1", 32, "f16")
    found = coded(raw, "MXFP4", coding, "there")
    values = codes.CODEBOOKS["e2m1"][found.codes] * found.scales.astype(np.float32)
    assert same(values, dequantize(raw, Q.MXFP4))
    raw[0, 0] = 102
    with pytest.raises(InputError, match="there: a scale lies beyond FP16"):
        coded(raw, "MXFP4", coding, "there")


def q4_1(offset: int, *, n: int = 6) -> np.ndarray:
    """Blocks of random codes and scales, the offset so many scales below zero."""
    rng = np.random.default_rng(offset)
    scales = (rng.integers(1, 64, (n, 1)) / 1024).astype("<f2")
    nibbles = rng.integers(0, 256, (n, 16)).astype(np.uint8)
    return np.concatenate([scales.view(np.uint8), (-offset * scales).astype("<f2").view(np.uint8), nibbles], axis=1)


@pytest.mark.parametrize(("offsets", "scheme"), [((8, 8), "int4/g32"), ((0, 15), "int4z/g32"), ((3, 8), "int4z/g32")])
def test_q4_1_with_whole_offsets_is_kept(offsets, scheme):
    raw = np.stack([q4_1(offset).reshape(-1) for offset in offsets])  # 2 rows of 6 blocks
    coding = coding_of("Q4_1", 2, raw.shape[1], lambda start, stop: raw[start:stop].reshape(-1))
    assert str(coding) == scheme
    found = coded(raw, "Q4_1", coding, "there")
    zeros = 8 if found.zero_points is None else np.repeat(found.zero_points.astype(np.float32), 32, axis=1)
    values = (found.codes.astype(np.float32) - zeros) * np.repeat(found.scales.astype(np.float32), 32, axis=1)
    assert same(values, dequantize(raw, Q.Q4_1))


def test_q4_1_with_other_offsets_keeps_them(monkeypatch):
    monkeypatch.setattr(gguf_blocks, "CHECKED_AT_ONCE", 1)  # a row at a time
    raw = np.stack([q4_1(8).reshape(-1)] * 3)
    raw[1, 22] ^= 1  # the last bit of an offset
    read = []

    def rows(start, stop):
        read.append(start)
        return raw[start:stop].reshape(-1)

    coding = coding_of("Q4_1", 3, raw.shape[1], rows)
    assert str(coding) == "int4o/g32"
    assert read == [0, 1], "no further than the first that does not fit"
    assert str(coding_of("Q4_1", 1, raw.shape[1], lambda a, b: q4_1(16))) == "int4o/g32", "no such zero point"
    found = coded(raw, "Q4_1", coding, "there")
    scales, offsets = (np.repeat(a.astype(np.float32), 32, axis=1) for a in (found.scales, found.offsets))
    assert same(found.codes * scales + offsets, dequantize(raw, Q.Q4_1))
