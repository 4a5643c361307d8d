"""Llama 2, 3 and 3.x, and what shares their shape (SmolLM2, TinyLlama)."""

from __future__ import annotations

from typing import Final

from w4conv.models.config import Config, decoder
from w4conv.models.spec import ModelSpec

ARCHITECTURE: Final = "LlamaForCausalLM"
MODEL_TYPE: Final = "llama"


def parse(config: Config) -> ModelSpec:
    attention_bias = config.flag("attention_bias")
    return decoder(
        config,
        family="llama",
        architecture=ARCHITECTURE,
        default_kv_heads=None,
        default_max_positions=2048,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
    )
