"""config.json -> ModelSpec: the traps of each family, and every value that must be refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers import llama_tensors, real_configs
from hypothesis import given, settings
from hypothesis import strategies as st

from w4conv import models
from w4conv.errors import InputError
from w4conv.models import FAMILIES, RopeSpec, known_architectures, parse_config
from w4conv.models.rope import SCALINGS

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
MISTRAL = BASE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = BASE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def shapes_of(*, biases=(), tied=False, head_dim=16) -> dict[str, tuple[int, ...]]:
    tensors = llama_tensors(
        hidden=64,
        inner=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=head_dim,
        vocab=300,
        tied=tied,
        biases=biases,
        seed=0,
    )
    return {name: values.shape for name, values in tensors.items()}


def without(config: dict, *keys: str) -> dict:
    return {k: v for k, v in config.items() if k not in keys}


def test_defaults_of_a_plain_llama():
    spec = parse_config(BASE)
    assert (spec.family, spec.architecture) == ("llama", "LlamaForCausalLM")
    assert (spec.head_dim, spec.norm_eps, spec.max_positions) == (16, 1e-6, 2048)
    assert spec.rope == RopeSpec(10000.0)
    assert not any((spec.tied_head, spec.qkv_bias, spec.o_bias, spec.mlp_bias))
    assert spec.sliding_windows == ()
    assert spec.n_parameters == sum(math.prod(shape) for shape in shapes_of().values())


def test_tensor_names_are_those_of_a_checkpoint():
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for config, biases in [
        (BASE, ()),
        (BASE | {"attention_bias": True}, every[:4]),
        (BASE | {"mlp_bias": True}, every[4:]),
        (MISTRAL, ()),
        (QWEN2, every[:3]),
    ]:
        for tied in (False, True):
            spec = parse_config(config | {"tie_word_embeddings": tied})
            assert {t.name: t.shape for t in spec.tensors()} == shapes_of(biases=biases, tied=tied)


def test_explicit_head_dim():
    spec = parse_config(BASE | {"head_dim": 24})
    assert spec.head_dim == 24
    assert {t.name: t.shape for t in spec.tensors()} == shapes_of(head_dim=24)
    assert parse_config(BASE | {"head_dim": None}).head_dim == 16
    assert parse_config(BASE | {"hidden_size": 66, "head_dim": 16}).head_dim == 16
    with pytest.raises(InputError, match="num_attention_heads: 4 does not divide hidden_size 66"):
        parse_config(BASE | {"hidden_size": 66})
    with pytest.raises(InputError, match="head_dim: 17 is odd"):
        parse_config(BASE | {"head_dim": 17})
    with pytest.raises(InputError, match="head_dim: 15 is odd"):
        parse_config(BASE | {"hidden_size": 60})


@pytest.mark.parametrize(("config", "absent"), [(BASE, 4), (MISTRAL, 8), (QWEN2, 32)])
def test_key_value_heads_when_absent_or_null(config, absent):
    config = config | {"num_attention_heads": 32, "head_dim": 4}
    assert parse_config(without(config, "num_key_value_heads")).n_kv_heads == (32 if absent == 4 else absent)
    assert parse_config(config | {"num_key_value_heads": None}).n_kv_heads == 32
    with pytest.raises(InputError, match="num_key_value_heads: 5 does not divide the 32 attention heads"):
        parse_config(config | {"num_key_value_heads": 5})


def test_rope_forms():
    def rope(**keys):
        return parse_config(BASE | keys).rope

    assert rope(rope_theta=500000) == RopeSpec(500000.0)
    assert rope(rope_scaling=None, rope_theta=130000) == RopeSpec(130000.0)
    assert rope(rope_scaling={"type": "linear", "factor": 4}) == RopeSpec(10000.0, "linear", 4.0)
    expected = RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert rope(rope_theta=5e5, rope_scaling={"rope_type": "llama3"} | LLAMA3) == expected
    assert rope(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3) == expected
    assert rope(rope_theta=1.5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}) == RopeSpec(5e5)
    assert rope(rope_theta=7.0, rope_parameters={"rope_type": "default"}) == RopeSpec(7.0)
    both = {"rope_parameters": {"rope_theta": 3.0}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert rope(**both) == RopeSpec(10000.0, "linear", 2.0)
    # Both words in one object: rope_type is the newer one.
    assert rope(rope_scaling={"type": "yarn", "rope_type": "linear", "factor": 2.0}).scaling == "linear"
    short = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert rope(rope_scaling={"rope_type": "llama3"} | short, max_position_embeddings=99).original_max_positions == 99


def test_rope_scalings_for_long_contexts():
    def rope(**keys):
        return parse_config(BASE | {"max_position_embeddings": 4096, "head_dim": 16} | keys).rope

    yarn = rope(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024})
    assert (yarn.original_max_positions, yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (1024, 32, 1, True)
    assert yarn.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert rope(rope_scaling={"type": "yarn", "factor": 4.0, "attention_factor": 0.5}).magnitude == 0.5
    mscales = rope(rope_scaling={"type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 2.0})
    assert mscales.magnitude == pytest.approx((0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1))
    dynamic = parse_config(BASE | {"max_position_embeddings": 100, "rope_scaling": {"type": "dynamic", "factor": 3}})
    assert (dynamic.rope.original_max_positions, dynamic.max_positions) == (100, 300)
    assert dynamic.rope.tables(16, 110)[0].frequencies.shape == (11, 8)
    factors = {"short_factor": [1] * 6, "long_factor": [2.5] * 6}
    long = rope(
        rope_scaling={"type": "su"} | factors, partial_rotary_factor=0.75, original_max_position_embeddings=1024
    )
    assert (long.scaling, long.original_max_positions, long.rotary_dim(16)) == ("longrope", 1024, 12)
    assert long.magnitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))
    short, stretched = long.tables(16, 4096)
    assert short.frequencies[0].tolist() == pytest.approx((stretched.frequencies[0] * 2.5).tolist())


@pytest.mark.parametrize("name", ["mrope", "proportional", "3d"])
def test_other_rope_scalings_are_refused_by_name(name):
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(InputError, match=f"{key}: rope_type: '{name}' is not supported; known are default, linear"):
            parse_config(BASE | {key: {"type": name, "factor": 4.0}})


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor: is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor: expected a number above 0, got 0"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "factor: expected a number above 0, got '8'"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object"),
        ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4}}, "high_freq_factor: 4 is not"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between kinds of layers"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor: 0.2 of a head of 16 is no even number"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor: 2 of a head of 16"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor: 0.5 is below 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, "more than 67108864"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1] * 8}}, "long_factor: is missing"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1] * 7}}, "short_factor: expected 8 numbers"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1] * 7 + [0]}}, "short_factor: expected a number"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-320}}, "frequencies of this linear scaling are not finite"),
        ({"rope_theta": 0}, "rope_theta: expected a number above 0"),
        ({"rope_theta": math.inf}, "rope_theta: expected a number above 0, got inf"),
        ({"rope_theta": 10**400}, "rope_theta: expected a number above 0, got a huge integer"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; known are silu"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        ({"hidden_size": 64.0}, "hidden_size: expected an integer from 1 to 1048576, got 64.0"),
        ({"hidden_size": True}, "hidden_size: expected an integer"),
        ({"vocab_size": 0}, "vocab_size: expected an integer from 1"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: expected an integer from 1 to 1024, got a huge integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: expected"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: expected a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, got 'yes'"),
        ({"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list"),
        ({"architectures": [1]}, "architectures: expected a list"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "LlamaForCausalLM, X is not supported"),
        ({"model_type": "qwen2"}, "model_type: 'qwen2' contradicts architectures LlamaForCausalLM"),
        ({"model_type": 3}, "model_type: expected a string"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_key(keys, match):
    with pytest.raises(InputError, match=rf"config\.json: .*{match}"):
        parse_config(BASE | keys)


def test_family_by_model_type_alone():
    for config, family in ((BASE, "llama"), (MISTRAL, "mistral"), (QWEN2, "qwen2")):
        assert parse_config(without(config, "architectures")).family == family
        assert parse_config(without(config, "model_type")).family == family
    with pytest.raises(
        InputError, match="'gpt2' is not supported; known are LlamaForCausalLM, MistralForCausalLM, Mixtral"
    ):
        parse_config({"model_type": "gpt2"})
    with pytest.raises(InputError, match="'' is not supported; known are"):
        parse_config({})


def test_mistral_windows():
    assert parse_config(MISTRAL).sliding_windows == (4096, 4096)  # the class default, where the key is absent
    assert parse_config(MISTRAL | {"sliding_window": None}).sliding_windows == ()
    assert parse_config(MISTRAL | {"sliding_window": 7}).sliding_windows == (7, 7)
    full = {"layer_types": ["full_attention"] * 2}
    assert parse_config(MISTRAL | full | {"sliding_window": None}).sliding_windows == ()
    with pytest.raises(InputError, match="layer_types: a Mistral model has sliding_attention in all of its 2 layers"):
        parse_config(MISTRAL | full)


def test_qwen2_windows():
    on = QWEN2 | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert parse_config(on).sliding_windows == (0, 0, 0, 9)
    assert parse_config(on | {"max_window_layers": 0}).sliding_windows == (9, 9, 9, 9)
    assert parse_config(on | {"max_window_layers": 4}).sliding_windows == ()
    assert parse_config(on | {"use_sliding_window": False}).sliding_windows == ()
    assert parse_config(on | {"sliding_window": None}).sliding_windows == ()
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse_config(on | {"layer_types": kinds}).sliding_windows == (9, 0, 9, 0)
    for keys, match in [
        ({"use_sliding_window": False}, "no sliding window is switched on"),
        ({"layer_types": kinds[:3]}, "expected a list of 4 words"),
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' is neither"),
        ({"use_mrope": True}, "use_mrope"),
    ]:
        with pytest.raises(InputError, match=match):
            parse_config(on | {"layer_types": kinds} | keys)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**500)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*LLAMA3, "long_factor", "beta_fast", "mscale"]), inner, max_size=3),
        st.dictionaries(st.just("rope_type"), st.sampled_from(SCALINGS)),
    ),
    max_leaves=4,
)
keys = st.sampled_from(
    [*BASE, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "hidden_act",
     "tie_word_embeddings", "attention_bias", "use_sliding_window", "max_window_layers", "rms_norm_eps",
     "max_position_embeddings", "partial_rotary_factor", "original_max_position_embeddings", "no_rope_layers",
     "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers",
     "attn_logit_softcapping", "query_pre_attn_scalar", "hidden_activation", "logits_scaling", "dtype",
     "sliding_window_pattern", "text_config", "swiglu_limit", "no_rope_layer_interval"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([BASE | {"architectures": [name], "model_type": None} for name in known_architectures()]),
    st.dictionaries(keys, json_values, max_size=3),
)
def test_any_config_gives_a_spec_or_an_input_error(config, changes):
    try:
        spec = parse_config(config | changes)
    except InputError:
        return
    assert spec.n_heads % spec.n_kv_heads == 0
    assert spec.head_dim % 2 == 0
    assert all(math.isfinite(f) for f in spec.rope.inverse_frequencies(spec.head_dim))
    assert spec.n_parameters > 0


@pytest.mark.parametrize(
    ("model", "n_parameters"),  # as transformers counts them on the meta device
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.2-1B-Instruct", 1_235_814_400),
        ("Llama-3.2-3B", 3_212_749_824),
        ("Meta-Llama-3-8B-Instruct", 8_030_261_248),
        ("Mistral-7B-v0.1", 7_241_732_096),
        ("Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen2.5-7B", 7_615_616_512),
        ("SmolLM2-1.7B-Instruct", 1_711_376_384),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("SmolLM3-3B", 3_075_098_624),
        ("gemma-2-9b-it", 9_241_705_984),
        ("gemma-3-270m", 268_098_176),
        ("Phi-3-mini-4k-slerp", 3_821_079_552),
    ],
)
def test_parameters_of_real_models(model, n_parameters):
    spec = parse_config(real_configs()[model])
    assert spec.n_parameters == n_parameters


def test_every_file_of_a_family_is_known():
    files = {p.stem for p in Path(models.__file__).parent.glob("*.py") if "ARCHITECTURES: Final" in p.read_text()}
    assert {family.__name__.rpartition(".")[2] for family in FAMILIES} == files
