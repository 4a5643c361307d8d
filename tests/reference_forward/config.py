"""Section 4.7 of docs/numerics.md: what a family has, and what a config.json says beside it.

Every key is to be there, as transformers writes them; what an absent one means is its business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference_forward.rope import Rope, make_rope

BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Experts:
    """Names in a layer; {} is an expert's number."""

    router: str
    gate: str
    up: str
    down: str
    gate_up: str = ""


MIXTRAL = Experts("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{w}.weight" for w in ("w1", "w3", "w2")))
QWEN3_MOE = Experts("mlp.gate", *(f"mlp.experts.{{}}.{w}_proj.weight" for w in ("gate", "up", "down")))
GRANITEMOE = Experts(
    "block_sparse_moe.router.layer", "", "", "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.input_linear.weight",
)  # fmt: skip
GPT_OSS = Experts("mlp.router", "", "", "mlp.experts.down_proj", "mlp.experts.gate_up_proj")


@dataclass(frozen=True)
class Family:
    """norms: before the attention, on its output, before the feed-forward part, on its output."""

    norms: tuple[str | None, ...] = BEFORE
    qk_norm: str = ""  # "head" or "row"
    norm_offset: float = 0.0
    fused: bool = False  # q, k and v in one matrix, gate and up in one
    interleaved: bool = False  # rows of gate and up alternate
    activation: str = "silu"
    experts: Experts | None = None


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(experts=MIXTRAL),
    "qwen2": Family(),
    "qwen3": Family(qk_norm="head"),
    "qwen3_moe": Family(qk_norm="head", experts=QWEN3_MOE),
    "smollm3": Family(),
    "phi3": Family(fused=True),
    "gemma2": Family(norms=AROUND, norm_offset=1.0, activation="gelu"),
    "gemma3_text": Family(norms=AROUND, norm_offset=1.0, activation="gelu", qk_norm="head"),
    "olmo2": Family(norms=AFTER, qk_norm="row"),
    "granite": Family(),
    "granitemoe": Family(experts=GRANITEMOE),
    "gpt_oss": Family(interleaved=True, activation="clamped", experts=GPT_OSS),
}


@dataclass(frozen=True)
class Layer:
    rope: Rope | None
    window: int  # 0: none
    routed: bool


@dataclass(frozen=True)
class Model:
    family: Family
    layers: tuple[Layer, ...]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    attention_scale: float
    embedding_scale: float
    residual_scale: float
    logits_divisor: float
    attention_softcap: float
    final_softcap: float
    n_experts: int
    n_experts_per_token: int
    renormalized: bool


def read_config(config: dict[str, Any]) -> Model:
    if config["model_type"] == "gemma3":  # the language part of a multimodal model
        config = {"dtype": config.get("dtype")} | config["text_config"] | {"model_type": "gemma3_text"}
    kind = config["model_type"]
    family, n_layers = FAMILIES[kind], config["num_hidden_layers"]
    n_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // n_heads
    max_positions = config["max_position_embeddings"]
    gemma = kind in ("gemma2", "gemma3_text")
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    of_kinds = {k: v for k, v in settings.items() if k in ("full_attention", "sliding_attention")}
    ropes = []
    for attention in ("full_attention", "sliding_attention"):
        own = of_kinds.get(attention, settings if not of_kinds else {})
        beside = {
            key: config[key]
            for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
            if config.get(key) is not None
        }
        if beside.get("original_max_position_embeddings") is not None:
            own = own | {"original_max_position_embeddings": beside["original_max_position_embeddings"]}
        ropes.append(make_rope({"rope_theta": 10000.0} | beside | own, head_dim, max_positions))
    layers = []
    for i in range(n_layers):
        window = window_of(config, kind, i)
        rope: Rope | None = ropes[int(kind == "gemma3_text" and window > 0)]
        if kind == "smollm3" and not config["no_rope_layers"][i]:
            rope = None
        routed = family.experts is not None
        if kind == "qwen3_moe":
            routed = i not in (config["mlp_only_layers"] or []) and (i + 1) % config["decoder_sparse_step"] == 0
        layers.append(Layer(rope, window, routed))
    granite = kind in ("granite", "granitemoe")
    scale = config["query_pre_attn_scalar"] ** -0.5 if gemma else head_dim**-0.5
    return Model(
        family=family,
        layers=tuple(layers),
        n_heads=n_heads,
        n_kv_heads=config["num_key_value_heads"] or n_heads,
        head_dim=head_dim,
        eps=config["rms_norm_eps"],
        max_positions=max_positions,
        attention_scale=config["attention_multiplier"] if granite else scale,
        embedding_scale=embedding_scale(config) if gemma else config["embedding_multiplier"] if granite else 1.0,
        residual_scale=config["residual_multiplier"] if granite else 1.0,
        logits_divisor=config["logits_scaling"] if granite else 1.0,
        attention_softcap=(config["attn_logit_softcapping"] or 0.0) if gemma else 0.0,
        final_softcap=(config["final_logit_softcapping"] or 0.0) if gemma else 0.0,
        n_experts=config.get("num_local_experts") or config.get("num_experts") or 0,
        n_experts_per_token=config.get("num_experts_per_tok") or 0,
        renormalized=bool(config.get("norm_topk_prob", True)),
    )


def window_of(config: dict[str, Any], kind: str, layer: int) -> int:
    """How many of the newest keys a layer sees; 0 for all."""
    window: int = config.get("sliding_window") or 0
    if kind in ("mistral", "mixtral"):
        return window
    if kind in ("qwen2", "qwen3", "qwen3_moe", "smollm3") and not config["use_sliding_window"]:
        return 0
    if kind == "qwen3_moe":
        return window
    if "layer_types" not in config:
        return window if kind == "phi3" else 0
    return window if config["layer_types"][layer] == "sliding_attention" else 0


def embedding_scale(config: dict[str, Any]) -> float:
    """sqrt(hidden_size) in the type of the checkpoint's weights."""
    scale = math.sqrt(config["hidden_size"])
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype == "bfloat16":
        step = 2.0 ** (math.frexp(scale)[1] - 8)
        return round(scale / step) * step
    return float(np.float16(scale)) if dtype == "float16" else scale
