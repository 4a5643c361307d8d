"""Llama 2, 3, 3.x, SmolLM2 and others of the same class."""

from __future__ import annotations

from typing import Final

from w4conv.models.config import Config
from w4conv.models.spec import ModelSpec

ARCHITECTURE: Final = "LlamaForCausalLM"
MODEL_TYPE: Final = "llama"


def parse(config: Config) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    attention_bias = config.flag("attention_bias", default=False)
    return ModelSpec(
        family=MODEL_TYPE,
        architecture=ARCHITECTURE,
        **config.sizes(),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        tied_head=config.flag("tie_word_embeddings", default=False),
    )
