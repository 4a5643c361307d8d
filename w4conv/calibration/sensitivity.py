"""Sensitivity: the loss of each matrix with each scheme of a menu. The allocation of bits minimizes their sum.

With a calibration set, the loss is KLD in nats, with the smallest scheme, rounded for the inputs. It is measured for
each layer, all others being exact, and for each part (every q_proj, say), all else being exact. Each matrix gets the
share of both that `fitted` finds from the error that it alone causes in the output of its layer. For larger schemes it
scales with the error of the weights, each column weighted by the mean square of its inputs.

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
from w4conv.quantization.calibrated import Inputs, ScaleError, quick
from w4conv.quantization.moments import Moments
from w4conv.runtime.layer_model import LayerModel
from w4conv.runtime.layers import LayeredSource
from w4conv.runtime.native_model import Matrix
from w4conv.scheme import QuantScheme
from w4conv.sources.base import Source

IntArray = npt.NDArray[np.int64]

EMBEDDING, HEAD = "embed_tokens", "lm_head"
N_SEQUENCES: Final = 4
SEQUENCE_TOKENS: Final = 128  # of each, at most
_FITTINGS: Final = 20  # of layers and parts; a few already do
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
        alone: list[dict[str, float]] = []  # by layer and key: the error that a matrix or stack alone causes
        errors: dict[str, tuple[float, ...]] = {}
        for layer in range(spec.n_layers):
            here = [s for s in self._stacks if s[0].layer == layer]
            moments = run.enter(layer)
            inputs = {hook: Inputs(m, m, threads=self._threads) for hook, m in moments.items() if np.isfinite(m).all()}
            of = {_key(s): inputs.get(READS.get(s[0].part, "")) for s in here}
            alone.append(run.leave({_key(s): {t.local_name: self._coded(t, of[_key(s)]) for t in s} for s in here}))
            for s in here:
                seen = of[_key(s)]
                squares = None if seen is None else np.diag(seen.fit).astype(np.float64)
                errors[s[0].name] = self._errors(s, squares)
        errors |= {s[0].name: self._errors(s, None) for s in ends}
        found = run.divergences()
        if not np.isfinite(list(found.values())).all():
            raise InputError(f"{self._source.path}: the model's activations are not finite; its weights are broken")
        shares = fitted(alone, found)
        losses = {
            s[0].name: found[s[0].part] if s[0].layer is None else shares[s[0].layer][_key(s)] for s in self._stacks
        }
        return {
            name: tuple(losses[name] * (e / errors[name][0] if errors[name][0] > 0 else 0.0) for e in errors[name])
            for name in losses
        }

    def _coded(self, t: TensorSpec, inputs: Inputs | None = None) -> Matrix:
        """With the smallest scheme of the menu: a matrix rounded for its inputs; without them, or of a stack, to
        nearest."""
        scheme, dtype = self._menu[0], self._source.tensors[t.name].dtype
        stacked = len(t.shape) == 3
        blocks = []
        with self._naming_tensor(t):
            for i in range(t.shape[0] if stacked else 1):
                values = self._source.read(t.name, slice(i, i + 1))[0] if stacked else self._source.read(t.name)
                w = codes.as_f32(values, dtype)
                if inputs is None or stacked or not np.isfinite(w).all():
                    packed = kernels.quantize_rtn(values, dtype, scheme, threads=self._threads)
                else:
                    packed = quick(w, inputs, scheme, threads=self._threads)
                blocks.append(packed.raw_parts())
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
        except (kernels.BadValueError, ScaleError) as error:
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


def _key(stack: Stack) -> str:
    """The same in every layer."""
    return stack[0].local_name


def fitted(alone: Sequence[Mapping[str, float]], found: Mapping[int | str, float]) -> list[dict[str, float]]:
    """Shares of the losses `found` for layers (by number) and parts (by name), which start in proportion to `alone`, by
    layer and part. Sums over a layer are its loss; those over a part are in proportion to the parts' losses, nearly.

    Layers and parts are scaled in turn (iterative proportional fitting, Deming and Stephan 1940).
    """
    shares = [dict(of_layer) for of_layer in alone]
    parts = sorted({name for of_layer in shares for name in of_layer})
    scale = _ratio(sum(found[i] for i, s in enumerate(shares) if s), sum(found[name] for name in parts))
    for _ in range(_FITTINGS):
        for name in parts:
            whole = sum(s.get(name, 0.0) for s in shares)
            for s in shares:
                if name in s:
                    s[name] *= _ratio(found[name] * scale, whole)
        for i, s in enumerate(shares):
            whole = sum(s.values())
            for name in s:
                s[name] *= _ratio(found[i], whole)
    return shares


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


class _Run:
    """Runs the model on its hidden states, and on copies that each have one layer, one part of all layers, embedding or
    head quantized."""

    def __init__(self, model: LayeredSource, tokens: IntArray, ends: Mapping[str, Matrix], threads: int | None) -> None:
        self._model, self._ends, self._threads = model, ends, threads
        self._hidden = model.embed(tokens)  # (n, ctx, padded hidden_size)
        self._copies: dict[int | str, F32Array] = {}  # by layer, local name, or word for an end
        if EMBEDDING in ends:
            self._copies[EMBEDDING] = model.embed(
                tokens, lambda ids: _nearest(model.rows(model.spec.tensors()[0], ids), ends[EMBEDDING][0], threads)
            )

    def enter(self, i: int) -> dict[str, F32Array]:
        """Runs the exact model through a layer: second moments of the rows at each hook."""
        self._layer, self._loaded = i, self._model.layer(i, threads=self._threads)
        self._before = self._hidden.copy()
        moments: dict[str, Moments] = {}
        for sequence in self._hidden:
            captured = self._loaded.model.run(sequence, capture=True)
            assert captured is not None
            for hook, rows in captured._asdict().items():
                if not rows.shape[1]:  # inputs of experts are not captured
                    continue
                moments.setdefault(hook, Moments(rows.shape[1])).add(rows, threads=self._threads)
        return {hook: m.matrix() for hook, m in moments.items()}

    def leave(self, coded: Mapping[str, Mapping[str, Matrix]]) -> dict[str, float]:
        """Runs the copies through it; matrices of it, by a key and their names in the layer, in their coded form.
        Returns the output error of the layer with those of each key alone."""
        i, loaded, before = self._layer, self._loaded, self._before
        for what, copy in self._copies.items():
            if what not in coded:
                _pass_through(loaded.model, copy)
        alone = {}
        for name, matrices in coded.items():
            model, out = self._model.changed(i, loaded, matrices, threads=self._threads), before.copy()
            _pass_through(model, out)
            alone[name] = relative_error(out, self._hidden)
            if name in self._copies:
                _pass_through(model, self._copies[name])
            else:
                self._copies[name] = out
        if coded:
            self._copies[i] = before
            whole = {name: matrix for matrices in coded.values() for name, matrix in matrices.items()}
            _pass_through(self._model.changed(i, loaded, whole, threads=self._threads), before)
        return alone

    def divergences(self) -> dict[int | str, float]:
        """KLD of the logits with each layer, part, embedding or head coded. Call it after the last layer."""
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
