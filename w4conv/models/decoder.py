"""The part of config.json that all families share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from w4conv.models.activations import CONFIG_WORDS
from w4conv.models.config import (
    MAX_EXPERTS,
    MAX_EXPERTS_OF_ALL,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Config,
)
from w4conv.models.rope import parse_rope
from w4conv.models.spec import Experts, ModelSpec

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
# hidden_act -> the engine's word; "gelu" itself, by the error function, is another function.


def decoder(
    config: Config,
    *,
    family: str,
    architecture: str,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelSpec:
    """The part of a ModelSpec that all families read alike; without sliding windows.

    `config` has the defaults of the family: of max_position_embeddings, and of other keys where the family's differ.
    """
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, high=MAX_HEADS)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
    if "head_dim" not in config and hidden % heads:
        raise config.error(
            "num_attention_heads", f"{heads} does not divide hidden_size {hidden}, and there is no head_dim"
        )
    head_dim = config.integer("head_dim", max(1, hidden // heads), high=MAX_HEAD_DIM)
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd; rotary embeddings need pairs")
    max_positions = config.integer("max_position_embeddings", high=MAX_POSITIONS)
    rope = parse_rope(config, max_positions, head_dim)
    return ModelSpec(
        family=family,
        architecture=architecture,
        vocab_size=config.integer("vocab_size", high=MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        n_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=max(max_positions, rope.reach()),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        tied_head=config.flag("tie_word_embeddings"),
        activation=activation(config, "hidden_act"),
    )


def activation(config: Config, *keys: str) -> str:
    """The engine's word for the first of the keys that is there; "silu" without any."""
    key = next((key for key in keys if key in config), keys[0])
    word = config.text(key, "silu")
    if word not in CONFIG_WORDS:
        raise config.error(key, f"{word!r} is not supported; known are {', '.join(CONFIG_WORDS)}")
    return CONFIG_WORDS[word]


def layer_windows(config: Config, kinds: Sequence[str], window: int) -> tuple[int, ...]:
    """A window for each layer, 0 = none; () for none at all. kinds: the default of `layer_types`, a word a layer."""
    given = config.get("layer_types")
    words = list(kinds) if given is None else given
    if not isinstance(words, list) or len(words) != len(kinds):
        raise config.error("layer_types", f"expected a list of {len(kinds)} words, one a layer")
    for word in words:
        if word not in (FULL, SLIDING):
            raise config.error("layer_types", f"{str(word)[:40]!r} is neither {FULL} nor {SLIDING}")
    if SLIDING in words and not window:
        raise config.error("layer_types", f"names {SLIDING}, but no sliding window is switched on")
    windows = tuple(window if word == SLIDING else 0 for word in words)
    return windows if any(windows) else ()


def experts(
    config: Config,
    *,
    intermediate_size: int,
    router: str,
    matrices: Mapping[str, str],
    layers: tuple[bool, ...],
    key: str = "num_local_experts",
    biases: Mapping[str, str] | None = None,
    router_bias: bool = False,
    renormalized: bool = True,
) -> Experts:
    """A mixture of experts; key: where config.json has their number."""
    n_experts = config.integer(key, high=MAX_EXPERTS)
    if n_experts * sum(layers) > MAX_EXPERTS_OF_ALL:
        raise config.error(key, f"{n_experts} experts in {sum(layers)} layers are more than {MAX_EXPERTS_OF_ALL}")
    return Experts(
        n_experts=n_experts,
        n_per_token=config.integer("num_experts_per_tok", high=n_experts),
        intermediate_size=intermediate_size,
        router=router,
        matrices=matrices,
        layers=layers,
        renormalized=renormalized,
        biases=biases or {},
        router_bias=router_bias,
    )


def embedding_scale(config: Config, hidden_size: int) -> float:
    """sqrt(hidden_size), rounded to the type of the checkpoint's weights, as transformers multiplies in that type."""
    scale = math.sqrt(hidden_size)
    dtype = config.text("dtype" if "dtype" in config else "torch_dtype", "float32")
    if dtype == "bfloat16":  # 8 bits of significand
        step = 2.0 ** (math.frexp(scale)[1] - 8)
        return round(scale / step) * step
    return float(np.float16(scale)) if dtype == "float16" else scale
