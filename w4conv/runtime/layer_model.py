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
        self._routed = spec.routed(layer)
        self._model = NativeModel(spec, [layer], threads=threads, activations=activations)
        for t in spec.layer_tensors(layer):
            if t.role in ("norm", "bias"):
                self._model.set_vector(t, 0, vectors[t.local_name])
            else:
                self._model.set_matrix(t, 0, matrices[t.local_name])
        self._model.native.check_shapes()

    def run(self, hidden: F32Array, *, capture: bool = False, after_attention: bool = False) -> Captured | None:
        """Take one sequence (n_tokens, padded hidden_size) through the layer, in place.

        capture: return copies of the inputs of its linear layers. after_attention: `hidden` has already passed the
        attention block, in `observe` at gate_up.
        """
        captured = self._run(hidden, Captured._fields if capture else (), Captured._fields[-1], after_attention)
        return Captured(**captured) if capture else None

    def observe(self, hidden: F32Array, hook: str, *, after_attention: bool = False) -> F32Array:
        """Take one sequence as far as `hook`, a field of `Captured`, and return the rows there.

        `hidden` is unchanged at qkv. It has passed the attention block at o and gate_up, the whole layer at down.
        after_attention: as in `run`.
        """
        return self._run(hidden, (hook,), hook, after_attention)[hook]

    def _run(self, hidden: F32Array, wanted: Sequence[str], last: str, after_attention: bool) -> dict[str, F32Array]:
        n, spec = len(hidden), self._spec
        of_heads = spec.n_heads * spec.head_dim
        inner = 0 if self._routed else spec.intermediate_size
        widths = dict(zip(Captured._fields, (spec.hidden_size, of_heads, spec.hidden_size, inner), strict=True))
        captured = {
            hook: np.empty((n if hook in wanted else 0, padded_width(w)), np.float32) for hook, w in widths.items()
        }
        until = {"qkv": 0, "o": 1, "gate_up": 1, "down": 2}[last]
        session = self._model.native.session(n, self._kv)
        self._model.reach(n)
        session.rope_offset = spec.rope_set(n) * len(spec.ropes)
        for start in range(0, n, kernels.PASS_TOKENS):
            piece = slice(start, min(start + kernels.PASS_TOKENS, n))
            self._model.native.run_layer(
                session,
                0,
                hidden[piece],
                **{hook: c[piece] for hook, c in captured.items()},
                until=until,
                after_attention=after_attention,
            )
        return {hook: captured[hook][:, : widths[hook]] for hook in wanted}


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
