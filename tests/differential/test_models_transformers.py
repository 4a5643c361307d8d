"""ModelSpec against transformers: parameter counts, tensor names, rotary frequencies."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers import real_configs

from w4conv.models import parse_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def meta_model(config: dict):
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made)


def shapes(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}  # a tied head is listed once, as embedding


def test_real_models_have_the_same_parameters():
    configs = real_configs()
    assert len(configs) >= 17
    for name, config in configs.items():
        spec = parse_config(config)
        expected = shapes(meta_model(config))
        if spec.experts is None:  # those of experts are stacked in memory, and not so in files
            assert {t.name: t.shape for t in spec.tensors()} == expected, name
        assert spec.n_parameters == sum(int(np.prod(shape)) for shape in expected.values())


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 300,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "head_dim": 24},
        {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
        {"model_type": "llama", "mlp_bias": True, "num_key_value_heads": 2},
        {"model_type": "mistral"},
        {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None},
        {"model_type": "qwen2", "num_attention_heads": 32},
        {"model_type": "qwen2", "num_key_value_heads": 4, "use_sliding_window": True, "max_window_layers": 2},
        {"model_type": "qwen3", "num_attention_heads": 32},
        {"model_type": "smollm3"},
        {"model_type": "phi3"},
        {"model_type": "phi3", "sliding_window": 7},
        {"model_type": "gemma2"},
        {"model_type": "gemma3_text"},
        {"model_type": "olmo2"},
        {"model_type": "granite"},
    ],
)
def test_class_defaults(config):
    config = SMALL | config
    model = meta_model(config)
    spec = parse_config(config)
    assert {t.name: t.shape for t in spec.tensors()} == shapes(model)
    kinds = getattr(model.config, "layer_types", None)
    window = getattr(model.config, "sliding_window", None) or 0
    if spec.family == "gemma3":
        kinds = ["sliding_attention"] * 4
    expected = tuple(window if kinds is None or k == "sliding_attention" else 0 for k in kinds or [None] * 4)
    assert spec.sliding_windows == (expected if any(expected) else ())
    assert spec.norm_eps == model.config.rms_norm_eps
    assert spec.max_positions == model.config.max_position_embeddings


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 130000},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, "rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False,
                             "beta_fast": 16.0, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 24,
                             "long_factor": [2.0] * 24, "partial_rotary_factor": 0.75,
                             "original_max_position_embeddings": 1024}},
    ],
)  # fmt: skip
def test_inverse_frequencies(rope):
    config = SMALL | {"model_type": "llama", "head_dim": 64} | rope
    made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    oracle = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(made)
    spec = parse_config(config)
    got = np.array(spec.rope.inverse_frequencies(64))
    np.testing.assert_allclose(got, oracle.inv_freq.numpy(), rtol=1e-6)
    assert spec.rope.magnitude == pytest.approx(oracle.attention_scaling)
