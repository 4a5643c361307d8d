"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; sliding windows on the upper layers where switched on."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_LAYERS, MAX_POSITIONS, Config
from w4conv.models.decoder import FULL, SLIDING, decoder, layer_windows
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"Qwen2ForCausalLM": "qwen2"}
DEFAULTS: Final = {"num_key_value_heads": 32, "max_position_embeddings": 32768}


def parse(config: Config, architecture: str) -> ModelSpec:
    if config.flag("use_mrope"):
        raise config.error("use_mrope", "multimodal rotary embeddings are not supported")
    spec = decoder(config.with_defaults(DEFAULTS), family="qwen2", architecture=architecture, qkv_bias=True)
    return replace(spec, sliding_windows=upper_windows(config, spec.n_layers))


def upper_windows(config: Config, n_layers: int) -> tuple[int, ...]:
    """A window on the layers from `max_window_layers` on, where switched on; `layer_types` wins."""
    window = 0
    if config.flag("use_sliding_window") and not config.is_null("sliding_window"):
        window = config.integer("sliding_window", 4096, high=MAX_POSITIONS)
    first = config.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
    kinds = [SLIDING if window and layer >= first else FULL for layer in range(n_layers)]
    return layer_windows(config, kinds, window)
