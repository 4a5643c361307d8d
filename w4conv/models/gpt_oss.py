"""gpt-oss: attention with sinks and biases, every other layer with a window, experts with a clamped activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_POSITIONS, Config
from w4conv.models.decoder import FULL, SLIDING, decoder, experts, layer_windows
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"GptOssForCausalLM": "gpt_oss"}
DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
ROPE: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def parse(config: Config, architecture: str) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    if config.section("rope_scaling").empty() and config.section("rope_parameters").empty():
        config = config.replaced("rope_parameters", ROPE)
    for key in ("swiglu_alpha", "swiglu_limit"):  # the numbers that the kernel was written for
        if config.number(key) != DEFAULTS[key]:
            raise config.error(key, f"{config.number(key):g} is not supported; only {DEFAULTS[key]:g} is")
    bias = config.flag("attention_bias")
    spec = decoder(config, family="gpt_oss", architecture=architecture, qkv_bias=bias, o_bias=bias)
    window = config.integer("sliding_window", high=MAX_POSITIONS) if "sliding_window" in config else 0
    kinds = [SLIDING if window and layer % 2 == 0 else FULL for layer in range(spec.n_layers)]
    return replace(
        spec,
        activation="clamped_silu",
        interleaved=True,
        sinks=True,
        sliding_windows=layer_windows(config, kinds, window),
        experts=experts(
            config,
            intermediate_size=spec.intermediate_size,
            router="mlp.router",
            matrices={"gate_up_proj": "mlp.experts.gate_up_proj", "down_proj": "mlp.experts.down_proj"},
            biases={"gate_up_proj": "mlp.experts.gate_up_proj_bias", "down_proj": "mlp.experts.down_proj_bias"},
            router_bias=True,
            layers=(True,) * spec.n_layers,
        ),
    )
