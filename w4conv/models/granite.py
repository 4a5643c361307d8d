"""Granite: Llama with factors of its own for embedding, attention, branches and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import Config
from w4conv.models.decoder import decoder
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"GraniteForCausalLM": "granite"}
DEFAULTS: Final = {"max_position_embeddings": 2048}


def parse(config: Config, architecture: str) -> ModelSpec:
    return granite(config, family="granite", architecture=architecture, mlp_bias=config.flag("mlp_bias"))


def granite(config: Config, *, family: str, architecture: str, mlp_bias: bool = False) -> ModelSpec:
    """What all Granite models share."""
    bias = config.flag("attention_bias")
    spec = decoder(
        config.with_defaults(DEFAULTS),
        family=family,
        architecture=architecture,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=mlp_bias,
    )
    return replace(
        spec,
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )
