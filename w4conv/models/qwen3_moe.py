"""Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Config
from w4conv.models.decoder import decoder, experts
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"Qwen3MoeForCausalLM": "qwen3_moe"}
DEFAULTS: Final = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
}


def parse(config: Config, architecture: str) -> ModelSpec:
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"  # newer writers, older ones
    config = config.with_defaults(DEFAULTS)
    bias = config.flag("attention_bias")
    spec = decoder(config, family="qwen3_moe", architecture=architecture, qkv_bias=bias, o_bias=bias)
    window = 0
    if config.flag("use_sliding_window") and not config.is_null("sliding_window"):
        window = config.integer("sliding_window", 4096, high=MAX_POSITIONS)
    layers = _routed(config, spec.n_layers)
    if not any(layers):
        return replace(spec, qk_norm="head", sliding_windows=(window,) * spec.n_layers if window else ())
    return replace(
        spec,
        qk_norm="head",
        sliding_windows=(window,) * spec.n_layers if window else (),
        experts=experts(
            config,
            key=key,
            intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
            router="mlp.gate",
            matrices={part: f"mlp.experts.{{}}.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")},
            layers=layers,
            renormalized=config.flag("norm_topk_prob"),
        ),
    )


def _routed(config: Config, n_layers: int) -> tuple[bool, ...]:
    step = config.integer("decoder_sparse_step", high=MAX_LAYERS)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise config.error("mlp_only_layers", "expected a list of layer numbers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers))
