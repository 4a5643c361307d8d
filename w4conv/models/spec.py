"""ModelSpec: what the engine must know of a model, independent of any file format. No arithmetic on weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Role = Literal["embedding", "head", "linear", "norm", "bias"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a model needs: its Hugging Face name, its shape, and what it is for.

    layer: index of the decoder layer, or None for embedding, final norm and head.
    part: place in the layer: "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        "input_layernorm", "post_attention_layernorm", "q_proj.bias", ..., or "embed_tokens", "norm", "lm_head".
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None
    part: str


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base and scaling.

    scaling: "default", "linear" or "llama3"; the other fields hold what that scaling needs (FORMATS: config.json keys
    `factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`).
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """head_dim / 2 angular frequencies in radians a position, one for each pair (i, i + head_dim / 2)."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.scaling == "linear":
            return tuple(f / self.factor for f in plain)
        if self.scaling == "llama3":
            return tuple(self._llama3(f) for f in plain)
        return tuple(plain)

    def _llama3(self, frequency: float) -> float:
        # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.
        turns = self.original_max_positions * frequency / (2 * math.pi)
        if turns > self.high_freq_factor:
            return frequency
        if turns < self.low_freq_factor:
            return frequency / self.factor
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - blend) * frequency / self.factor + blend * frequency


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer of the Llama shape (RMSNorm first, rotary attention, gated SiLU feed-forward)."""

    family: str  # the file in w4conv/models: "llama", "mistral", "qwen2"
    architecture: str  # as in config.json: "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_positions: int
    sliding_windows: tuple[int, ...] = ()  # a window for each layer, 0 = none; empty = none anywhere
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the model in the order a forward pass touches them; a tied head is not listed."""
        out = [
            TensorSpec(
                "model.embed_tokens.weight", (self.vocab_size, self.hidden_size), "embedding", None, "embed_tokens"
            )
        ]
        for layer in range(self.n_layers):
            out += self._layer(layer)
        out.append(TensorSpec("model.norm.weight", (self.hidden_size,), "norm", None, "norm"))
        if not self.tied_head:
            out.append(TensorSpec("lm_head.weight", (self.vocab_size, self.hidden_size), "head", None, "lm_head"))
        return tuple(out)

    def _layer(self, layer: int) -> list[TensorSpec]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        prefix = f"model.layers.{layer}."
        out: list[TensorSpec] = []

        def norm(part: str) -> None:
            out.append(TensorSpec(f"{prefix}{part}.weight", (hidden,), "norm", layer, part))

        def linear(module: str, part: str, n_out: int, n_in: int, *, bias: bool) -> None:
            out.append(TensorSpec(f"{prefix}{module}.{part}.weight", (n_out, n_in), "linear", layer, part))
            if bias:
                out.append(TensorSpec(f"{prefix}{module}.{part}.bias", (n_out,), "bias", layer, f"{part}.bias"))

        norm("input_layernorm")
        linear("self_attn", "q_proj", q, hidden, bias=self.qkv_bias)
        linear("self_attn", "k_proj", kv, hidden, bias=self.qkv_bias)
        linear("self_attn", "v_proj", kv, hidden, bias=self.qkv_bias)
        linear("self_attn", "o_proj", hidden, q, bias=self.o_bias)
        norm("post_attention_layernorm")
        linear("mlp", "gate_proj", inner, hidden, bias=self.mlp_bias)
        linear("mlp", "up_proj", inner, hidden, bias=self.mlp_bias)
        linear("mlp", "down_proj", hidden, inner, bias=self.mlp_bias)
        return out

    @property
    def n_parameters(self) -> int:
        return sum(math.prod(t.shape) for t in self.tensors())
