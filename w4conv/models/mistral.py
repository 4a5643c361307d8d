"""Mistral: Llama with a sliding window on every layer where `sliding_window` is not null. No biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_POSITIONS, Config, decoder
from w4conv.models.spec import ModelSpec

ARCHITECTURE: Final = "MistralForCausalLM"
MODEL_TYPE: Final = "mistral"


def parse(config: Config) -> ModelSpec:
    spec = decoder(
        config,
        family="mistral",
        architecture=ARCHITECTURE,
        default_kv_heads=8,
        default_max_positions=131072,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )
    # The class default of `sliding_window` is 4096: an absent key means a window, null means none.
    window = 0 if config.is_null("sliding_window") else config.integer("sliding_window", 4096, high=MAX_POSITIONS)
    kind = "sliding_attention" if window else "full_attention"
    if "layer_types" in config and config.get("layer_types") != [kind] * spec.n_layers:
        raise config.error("layer_types", f"a Mistral model has {kind} in all of its {spec.n_layers} layers")
    return replace(spec, sliding_windows=(window,) * spec.n_layers) if window else spec
