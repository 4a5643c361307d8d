"""Calibration: each matrix is rounded for its inputs, observed on a calibration set or given as statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import codes, kernels
from w4conv.arrays import F32Array
from w4conv.calibration.statistics import HEAD, Statistics
from w4conv.calibration.text import HELD_OUT, CalibrationSet, is_held_out
from w4conv.container import Layout
from w4conv.errors import InputError
from w4conv.models.spec import READS, ModelSpec, TensorSpec
from w4conv.quantization.calibrated import METHODS, Inputs, OutputResidual, ScaleError, Solution, solve
from w4conv.quantization.moments import CrossMoments, Moments
from w4conv.quantization.query_moments import RopeAverage
from w4conv.runtime.engine import Captured, LayerModel, Matrix
from w4conv.runtime.layers import LayeredSource, final_norm
from w4conv.scheme import TILE_ROWS, QuantScheme
from w4conv.sources.base import Source

Parts = Mapping[str, npt.NDArray[np.uint8]]  # of a tensor, by kind, as in the container

TIED_SHARE: Final = 4  # the inputs of a tied head are observed on one sequence in so many
QUERY_SHARE: Final = 4  # the second moments of queries are taken over one sequence in so many
_READ_ROWS: Final = 1 << 13
NORMED_HOOKS: Final = ("qkv", "gate_up")  # their rows are the output of a norm


@dataclass(slots=True)
class _Observed:
    """What one hook has seen.

    residual: at NORMED_HOOKS of the rows themselves, else of the hidden states after the linear layer; None for zero.
    """

    inputs: Inputs
    residual: OutputResidual | None


class Calibrator(ABC):
    """Rounds the matrices of a source for their inputs. `layout` says how each tensor is coded."""

    def __init__(
        self, source: Source, spec: ModelSpec, layout: Layout, methods: Mapping[str, str], *,
        threads: int | None, solved: Callable[[int, str], None], kept: Collection[str] = (),
    ) -> None:  # fmt: skip
        """methods: by name, of the matrices to solve. All others are coded by round-to-nearest.

        solved: called with the bytes and the name of each source matrix, once it is rounded. kept: names of the
        tensors that an interrupted conversion has already written.
        """
        self._source, self._spec, self._layout, self._methods = source, spec, layout, methods
        self._threads, self._solved, self._kept = threads, solved, kept
        # number of matrices by winning method
        self._chosen = {name: 0 for method in methods.values() for name in METHODS[method]}

    @abstractmethod
    def take(self, name: str) -> Solution:
        """The rounding of a matrix that is not kept. Call it once for each, in the order of the model.

        Raises InputError.
        """

    def notes(self) -> list[str]:
        won = ", ".join(f"{method} {n}" for method, n in self._chosen.items() if n)
        return [f"rounding chosen for each matrix by its outputs' error on held-out sequences: {won}"] if won else []

    def _solve_matrix(
        self, t: TensorSpec, observed: _Observed, *, of_inputs: bool, query_moments: F32Array | None = None
    ) -> Solution:
        """of_inputs: the residual is that of the inputs, not of the outputs. query_moments: as in `solve`."""
        values = self._source.read(t.name)
        s = self._solve(t, values, 0, observed, of_inputs=of_inputs, query_moments=query_moments)
        if t.name not in self._kept:  # of a layer partly kept, all matrices are solved again
            self._chosen[s.method] += 1
            self._solved(values.nbytes, t.name)
        return s

    def _solve_rows(self, t: TensorSpec, observed: _Observed) -> Solution:
        """Embedding or head, a block of rows at a time."""
        found = []
        for row in range(0, t.shape[0], _READ_ROWS):
            values = self._source.read(t.name, slice(row, min(row + _READ_ROWS, t.shape[0])))
            found.append(self._solve(t, values, row, observed, of_inputs=True))
            self._chosen[found[-1].method] += row == 0
            self._solved(values.nbytes, t.name)
        joined: dict[str, Any] = {kind: np.concatenate([s.parts()[kind] for s in found]) for kind in found[0].parts()}
        return replace(found[0], **joined, n_underflowed=sum(s.n_underflowed for s in found))

    def _solve(
        self, t: TensorSpec, values: npt.NDArray[Any], row: int, observed: _Observed, *, of_inputs: bool,
        query_moments: F32Array | None = None,
    ) -> Solution:  # fmt: skip
        """values: rows of t from `row` on."""
        w = codes.as_f32(values, self._source.tensors[t.name].dtype)
        residual = observed.residual
        if of_inputs and residual is not None:
            residual = residual.of(w, threads=self._threads)
        scheme, method = self._layout.tensors[t.name].scheme, self._methods[t.name]
        try:
            return solve(
                w, observed.inputs, scheme, method, residual=residual, query_moments=query_moments,
                threads=self._threads,
            )  # fmt: skip
        except ScaleError as error:
            raise self._bad_value(t.name, error, row + error.row) from None

    def _bad_value(self, name: str, error: kernels.BadValueError | ScaleError, row: int | None = None) -> InputError:
        at = error.row if row is None else row
        return InputError(f"{self._source.path}: {name}: {error.reason} at row {at}, column {error.column}")


class StatisticsCalibrator(Calibrator):
    """From statistics of the original model. Each matrix is rounded independently, without output residual."""

    def __init__(
        self, source: Source, spec: ModelSpec, layout: Layout, methods: Mapping[str, str], statistics: Statistics, *,
        threads: int | None, solved: Callable[[int, str], None], kept: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(source, spec, layout, methods, threads=threads, solved=solved, kept=kept)
        self._statistics = statistics
        self._at: tuple[tuple[int | None, str], _Observed] | None = None

    def take(self, name: str) -> Solution:
        t = next(t for t in self._spec.tensors() if t.name == name)
        if t.layer is None:
            return self._solve_rows(t, self._at_hook(None, HEAD))
        return self._solve_matrix(t, self._at_hook(t.layer, READS[t.part]), of_inputs=False)

    def _at_hook(self, layer: int | None, hook: str) -> _Observed:
        if self._at is None or self._at[0] != (layer, hook):
            moments = self._statistics.at_hook(layer, hook).second_moments()
            self._at = (layer, hook), _Observed(Inputs(*moments, threads=self._threads), None)
        return self._at[1]


class SequentialCalibrator(Calibrator):
    """Layer by layer on a calibration set: the inputs of a layer come from the layers quantized before it.

    Memory holds the hidden states of all tokens, and the weights and moments of one layer. Layers that an interrupted
    conversion has written are run as written, not rounded again.
    """

    def __init__(
        self, source: Source, spec: ModelSpec, layout: Layout, methods: Mapping[str, str], text: CalibrationSet, *,
        threads: int | None, solved: Callable[[int, str], None], kept: Collection[str] = (),
        stored: Callable[[str], Parts] | None = None,
    ) -> None:  # fmt: skip
        """stored: the parts of a kept tensor, by name."""
        super().__init__(source, spec, layout, methods, threads=threads, solved=solved, kept=kept)
        self._stored, self._model = stored, LayeredSource(source, threads=threads)
        self._sequences = text.sequences
        # Hidden states (n, ctx, padded hidden_size): of the original model, and of the one quantized so far.
        self._hidden: tuple[F32Array, F32Array] | None = None
        self._next_layer = 0
        self._done: dict[str, Solution] = {}

    def take(self, name: str) -> Solution:
        if self._hidden is None:
            self._start()
        while name not in self._done:
            self._done.clear()
            if self._next_layer < self._spec.n_layers:
                self._run_layer(self._next_layer)
            else:
                self._round_head()
            self._next_layer += 1
        return self._done.pop(name)

    def _start(self) -> None:
        original = self._model.embed(self._sequences)
        embedding = self._spec.tensors()[0]
        if embedding.name in self._methods:  # tied: rounded for its error as the head
            if embedding.name not in self._kept:
                observed = self._original_head(original[::TIED_SHARE].copy())
                self._done[embedding.name] = self._solve_rows(embedding, observed)
            matrix = self._rounded(embedding)
            self._hidden = original, self._model.embed(self._sequences, lambda ids: _some_rows(matrix, ids))
        else:
            self._hidden = original, self._model.embed(self._sequences, self._nearest_rows)

    def _run_layer(self, layer: int) -> None:
        assert self._hidden is not None
        original, hidden = self._hidden
        linears, matrices, vectors = self._load(layer)
        model = LayerModel(self._spec, layer, matrices, vectors, threads=self._threads)
        query_moments: dict[str, F32Array] = {}
        if all(t.name in self._kept for t in linears.values()):
            for sequence in original:
                model.run(sequence)
            matrices |= {part: self._rounded(t) for part, t in linears.items()}
            hooks: tuple[str, ...] = ()
        else:
            targets = self._targets(model, original)
            query_moments = self._query_moments(layer, linears, vectors, targets["qkv"][::QUERY_SHARE])
            hooks = Captured._fields
        for hook in hooks:
            model = LayerModel(self._spec, layer, matrices, vectors, threads=self._threads)
            observed = self._observe(model, hook, hidden, targets)
            for part in (part for part in linears if READS[part] == hook):
                matrices[part] = self._round(linears[part], observed, query_moments.get(part))
        model = LayerModel(self._spec, layer, matrices, vectors, threads=self._threads)
        for sequence in hidden:
            model.run(sequence, after_attention=len(hooks) > 0)

    def _load(self, layer: int) -> tuple[dict[str, TensorSpec], dict[str, Matrix], dict[str, F32Array]]:
        """The matrices of a layer: what they are, their original values; and its vectors."""
        tensors = [t for t in self._spec.tensors() if t.layer == layer]
        linears = {t.part: t for t in tensors if t.role == "linear"}
        vectors = {t.part: self._model.vector(t) for t in tensors if t.role in ("norm", "bias")}
        return linears, {part: self._model.matrix(t) for part, t in linears.items()}, vectors

    def _targets(self, model: LayerModel, original: F32Array) -> dict[str, F32Array]:
        """Targets of the quantized layer, by hook: the inputs at NORMED_HOOKS; elsewhere the hidden states after the
        residual add. Advances `original` through the layer."""
        width = self._spec.hidden_size
        qkv, gate_up = (np.empty((*original.shape[:2], width), np.float32) for _ in range(2))
        middle = np.empty_like(original)
        for i, sequence in enumerate(original):
            qkv[i] = model.observe(sequence, "qkv")
            gate_up[i] = model.observe(sequence, "gate_up")
            middle[i] = sequence
            model.run(sequence, after_attention=True)
        return {"qkv": qkv, "o": middle[..., :width], "gate_up": gate_up, "down": original[..., :width]}

    def _query_moments(
        self, layer: int, linears: dict[str, TensorSpec], vectors: dict[str, F32Array], inputs: F32Array
    ) -> dict[str, F32Array]:
        """RoPE-averaged second moments of the queries of the original model. inputs: of q_proj."""
        spec, keys = self._spec, linears.get("k_proj")
        if keys is None or spec.qk_norm or "gptq" not in METHODS[self._methods.get(keys.name, "rtn")]:
            return {}
        t = linears["q_proj"]
        w = codes.as_f32(self._source.read(t.name), self._source.tensors[t.name].dtype)
        queries = [Moments(spec.head_dim) for _ in range(spec.n_kv_heads)]
        for rows in inputs:
            q = kernels.gemm_nt(rows, w, threads=self._threads) + vectors.get("q_proj.bias", np.float32(0))
            for i, head in enumerate(np.split(q, spec.n_heads, axis=1)):
                queries[i * spec.n_kv_heads // spec.n_heads].add(head, threads=self._threads)
        rope_average = RopeAverage(spec, layer, inputs.shape[1])
        return {"k_proj": np.stack([rope_average.mean(m.matrix()) for m in queries])}

    def _observe(self, model: LayerModel, hook: str, hidden: F32Array, targets: dict[str, F32Array]) -> _Observed:
        """model: quantized before `hook`, original from there. At gate_up, `hidden` advances past the attention block;
        at down it already has."""
        # A norm between the outputs and the residual add hides the output residual: then it counts as zero.
        out_norm = {"o": "attention_out_norm", "down": "mlp_out_norm"}.get(hook)
        share = np.float32(0 if out_norm in self._spec.norms else 1 / self._spec.residual_scale)

        def pairs() -> Iterator[tuple[F32Array, F32Array]]:
            for i, sequence in enumerate(hidden):
                after = sequence if hook == "gate_up" else sequence.copy()
                rows = model.observe(after, hook, after_attention=hook == "down")
                if hook in NORMED_HOOKS:
                    yield rows, targets[hook][i] - rows
                else:
                    yield rows, (targets[hook][i] - after[:, : self._spec.hidden_size]) * share

        return self._summed(pairs())

    def _summed(self, pairs: Iterator[tuple[F32Array, F32Array]], *, held_out: int = HELD_OUT) -> _Observed:
        """pairs: of each sequence, input rows and their residual, or that of the hidden states after the layer.

        held_out: one sequence in so many is held out.
        """
        sums: list[tuple[Moments, CrossMoments]] = []
        for i, (rows, residual) in enumerate(pairs):
            if not np.isfinite(rows).all():
                raise InputError(f"{self._source.path}: the model's activations are not finite; its weights are broken")
            width = rows.shape[1]
            sums = sums or [(Moments(width), CrossMoments(residual.shape[1], width)) for _ in range(2)]
            moments, cross = sums[is_held_out(i, held_out)]
            moments.add(rows, threads=self._threads)
            cross.add(residual, rows, threads=self._threads)
        (fit, fit_residual), (judge, judge_residual) = sums
        return _Observed(
            Inputs(fit.matrix(), judge.matrix(), threads=self._threads),
            OutputResidual(fit_residual.matrix(), judge_residual.matrix()),
        )

    def _round(self, t: TensorSpec, observed: _Observed, query_moments: F32Array | None) -> Matrix:
        if t.name not in self._methods:
            scheme = self._layout.tensors[t.name].scheme
            same = self._source.tensors[t.name].coding == scheme  # coded as in the source
            return self._model.matrix(t) if same else self._coded(t, scheme)
        self._done[t.name] = self._solve_matrix(
            t, observed, of_inputs=READS[t.part] in NORMED_HOOKS, query_moments=query_moments
        )
        return self._rounded(t)

    def _rounded(self, t: TensorSpec) -> Matrix:
        """As in the container."""
        if t.name in self._kept:
            assert self._stored is not None
            parts = self._stored(t.name)
        else:
            parts = {kind: kernels.as_bytes(part) for kind, part in self._done[t.name].parts().items()}
        return self._layout.tensors[t.name].scheme, (t.shape[0], t.shape[1]), parts

    def _coded(self, t: TensorSpec, scheme: QuantScheme) -> Matrix:
        dtype = self._source.tensors[t.name].dtype
        try:
            parts = _nearest(self._source.read(t.name), dtype, scheme, self._threads)
        except kernels.BadValueError as error:
            raise self._bad_value(t.name, error) from None
        return scheme, (t.shape[0], t.shape[1]), parts

    def _nearest_rows(self, ids: npt.NDArray[np.int64]) -> F32Array:
        """As in the container."""
        t = self._spec.tensors()[0]
        scheme = self._layout.tensors[t.name].scheme
        rows = self._model.rows(t, ids)
        try:
            parts = _nearest(rows, "F32", scheme, self._threads)
        except kernels.BadValueError as error:
            raise self._bad_value(t.name, error, int(ids[error.row])) from None
        return codes.dequantize(scheme, rows.shape, parts)

    def _original_head(self, original: F32Array) -> _Observed:
        """Inputs of the head in the original model; overwrites `original`."""
        for layer in range(self._spec.n_layers):
            _, matrices, vectors = self._load(layer)
            model = LayerModel(self._spec, layer, matrices, vectors, threads=self._threads)
            for sequence in original:
                model.run(sequence)
        rows = (self._normed(sequence) for sequence in original)
        return self._summed(((x, np.zeros_like(x)) for x in rows), held_out=2)

    def _round_head(self) -> None:
        assert self._hidden is not None
        normed = ((self._normed(a), self._normed(b)) for a, b in zip(*self._hidden, strict=True))
        observed = self._summed((rounded, original - rounded) for original, rounded in normed)
        head = self._spec.tensors()[-1]
        self._done[head.name] = self._solve_rows(head, observed)

    def _normed(self, hidden: F32Array) -> F32Array:
        """Hidden states after the final norm."""
        return final_norm(self._spec, hidden, self._model.final_norm_weight(), threads=self._threads)


def _nearest(
    values: npt.NDArray[Any], dtype: str, scheme: QuantScheme, threads: int | None
) -> dict[str, npt.NDArray[np.uint8]]:
    if scheme.is_float:
        return {"values": kernels.as_bytes(kernels.pack_float(values, dtype, scheme, threads=threads))}
    packed = kernels.quantize_rtn(values, dtype, scheme, threads=threads)
    return {kind: kernels.as_bytes(part) for kind, part in packed.parts().items()}


def _some_rows(matrix: Matrix, ids: npt.NDArray[np.int64]) -> F32Array:
    scheme, (n_rows, n_columns), parts = matrix
    tiles = {kind: part.reshape(codes.n_tiles(n_rows), -1) for kind, part in parts.items()}
    out = np.empty((len(ids), n_columns), np.float32)
    for i, (tile, row) in enumerate(zip(ids // TILE_ROWS, ids % TILE_ROWS, strict=True)):
        of_tile = {kind: part[tile] for kind, part in tiles.items()}
        out[i] = codes.dequantize(scheme, (TILE_ROWS, n_columns), of_tile)[row]
    return out
