"""Mistral: Llama with a sliding window on every layer where `sliding_window` is not null. No biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_POSITIONS, Config
from w4conv.models.decoder import FULL, SLIDING, decoder
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"MistralForCausalLM": "mistral"}
DEFAULTS: Final = {"num_key_value_heads": 8, "max_position_embeddings": 131072}


def parse(config: Config, architecture: str) -> ModelSpec:
    spec = decoder(config.with_defaults(DEFAULTS), family="mistral", architecture=architecture)
    # The class default of `sliding_window` is 4096: an absent key means a window, null means none.
    window = 0 if config.is_null("sliding_window") else config.integer("sliding_window", 4096, high=MAX_POSITIONS)
    kind = SLIDING if window else FULL
    if "layer_types" in config and config.get("layer_types") != [kind] * spec.n_layers:
        raise config.error("layer_types", f"a Mistral model has {kind} in all of its {spec.n_layers} layers")
    return replace(spec, sliding_windows=(window,) * spec.n_layers) if window else spec
