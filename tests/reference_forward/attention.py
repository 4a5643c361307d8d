"""Section 5 of docs/numerics.md: attention, and the keys and values kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_forward.arithmetic import F32, exp, f32, fma, softcap, sum16
from reference_forward.config import Model
from reference_forward.gemm import integers
from reference_forward.rope import Rope

KV_SPLIT = 256
SINK_TOKENS = 16  # first positions that every query sees under a budget
LEAST_WINDOW = 64
PASS = 120  # tokens of one pass


@dataclass(frozen=True)
class Rule:
    """The rules for the scores of a layer; sinks: (n_heads,) or None."""

    scale: float
    softcap: float
    sinks: F32 | None


@dataclass(frozen=True)
class Kept:
    """Keys or values as they are stored: (n_tokens, n_kv_heads, head_dim) as float32, and of int8 the scales."""

    rows: F32
    scales: F32 | None  # (n_tokens, n_kv_heads)

    @classmethod
    def of(cls, x: F32, kind: str) -> Kept:
        """5.2: each token's row of a KV head by itself."""
        if kind == "int8":
            scales, codes = integers(x, 127)
            return cls(codes.astype(f32), scales[..., 0])
        return cls(x.astype(np.float16).astype(f32) if kind == "f16" else x, None)


# ---- 5.1 Scores and KV splits --------------------------------------------------------------------------------------


def chain(a: F32, b: F32) -> F32:
    """a: (n, n_heads, d), b: (n_keys, n_heads, d). (n, n_heads, n_keys): fma over d, ascending, from 0."""
    s = np.zeros((*a.shape[:2], len(b)), f32)
    for i in range(a.shape[2]):
        s = fma(a[:, :, i, None], b[:, :, i].T[None], s)
    return s


def attend(q: F32, keys: Kept, values: Kept, visible: npt.NDArray[np.bool_], rule: Rule, biases: Biases | None) -> F32:
    """q: (n, n_heads, head_dim), of as many tokens as keys and values have; visible: (n, n). (n, n_heads, head_dim)."""
    n_group = q.shape[1] // keys.rows.shape[1]

    def of_heads(x: Any, split: slice) -> Any:  # a KV head's queries one after another
        return None if x is None else np.repeat(x[split], n_group, axis=1)

    tops, sums, outs = [], [], []
    for start in range(0, len(keys.rows), KV_SPLIT):
        split = slice(start, start + KV_SPLIT)
        mask = visible[:, None, split]
        score = chain(q, of_heads(keys.rows, split))
        if keys.scales is not None:
            score = score * of_heads(keys.scales, split).T
        if biases is not None:
            score = score + chain(biases.queries, biases.positions[split, None])
        score = softcap(score * f32(rule.scale), rule.softcap)
        score = np.where(mask, score, f32(-np.inf))
        top = score.max(axis=2)
        p = np.where(mask, exp(score - top[..., None]), f32(0))
        tops.append(top)
        sums.append(sum16(p))
        if values.scales is not None:
            p = p * of_heads(values.scales, split).T
        out, v = np.zeros_like(q), of_heads(values.rows, split)
        for j in range(len(v)):
            out = np.where(mask[..., j, None], fma(p[..., j, None], v[None, j], out), out)
        outs.append(out)
    return join(tops, sums, outs, rule.sinks)


def join(tops: Sequence[F32], sums: Sequence[F32], outs: Sequence[F32], sinks: F32 | None) -> F32:
    """KV splits ascending; a split of which a query sees nothing has the sum 0 and is skipped."""
    top = np.max([*tops, *([] if sinks is None else [np.broadcast_to(sinks, tops[0].shape)])], axis=0)
    total = np.zeros_like(top) if sinks is None else exp(sinks - top)
    out = np.zeros_like(outs[0])
    first = np.ones(top.shape, np.bool_)
    for split_top, split_sum, split_out in zip(tops, sums, outs, strict=True):
        some = split_sum != 0
        w = exp(np.where(some, split_top - top, f32(0)))
        total = np.where(some, total + split_sum * w, total)
        x = split_out * w[..., None]
        out = np.where(some[..., None], np.where(first[..., None], x, out + x), out)
        first &= ~some
    return out / total[..., None]


# ---- 5.3 Keys of 8 bits with a bias --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Biases:
    """queries: (n, n_heads, n_terms), the t of the page; positions: (n keys, n_terms), its r."""

    queries: F32
    positions: F32

    @classmethod
    def of(cls, q: F32, bias: F32, rope: Rope) -> Biases:
        """q: rotated queries (n, n_heads, head_dim); bias: (n_kv_heads, head_dim)."""
        b = np.repeat(bias, q.shape[1] // len(bias), axis=0)
        tables = [rope.cos_sin(position) for position in range(len(q))]
        n = len(tables[0][0])
        qa, qb, ba, bb = q[..., :n], q[..., n : 2 * n], b[:, :n], b[:, n : 2 * n]
        terms = [qa * ba + qb * bb, qb * ba - qa * bb]
        positions = [np.array([cos for cos, _ in tables]), np.array([sin for _, sin in tables])]
        if q.shape[2] > 2 * n:
            rest = np.zeros(q.shape[:2], f32)
            for i in range(2 * n, q.shape[2]):
                rest = rest + q[..., i] * b[:, i]
            terms.append(rest[..., None])
            positions.append(np.ones((len(q), 1), f32))
        return cls(np.concatenate(terms, axis=2), np.concatenate(positions, axis=1))


# ---- 5.4 Windows and budgets ---------------------------------------------------------------------------------------


def visible_to(n: int, window: int, budget: int) -> npt.NDArray[np.bool_]:
    """(n queries, n keys). window: of the layer, or 0; budget: the window of `--kv-memory`, or 0."""
    query, key = np.arange(n)[:, None], np.arange(n)[None]
    if budget and (not window or budget < window):
        return (key <= query) & ((key > query - budget) | (key < SINK_TOKENS))
    return (key <= query) & ((key > query - window) | (window == 0))


def window_within(nbytes: int, model: Model, kind: str, ctx: int) -> int:
    """The window that a budget sets; 0 when it holds a whole context."""

    def up(n: int, step: int) -> int:
        return -(-n // step) * step

    def session_nbytes(budget: int) -> int:
        total, size = 0, {"f32": 4, "f16": 2, "int8": 1}[kind]
        for layer in model.layers:
            window, n_sink_tokens = layer.window, 0
            if budget and (not window or budget < window):
                window, n_sink_tokens = budget, SINK_TOKENS
            slots = up(ctx, KV_SPLIT)
            if window:
                slots = min(slots, up(n_sink_tokens + window - 1 + PASS, KV_SPLIT))
            a_token = (model.head_dim + up(model.head_dim, 16)) * size + (8 if kind == "int8" else 0)
            total += model.n_kv_heads * slots * a_token
        return total

    if session_nbytes(0) <= nbytes:
        return 0
    return max(window for window in range(LEAST_WINDOW, ctx) if session_nbytes(window) <= nbytes)
