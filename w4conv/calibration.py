"""Calibration: the model run layer by layer on a text, each layer rounded for the inputs that the rounded ones before
it give. One layer's weights and moments are held at a time, and the hidden rows of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from w4conv import codes, kernels
from w4conv.container import Layout
from w4conv.errors import InputError, UsageError
from w4conv.measure.texts import load_text
from w4conv.models.spec import ModelSpec, TensorSpec
from w4conv.quantization.calibrated import METHODS, Inputs, ScaleError, Solution, solve
from w4conv.quantization.moments import Moments
from w4conv.quantization.recipe import KEPT
from w4conv.runtime.engine import LayerModel, Matrix, padded_width
from w4conv.runtime.tokenizer import Tokenizer
from w4conv.scheme import QuantScheme
from w4conv.sources.base import Source

F32Array = npt.NDArray[np.float32]

HELD_OUT: Final = 8  # one sequence in so many is held out to judge by
_READ_ROWS: Final = 1 << 13
# The place in the layer whose rows each matrix reads.
READS: Final = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv", "o_proj": "o",
    "gate_proj": "gate_up", "up_proj": "gate_up", "gate_up_proj": "gate_up", "down_proj": "down",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """sequences: (n, ctx) token ids, spread evenly over the text. digest: BLAKE3 of the text's bytes, hexadecimal."""

    digest: str
    sequences: npt.NDArray[np.int64]

    def record(self) -> dict[str, Any]:
        """For the provenance of a container."""
        n, ctx = self.sequences.shape
        return {"text_blake3": self.digest, "tokens": n * ctx, "ctx": ctx, "held_out_sequences": n // HELD_OUT}


def read_calibration(
    path: Path, blobs: Mapping[str, bytes], spec: ModelSpec, *, tokens: int, ctx: int
) -> CalibrationText:
    """Raises UsageError when the text is too short for so many tokens, InputError when it cannot be read."""
    if spec.experts is not None:
        raise UsageError(
            f"{spec.architecture} is a mixture of experts, whose activations differ from expert to expert; calibration "
            "is not supported for it. Leave out --calibration"
        )
    if not 2 <= ctx <= spec.max_positions:
        raise UsageError(f"calibration-ctx is {ctx}, expected 2 to {spec.max_positions}, the limit of the model")
    n = tokens // ctx
    if n < HELD_OUT:
        raise UsageError(
            f"{tokens:,} calibration tokens are {n} sequences of {ctx}; at least {HELD_OUT} are needed, since one in "
            f"{HELD_OUT} is held out. Raise calibration-tokens or lower calibration-ctx"
        )
    text = load_text(path)
    tokenizer = Tokenizer(blobs)
    ids = np.array(tokenizer.encode(text.content), np.int64)
    if len(ids) < n * ctx:
        raise UsageError(
            f"{path} has {len(ids):,} tokens, fewer than the {n * ctx:,} asked for. Use a longer text or lower "
            "calibration-tokens"
        )
    starts = np.arange(n) * (len(ids) - ctx) // max(n - 1, 1)
    sequences = ids[starts[:, None] + np.arange(ctx)]
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        sequences[:, 0] = tokenizer.bos_id
    return CalibrationText(blake3(text.content.encode()).hexdigest(), sequences)


class Calibrator:
    """Rounds the layers of a source in order. `layout` says how each tensor is coded."""

    def __init__(
        self, source: Source, spec: ModelSpec, layout: Layout, text: CalibrationText, methods: Mapping[str, str], *,
        threads: int | None, solved: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        """methods: of each matrix that is to be solved; the others are coded without regard to their inputs.

        solved: told the bytes of each source matrix, and its name, once it is rounded.
        """
        self._source, self._spec, self._layout, self._methods = source, spec, layout, methods
        self._threads, self._solved = threads, solved
        self._sequences = text.sequences
        self._hidden: F32Array | None = None  # (n, ctx, padded hidden_size)
        self._next_layer = 0
        self._done: dict[str, Solution] = {}
        # matrices by the method that won
        self.chosen = {name: 0 for method in methods.values() for name in METHODS[method]}

    def take(self, name: str) -> Solution:
        """The rounding of a matrix; matrices of layers are asked for in order, each once. Raises InputError."""
        while name not in self._done:
            self._done.clear()
            self._run_layer(self._next_layer)
            self._next_layer += 1
        return self._done.pop(name)

    def note(self) -> str:
        won = ", ".join(f"{method} {n}" for method, n in self.chosen.items() if n)
        return f"rounding chosen for each matrix by its outputs' error on held-out sequences: {won}"

    def _run_layer(self, layer: int) -> None:
        if self._hidden is None:
            self._hidden = self._embed()
        tensors = [t for t in self._spec.tensors() if t.layer == layer]
        linears = [t for t in tensors if t.role == "linear"]
        vectors = {t.part: _floats(self._source, t.name) for t in tensors if t.role in ("norm", "bias")}
        original = {t.part: self._original(t) for t in linears}
        inputs = self._inputs(LayerModel(self._spec, layer, original, vectors, threads=self._threads))
        del original
        rounded: dict[str, Matrix] = {}
        for t in linears:
            scheme = self._layout.tensors[t.name].scheme
            if t.name not in self._methods:
                kept = self._source.tensors[t.name].coding == scheme  # then its values as they are
                rounded[t.part] = self._original(t) if kept else self._coded(t, scheme)
                continue
            values = self._source.read(t.name)
            try:
                s = solve(
                    _as_f32(values, self._source.tensors[t.name].dtype), inputs[READS[t.part]], scheme,
                    self._methods[t.name],
                    threads=self._threads,
                )  # fmt: skip
            except ScaleError as error:
                raise self._bad(t.name, error) from None
            self._done[t.name] = s
            self.chosen[s.method] += 1
            parts = {"codes": kernels.as_bytes(s.codes), "scales": kernels.as_bytes(s.scales)}
            rounded[t.part] = (scheme, (t.shape[0], t.shape[1]), parts)
            self._solved(values.nbytes, t.name)
        model = LayerModel(self._spec, layer, rounded, vectors, threads=self._threads)
        for sequence in self._hidden:
            model.run(sequence)

    def _inputs(self, model: LayerModel) -> dict[str, Inputs]:
        assert self._hidden is not None
        moments: dict[str, tuple[Moments, Moments]] = {}
        for i, sequence in enumerate(self._hidden):
            captured = model.run(sequence.copy(), capture=True)
            assert captured is not None
            for place, rows in captured._asdict().items():
                if not np.isfinite(rows).all():
                    raise InputError(
                        f"{self._source.path}: the model's activations are not finite; its weights are broken"
                    )
                pair = moments.setdefault(place, (Moments(rows.shape[1]), Moments(rows.shape[1])))
                pair[i % HELD_OUT == HELD_OUT // 2].add(rows, threads=self._threads)
        return {place: Inputs(fit.matrix(), held_out.matrix()) for place, (fit, held_out) in moments.items()}

    def _original(self, t: TensorSpec) -> Matrix:
        return self._coded(t, KEPT[self._source.tensors[t.name].dtype])

    def _coded(self, t: TensorSpec, scheme: QuantScheme) -> Matrix:
        dtype = self._source.tensors[t.name].dtype
        try:
            parts = _nearest(self._source.read(t.name), dtype, scheme, self._threads)
        except kernels.BadValueError as error:
            raise self._bad(t.name, error) from None
        return scheme, (t.shape[0], t.shape[1]), parts

    def _embed(self) -> F32Array:
        """The hidden rows that the first layer reads, from the embedding as the container will hold it."""
        t = self._spec.tensors()[0]
        scheme, dtype = self._layout.tensors[t.name].scheme, self._source.tensors[t.name].dtype
        ids, places = np.unique(self._sequences, return_inverse=True)
        rows = self._rows(t.name, ids)
        try:
            parts = _nearest(rows, dtype, scheme, self._threads)
        except kernels.BadValueError as error:
            raise self._bad(t.name, error, int(ids[error.row])) from None
        out = np.zeros((*self._sequences.shape, padded_width(t.shape[1])), np.float32)
        out[..., : t.shape[1]] = codes.dequantize(scheme, rows.shape, parts)[places.reshape(self._sequences.shape)]
        out *= np.float32(self._spec.embedding_scale)
        return out

    def _rows(self, name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The rows `ids` (ascending) of a matrix, read a block at a time."""
        blocks = []
        for start in range(0, self._source.tensors[name].shape[0], _READ_ROWS):
            wanted = ids[(ids >= start) & (ids < start + _READ_ROWS)] - start
            if len(wanted):
                blocks.append(self._source.read(name, slice(start, start + int(wanted[-1]) + 1))[wanted])
        return np.concatenate(blocks)

    def _bad(self, name: str, error: kernels.BadValueError | ScaleError, row: int | None = None) -> InputError:
        at = error.row if row is None else row
        return InputError(f"{self._source.path}: {name}: {error.reason} at row {at}, column {error.column}")


def _nearest(
    values: npt.NDArray[Any], dtype: str, scheme: QuantScheme, threads: int | None
) -> dict[str, npt.NDArray[np.uint8]]:
    if scheme.is_float:
        return {"values": kernels.as_bytes(kernels.pack_float(values, dtype, scheme, threads=threads))}
    packed = kernels.quantize_rtn(values, dtype, scheme, threads=threads)
    return {kind: kernels.as_bytes(part) for kind, part in packed.parts().items()}


def _floats(source: Source, name: str) -> F32Array:
    return _as_f32(source.read(name), source.tensors[name].dtype)


def _as_f32(values: npt.NDArray[Any], dtype: str) -> F32Array:
    return codes.bf16_to_f32(values.view(np.uint16)) if dtype == "BF16" else values.astype(np.float32)
