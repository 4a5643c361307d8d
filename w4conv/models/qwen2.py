"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; sliding windows on the upper layers where switched on."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_LAYERS, MAX_POSITIONS, Config, decoder
from w4conv.models.spec import ModelSpec

ARCHITECTURE: Final = "Qwen2ForCausalLM"
MODEL_TYPE: Final = "qwen2"


def parse(config: Config) -> ModelSpec:
    if config.flag("use_mrope"):
        raise config.error("use_mrope", "multimodal rotary embeddings are not supported")
    spec = decoder(
        config,
        family="qwen2",
        architecture=ARCHITECTURE,
        default_kv_heads=32,
        default_max_positions=32768,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
    )
    windows = _windows(config, spec.n_layers)
    return replace(spec, sliding_windows=windows) if any(windows) else spec


def _windows(config: Config, n_layers: int) -> tuple[int, ...]:
    """A window for each layer, 0 = none."""
    window = 0
    if config.flag("use_sliding_window") and not config.is_null("sliding_window"):
        window = config.integer("sliding_window", 4096, high=MAX_POSITIONS)
    first = config.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else 0 for layer in range(n_layers))
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise config.error("layer_types", f"expected a list of {n_layers} words, one a layer")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error("layer_types", f"{str(kind)[:40]!r} is neither full_attention nor sliding_attention")
    if "sliding_attention" in kinds and not window:
        raise config.error("layer_types", "names sliding_attention, but no sliding window is switched on")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
