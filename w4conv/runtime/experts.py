"""A layer of experts, one expert after another: all tokens pass it together, and memory holds its weights only.

The results are bit for bit the engine's (docs/numerics.md 4.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from w4conv import kernels
from w4conv.arrays import F32Array
from w4conv.models.spec import Experts, ModelSpec
from w4conv.runtime.native_model import Matrix
from w4conv.scheme import F32

ROUTED_PARTS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Routing:
    """Of each token and expert, (n_tokens, n_experts). weights: factors of the experts' outputs, where chosen. margins:
    router scores above the lowest score that was chosen."""

    chosen: npt.NDArray[np.bool_]
    weights: F32Array
    margins: F32Array


def route(experts: Experts, scores: F32Array) -> Routing:
    """scores: of the router with its bias, finite."""
    rows = np.arange(len(scores))
    order = np.argsort(-scores, axis=1, kind="stable")[:, : experts.n_per_token]  # of equal ones the first
    chosen = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(chosen, order, np.True_, axis=1)
    weights = kernels.softmax(scores)
    if experts.renormalized:
        total = np.zeros(len(scores), np.float32)
        for expert in order.T:
            total += weights[rows, expert]
        weights = weights / total[:, None]
    return Routing(chosen, weights, scores - np.take_along_axis(scores, order[:, -1:], axis=1))


class Expert:
    """One expert. matrices, biases: by part; an absent bias is none."""

    def __init__(
        self, spec: ModelSpec, matrices: Mapping[str, Matrix], biases: Mapping[str, F32Array], *, threads: int | None
    ) -> None:
        self._spec, self._matrices, self._biases, self._threads = spec, matrices, biases, threads

    def n_rows(self, part: str) -> int:
        return self._matrices[part][1][-2]

    def product(self, part: str, x: F32Array) -> F32Array:
        """x (n, n_columns) times a matrix, without its bias: (n, n_rows)."""
        return product(self._matrices[part], x, threads=self._threads)

    def inner(self, x: F32Array) -> F32Array:
        """The inputs of down_proj: (n, hidden_size) -> (n, intermediate_size)."""
        if "gate_up_proj" in self._matrices:
            both = self._output("gate_up_proj", x)
            gate, up = (both[:, ::2], both[:, 1::2]) if self._spec.interleaved else np.split(both, 2, axis=1)
        else:
            gate, up = self._output("gate_proj", x), self._output("up_proj", x)
        return kernels.gated(self._spec.activation, gate, up, threads=self._threads)

    def output(self, inner: F32Array) -> F32Array:
        """(n, intermediate_size) -> (n, hidden_size)."""
        return self._output("down_proj", inner)

    def _output(self, part: str, x: F32Array) -> F32Array:
        y = self.product(part, x)
        return y + self._biases[part] if part in self._biases else y


def product(matrix: Matrix, x: F32Array, *, threads: int | None) -> F32Array:
    scheme, shape, parts = matrix
    if not len(x):
        return np.empty((0, shape[-2]), np.float32)
    return kernels.matmul(scheme, (shape[-2], shape[-1]), parts, x, threads=threads)


def attention_alone(spec: ModelSpec, layer: int) -> tuple[ModelSpec, dict[str, Matrix]]:
    """A layer of experts without them, for observing what comes before: a dense layer, and the matrices of zeros, one
    channel wide, that it has in place of the experts."""
    dense = replace(spec, experts=None, intermediate_size=1, mlp_bias=False)
    zeros = {t.part: t.shape for t in dense.layer_tensors(layer) if t.part in ROUTED_PARTS}
    return dense, {
        part: (F32, shape, kernels.nearest_parts(np.zeros(shape, np.float32), "F32", F32))
        for part, shape in zeros.items()
    }
