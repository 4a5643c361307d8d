"""The native model: made from a ModelSpec, its weights set a tensor at a time, its RoPE tables grown as needed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv import _native, cpus, kernels
from w4conv.arrays import F32Array
from w4conv.errors import UsageError
from w4conv.models.spec import ModelSpec, TensorSpec
from w4conv.scheme import QuantScheme

ACTIVATION_BITS: Final = {"int16": 16, "int8": 8}
# Scheme, shape (of a stack: with the number of matrices in front), and raw parts as in the container.
Matrix = tuple[QuantScheme, tuple[int, ...], Mapping[str, npt.NDArray[np.uint8]]]

_ROPE_STEP: Final = 1024  # lengths whose frequencies are made together


class NativeModel:
    """Some layers of a model, at first without weights. native: what runs; its methods check shapes and types."""

    def __init__(self, spec: ModelSpec, layers: Sequence[int], *, threads: int | None, activations: str) -> None:
        """layers: of the model, in order; they become layers 0, 1 .. here. Raises UsageError, ResourceError."""
        self.native = _new_native(spec, layers, threads=threads, activations=activations)
        self._head_dim, self._norm_offset, self._lock = spec.head_dim, spec.norm_offset, threading.Lock()
        self._growing = [(i, rope) for i, (rope, _) in enumerate(spec.rope_tables(1)) if rope.scaling == "dynamic"]
        self._reach = [rope.original_max_positions for _, rope in self._growing]

    def reach(self, n_positions: int) -> None:
        """Extend RoPE tables to sequences of n_positions."""
        if not self._growing or n_positions <= min(self._reach):
            return
        with self._lock:
            for k, (i, rope) in enumerate(self._growing):
                while self._reach[k] < n_positions:
                    start, stop = self._reach[k] + 1, self._reach[k] + _ROPE_STEP + 1
                    self.native.extend_rope(i, rope.rows(self._head_dim, start, stop))
                    self._reach[k] = stop - 1

    def set_matrix(self, t: TensorSpec, layer: int, matrix: Matrix) -> None:
        """A matrix, or a stack of those of all experts. layer: as here; -1 for what belongs to none."""
        scheme, shape, parts = matrix
        if len(shape) == 2:
            stack = [(-1 if t.expert is None else t.expert, parts)]
        else:  # the matrices of all experts, one after another
            stack = [
                (i, {kind: part.reshape(shape[0], -1)[i] for kind, part in parts.items()}) for i in range(shape[0])
            ]
        for expert, own in stack:
            self.native.set_linear(layer, expert, t.part, kernels.matrix_parts(scheme, (shape[-2], shape[-1]), own))

    def set_vector(self, t: TensorSpec, layer: int, values: F32Array) -> None:
        """A norm, a bias (of all experts: a row each) or the sink logits. layer: as of `set_matrix`."""
        if t.part == "sinks":
            self.native.set_sinks(layer, values)
        elif t.role == "norm":
            self.native.set_norm(layer, t.part, values + np.float32(self._norm_offset))
        else:
            rows = values if values.ndim == 2 else values[None]
            experts = range(len(rows)) if values.ndim == 2 else [-1 if t.expert is None else t.expert]
            for expert, row in zip(experts, rows, strict=True):
                self.native.set_bias(layer, expert, t.part.removesuffix(".bias"), np.ascontiguousarray(row))


def _new_native(spec: ModelSpec, layers: Sequence[int], *, threads: int | None, activations: str) -> _native.Model:
    if activations not in tuple(ACTIVATION_BITS):
        raise UsageError(f"activations {activations!r} are neither {' nor '.join(ACTIVATION_BITS)}")
    c = _native.ModelConfig()
    c.vocab_size, c.hidden_size, c.norm_eps = spec.vocab_size, spec.hidden_size, spec.norm_eps
    c.n_heads, c.n_kv_heads, c.head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
    c.attention_scale = spec.attention_scale or spec.head_dim**-0.5
    c.attention_softcap, c.final_softcap = spec.attention_softcap, spec.final_softcap
    c.embedding_scale, c.residual_scale = spec.embedding_scale, spec.residual_scale
    c.logits_divisor, c.interleaved = spec.logits_divisor, spec.interleaved
    c.activation_bits = ACTIVATION_BITS[activations]
    c.set_activation(spec.activation)
    if spec.experts is not None:
        c.n_experts_per_token, c.renormalized = spec.experts.n_per_token, spec.experts.renormalized
    for _, table in spec.rope_tables(1):
        c.add_rope(*table)
    for layer in layers:
        c.add_layer(spec.rope_index(layer), spec.window(layer))
    with kernels.starting_threads():
        return _native.new_model(c, cpus.thread_count(threads))
