"""Gemma 2: four norms a layer, soft caps, every other layer with a window, a scaled embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from w4conv.models.config import MAX_POSITIONS, MAX_WIDTH, Config
from w4conv.models.decoder import FULL, SLIDING, activation, decoder, embedding_scale, layer_windows
from w4conv.models.spec import NORMS_AROUND, ModelSpec

ARCHITECTURES: Final = {"Gemma2ForCausalLM": "gemma2"}
DEFAULTS: Final = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}


def parse(config: Config, architecture: str) -> ModelSpec:
    config = config.with_defaults(DEFAULTS)
    spec = gemma(config, family="gemma2", architecture=architecture)
    window = config.integer("sliding_window", high=MAX_POSITIONS) if "sliding_window" in config else 0
    kinds = [SLIDING if window and layer % 2 == 0 else FULL for layer in range(spec.n_layers)]
    return replace(spec, sliding_windows=layer_windows(config, kinds, window))


def gemma(config: Config, *, family: str, architecture: str) -> ModelSpec:
    """What Gemma 2 and 3 share. A cap that is null is none."""
    if config.flag("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention", "only attention to what came before is supported")
    bias = config.flag("attention_bias")
    # Of the two names of the activation, only the newer one counts.
    kind = activation(config, "hidden_activation") if "hidden_activation" in config else "gelu_tanh"
    base = config.replaced("hidden_act", None)
    spec = decoder(base, family=family, architecture=architecture, qkv_bias=bias, o_bias=bias)
    caps = [
        config.number(key) if key in config else 0.0 for key in ("attn_logit_softcapping", "final_logit_softcapping")
    ]
    return replace(
        spec,
        activation=kind,
        norms=NORMS_AROUND,
        norm_offset=1.0,
        attention_scale=config.whole("query_pre_attn_scalar", high=MAX_WIDTH) ** -0.5,
        attention_softcap=caps[0],
        final_softcap=caps[1],
        embedding_scale=embedding_scale(config, spec.hidden_size),
    )
