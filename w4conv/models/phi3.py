"""Phi-3, Phi-3.5 and Phi-4-mini: q, k and v in one matrix, gate and up in another; part of each head rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_POSITIONS, Config
from w4conv.models.decoder import FULL, SLIDING, decoder, layer_windows
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"Phi3ForCausalLM": "phi3"}
DEFAULTS: Final = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def parse(config: Config, architecture: str) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    spec = decoder(_long(config), family="phi3", architecture=architecture)
    window = config.integer("sliding_window", high=MAX_POSITIONS) if "sliding_window" in config else 0
    windows = layer_windows(config, [SLIDING if window else FULL] * spec.n_layers, window)
    return replace(spec, fused=("qkv", "gate_up"), sliding_windows=windows)


def _long(config: Config) -> Config:
    """Older checkpoints name their "longrope" scaling "yarn"."""
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if isinstance(settings, dict) and "yarn" in (settings.get("rope_type"), settings.get("type")):
            return config.replaced(key, {**settings, "rope_type": "longrope"})
    return config
