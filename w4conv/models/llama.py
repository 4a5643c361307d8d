"""Llama 2, 3 and 3.x, and what shares their shape (SmolLM2, TinyLlama, Falcon 3)."""

from __future__ import annotations

from typing import Final

from w4conv.models.config import Config
from w4conv.models.decoder import decoder
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"LlamaForCausalLM": "llama"}
DEFAULTS: Final = {"max_position_embeddings": 2048}


def parse(config: Config, architecture: str) -> ModelSpec:
    attention_bias = config.flag("attention_bias")
    return decoder(
        config.with_defaults(DEFAULTS),
        family="llama",
        architecture=architecture,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
    )
