"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window in the upper layers only where it is switched on."""

from __future__ import annotations

from typing import Final

from w4conv.errors import InputError
from w4conv.models.config import MAX_POSITIONS, Config
from w4conv.models.spec import ModelSpec

ARCHITECTURE: Final = "Qwen2ForCausalLM"
MODEL_TYPE: Final = "qwen2"


def parse(config: Config) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    sizes = config.sizes()
    return ModelSpec(
        family=MODEL_TYPE,
        architecture=ARCHITECTURE,
        **sizes,
        sliding_windows=_windows(config, sizes["n_layers"]),
        qkv_bias=True,
        tied_head=config.flag("tie_word_embeddings", default=False),
    )


def _windows(config: Config, n_layers: int) -> tuple[int, ...]:
    if not config.flag("use_sliding_window", default=False) or "sliding_window" not in config:
        return ()
    window = config.integer("sliding_window", high=MAX_POSITIONS)
    types = config.strings("layer_types")
    if not types:  # transformers derives them so
        first = config.integer("max_window_layers", default=28, low=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(n_layers)]
    if len(types) != n_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise InputError(f"config.json: layer_types has to name full_attention or sliding_attention {n_layers} times")
    return tuple(window if t == "sliding_attention" else 0 for t in types)
