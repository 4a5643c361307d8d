"""Section 4 of docs/numerics.md: the layer (4), gates (4.3), experts (4.5), logits (4.6)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from reference_forward.arithmetic import F32, exp, f32, fma, hexadecimal, rmsnorm, softcap, sum16
from reference_forward.attention import Biases, Kept, Rule, attend, visible_to, window_within
from reference_forward.config import Layer, read_config
from reference_forward.gemm import Matrix, multiply, read_matrices
from reference_forward.rope import Rope
from w4conv.container import Container


class ReferenceModel:
    """Logits of a container's model, as docs/numerics.md defines them; options as those of w4conv.Model."""

    def __init__(
        self,
        container: Container,
        *,
        kv: str = "f16",
        activations: str = "int16",
        kv_memory: int | None = None,
        ctx: int | None = None,
    ) -> None:
        self.container, self.kv = container, kv
        self.top = {"int16": 32767, "int8": 127}[activations]
        self.config = read_config(json.loads(container.blobs["config.json"]))
        ctx = ctx or self.config.max_positions
        self.budget = 0 if kv_memory is None else window_within(kv_memory, self.config, kv, ctx)
        self.matrices: dict[str, list[Matrix]] = {}

    # ---- parts of the container ------------------------------------------------------------------------------------

    def vector(self, name: str) -> F32 | None:
        return self.container.dequantize(name) if name in self.container.tensors else None

    def matrix(self, name: str, expert: int = 0) -> Matrix:
        if name not in self.matrices:
            self.matrices[name] = read_matrices(self.container, name)
        return self.matrices[name][expert]

    def linear(self, name: str, x: F32) -> F32:
        return multiply(self.matrix(f"{name}.weight"), x, top=self.top)

    def with_bias(self, name: str, y: F32) -> F32:
        bias = self.vector(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str | None, x: F32) -> F32:
        """RMSNorm over the last axis, or over the parts of it that the weight is long."""
        if name is None:
            return x
        weight = self.vector(f"{name}.weight")
        assert weight is not None
        if self.config.family.norm_offset:
            weight = weight + f32(self.config.family.norm_offset)
        runs = x.reshape(*x.shape[:-1], -1, len(weight))
        return rmsnorm(runs, weight, self.config.eps).reshape(x.shape)

    # ---- 4 From tokens to logits -----------------------------------------------------------------------------------

    def logits(self, tokens: Sequence[int]) -> F32:
        """After each token of a text: (n_tokens, vocab_size)."""
        with np.errstate(all="ignore"):
            rope = next((layer.rope for layer in self.config.layers if layer.rope is not None), None)
            if rope is None or rope.long is None:
                return self.run(tokens, long=False)
            short = self.run(tokens[: rope.limit], long=False)
            if len(tokens) <= rope.limit:
                return short
            return np.concatenate([short, self.run(tokens, long=True)[rope.limit :]])

    def run(self, tokens: Sequence[int], *, long: bool) -> F32:
        embedding = self.matrix("model.embed_tokens.weight")
        x = embedding.rows(np.asarray(tokens)) * f32(self.config.embedding_scale)
        for i, layer in enumerate(self.config.layers):
            x = self.layer(f"model.layers.{i}.", layer, x, long=long)
        return self.head(self.norm("model.norm", x))

    def layer(self, at: str, layer: Layer, x: F32, *, long: bool) -> F32:
        norms = [None if name is None else at + name for name in self.config.family.norms]
        rope = layer.rope.long if layer.rope is not None and long else layer.rope
        y = self.attention(f"{at}self_attn.", layer, rope, self.norm(norms[0], x))
        x = self.add_branch(x, norms[1], self.with_bias(f"{at}self_attn.o_proj", y))
        y = self.norm(norms[2], x)
        y = self.experts(at, y) if layer.routed else self.feed_forward(f"{at}mlp.", y)
        return self.add_branch(x, norms[3], y)

    def add_branch(self, x: F32, norm: str | None, y: F32) -> F32:
        return x + self.norm(norm, y) * f32(self.config.residual_scale)

    def attention(self, at: str, layer: Layer, rope: Rope | None, x: F32) -> F32:
        c, n = self.config, len(x)
        widths = np.cumsum([c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim])
        if c.family.fused:
            q, k, v = np.split(self.with_bias(f"{at}qkv_proj", self.linear(f"{at}qkv_proj", x)), widths, axis=1)
        else:
            q, k, v = (self.linear(f"{at}{part}_proj", x) for part in "qkv")
            q, v = self.with_bias(f"{at}q_proj", q), self.with_bias(f"{at}v_proj", v)
        key_bias = self.vector(f"{at}k_proj.bias")
        if self.kv != "int8" or rope is None or c.family.qk_norm:
            k, key_bias = self.with_bias(f"{at}k_proj", k), None
        if c.family.qk_norm:
            if c.family.qk_norm == "head":
                q, k = q.reshape(n, -1, c.head_dim), k.reshape(n, -1, c.head_dim)
            q, k = self.norm(f"{at}q_norm", q), self.norm(f"{at}k_norm", k)
        q, k, v = (rows.reshape(n, -1, c.head_dim) for rows in (q, k, v))
        if rope is not None:
            q, k = (np.array([rope.rotate(row, p) for p, row in enumerate(rows)]) for rows in (q, k))
        biases = None
        if key_bias is not None and rope is not None:
            biases = Biases.of(q, key_bias.reshape(-1, c.head_dim), rope)
        out = attend(
            q,
            Kept.of(k, self.kv),
            Kept.of(v, self.kv),
            visible_to(n, layer.window, self.budget),
            Rule(c.attention_scale, c.attention_softcap, self.vector(f"{at}sinks")),
            biases,
        )
        return self.linear(f"{at}o_proj", out.reshape(n, -1))

    # ---- 4.3 Gates -------------------------------------------------------------------------------------------------

    def feed_forward(self, at: str, x: F32) -> F32:
        if self.config.family.fused:
            gate, up = np.split(self.linear(f"{at}gate_up_proj", x), 2, axis=1)
        else:
            gate, up = (self.with_bias(f"{at}{p}_proj", self.linear(f"{at}{p}_proj", x)) for p in ("gate", "up"))
        y = self.linear(f"{at}down_proj", activation(self.config.family.activation, gate, up))
        return self.with_bias(f"{at}down_proj", y)

    # ---- 4.5 Experts -----------------------------------------------------------------------------------------------

    def experts(self, at: str, x: F32) -> F32:
        c, names = self.config, self.config.family.experts
        assert names is not None
        scores = self.with_bias(at + names.router, self.linear(at + names.router, x))
        weights = np.zeros_like(scores)  # 0 of experts not chosen
        chosen = np.zeros(scores.shape, np.bool_)
        for m, row in enumerate(scores):
            order = np.argsort(-row, kind="stable")[: c.n_experts_per_token]
            p = exp(row - row.max())
            p = p / sum16(p)
            total = f32(0)
            for e in order:
                total = total + p[e]
            chosen[m, order] = True
            weights[m, order] = p[order] / total if c.renormalized else p[order]
        out = np.zeros_like(x)
        for e in range(c.n_experts):
            rows = np.flatnonzero(chosen[:, e])
            if len(rows):
                out[rows] = out[rows] + weights[rows, e, None] * self.expert(at, e, x[rows])
        return out

    def expert(self, at: str, e: int, x: F32) -> F32:
        c, names = self.config, self.config.family.experts
        assert names is not None

        def product(name: str, x: F32) -> F32:
            own = "{}" in name
            y = multiply(self.matrix(at + name.format(e), 0 if own else e), x, top=self.top)
            bias = self.vector(f"{at}{name}_bias")
            return y if bias is None else y + bias[e]

        if not names.gate_up:
            gate, up = product(names.gate, x), product(names.up, x)
        else:
            both = product(names.gate_up, x)
            half = both.shape[1] // 2
            interleaved = c.family.interleaved
            gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else (both[:, :half], both[:, half:])
        return product(names.down, activation(c.family.activation, gate, up))

    # ---- 4.6 Logits ------------------------------------------------------------------------------------------------

    def head(self, x: F32) -> F32:
        name = "lm_head.weight" if "lm_head.weight" in self.container.tensors else "model.embed_tokens.weight"
        y = multiply(self.matrix(name), x, top=self.top) / f32(self.config.logits_divisor)
        return softcap(y, self.config.final_softcap)


# ---- 4.3 Gates -----------------------------------------------------------------------------------------------------

GELU_CUBE, GELU_SCALE = hexadecimal("0x1.6e4e26p-5"), hexadecimal("0x1.988454p+0")
CLAMPED_SCALE = hexadecimal("0x1.b3b646p+0")


def activation(kind: str, g: F32, u: F32) -> F32:
    if kind == "silu":
        return g / (f32(1) + exp(-g)) * u
    if kind == "gelu":
        y = GELU_SCALE * fma(g * g * GELU_CUBE, g, g)
        return g / (f32(1) + exp(-y)) * u
    if kind != "clamped":
        raise ValueError(f"no such activation: {kind}")
    g = np.where(g > f32(7), f32(7), g)
    u = np.where(u < f32(-7), f32(-7), np.where(u > f32(7), f32(7), u))
    return g / (f32(1) + exp(-(CLAMPED_SCALE * g))) * (u + f32(1))
