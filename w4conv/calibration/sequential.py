"""Calibration on text, layer by layer: the inputs of a layer come from the layers quantized before it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv import codes, kernels
from w4conv.arrays import F32Array
from w4conv.calibration.calibrator import NORMED_HOOKS, Calibrator, Observed, joined, summed
from w4conv.calibration.experts import ExpertLayer, FewTokens, note_few
from w4conv.calibration.text import HELD_OUT, CalibrationSet, is_held_out
from w4conv.container import Layout
from w4conv.errors import InputError
from w4conv.models.spec import READS, ModelSpec, TensorSpec
from w4conv.quantization.calibrated import METHODS, Solution
from w4conv.quantization.moments import Moments
from w4conv.quantization.query_moments import RopeAverage
from w4conv.runtime.experts import attention_alone
from w4conv.runtime.layer_model import Captured, LayerModel
from w4conv.runtime.layers import LayeredSource, final_norm
from w4conv.runtime.native_model import Matrix
from w4conv.scheme import TILE_ROWS
from w4conv.sources.base import Source

Parts = Mapping[str, npt.NDArray[np.uint8]]  # of a tensor, by kind, as in the container

TIED_SHARE: Final = 4  # the inputs of a tied head are observed on one sequence in so many
QUERY_SHARE: Final = 4  # the second moments of queries are taken over one sequence in so many


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
        # Of the layer at work: matrices of experts rounded so far, and parts of kept ones.
        self._of_experts: dict[str, list[Solution]] = {}
        self._kept_parts: dict[str, Parts] = {}
        self.few_tokens: list[FewTokens] = []

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

    def notes(self) -> list[str]:
        return [*super().notes(), *note_few(self._spec, self.few_tokens)]

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
        routed = self._spec.routed(layer)
        linears, matrices, vectors = self._load(layer)
        model = self._layer_model(layer, matrices, vectors)
        query_moments: dict[str, F32Array] = {}
        targets: dict[str, F32Array] = {}
        if all(t.name in self._kept for t in linears.values()):
            if routed:
                rows = np.stack([model.observe(sequence, "gate_up") for sequence in original])
            else:
                for sequence in original:
                    model.run(sequence)
            matrices |= {part: self._rounded(t) for part, t in linears.items()}
            hooks: tuple[str, ...] = ()
        else:
            targets = self._targets(model, original)
            rows = targets["gate_up"]
            query_moments = self._query_moments(layer, linears, vectors, targets["qkv"][::QUERY_SHARE])
            hooks = Captured._fields[: 2 if routed else 4]
        for hook in hooks:
            model = self._layer_model(layer, matrices, vectors)
            observed = self._observe(model, hook, hidden, targets)
            for part in (part for part in linears if READS[part] == hook):
                matrices[part] = self._round(linears[part], observed, query_moments.get(part))
        model = self._layer_model(layer, matrices, vectors)
        if routed:
            targets.clear()
            self._run_experts(layer, rows, np.stack([model.observe(sequence, "gate_up") for sequence in hidden]))
        else:
            for sequence in hidden:
                model.run(sequence, after_attention=len(hooks) > 0)

    def _run_experts(self, layer: int, original: F32Array, quantized: F32Array) -> None:
        """original, quantized: rows at gate_up, (n, ctx, hidden_size). Both streams have passed the attention block."""
        assert self._hidden is not None
        self._kept_parts.clear()
        experts = ExpertLayer(self._model, layer, self._source.path, threads=self._threads)
        router = self._model.matrix(experts.router)
        n, ctx, width = original.shape
        streams = (
            experts.stream(self._finite(original.reshape(-1, width)), router),
            experts.stream(self._finite(quantized.reshape(-1, width)), self._unsolved(experts.router)),
        )
        held_out = np.repeat([is_held_out(i) for i in range(n)], ctx)
        self._add_outputs(zip(self._hidden, experts.round(*streams, held_out, self), strict=True))
        if experts.few:
            self.few_tokens.append(FewTokens(layer, tuple(experts.few)))

    def _add_outputs(self, pairs: Iterable[tuple[F32Array, F32Array]]) -> None:
        """Of experts, (n_tokens, hidden_size), to hidden states."""
        for hidden, out in pairs:
            scaled = out * np.float32(self._spec.residual_scale)
            hidden[..., : self._spec.hidden_size] += scaled.reshape(*hidden.shape[:2], -1)

    def _finite(self, rows: F32Array) -> F32Array:
        if not np.isfinite(rows).all():
            raise InputError(f"{self._source.path}: the model's activations are not finite; its weights are broken")
        return rows

    def is_solved(self, t: TensorSpec) -> bool:
        """As of `experts.Rounder`."""
        return t.name in self._methods and t.name not in self._kept

    def round(self, t: TensorSpec, expert: int, observed: Observed | None) -> Matrix:
        """As of `experts.Rounder`."""
        index = None if t.expert == expert else expert
        scheme = self._layout.tensors[t.name].scheme
        if t.name not in self._methods:
            return self._unsolved(t, index)
        if observed is None:
            if t.name not in self._kept_parts:
                self._kept_parts[t.name] = self._stored_parts(t)
            parts = self._kept_parts[t.name]
            if index is not None:
                parts = {kind: part.reshape(t.shape[0], -1)[index] for kind, part in parts.items()}
            return scheme, t.shape[-2:], parts
        s = self._solve_matrix(t, observed, of_inputs=False, index=index)
        found = self._of_experts.setdefault(t.name, [])
        found.append(s)
        if len(found) == (1 if index is None else t.shape[0]):
            self._done[t.name] = joined(self._of_experts.pop(t.name))
        return scheme, t.shape[-2:], s.packed.raw_parts()

    def _layer_model(self, layer: int, matrices: Mapping[str, Matrix], vectors: Mapping[str, F32Array]) -> LayerModel:
        """Of a layer of experts, what comes before them."""
        spec = self._spec
        if spec.routed(layer):
            spec, zeros = attention_alone(spec, layer)
            matrices = zeros | dict(matrices)
        return LayerModel(spec, layer, matrices, vectors, threads=self._threads)

    def _load(self, layer: int) -> tuple[dict[str, TensorSpec], dict[str, Matrix], dict[str, F32Array]]:
        """The matrices of a layer, without experts: what they are, their original values; and its vectors."""
        experts = {t.name for t in self._spec.expert_tensors(layer)} if self._spec.routed(layer) else set()
        tensors = [t for t in self._spec.layer_tensors(layer) if t.name not in experts]
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

    def _observe(self, model: LayerModel, hook: str, hidden: F32Array, targets: dict[str, F32Array]) -> Observed:
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

    def _summed(self, pairs: Iterator[tuple[F32Array, F32Array]], *, held_out: int = HELD_OUT) -> Observed:
        """pairs: of each sequence, input rows and their residual, or that of the hidden states after the layer.

        held_out: one sequence in so many is held out.
        """
        blocks = ((is_held_out(i, held_out), *pair) for i, pair in enumerate(pairs))
        return summed(blocks, self._source.path, threads=self._threads)

    def _round(self, t: TensorSpec, observed: Observed, query_moments: F32Array | None) -> Matrix:
        if t.name not in self._methods:
            return self._unsolved(t)
        self._done[t.name] = self._solve_matrix(
            t, observed, of_inputs=READS[t.part] in NORMED_HOOKS, query_moments=query_moments
        )
        return self._rounded(t)

    def _unsolved(self, t: TensorSpec, index: int | None = None) -> Matrix:
        """As in the container: a matrix whose codes do not depend on its inputs. index: of a stack, that matrix."""
        scheme = self._layout.tensors[t.name].scheme
        if self._source.tensors[t.name].coding == scheme:  # coded as in the source
            return self._model.matrix(t, index)
        dtype = self._source.tensors[t.name].dtype
        try:
            parts = kernels.nearest_parts(self._values(t, index), dtype, scheme, threads=self._threads)
        except kernels.BadValueError as error:
            raise self._bad_value(t.name, error) from None
        return scheme, t.shape[-2:], parts

    def _rounded(self, t: TensorSpec) -> Matrix:
        """As in the container."""
        parts = self._stored_parts(t) if t.name in self._kept else self._done[t.name].packed.raw_parts()
        return self._layout.tensors[t.name].scheme, t.shape, parts

    def _stored_parts(self, t: TensorSpec) -> Parts:
        assert self._stored is not None
        return self._stored(t.name)

    def _nearest_rows(self, ids: npt.NDArray[np.int64]) -> F32Array:
        """As in the container."""
        t = self._spec.tensors()[0]
        scheme = self._layout.tensors[t.name].scheme
        rows = self._model.rows(t, ids)
        try:
            parts = kernels.nearest_parts(rows, "F32", scheme, threads=self._threads)
        except kernels.BadValueError as error:
            raise self._bad_value(t.name, error, int(ids[error.row])) from None
        return codes.dequantize(scheme, rows.shape, parts)

    def _original_head(self, original: F32Array) -> Observed:
        """Inputs of the head in the original model; overwrites `original`."""
        for layer in range(self._spec.n_layers):
            _, matrices, vectors = self._load(layer)
            model = self._layer_model(layer, matrices, vectors)
            if not self._spec.routed(layer):
                for sequence in original:
                    model.run(sequence)
                continue
            experts = ExpertLayer(self._model, layer, self._source.path, threads=self._threads)
            before = np.concatenate([model.observe(sequence, "gate_up") for sequence in original])
            stream = experts.stream(self._finite(before), self._model.matrix(experts.router))
            self._add_outputs([(original, experts.outputs(stream))])
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


def _some_rows(matrix: Matrix, ids: npt.NDArray[np.int64]) -> F32Array:
    scheme, (n_rows, n_columns), parts = matrix
    tiles = {kind: part.reshape(codes.n_tiles(n_rows), -1) for kind, part in parts.items()}
    out = np.empty((len(ids), n_columns), np.float32)
    for i, (tile, row) in enumerate(zip(ids // TILE_ROWS, ids % TILE_ROWS, strict=True)):
        of_tile = {kind: part[tile] for kind, part in tiles.items()}
        out[i] = codes.dequantize(scheme, (TILE_ROWS, n_columns), of_tile)[row]
    return out
