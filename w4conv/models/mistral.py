"""Mistral: Llama's shape, no biases, one sliding window for all layers when the config gives one."""

from __future__ import annotations

from typing import Final

from w4conv.models.config import MAX_POSITIONS, Config
from w4conv.models.spec import ModelSpec

ARCHITECTURE: Final = "MistralForCausalLM"
MODEL_TYPE: Final = "mistral"


def parse(config: Config) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    sizes = config.sizes()
    window = config.integer("sliding_window", high=MAX_POSITIONS) if "sliding_window" in config else 0
    return ModelSpec(
        family=MODEL_TYPE,
        architecture=ARCHITECTURE,
        **sizes,
        sliding_windows=(window,) * sizes["n_layers"] if window else (),
        tied_head=config.flag("tie_word_embeddings", default=False),
    )
