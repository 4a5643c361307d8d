"""Where the error of a quantized model arises: layer by layer, and in which matrix.

Errors are mean squares relative to the base, for each token; then the mean over tokens. A few tokens have hidden states
a thousand times larger than all others; so each counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from w4conv import cpus, kernels
from w4conv.arrays import F32Array
from w4conv.models.spec import READS
from w4conv.runtime.layer_model import Captured
from w4conv.runtime.layers import LoadedLayer
from w4conv.runtime.native_model import ACTIVATION_BITS, Matrix

N_WINDOWS: Final = 4  # the first of the text, observed
_BRANCHES: Final = {"attention": "o_proj", "mlp": "down_proj"}  # and its last matrix


@dataclass(frozen=True, slots=True)
class MatrixError:
    """part: such as "q_proj". error: of its outputs, on the inputs that it has in the base."""

    part: str
    error: float


@dataclass(frozen=True, slots=True)
class LayerError:
    """block: of the hidden states after the layer; attention, mlp: of the outputs of these blocks, before a norm on
    them; each model in its own run. matrices: of one quantized matrix alone, all others exact."""

    layer: int
    block: float
    attention: float | None
    mlp: float | None
    matrices: tuple[MatrixError, ...]


class LayerErrors:
    """An Observer (layerwise.py) of a model and its base, in this order."""

    n_windows = N_WINDOWS

    def __init__(self, *, threads: int | None = None, activations: str = "int16") -> None:
        """activations: of the first model."""
        self._threads = cpus.thread_count(threads)
        self._bits = ACTIVATION_BITS[activations]
        self._sums: dict[int, dict[str, float]] = {}
        self._n_tokens: dict[int, int] = {}

    def add(
        self, layer: int, loaded: Sequence[LoadedLayer], captured: Sequence[Captured], hidden: Sequence[F32Array]
    ) -> None:
        ours, theirs = loaded
        sums = self._sums.setdefault(layer, {})

        def count(what: str, found: F32Array, target: F32Array) -> None:
            sums[what] = sums.get(what, 0.0) + relative_error(found, target)

        count("block", hidden[0], hidden[1])
        reads = [rows._asdict() for rows in captured]
        for part, matrix in theirs.matrices.items():
            x = reads[1].get(READS.get(part, ""))
            if x is None or x.shape[1:] != matrix[1][1:]:  # experts read the rows of some tokens only
                continue
            target = self._multiply(matrix, x)
            count(part, self._multiply(ours.matrices[part], x), target)
            for branch, last in _BRANCHES.items():
                if part == last:
                    count(branch, self._multiply(ours.matrices[part], reads[0][READS[part]]), target)
        self._n_tokens[layer] = self._n_tokens.get(layer, 0) + len(hidden[0])

    def result(self) -> tuple[LayerError, ...]:
        out = []
        for layer, sums in sorted(self._sums.items()):
            mean = {what: total / self._n_tokens[layer] for what, total in sums.items()}
            block, attention, mlp = mean.pop("block"), mean.pop("attention", None), mean.pop("mlp", None)
            matrices = tuple(MatrixError(part, error) for part, error in mean.items())
            out.append(LayerError(layer, block, attention, mlp, matrices))
        return tuple(out)

    def _multiply(self, matrix: Matrix, x: F32Array) -> F32Array:
        scheme, (n_rows, n_columns), parts = matrix
        rows = np.ascontiguousarray(x)
        return kernels.matmul(
            scheme, (n_rows, n_columns), parts, rows, threads=self._threads, activation_bits=self._bits
        )


@np.errstate(invalid="ignore")  # of a model that is broken: the error is NaN
def relative_error(found: F32Array, target: F32Array) -> float:
    """Sum over rows (the last axis) of |found - target|^2 / |target|^2; of a zero target 1 for any error, else 0."""
    y, e = target.astype(np.float64), found.astype(np.float64) - target
    signal, noise = np.square(y).sum(axis=-1), np.square(e).sum(axis=-1)
    ratio = np.where(noise > 0, 1.0, 0.0)
    return float(np.divide(noise, signal, out=ratio, where=signal > 0).sum())
