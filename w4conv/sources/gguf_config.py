"""config.json and generation_config.json, rebuilt from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.errors import InputError
from w4conv.files.strict_json import to_json
from w4conv.sources.gguf_architectures import Architecture
from w4conv.sources.gguf_header import GgufHeader

TOKEN_IDS: Final = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
END_IDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tensors that hold no weights, but divisors of the frequencies of the rotary embedding.
ROPE_FACTORS: Final = "rope_freqs.weight"  # computed from the llama3 rope scaling, of which it is the only trace
LONG_FACTORS: Final = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
# The published settings of llama3 rope scaling differ in `factor` and, rarely, in the original context.
LLAMA3_LOW: Final = 1.0
LLAMA3_HIGH: Final = 4.0
LLAMA3_CONTEXTS: Final = (8192, 4096, 2048, 16384, 32768, 65536, 131072)
FACTOR_TOLERANCE: Final = 1e-4  # the writers compute the factors in float32


def rebuild_config(
    header: GgufHeader,
    architecture: Architecture,
    *,
    vocab_size: int,
    biases: frozenset[str],
    tied: bool,
    factors: Mapping[str, npt.NDArray[np.float32]],
    dtype: str,
) -> bytes:
    """config.json for the file. factors: of the rotary embedding, by the names of their tensors.

    Raises InputError naming a key that is missing, of another type, or not supported.
    """
    arch = f"{architecture.name}."
    hidden = header.integer(f"{arch}embedding_length")
    n_heads = header.integer(f"{arch}attention.head_count")
    if n_heads < 1:
        raise header.error(f"{arch}attention.head_count", f"{n_heads} is not positive")
    head_dim = header.integer(f"{arch}attention.key_length", hidden // n_heads)
    values = header.integer(f"{arch}attention.value_length", head_dim)
    if values != head_dim:
        raise header.error(
            f"{arch}attention.value_length", f"{values} differs from the head size {head_dim}; not supported"
        )
    rotary = header.integer(f"{arch}rope.dimension_count", head_dim)
    if not 0 < rotary <= head_dim:
        raise header.error(f"{arch}rope.dimension_count", f"{rotary} is not between 1 and the head size {head_dim}")
    theta = _shortest(header.number(f"{arch}rope.freq_base", 10000.0))
    config: dict[str, object] = {
        "architectures": [architecture.hf_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": header.integer(f"{arch}feed_forward_length"),
        "num_hidden_layers": header.integer(f"{arch}block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": header.integer(f"{arch}attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": header.integer(f"{arch}context_length"),
        "rms_norm_eps": _shortest(header.number(f"{arch}attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, arch, theta, rotary, factors),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
    }
    if rotary != head_dim:
        config["partial_rotary_factor"] = _shortest(rotary / head_dim)
    config |= _settings(header, architecture.name, config)
    if architecture.name not in ("qwen2", "phi3"):
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in biases
    if architecture.name in ("llama", "smollm3", "granite"):
        config["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in biases
    config |= {name: header.integer(key) for name, key in TOKEN_IDS.items() if key in header}
    return _json(config)


def _settings(header: GgufHeader, name: str, config: Mapping[str, object]) -> dict[str, object]:
    """Keys of config.json beyond the common ones, or in place of them."""
    arch = f"{name}."
    match name:
        case "llama":
            return _llama(header, arch)
        case "qwen2" | "qwen3":
            return {"use_sliding_window": False}
        case "qwen3moe":
            return _qwen3_moe(header, arch)
        case "phi3":
            return _phi3(header, arch)
        case "gemma2" | "gemma3":
            return _gemma(header, arch, config)
        case "granite":
            return _granite(header, arch)
        case "granitemoe":
            return _granite(header, arch) | _local_experts(header, arch)
        case "gpt-oss":
            return _gpt_oss(header, arch, config)
        case _:
            return {}


def _llama(header: GgufHeader, arch: str) -> dict[str, object]:
    """Llama, Mistral where there is a window, or Mixtral where there are experts."""
    window = header.integer(f"{arch}attention.sliding_window", 0)
    if header.integer(f"{arch}expert_count", 0):
        names = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": window or None}
        return names | _local_experts(header, arch)
    if window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {}


def _local_experts(header: GgufHeader, arch: str) -> dict[str, object]:
    return {
        "num_local_experts": header.integer(f"{arch}expert_count"),
        "num_experts_per_tok": header.integer(f"{arch}expert_used_count"),
    }


def _gpt_oss(header: GgufHeader, arch: str, config: Mapping[str, object]) -> dict[str, object]:
    """Of the yarn scaling the file does not tell that the model does not round where it begins and ends."""
    scaling = config["rope_scaling"]
    assert scaling is None or isinstance(scaling, dict)
    plain = {"rope_type": "default"}  # without any, it would be the model's own
    return _local_experts(header, arch) | {
        "intermediate_size": header.integer(f"{arch}expert_feed_forward_length"),
        "sliding_window": header.integer(f"{arch}attention.sliding_window", 0) or None,
        "rope_scaling": plain if scaling is None else scaling | {"truncate": False},
    }


def _qwen3_moe(header: GgufHeader, arch: str) -> dict[str, object]:
    return {
        "use_sliding_window": False,
        "num_experts": header.integer(f"{arch}expert_count"),
        "num_experts_per_tok": header.integer(f"{arch}expert_used_count"),
        "moe_intermediate_size": header.integer(f"{arch}expert_feed_forward_length"),
        "norm_topk_prob": True,  # what llama.cpp computes
    }


def _phi3(header: GgufHeader, arch: str) -> dict[str, object]:
    original = f"{arch}rope.scaling.original_context_length"
    return {
        "sliding_window": header.integer(f"{arch}attention.sliding_window", 0) or None,
        "original_max_position_embeddings": header.integer(original, header.integer(f"{arch}context_length")),
    }


def _gemma(header: GgufHeader, arch: str, config: Mapping[str, object]) -> dict[str, object]:
    """The scale of attention is not in the file: llama.cpp knows the models of 27 B by their number of layers."""
    head_dim, hidden, n_heads = (config[key] for key in ("head_dim", "hidden_size", "num_attention_heads"))
    assert isinstance(hidden, int)
    assert isinstance(n_heads, int)
    large = config["num_hidden_layers"] == GEMMA_27B_LAYERS[arch.rstrip(".")]
    caps = {}
    for key, name in (("attn_logit_softcapping", "attn"), ("final_logit_softcapping", "final")):
        stored = f"{arch}{name}_logit_softcapping"
        caps[key] = _shortest(header.number(stored)) if stored in header else None
    out: dict[str, object] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": header.integer(f"{arch}attention.sliding_window"),
        "query_pre_attn_scalar": hidden // n_heads if large else head_dim,
        **caps,
    }
    if arch == "gemma3.":
        out |= {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}
    return out


def _granite(header: GgufHeader, arch: str) -> dict[str, object]:
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {ours: _shortest(header.number(arch + theirs)) for ours, theirs in keys.items()}


GEMMA_27B_LAYERS: Final = {"gemma2": 46, "gemma3": 62}


def rebuild_generation_config(header: GgufHeader) -> bytes:
    """generation_config.json: the first token, and every token that ends a text or a turn."""
    ends: list[int] = []
    for name in END_IDS:
        key = f"tokenizer.ggml.{name}"
        if key in header and header.integer(key) not in ends:
            ends.append(header.integer(key))
    config: dict[str, object] = {"eos_token_id": ends} if ends else {}
    if TOKEN_IDS["bos_token_id"] in header:
        config["bos_token_id"] = header.integer(TOKEN_IDS["bos_token_id"])
    return _json(config)


def _rope_scaling(
    header: GgufHeader, arch: str, theta: float, rotary: int, factors: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, object] | None:
    kind = header.text(f"{arch}rope.scaling.type", "none")
    if kind == "none" and f"{arch}rope.scale_linear" in header:  # its name in older files
        factor = header.number(f"{arch}rope.scale_linear")
        kind = "linear" if factor != 1.0 else "none"
    else:
        factor = header.number(f"{arch}rope.scaling.factor", 1.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise header.error(
            f"{arch}rope.scaling.type", f"{kind!r} is not supported; known are none, linear, yarn, longrope"
        )
    if ROPE_FACTORS in factors:
        if kind != "none":
            raise header.error(f"{arch}rope.scaling.type", f"{kind!r} together with {ROPE_FACTORS} is not supported")
        return _llama3_scaling(header, theta, rotary, factors[ROPE_FACTORS])
    if factors:
        return _longrope(header, arch, rotary, factors)
    if kind == "none":
        return None
    out: dict[str, object] = {"rope_type": kind, "factor": _shortest(factor)}
    if kind == "yarn":
        out["original_max_position_embeddings"] = header.integer(f"{arch}rope.scaling.original_context_length")
    elif kind == "longrope":
        raise header.error(f"{arch}rope.scaling.type", f"longrope without {' and '.join(LONG_FACTORS)}")
    return out


def _longrope(
    header: GgufHeader, arch: str, rotary: int, factors: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, object]:
    out: dict[str, object] = {"rope_type": "longrope"}
    for name, key in LONG_FACTORS.items():
        if name not in factors or len(factors[name]) != rotary // 2:
            raise InputError(f"{header.path}: {name}: expected {rotary // 2} factors, one for each rotated pair")
        out[key] = [_shortest(float(f)) for f in factors[name]]
    if f"{arch}rope.scaling.attn_factor" in header:
        out["attention_factor"] = _shortest(header.number(f"{arch}rope.scaling.attn_factor"))
    return out


def _llama3_scaling(
    header: GgufHeader, theta: float, head_dim: int, factors: npt.NDArray[np.float32]
) -> dict[str, object] | None:
    """The llama3 rope scaling that gives these factors, the only trace of it in the file."""
    if len(factors) != head_dim // 2 or not np.isfinite(factors).all() or not 0 < theta < math.inf:
        raise InputError(
            f"{header.path}: rope_freqs.weight: expected {head_dim // 2} finite factors, got {len(factors)}"
        )
    if (factors == 1).all():
        return None
    factor = float(factors.max())
    for context in LLAMA3_CONTEXTS:
        expected = np.array(list(_llama3_factors(theta, head_dim, factor, context)))
        if np.allclose(factors, expected, rtol=FACTOR_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": _shortest(factor),
                "low_freq_factor": LLAMA3_LOW,
                "high_freq_factor": LLAMA3_HIGH,
                "original_max_position_embeddings": context,
            }
    raise InputError(f"{header.path}: rope_freqs.weight: its factors are not those of a known llama3 rope scaling")


def _llama3_factors(theta: float, head_dim: int, factor: float, context: int) -> Iterator[float]:
    """The divisor of each frequency: 1 for short waves, `factor` for long ones, blended between."""
    for i in range(head_dim // 2):
        turns = context * theta ** (-2 * i / head_dim) / (2 * math.pi)
        blend = min(max((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0), 1.0)
        yield 1 / ((1 - blend) / factor + blend)


def _shortest(value: float) -> float:
    """The float of fewest digits that is the same float32 number, as GGUF stores it: 1e-05 and not 9.99...e-06."""
    return float(str(np.float32(value)))


def _json(config: dict[str, object]) -> bytes:
    return to_json(config, where="config.json, as the GGUF metadata has it", ensure_ascii=True, indent=2) + b"\n"
