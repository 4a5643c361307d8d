"""Gemma 3, text: as Gemma 2 with a norm on each head of queries and keys in place of caps; of six layers, five have a
window and a rotary embedding of their own. Also the language part of a multimodal checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_LAYERS, MAX_POSITIONS, Config
from w4conv.models.decoder import FULL, SLIDING, layer_windows
from w4conv.models.gemma2 import gemma
from w4conv.models.rope import RopeSpec, rope_of
from w4conv.models.spec import ModelSpec

ARCHITECTURES: Final = {"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"}
DEFAULTS: Final = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}
KINDS: Final = (FULL, SLIDING)


def parse(config: Config, architecture: str) -> ModelSpec:
    text = config if architecture == "Gemma3ForCausalLM" else _language_part(config)
    text = text.with_defaults(DEFAULTS)
    ropes = _ropes(text)
    spec = gemma(
        text.replaced("rope_parameters", None).replaced("rope_scaling", None),
        family="gemma3",
        architecture=architecture,
    )
    window = text.integer("sliding_window", high=MAX_POSITIONS) if "sliding_window" in text else 0
    key = "sliding_window_pattern" if "sliding_window_pattern" in text else "_sliding_window_pattern"
    pattern = text.whole(key, 6, high=MAX_LAYERS)
    kinds = [SLIDING if window and (layer + 1) % pattern else FULL for layer in range(spec.n_layers)]
    return replace(
        spec,
        rope=ropes[0],
        local_rope=ropes[1],
        max_positions=max(spec.max_positions, ropes[0].reach()),
        qk_norm="head",
        sliding_windows=layer_windows(text, kinds, window),
    )


def _language_part(config: Config) -> Config:
    """`text_config`, with the type of the weights where only the whole names it."""
    dtypes = {key: config.get(key) for key in ("dtype", "torch_dtype") if key in config}
    tied = config.flag("tie_word_embeddings", True)  # that of the whole counts, never the inner one
    return config.section("text_config").with_defaults(dtypes).replaced("tie_word_embeddings", tied)


def _ropes(config: Config) -> list[RopeSpec]:
    """Of full and of windowed layers: an object each in `rope_parameters`, or `rope_scaling` for the full ones only."""
    max_positions = config.integer("max_position_embeddings", high=MAX_POSITIONS)
    head_dim = config.integer("head_dim", high=1024)
    thetas = [config.number("rope_theta"), config.number("rope_local_base_freq")]
    settings = [config.section("rope_parameters").section(kind) for kind in KINDS]
    if not config.section("rope_scaling").empty():
        settings = [config.section("rope_scaling"), Config({})]
    ropes = [
        rope_of(own, config, max_positions, head_dim, theta=theta) for own, theta in zip(settings, thetas, strict=True)
    ]
    if len({rope.original_max_positions for rope in ropes if rope.scaling == "longrope"}) > 1:
        raise config.error(
            "rope_parameters", "two longrope scalings that change at different lengths are not supported"
        )
    return ropes
