"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_POSITIONS, Config
from w4conv.models.decoder import decoder, experts
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"MixtralForCausalLM": "mixtral"}
DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def parse(config: Config, architecture: str) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    spec = decoder(config, family="mixtral", architecture=architecture)
    window = config.integer("sliding_window", high=MAX_POSITIONS) if "sliding_window" in config else 0
    return replace(
        spec,
        sliding_windows=(window,) * spec.n_layers if window else (),
        experts=experts(
            config,
            intermediate_size=spec.intermediate_size,
            router="block_sparse_moe.gate",
            matrices={
                "gate_proj": "block_sparse_moe.experts.{}.w1.weight",
                "up_proj": "block_sparse_moe.experts.{}.w3.weight",
                "down_proj": "block_sparse_moe.experts.{}.w2.weight",
            },
            layers=(True,) * spec.n_layers,
        ),
    )
