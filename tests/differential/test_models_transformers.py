"""ModelSpec against transformers: parameter counts, tensor names, rotary frequencies."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers import data_dir

from w4conv.models import parse_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def real_configs() -> list[dict]:
    configs = [json.loads(path.read_text()) for path in sorted(data_dir("configs").glob("*/config.json"))]
    return [c for c in configs if c["architectures"][0] in FAMILIES]


def meta_model(config: dict):
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made)


def shapes(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}  # a tied head is listed once, as embedding


def test_real_models_have_the_same_parameters():
    configs = real_configs()
    assert len(configs) >= 8
    for config in configs:
        spec = parse_config(config)
        expected = shapes(meta_model(config))
        assert {t.name: t.shape for t in spec.tensors()} == expected, config.get("_name_or_path")
        assert spec.n_parameters == sum(int(np.prod(shape)) for shape in expected.values())


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 300,
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
    ],
)
def test_class_defaults(config):
    config = SMALL | config
    model = meta_model(config)
    spec = parse_config(config)
    assert {t.name: t.shape for t in spec.tensors()} == shapes(model)
    kinds = getattr(model.config, "layer_types", None)
    window = getattr(model.config, "sliding_window", None) or 0
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
    ],
)  # fmt: skip
def test_inverse_frequencies(rope):
    config = SMALL | {"model_type": "llama", "head_dim": 64} | rope
    made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(made).inv_freq.numpy()
    got = np.array(parse_config(config).rope.inverse_frequencies(64))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
