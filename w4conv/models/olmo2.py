"""OLMo 2: norms on the output of each branch only, and RMSNorm over all queries and over all keys of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import Config
from w4conv.models.decoder import decoder
from w4conv.models.spec import NORMS_AFTER, ModelSpec

ARCHITECTURES: Final = {"Olmo2ForCausalLM": "olmo2"}
DEFAULTS: Final = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def parse(config: Config, architecture: str) -> ModelSpec:
    bias = config.flag("attention_bias")
    config = config.with_defaults(DEFAULTS)
    spec = decoder(config, family="olmo2", architecture=architecture, qkv_bias=bias, o_bias=bias)
    return replace(spec, norms=NORMS_AFTER, qk_norm="row")
