"""ModelSpec: a model's tensors, shapes and settings, independent of any file format. No arithmetic on weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from w4conv.models.rope import RopeSpec, RopeTable

Role = Literal["embedding", "head", "linear", "router", "norm", "bias"]

# Norms: the name in the engine, and the name in the checkpoint.
NORMS_BEFORE: Final = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
NORMS_AFTER: Final = {
    "attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
}  # fmt: skip
NORMS_AROUND: Final = {
    "attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
}  # fmt: skip

# The hook whose rows each matrix reads.
READS: Final = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv", "o_proj": "o",
    "gate_proj": "gate_up", "up_proj": "gate_up", "gate_up_proj": "gate_up", "down_proj": "down",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a model needs: its Hugging Face name, its shape, and what it is for.

    layer: index of the decoder layer, or None for embedding, final norm and head.
    part: what it is in the layer: "q_proj", "k_proj", "v_proj" or "qkv_proj", "o_proj", "gate_proj" and "up_proj" or
        "gate_up_proj", "down_proj", "router", a key of NORMS_AROUND, "q_norm", "k_norm", "sinks", "q_proj.bias", ...,
        or "embed_tokens", "norm", "lm_head".
    expert: index of the expert it belongs to. None outside of experts, and where one tensor holds a matrix, or the
        bias, of every expert: shape (n_experts, n_rows, n_columns), or (n_experts, n_rows).
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None
    part: str
    expert: int | None = None

    @property
    def local_name(self) -> str:
        """The part, with the expert where it has one: unique in its layer."""
        return self.part if self.expert is None else f"experts.{self.expert}.{self.part}"


Stack = tuple[TensorSpec, ...]


def stacks_of(tensors: Iterable[TensorSpec]) -> list[Stack]:
    """The matrices of experts that are the same part of a layer together, each other tensor by itself; in order."""
    found: dict[object, list[TensorSpec]] = {}
    for t in tensors:
        found.setdefault(t.name if t.expert is None else (t.layer, t.part), []).append(t)
    return [tuple(stack) for stack in found.values()]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the feed-forward part of layers.

    matrices, biases: part ("gate_proj", "up_proj" or "gate_up_proj", "down_proj") -> name in the layer, with "{}" for
        the expert's index, or without where one tensor holds all of them.
    renormalized: an expert's weight is the softmax over those chosen; else over all.
    layers: which layers have experts.
    """

    n_experts: int
    n_per_token: int
    intermediate_size: int
    router: str
    matrices: Mapping[str, str]
    layers: tuple[bool, ...]
    renormalized: bool = True
    biases: Mapping[str, str] = field(default_factory=dict)
    router_bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary attention, gated feed-forward layers.

    family: the file in w4conv/models. architecture: as in config.json.
    max_positions: the longest sequence, with rope scaling.
    rope: of all layers; where local_rope is given, that one rotates the layers with a window. no_rope: layers without.
    sliding_windows: a window for each layer, 0 = none; empty = none anywhere.
    norms: a NORMS_ constant. norm_offset: added to the weights of every RMSNorm.
    qk_norm: RMSNorm on queries and keys before the rotation, of each "head" or of the whole "row"; "" for none.
    fused: matrices that hold several: "qkv" (queries' rows, then keys', then values'), "gate_up" (the gate's first).
    interleaved: the rows of gate and up alternate.
    activation: a key of ACTIVATIONS: "silu", "gelu_tanh" or "clamped_silu".
    attention_scale: factor of q.k; 0 stands for 1 / sqrt(head_dim). residual_scale: factor of each branch's output.
    softcaps: x -> cap * tanh(x / cap); 0 for none. sinks: a logit a head that takes part in the softmax.
    """

    family: str
    architecture: str
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
    sliding_windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    local_rope: RopeSpec | None = None
    no_rope: tuple[int, ...] = ()
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS_BEFORE)
    norm_offset: float = 0.0
    qk_norm: Literal["", "head", "row"] = ""
    fused: tuple[str, ...] = ()
    interleaved: bool = False
    activation: str = "silu"
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    final_softcap: float = 0.0
    sinks: bool = False
    experts: Experts | None = None

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the model in the order a forward pass touches them; a tied head is not listed."""
        return tuple(self.each_tensor())

    def each_tensor(self) -> Iterator[TensorSpec]:
        """The same, one at a time: a config may claim more tensors than any file has."""
        vocabulary = (self.vocab_size, self.hidden_size)
        yield TensorSpec("model.embed_tokens.weight", vocabulary, "embedding", None, "embed_tokens")
        for layer in range(self.n_layers):
            yield from self.layer_tensors(layer)
        yield TensorSpec("model.norm.weight", (self.hidden_size,), "norm", None, "norm")
        if not self.tied_head:
            yield TensorSpec("lm_head.weight", vocabulary, "head", None, "lm_head")

    def layer_tensors(self, layer: int) -> list[TensorSpec]:
        """Those of one layer."""
        out = [*self._norm(layer, "attention_norm"), *self._attention(layer), *self._norm(layer, "attention_out_norm")]
        out += self._norm(layer, "mlp_norm")
        out += self.expert_tensors(layer) if self.routed(layer) else self._mlp(layer)
        return out + self._norm(layer, "mlp_out_norm")

    def used_by_token(self, tensor: TensorSpec, amount: int) -> int:
        """Of `amount` elements or bytes of a tensor, those that decoding one token reads: of experts those that it goes
        to, one row of an embedding that is no head."""
        if tensor.role == "embedding" and not self.tied_head:
            return amount // self.vocab_size
        if self.experts is not None and (tensor.expert is not None or len(tensor.shape) == 3):
            return amount * self.experts.n_per_token // self.experts.n_experts
        return amount

    def routed(self, layer: int) -> bool:
        """Whether the layer's feed-forward part is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """`rope`, and `local_rope` where there is one."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def long_after(self) -> tuple[int, ...]:
        """Positions beyond which a sequence takes the next set of `rope_tables`, rising; () where there is one set."""
        return tuple(sorted({rope.original_max_positions for rope in self.ropes if rope.scaling == "longrope"}))

    def rope_set(self, n_positions: int) -> int:
        """Which set of `rope_tables` a sequence of so many positions takes."""
        return sum(n_positions > limit for limit in self.long_after)

    def rope_tables(self, n_positions: int) -> list[tuple[RopeSpec, RopeTable]]:
        """A set of tables, one for each of `ropes`, for sequences of at most n_positions; behind it, where there is a
        "longrope", a set for the sequences beyond each of `long_after`. A rope that does not change has the same table
        in all."""
        tables = [(rope, rope.tables(self.head_dim, n_positions)) for rope in self.ropes]
        sets = [0, *self.long_after]
        return [(rope, own[len(own) > 1 and rope.original_max_positions <= s]) for s in sets for rope, own in tables]

    def rope_index(self, layer: int) -> int:
        """Of `ropes`; -1 for none."""
        if layer in self.no_rope:
            return -1
        return int(self.local_rope is not None and self.window(layer) > 0)

    def window(self, layer: int) -> int:
        """Newest keys that the layer sees; 0 for all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def _norm(self, layer: int, part: str) -> list[TensorSpec]:
        if part not in self.norms:
            return []
        name = f"model.layers.{layer}.{self.norms[part]}.weight"
        return [TensorSpec(name, (self.hidden_size,), "norm", layer, part)]

    def _linear(self, layer: int, module: str, n_out: int, n_in: int, *, bias: bool) -> Iterator[TensorSpec]:
        name, part = f"model.layers.{layer}.{module}", module.rpartition(".")[2]
        yield TensorSpec(f"{name}.weight", (n_out, n_in), "linear", layer, part)
        if bias:
            yield TensorSpec(f"{name}.bias", (n_out,), "bias", layer, f"{part}.bias")

    def _attention(self, layer: int) -> Iterator[TensorSpec]:
        hidden = self.hidden_size
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        if "qkv" in self.fused:
            yield from self._linear(layer, "self_attn.qkv_proj", q + 2 * kv, hidden, bias=self.qkv_bias)
        else:
            for part, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                yield from self._linear(layer, f"self_attn.{part}", width, hidden, bias=self.qkv_bias)
        prefix = f"model.layers.{layer}.self_attn."
        if self.qk_norm:
            for part, width in (("q_norm", q), ("k_norm", kv)):
                shape = (self.head_dim if self.qk_norm == "head" else width,)
                yield TensorSpec(f"{prefix}{part}.weight", shape, "norm", layer, part)
        if self.sinks:
            yield TensorSpec(f"{prefix}sinks", (self.n_heads,), "bias", layer, "sinks")
        yield from self._linear(layer, "self_attn.o_proj", hidden, q, bias=self.o_bias)

    def _mlp(self, layer: int) -> Iterator[TensorSpec]:
        hidden, inner = self.hidden_size, self.intermediate_size
        if "gate_up" in self.fused:
            yield from self._linear(layer, "mlp.gate_up_proj", 2 * inner, hidden, bias=self.mlp_bias)
        else:
            for part in ("gate_proj", "up_proj"):
                yield from self._linear(layer, f"mlp.{part}", inner, hidden, bias=self.mlp_bias)
        yield from self._linear(layer, "mlp.down_proj", hidden, inner, bias=self.mlp_bias)

    def expert_tensors(self, layer: int) -> list[TensorSpec]:
        """Router and experts of a layer that has them."""
        return list(self._experts(layer))

    def _experts(self, layer: int) -> Iterator[TensorSpec]:
        assert self.experts is not None
        e, prefix = self.experts, f"model.layers.{layer}."
        shapes = {
            "gate_proj": (e.intermediate_size, self.hidden_size),
            "up_proj": (e.intermediate_size, self.hidden_size),
            "gate_up_proj": (2 * e.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, e.intermediate_size),
        }
        yield TensorSpec(f"{prefix}{e.router}.weight", (e.n_experts, self.hidden_size), "router", layer, "router")
        if e.router_bias:
            yield TensorSpec(f"{prefix}{e.router}.bias", (e.n_experts,), "bias", layer, "router.bias")
        for expert in range(e.n_experts):
            for part, name in e.matrices.items():
                if "{}" in name:
                    yield TensorSpec(prefix + name.format(expert), shapes[part], "linear", layer, part, expert)
        for part, name in e.matrices.items():
            if "{}" not in name:
                yield TensorSpec(prefix + name, (e.n_experts, *shapes[part]), "linear", layer, part)
            if part in e.biases:
                shape = (e.n_experts, shapes[part][0])
                yield TensorSpec(prefix + e.biases[part], shape, "bias", layer, f"{part}.bias")

    @property
    def n_parameters(self) -> int:
        return sum(math.prod(t.shape) for t in self.tensors())
