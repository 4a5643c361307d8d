"""config.json and generation_config.json, rebuilt from GGUF metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.errors import InputError
from w4conv.sources.gguf_header import GgufHeader


@dataclass(frozen=True, slots=True)
class Architecture:
    """name: of the GGUF architecture. interleaved: the rows of q and k are stored pair after pair."""

    name: str
    hf_name: str
    model_type: str
    interleaved: bool


ARCHITECTURES: Final = {
    a.name: a
    for a in (
        Architecture("llama", "LlamaForCausalLM", "llama", interleaved=True),
        Architecture("qwen2", "Qwen2ForCausalLM", "qwen2", interleaved=False),
    )
}
TOKEN_IDS: Final = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
END_IDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
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
    rope_factors: npt.NDArray[np.float32] | None,
    dtype: str,
) -> bytes:
    """config.json for the file. Raises InputError naming a key that is missing, of another type, or not supported."""
    arch = f"{architecture.name}."
    if header.integer(f"{arch}expert_count", 0):
        raise header.error(f"{arch}expert_count", "a mixture of experts is not supported")
    hidden = header.integer(f"{arch}embedding_length")
    n_heads = header.integer(f"{arch}attention.head_count")
    if n_heads < 1:
        raise header.error(f"{arch}attention.head_count", f"{n_heads} is not positive")
    head_dim = header.integer(f"{arch}attention.key_length", hidden // n_heads)
    for key in (f"{arch}attention.value_length", f"{arch}rope.dimension_count"):
        if header.integer(key, head_dim) != head_dim:
            raise header.error(key, f"{header.integer(key)} differs from the head size {head_dim}; not supported")
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
        "rope_scaling": _rope_scaling(header, arch, theta, head_dim, rope_factors),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
    }
    if architecture.name == "qwen2":
        config["use_sliding_window"] = False
    elif window := header.integer(f"{arch}attention.sliding_window", 0):
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    else:
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in biases
        config["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in biases
    config |= {name: header.integer(key) for name, key in TOKEN_IDS.items() if key in header}
    return _json(config)


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
    header: GgufHeader, arch: str, theta: float, head_dim: int, factors: npt.NDArray[np.float32] | None
) -> dict[str, object] | None:
    kind = header.text(f"{arch}rope.scaling.type", "none")
    if kind == "none" and f"{arch}rope.scale_linear" in header:  # its name in older files
        factor = header.number(f"{arch}rope.scale_linear")
        kind = "linear" if factor != 1.0 else "none"
    else:
        factor = header.number(f"{arch}rope.scaling.factor", 1.0)
    if kind not in ("none", "linear"):
        raise header.error(f"{arch}rope.scaling.type", f"{kind!r} is not supported; known are none, linear")
    if factors is None:
        return {"rope_type": "linear", "factor": _shortest(factor)} if kind == "linear" else None
    if kind != "none":
        raise header.error(f"{arch}rope.scaling.type", f"{kind!r} together with rope_freqs.weight is not supported")
    return _llama3_scaling(header, theta, head_dim, factors)


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
    """By what each frequency is divided: 1 for short waves, `factor` for long ones, blended between."""
    for i in range(head_dim // 2):
        turns = context * theta ** (-2 * i / head_dim) / (2 * math.pi)
        blend = min(max((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0), 1.0)
        yield 1 / ((1 - blend) / factor + blend)


def _shortest(value: float) -> float:
    """The float of fewest digits that is the same float32 number, as GGUF stores it: 1e-05 and not 9.99...e-06."""
    return float(str(np.float32(value)))


def _json(config: dict[str, object]) -> bytes:
    return json.dumps(config, indent=2).encode() + b"\n"
