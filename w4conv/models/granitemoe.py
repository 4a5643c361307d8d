"""Granite with a mixture of experts in every layer, all experts of a layer in one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import Config
from w4conv.models.decoder import experts
from w4conv.models.granite import granite
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"GraniteMoeForCausalLM": "granitemoe"}
DEFAULTS: Final = {"num_local_experts": 8, "num_experts_per_tok": 2}


def parse(config: Config, architecture: str) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    spec = granite(config, family="granitemoe", architecture=architecture)
    return replace(
        spec,
        experts=experts(
            config,
            intermediate_size=spec.intermediate_size,
            router="block_sparse_moe.router.layer",
            matrices={
                "gate_up_proj": "block_sparse_moe.input_linear.weight",
                "down_proj": "block_sparse_moe.output_linear.weight",
            },
            layers=(True,) * spec.n_layers,
        ),
    )
