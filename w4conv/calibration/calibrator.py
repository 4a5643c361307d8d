"""Calibration: each matrix rounded for what it reads, as observed on a text or as statistics of it say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import codes, kernels
from w4conv.calibration.statistics import HEAD, Statistics
from w4conv.calibration.text import HELD_OUT, CalibrationText, is_held_out
from w4conv.container import Layout
from w4conv.errors import InputError
from w4conv.models.spec import READS, ModelSpec, TensorSpec
from w4conv.quantization.calibrated import METHODS, Inputs, Lack, ScaleError, Solution, solve
from w4conv.quantization.moments import CrossMoments, Moments
from w4conv.quantization.recipe import KEPT
from w4conv.quantization.scores import Turns
from w4conv.runtime.engine import Captured, LayerModel, Matrix, padded_width
from w4conv.runtime.layers import final_norm
from w4conv.scheme import TILE_ROWS, QuantScheme
from w4conv.sources.base import Source

F32Array = npt.NDArray[np.float32]
Parts = Mapping[str, npt.NDArray[np.uint8]]  # of a tensor, by kind, as the container has them

TIED_SHARE: Final = 4  # one sequence in so many is run to see what a tied head reads
MET_SHARE: Final = 4  # one sequence in so many shows what queries are like
_READ_ROWS: Final = 1 << 13
NORMED: Final = ("qkv", "gate_up")  # places whose rows a norm gives


@dataclass(slots=True)
class _Seen:
    """Of one place.

    lack: of the rows that a norm gives, for places in NORMED; else of the hidden rows; None for nothing.
    """

    inputs: Inputs
    lack: Lack | None


class Calibrator(ABC):
    """Rounds the matrices of a source for what they read. `layout` says how each tensor is coded."""

    def __init__(
        self, source: Source, spec: ModelSpec, layout: Layout, methods: Mapping[str, str], *,
        threads: int | None, solved: Callable[[int, str], None], kept: Collection[str] = (),
    ) -> None:  # fmt: skip
        """methods: of each matrix that is to be solved; the others are coded without regard to their inputs.

        solved: told the bytes of each source matrix, and its name, once it is rounded. kept: names of the first
        tensors, which an interrupted conversion has written already.
        """
        self._source, self._spec, self._layout, self._methods = source, spec, layout, methods
        self._threads, self._solved, self._kept = threads, solved, kept
        # matrices by the method that won
        self._chosen = {name: 0 for method in methods.values() for name in METHODS[method]}

    @abstractmethod
    def take(self, name: str) -> Solution:
        """The rounding of a matrix that is not kept; asked for in the order of the model, each once.

        Raises InputError.
        """

    def notes(self) -> list[str]:
        won = ", ".join(f"{method} {n}" for method, n in self._chosen.items() if n)
        return [f"rounding chosen for each matrix by its outputs' error on held-out sequences: {won}"] if won else []

    def _solve_matrix(self, t: TensorSpec, seen: _Seen, *, of_inputs: bool, met: F32Array | None = None) -> Solution:
        """of_inputs: whether what is lacking is so of the inputs. met: as `solve` has it."""
        values = self._source.read(t.name)
        s = self._solve(t, values, 0, seen, of_inputs=of_inputs, met=met)
        if t.name not in self._kept:  # where only part of a layer is, the rest needs the same inputs
            self._chosen[s.method] += 1
            self._solved(values.nbytes, t.name)
        return s

    def _solve_rows(self, t: TensorSpec, seen: _Seen) -> Solution:
        """A matrix with a row for each token, a block of rows at a time."""
        found = []
        for row in range(0, t.shape[0], _READ_ROWS):
            values = self._source.read(t.name, slice(row, min(row + _READ_ROWS, t.shape[0])))
            found.append(self._solve(t, values, row, seen, of_inputs=True))
            self._chosen[found[-1].method] += row == 0
            self._solved(values.nbytes, t.name)
        joined: dict[str, Any] = {kind: np.concatenate([s.parts()[kind] for s in found]) for kind in found[0].parts()}
        return replace(found[0], **joined, n_underflowed=sum(s.n_underflowed for s in found))

    def _solve(
        self, t: TensorSpec, values: npt.NDArray[Any], row: int, seen: _Seen, *, of_inputs: bool,
        met: F32Array | None = None,
    ) -> Solution:  # fmt: skip
        """values: rows of t from `row` on."""
        w = codes.as_f32(values, self._source.tensors[t.name].dtype)
        lack = seen.lack.of(w, threads=self._threads) if of_inputs and seen.lack is not None else seen.lack
        scheme, method = self._layout.tensors[t.name].scheme, self._methods[t.name]
        try:
            return solve(w, seen.inputs, scheme, method, lack=lack, met=met, threads=self._threads)
        except ScaleError as error:
            raise self._bad(t.name, error, row + error.row) from None

    def _bad(self, name: str, error: kernels.BadValueError | ScaleError, row: int | None = None) -> InputError:
        at = error.row if row is None else row
        return InputError(f"{self._source.path}: {name}: {error.reason} at row {at}, column {error.column}")


class StatisticsCalibrator(Calibrator):
    """For what the matrices read in the model as it was, from its statistics: each for its own outputs."""

    def __init__(
        self, source: Source, spec: ModelSpec, layout: Layout, methods: Mapping[str, str], statistics: Statistics, *,
        threads: int | None, solved: Callable[[int, str], None], kept: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(source, spec, layout, methods, threads=threads, solved=solved, kept=kept)
        self._statistics = statistics
        self._at: tuple[tuple[int | None, str], _Seen] | None = None

    def take(self, name: str) -> Solution:
        t = next(t for t in self._spec.tensors() if t.name == name)
        if t.layer is None:
            return self._solve_rows(t, self._of_place(None, HEAD))
        return self._solve_matrix(t, self._of_place(t.layer, READS[t.part]), of_inputs=False)

    def _of_place(self, layer: int | None, place: str) -> _Seen:
        if self._at is None or self._at[0] != (layer, place):
            seen = _Seen(Inputs(*self._statistics.of_place(layer, place).second_moments(), threads=self._threads), None)
            self._at = (layer, place), seen
        return self._at[1]


class TextCalibrator(Calibrator):
    """The model run layer by layer on a text, each layer rounded for the inputs that the rounded ones before it give.

    One layer's weights and moments are held at a time, and the hidden rows of all tokens. Layers that an interrupted
    conversion has written are not rounded again, but run with what was written.
    """

    def __init__(
        self, source: Source, spec: ModelSpec, layout: Layout, methods: Mapping[str, str], text: CalibrationText, *,
        threads: int | None, solved: Callable[[int, str], None], kept: Collection[str] = (),
        stored: Callable[[str], Parts] | None = None,
    ) -> None:  # fmt: skip
        """stored: gives the parts of tensors that are kept."""
        super().__init__(source, spec, layout, methods, threads=threads, solved=solved, kept=kept)
        self._stored = stored
        self._sequences = text.sequences
        # Hidden rows (n, ctx, padded hidden_size) of the model as it was, and of the one rounded so far.
        self._streams: tuple[F32Array, F32Array] | None = None
        self._next_layer = 0
        self._done: dict[str, Solution] = {}

    def take(self, name: str) -> Solution:
        if self._streams is None:
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
        exact = self._embed(self._original_rows)
        embedding = self._spec.tensors()[0]
        if embedding.name in self._methods:  # and the head, what its error is judged as
            if embedding.name not in self._kept:
                seen = self._exact_head(exact[::TIED_SHARE].copy())
                self._done[embedding.name] = self._solve_rows(embedding, seen)
            matrix = self._rounded(embedding)
            self._streams = exact, self._embed(lambda ids: _some_rows(matrix, ids))
        else:
            self._streams = exact, self._embed(self._nearest_rows)

    def _run_layer(self, layer: int) -> None:
        assert self._streams is not None
        exact, hidden = self._streams
        linears, matrices, vectors = self._load(layer)
        original = LayerModel(self._spec, layer, matrices, vectors, threads=self._threads)
        met: dict[str, F32Array] = {}
        if all(t.name in self._kept for t in linears.values()):
            for sequence in exact:
                original.run(sequence)
            matrices |= {part: self._rounded(t) for part, t in linears.items()}
            places: tuple[str, ...] = ()
        else:
            wanted = self._wanted(original, exact)
            met = self._met(layer, linears, vectors, wanted["qkv"][::MET_SHARE])
            places = Captured._fields
        for place in places:
            model = LayerModel(self._spec, layer, matrices, vectors, threads=self._threads)
            seen = self._observe(model, place, hidden, wanted)
            for part in (part for part in linears if READS[part] == place):
                matrices[part] = self._round(linears[part], seen, met.get(part))
        model = LayerModel(self._spec, layer, matrices, vectors, threads=self._threads)
        for sequence in hidden:
            model.run(sequence, attended=len(places) > 0)

    def _load(self, layer: int) -> tuple[dict[str, TensorSpec], dict[str, Matrix], dict[str, F32Array]]:
        """The matrices of a layer: what they are, their original values; and its vectors."""
        tensors = [t for t in self._spec.tensors() if t.layer == layer]
        linears = {t.part: t for t in tensors if t.role == "linear"}
        vectors = {t.part: _floats(self._source, t.name) for t in tensors if t.role in ("norm", "bias")}
        return linears, {part: self._original(t) for part, t in linears.items()}, vectors

    def _wanted(self, model: LayerModel, exact: F32Array) -> dict[str, F32Array]:
        """What the rounded layer is to come near to: the inputs of its products that read normed rows, and the hidden
        rows after its products that are added to them. `exact` moves on."""
        width = self._spec.hidden_size
        qkv, gate_up = (np.empty((*exact.shape[:2], width), np.float32) for _ in range(2))
        middle = np.empty_like(exact)
        for i, sequence in enumerate(exact):
            qkv[i] = model.observe(sequence, "qkv")
            gate_up[i] = model.observe(sequence, "gate_up")
            middle[i] = sequence
            model.run(sequence, attended=True)
        return {"qkv": qkv, "o": middle[..., :width], "gate_up": gate_up, "down": exact[..., :width]}

    def _met(
        self, layer: int, linears: dict[str, TensorSpec], vectors: dict[str, F32Array], inputs: F32Array
    ) -> dict[str, F32Array]:
        """What keys are multiplied with: the queries of the model as it was. inputs: those of q and k."""
        spec, keys = self._spec, linears.get("k_proj")
        if keys is None or spec.qk_norm or "gptq" not in METHODS[self._methods.get(keys.name, "rtn")]:
            return {}
        t = linears["q_proj"]
        w = codes.as_f32(self._source.read(t.name), self._source.tensors[t.name].dtype)
        queries = [Moments(spec.head_dim) for _ in range(spec.n_kv_heads)]
        for rows in inputs:
            q = kernels.product(rows, w, threads=self._threads) + vectors.get("q_proj.bias", np.float32(0))
            for i, head in enumerate(np.split(q, spec.n_heads, axis=1)):
                queries[i * spec.n_kv_heads // spec.n_heads].add(head, threads=self._threads)
        turns = Turns(spec, layer, inputs.shape[1])
        return {"k_proj": np.stack([turns.mean(m.matrix()) for m in queries])}

    def _observe(self, model: LayerModel, place: str, hidden: F32Array, wanted: dict[str, F32Array]) -> _Seen:
        """model: rounded as far as the matrices that read `place`. For gate_up, `hidden` moves on past the attention;
        for down, it has."""
        # What outputs lack can be told from hidden rows to which they are added as they are, not through a norm.
        out_norm = {"o": "attention_out_norm", "down": "mlp_out_norm"}.get(place)
        share = np.float32(0 if out_norm in self._spec.norms else 1 / self._spec.residual_scale)

        def pairs() -> Iterator[tuple[F32Array, F32Array]]:
            for i, sequence in enumerate(hidden):
                after = sequence if place == "gate_up" else sequence.copy()
                rows = model.observe(after, place, attended=place == "down")
                if place in NORMED:
                    yield rows, wanted[place][i] - rows
                else:
                    yield rows, (wanted[place][i] - after[:, : self._spec.hidden_size]) * share

        return self._see(pairs())

    def _see(self, pairs: Iterator[tuple[F32Array, F32Array]], *, held_out: int = HELD_OUT) -> _Seen:
        """pairs: of each sequence, the rows that a product reads, and what these or the hidden rows after it lack.

        held_out: one in how many is.
        """
        sums: list[tuple[Moments, CrossMoments]] = []
        for i, (rows, lack) in enumerate(pairs):
            if not np.isfinite(rows).all():
                raise InputError(f"{self._source.path}: the model's activations are not finite; its weights are broken")
            width = rows.shape[1]
            sums = sums or [(Moments(width), CrossMoments(lack.shape[1], width)) for _ in range(2)]
            moments, products = sums[is_held_out(i, held_out)]
            moments.add(rows, threads=self._threads)
            products.add(lack, rows, threads=self._threads)
        (fit, fit_lack), (judge, judge_lack) = sums
        return _Seen(
            Inputs(fit.matrix(), judge.matrix(), threads=self._threads),
            Lack(fit_lack.matrix(), judge_lack.matrix()),
        )

    def _round(self, t: TensorSpec, seen: _Seen, met: F32Array | None) -> Matrix:
        if t.name not in self._methods:
            scheme = self._layout.tensors[t.name].scheme
            same = self._source.tensors[t.name].coding == scheme  # then its values as they are
            return self._original(t) if same else self._coded(t, scheme)
        self._done[t.name] = self._solve_matrix(t, seen, of_inputs=READS[t.part] in NORMED, met=met)
        return self._rounded(t)

    def _rounded(self, t: TensorSpec) -> Matrix:
        """As it is written, or is going to be."""
        if t.name in self._kept:
            assert self._stored is not None
            parts = self._stored(t.name)
        else:
            parts = {kind: kernels.as_bytes(part) for kind, part in self._done[t.name].parts().items()}
        return self._layout.tensors[t.name].scheme, (t.shape[0], t.shape[1]), parts

    def _original(self, t: TensorSpec) -> Matrix:
        return self._coded(t, KEPT[self._source.tensors[t.name].dtype])

    def _coded(self, t: TensorSpec, scheme: QuantScheme) -> Matrix:
        dtype = self._source.tensors[t.name].dtype
        try:
            parts = _nearest(self._source.read(t.name), dtype, scheme, self._threads)
        except kernels.BadValueError as error:
            raise self._bad(t.name, error) from None
        return scheme, (t.shape[0], t.shape[1]), parts

    def _embed(self, rows_of: Callable[[npt.NDArray[np.int64]], F32Array]) -> F32Array:
        """The hidden rows (n, ctx, padded hidden_size) that the first layer reads; rows_of: the embedding's, by ids."""
        ids, places = np.unique(self._sequences, return_inverse=True)
        rows = rows_of(ids)
        out = np.zeros((*self._sequences.shape, padded_width(rows.shape[1])), np.float32)
        out[..., : rows.shape[1]] = rows[places.reshape(self._sequences.shape)]
        out *= np.float32(self._spec.embedding_scale)
        return out

    def _original_rows(self, ids: npt.NDArray[np.int64]) -> F32Array:
        t = self._spec.tensors()[0]
        return codes.as_f32(self._rows(t.name, ids), self._source.tensors[t.name].dtype)

    def _nearest_rows(self, ids: npt.NDArray[np.int64]) -> F32Array:
        """As the container will hold them."""
        t = self._spec.tensors()[0]
        scheme, dtype = self._layout.tensors[t.name].scheme, self._source.tensors[t.name].dtype
        rows = self._rows(t.name, ids)
        try:
            parts = _nearest(rows, dtype, scheme, self._threads)
        except kernels.BadValueError as error:
            raise self._bad(t.name, error, int(ids[error.row])) from None
        return codes.dequantize(scheme, rows.shape, parts)

    def _rows(self, name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The rows `ids` (ascending) of a matrix, read a block at a time."""
        blocks = []
        for start in range(0, self._source.tensors[name].shape[0], _READ_ROWS):
            wanted = ids[(ids >= start) & (ids < start + _READ_ROWS)] - start
            if len(wanted):
                blocks.append(self._source.read(name, slice(start, start + int(wanted[-1]) + 1))[wanted])
        return np.concatenate(blocks)

    def _exact_head(self, exact: F32Array) -> _Seen:
        """What the head reads in the model as it was; `exact` is used up."""
        for layer in range(self._spec.n_layers):
            _, matrices, vectors = self._load(layer)
            model = LayerModel(self._spec, layer, matrices, vectors, threads=self._threads)
            for sequence in exact:
                model.run(sequence)
        rows = (self._normed(sequence) for sequence in exact)
        return self._see(((x, np.zeros_like(x)) for x in rows), held_out=2)

    def _round_head(self) -> None:
        assert self._streams is not None
        normed = ((self._normed(a), self._normed(b)) for a, b in zip(*self._streams, strict=True))
        seen = self._see((rounded, exact - rounded) for exact, rounded in normed)
        head = self._spec.tensors()[-1]
        self._done[head.name] = self._solve_rows(head, seen)

    def _normed(self, hidden: F32Array) -> F32Array:
        """Hidden rows after the final norm."""
        norm = next(t for t in self._spec.tensors() if t.part == "norm")
        return final_norm(self._spec, hidden, _floats(self._source, norm.name), threads=self._threads)


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


def _floats(source: Source, name: str) -> F32Array:
    return codes.as_f32(source.read(name), source.tensors[name].dtype)
