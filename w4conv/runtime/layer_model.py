"""Parts of a model by themselves: one decoder layer, whose activations can be observed, and the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from w4conv import kernels
from w4conv.arrays import F32Array
from w4conv.models.spec import ModelSpec
from w4conv.runtime.native_model import Matrix, NativeModel
from w4conv.scheme import TILE_ROWS


class Captured(NamedTuple):
    """Inputs of the linear layers of a decoder layer, by hook, float32.

    qkv, gate_up: (n, hidden_size); o: (n, n_heads * head_dim); down: (n, intermediate_size), or (n, 0) with experts.
    """

    qkv: F32Array
    o: F32Array
    gate_up: F32Array
    down: F32Array


class LayerModel:
    """One decoder layer by itself, for running a model layer by layer.

    matrices: by `TensorSpec.local_name`, raw parts (uint8 arrays, as in the container). vectors: likewise, float32
    arrays of norms and biases.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        matrices: Mapping[str, Matrix],
        vectors: Mapping[str, F32Array],
        *,
        threads: int | None = None,
        activations: str = "int16",
        kv: str = "f16",
    ) -> None:
        self._spec, self._kv = spec, kv
        self._model = NativeModel(spec, [layer], threads=threads, activations=activations)
        for t in spec.layer_tensors(layer):
            if t.role in ("norm", "bias"):
                self._model.set_vector(t, 0, vectors[t.local_name])
            else:
                self._model.set_matrix(t, 0, matrices[t.local_name])
        self._model.native.check_shapes()
        inner = 0 if spec.routed(layer) else spec.intermediate_size
        widths = (spec.hidden_size, spec.n_heads * spec.head_dim, spec.hidden_size, inner)
        self._widths = dict(zip(Captured._fields, widths, strict=True))

    def run(self, hidden: F32Array, *, capture: bool = False, after_attention: bool = False) -> Captured | None:
        """Take one sequence (n_tokens, padded hidden_size) through the layer, in place.

        capture: return copies of the inputs of its linear layers. after_attention: `hidden` has already passed the
        attention block, in `observe` at gate_up.
        """
        start = "gate_up" if after_attention else "qkv"
        captured = self._run(hidden, self._rows(hidden, Captured._fields if capture else ()), start, "down")
        return Captured(**captured) if capture else None

    def observe(self, hidden: F32Array, hook: str, *, after_attention: bool = False) -> F32Array:
        """Take one sequence as far as `hook`, a field of `Captured`, and return the rows there.

        `hidden` is unchanged at qkv. It has passed the attention block at o and gate_up, the whole layer at down.
        after_attention: as in `run`.
        """
        return self._run(hidden, self._rows(hidden, (hook,)), "gate_up" if after_attention else "qkv", hook)[hook]

    def resume(self, hidden: F32Array, hook: str, rows: F32Array) -> F32Array:
        """Take one sequence on from the rows at a hook, o or down, which `observe` gave for this `hidden`: through the
        linear layer that reads them, to the end of the block. Returns the rows at gate_up after o, else `rows`.
        """
        at = self._rows(hidden, (hook, "gate_up") if hook == "o" else (hook,))
        at[hook][:, : rows.shape[1]] = rows
        at[hook][:, rows.shape[1] :] = 0
        last = "gate_up" if hook == "o" else "down"
        return self._run(hidden, at, hook, last)[last]

    def _rows(self, hidden: F32Array, hooks: Sequence[str]) -> dict[str, F32Array]:
        """Room for the rows at some hooks."""
        return {hook: np.empty((len(hidden), padded_width(self._widths[hook])), np.float32) for hook in hooks}

    def _run(self, hidden: F32Array, rows: dict[str, F32Array], start: str, last: str) -> dict[str, F32Array]:
        """rows: padded; those at o or down, where it starts there, are given. Returns them without their padding."""
        n, nowhere = len(hidden), np.empty((0, TILE_ROWS), np.float32)
        session = self._model.native.session(n, self._kv)
        self._model.reach(n)
        session.rope_offset = self._spec.rope_set(n) * len(self._spec.ropes)
        for first in range(0, n, kernels.PASS_TOKENS):
            piece = slice(first, min(first + kernels.PASS_TOKENS, n))
            self._model.native.run_layer(
                session,
                0,
                hidden[piece],
                **{hook: rows[hook][piece] if hook in rows else nowhere for hook in Captured._fields},
                from_=Captured._fields.index(start),
                until={"qkv": 0, "o": 1, "gate_up": 1, "down": 2}[last],
            )
        return {hook: found[:, : self._widths[hook]] for hook, found in rows.items()}


class HeadModel:
    """The final norm and the head by themselves: hidden states after the last layer -> logits."""

    def __init__(
        self,
        spec: ModelSpec,
        head: Matrix,
        norm: F32Array,
        *,
        threads: int | None = None,
        activations: str = "int16",
    ) -> None:
        self._spec = spec
        model = NativeModel(spec, [], threads=threads, activations=activations)
        tensors = {t.part: t for t in spec.tensors() if t.layer is None}
        model.set_vector(tensors["norm"], -1, norm)
        model.set_matrix(tensors.get("lm_head", tensors["embed_tokens"]), -1, head)
        model.native.check_shapes()
        self._native = model.native

    def logits(self, hidden: F32Array) -> F32Array:
        """(n_tokens, padded hidden_size) -> (n_tokens, vocab_size) float32, bit for bit those of a `Model`."""
        out = np.empty((len(hidden), self._spec.vocab_size), np.float32)
        for start in range(0, len(hidden), kernels.PASS_TOKENS):
            piece = slice(start, start + kernels.PASS_TOKENS)
            self._native.finish(np.ascontiguousarray(hidden[piece]), out[piece])
        return out


def padded_width(n: int) -> int:
    """Floats of a row of n in native buffers."""
    return -(-n // TILE_ROWS) * TILE_ROWS
