"""Sensitivity: the loss of each matrix with each scheme of a menu. The allocation of bits minimizes their sum.

With a calibration set, the loss is KLD in nats. It is measured for each layer: the layer is coded with the smallest
scheme, all others are exact. It is split among the matrices of the layer in proportion to the error that each alone
causes in the layer's output. For larger schemes it scales with the error of the weights, each column weighted by the
mean square of its inputs.

The matrices of all experts that are one part of a layer count as one matrix: they get one scheme.

Data-free, the loss is the relative error of the weights times a weight by part (PART_WEIGHTS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv import codes, elementary, kernels
from w4conv.arrays import F32Array, F64Array
from w4conv.calibration.statistics import Statistics
from w4conv.errors import InputError
from w4conv.measure.divergence import kullback_leibler, log_softmax
from w4conv.measure.layer_errors import relative_error
from w4conv.models.spec import READS, ModelSpec, Stack, TensorSpec
from w4conv.runtime.layer_model import LayerModel
from w4conv.runtime.layers import LayeredSource
from w4conv.runtime.native_model import Matrix
from w4conv.scheme import QuantScheme
from w4conv.sources.base import Source

IntArray = npt.NDArray[np.int64]

EMBEDDING, HEAD = "embed_tokens", "lm_head"
N_SEQUENCES: Final = 4
SEQUENCE_TOKENS: Final = 128  # of each, at most
_SCORED_EVERY: Final = 2  # logits are compared at one position in so many
_SAMPLED_EXPERTS: Final = 4
_SAMPLED_ROWS: Final = 1024  # the error of weights is measured on so many rows of a matrix, in runs of 16
# KLD for the same relative error of the weights, relative to q_proj, measured on SmolLM2-135M. Ends: for each layer.
PART_WEIGHTS: Final[Mapping[str, float]] = {
    "q_proj": 1, "k_proj": 1, "v_proj": 6, "qkv_proj": 4, "o_proj": 1.5, "gate_proj": 2.5, "up_proj": 4,
    "gate_up_proj": 3.5, "down_proj": 4,
}  # fmt: skip
OTHER_WEIGHT: Final = 3.0
END_WEIGHT: Final = 4.5


class Sensitivity:
    """Losses, one for each scheme of the menu, of tensors or stacks of them, by the name of the first."""

    def __init__(
        self, source: Source, stacks: Sequence[Stack], menu: Sequence[QuantScheme], *, threads: int | None,
        advance: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        """stacks: the matrices in question (`stacks_of`). advance: called with the bytes and the first name of each."""
        self._source, self._stacks, self._menu = source, stacks, menu
        self._threads, self._advance = threads, advance

    def from_weights(self) -> dict[str, tuple[float, ...]]:
        weights = self._part_weights()
        return {s[0].name: tuple(weights[s[0].name] * e for e in self._errors(s, None)) for s in self._stacks}

    def _part_weights(self) -> dict[str, float]:
        firsts = [s[0] for s in self._stacks]
        of_end = END_WEIGHT * max(len({t.layer for t in firsts if t.layer is not None}), 1)
        return {t.name: of_end if t.layer is None else PART_WEIGHTS.get(t.part, OTHER_WEIGHT) for t in firsts}

    def from_statistics(self, statistics: Statistics) -> dict[str, tuple[float, ...]]:
        """As `from_weights`, each column weighted by the mean square of its input."""

        def squares(t: TensorSpec) -> F64Array | None:
            if t.layer is None:
                return None
            return np.asarray(statistics.at_hook(t.layer, READS[t.part]).mean_square[0], np.float64)

        weights = self._part_weights()
        return {s[0].name: tuple(weights[s[0].name] * e for e in self._errors(s, squares(s[0]))) for s in self._stacks}

    def from_calibration_set(self, spec: ModelSpec, sequences: IntArray) -> dict[str, tuple[float, ...]]:
        """sequences: (n, ctx) token ids, of which N_SEQUENCES are used."""
        some = np.unique(np.arange(N_SEQUENCES) * len(sequences) // N_SEQUENCES)
        ends = [s for s in self._stacks if s[0].layer is None]
        run = _Run(
            LayeredSource(self._source, threads=self._threads),
            sequences[some, :SEQUENCE_TOKENS],
            {s[0].part: self._coded(s[0]) for s in ends},
            self._threads,
        )
        layers: list[dict[str, float]] = []  # by layer: the error that each matrix or stack alone causes
        errors: dict[str, tuple[float, ...]] = {}
        for layer in range(spec.n_layers):
            here = [s for s in self._stacks if s[0].layer == layer]
            alone, squares = run.layer(layer, {s[0].name: {t.local_name: self._coded(t) for t in s} for s in here})
            layers.append(alone)
            errors |= {s[0].name: self._errors(s, squares.get(READS.get(s[0].part, ""))) for s in here}
        errors |= {s[0].name: self._errors(s, None) for s in ends}
        found = run.divergences()
        losses = {}
        for layer, alone in enumerate(layers):
            whole = sum(alone.values())
            for name, error in alone.items():
                losses[name] = found[layer] * error / whole if whole > 0 else 0.0
        losses |= {s[0].name: found[s[0].part] for s in ends}
        if not np.isfinite(list(losses.values())).all():
            raise InputError(f"{self._source.path}: the model's activations are not finite; its weights are broken")
        return {
            name: tuple(losses[name] * (e / errors[name][0] if errors[name][0] > 0 else 0.0) for e in errors[name])
            for name in losses
        }

    def _coded(self, t: TensorSpec) -> Matrix:
        """With the smallest scheme of the menu."""
        scheme, dtype = self._menu[0], self._source.tensors[t.name].dtype
        blocks = []
        with self._naming_tensor(t):
            for i in range(t.shape[0] if len(t.shape) == 3 else 1):
                values = (
                    self._source.read(t.name, slice(i, i + 1))[0] if len(t.shape) == 3 else self._source.read(t.name)
                )
                blocks.append(kernels.nearest_parts(values, dtype, scheme, threads=self._threads))
        return scheme, t.shape, {kind: np.concatenate([b[kind] for b in blocks]) for kind in blocks[0]}

    def _errors(self, stack: Stack, squares: F64Array | None) -> tuple[float, ...]:
        """Relative error of the weights with each scheme, columns weighted by `squares`."""
        weights = np.ones(stack[0].shape[-1]) if squares is None else squares
        signal, noise = 0.0, np.zeros(len(self._menu))
        for t, values in self._samples(stack):
            w = codes.as_f32(values, self._source.tensors[t.name].dtype)
            signal += _weighted(w, weights)
            for i, scheme in enumerate(self._menu):
                with self._naming_tensor(t):
                    noise[i] += _weighted(_nearest(w, scheme, self._threads) - w, weights)
        self._advance(sum(source_nbytes(self._source, t) for t in stack), stack[0].name)
        return tuple((noise / signal).tolist()) if signal > 0 else (0.0,) * len(self._menu)

    @contextmanager
    def _naming_tensor(self, t: TensorSpec) -> Iterator[None]:
        try:
            yield
        except kernels.BadValueError as error:
            raise InputError(
                f"{self._source.path}: {t.name}: {error.reason}. Fetch the checkpoint again; if it is so at its "
                "origin, it is broken"
            ) from None

    def _samples(self, stack: Stack) -> list[tuple[TensorSpec, npt.NDArray[np.generic]]]:
        """Runs of rows spread over a matrix, or rows of some matrices of a stack."""
        first = stack[0]
        if len(stack) == 1 and len(first.shape) == 2:
            n_rows = first.shape[-2]
            n_runs = max(min(n_rows, _SAMPLED_ROWS) // 16, 1)
            starts = np.unique(np.arange(n_runs) * max(n_rows - 16, 0) // max(n_runs - 1, 1)).tolist()
            runs = [self._source.read(first.name, slice(start, min(start + 16, n_rows))) for start in starts]
            return [(first, np.ascontiguousarray(np.concatenate(runs)))]
        n = first.shape[0] if len(stack) == 1 else len(stack)
        picked = np.unique(np.arange(_SAMPLED_EXPERTS) * n // _SAMPLED_EXPERTS).tolist()
        if len(stack) > 1:
            return [(stack[i], self._source.read(stack[i].name, slice(0, _SAMPLED_ROWS))) for i in picked]
        read = ((first, self._source.read(first.name, slice(i, i + 1))[0][:_SAMPLED_ROWS]) for i in picked)
        return [(t, np.ascontiguousarray(values)) for t, values in read]


def source_nbytes(source: Source, t: TensorSpec) -> int:
    """Of a tensor in the source, about."""
    return source.tensors[t.name].nbytes or int(np.prod(t.shape)) * 2


class _Run:
    """Runs the model on its hidden states, and on copies that each have one layer, embedding or head quantized."""

    def __init__(self, model: LayeredSource, tokens: IntArray, ends: Mapping[str, Matrix], threads: int | None) -> None:
        self._model, self._ends, self._threads = model, ends, threads
        self._hidden = model.embed(tokens)  # (n, ctx, padded hidden_size)
        self._copies: dict[int | str, F32Array] = {}
        if EMBEDDING in ends:
            self._copies[EMBEDDING] = model.embed(
                tokens, lambda ids: _nearest(model.rows(model.spec.tensors()[0], ids), ends[EMBEDDING][0], threads)
            )

    def layer(self, i: int, coded: Mapping[str, Mapping[str, Matrix]]) -> tuple[dict[str, float], dict[str, F64Array]]:
        """(output error of the layer with each of `coded` alone, sums of squares of the rows at each hook).

        coded: by any name, matrices by their names in the layer.
        """
        loaded = self._model.layer(i, threads=self._threads)
        before = self._hidden.copy()
        squares: dict[str, F64Array] = {}
        for sequence in self._hidden:
            captured = loaded.model.run(sequence, capture=True)
            assert captured is not None
            for hook, rows in captured._asdict().items():
                if not rows.shape[1]:  # inputs of experts are not captured
                    continue
                squares[hook] = squares.get(hook, np.zeros(1)) + np.square(rows.astype(np.float64)).sum(axis=0)
        for copy in self._copies.values():
            _pass_through(loaded.model, copy)

        def changed(matrices: Mapping[str, Matrix]) -> F32Array:
            out = before.copy()
            _pass_through(self._model.changed(i, loaded, matrices, threads=self._threads), out)
            return out

        alone = {name: relative_error(changed(matrices), self._hidden) for name, matrices in coded.items()}
        if coded:
            self._copies[i] = changed({name: m for matrices in coded.values() for name, m in matrices.items()})
        return alone, squares

    def divergences(self) -> dict[int | str, float]:
        """KLD of the logits with each layer, embedding or head coded. Call it after the last layer."""
        head = self._model.head(threads=self._threads)
        coded = self._ends.get(EMBEDDING if self._model.spec.tied_head else HEAD)
        coded_head = None if coded is None else self._model.changed_head(coded, threads=self._threads)
        sums: dict[int | str, float] = {}
        n = 0
        for i, sequence in enumerate(self._hidden):
            p = [log_softmax(row) for row in head.logits(sequence[::_SCORED_EVERY])]
            n += len(p)
            runs = [(what, head, copy[i]) for what, copy in self._copies.items() if what != EMBEDDING]
            if EMBEDDING in self._copies:
                last = coded_head if coded_head is not None and self._model.spec.tied_head else head
                runs.append((EMBEDDING, last, self._copies[EMBEDDING][i]))
            if coded_head is not None and not self._model.spec.tied_head:
                runs.append((HEAD, coded_head, sequence))
            for what, last, rows in runs:
                q = (log_softmax(row) for row in last.logits(rows[::_SCORED_EVERY]))
                sums[what] = sums.get(what, 0.0) + sum(kullback_leibler(b, a) for a, b in zip(q, p, strict=True))
        return {what: total / n for what, total in sums.items()}


def _pass_through(model: LayerModel, hidden: F32Array) -> None:
    for sequence in hidden:
        model.run(sequence)


def _nearest(rows: F32Array, scheme: QuantScheme, threads: int | None) -> F32Array:
    return codes.dequantize(scheme, rows.shape, kernels.nearest_parts(rows, "F32", scheme, threads=threads))


def _weighted(e: F32Array, weights: F64Array) -> float:
    return elementary.total(np.square(e.astype(np.float64)) * weights)
