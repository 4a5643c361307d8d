"""SmolLM3: Llama with no rotary embedding in every fourth layer ("NoPE")."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_LAYERS, MAX_POSITIONS, Config
from w4conv.models.decoder import FULL, SLIDING, decoder, layer_windows
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"SmolLM3ForCausalLM": "smollm3"}
DEFAULTS: Final = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


def parse(config: Config, architecture: str) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    bias = config.flag("attention_bias")
    spec = decoder(
        config,
        family="smollm3",
        architecture=architecture,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
    )
    no_rope = _no_rope(config, spec.n_layers)
    window = 0
    if config.flag("use_sliding_window") and "sliding_window" in config:
        window = config.integer("sliding_window", high=MAX_POSITIONS)
    kinds = [SLIDING if window and layer in no_rope else FULL for layer in range(spec.n_layers)]
    return replace(spec, no_rope=no_rope, sliding_windows=layer_windows(config, kinds, window))


def _no_rope(config: Config, n_layers: int) -> tuple[int, ...]:
    """`no_rope_layers` says 1 for a layer *with* a rotary embedding, 0 for one without."""
    interval = config.integer("no_rope_layer_interval", 4, high=MAX_LAYERS)
    flags = config.get("no_rope_layers")
    if flags is None:
        flags = [int((layer + 1) % interval != 0) for layer in range(n_layers)]
    if not isinstance(flags, list) or len(flags) != n_layers or any(flag not in (0, 1) for flag in flags):
        raise config.error("no_rope_layers", f"expected a list of {n_layers} numbers 0 or 1, one a layer")
    return tuple(layer for layer, flag in enumerate(flags) if not flag)
