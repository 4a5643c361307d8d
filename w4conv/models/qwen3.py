"""Qwen3: as Qwen2 without its biases, and RMSNorm on each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import Config
from w4conv.models.decoder import decoder
from w4conv.models.qwen2 import upper_windows
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"Qwen3ForCausalLM": "qwen3"}
DEFAULTS: Final = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}


def parse(config: Config, architecture: str) -> ModelSpec:
    bias = config.flag("attention_bias")
    config = config.with_defaults(DEFAULTS)
    spec = decoder(config, family="qwen3", architecture=architecture, qkv_bias=bias, o_bias=bias)
    return replace(spec, qk_norm="head", sliding_windows=upper_windows(config, spec.n_layers))
