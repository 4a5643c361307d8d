"""What lies between the products of a feed-forward part: gates, and the softmax of a router."""

from __future__ import annotations

import numpy as np

from w4conv import _native
from w4conv.arrays import F32Array
from w4conv.kernels.pool import native_pool
from w4conv.kernels.tiers import isa_tier
from w4conv.scheme import TILE_ROWS


def gated(activation: str, gate: F32Array, up: F32Array, *, threads: int | None = None) -> F32Array:
    """gate(g, u) of docs/numerics.md 4.3, (n_rows, n) each; the same bits on every tier."""
    n = gate.shape[1]
    out = _padded(gate)
    _native.gated(native_pool(threads), activation, out, _padded(up), n)
    return out[:, :n]


def softmax(x: F32Array) -> F32Array:
    """The softmax of each row of finite values (docs/numerics.md 4.5); the same bits on every tier."""
    isa_tier()
    n = x.shape[1]
    out = _padded(x)
    _native.softmax(out, n)
    return out[:, :n]


def _padded(x: F32Array) -> F32Array:
    out = np.zeros((len(x), -(-x.shape[1] // TILE_ROWS) * TILE_ROWS), np.float32)
    out[:, : x.shape[1]] = x
    return out
