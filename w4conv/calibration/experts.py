"""A layer of experts is calibrated one expert at a time, each for the tokens that are routed to it.

Two streams of tokens pass the experts side by side: of the original model, and of the one quantized so far. Each is
routed by itself, with the router's own weights. An expert is rounded on the inputs that it has in the second stream, of
the tokens that are routed to it there. It is to give what its original matrices give of the same tokens in the first
stream, wherever they are routed there. So the output residual of an expert is its own, and a token that changes experts
is no error of any.

An expert that sees few tokens is rounded for more: those that came nearest to being routed to it, by router scores.
Reasons and measurements: docs/decisions/0027-mixtures-of-experts.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F32Array
from w4conv.calibration.calibrator import Observed, summed
from w4conv.calibration.text import HELD_OUT
from w4conv.models.spec import READS, ModelSpec, TensorSpec
from w4conv.runtime.experts import Expert, Routing, product, route
from w4conv.runtime.layers import LayeredSource
from w4conv.runtime.native_model import Matrix

# An expert is rounded for at least one token for so many columns of gate and up, one in HELD_OUT of them held out.
COLUMNS_A_TOKEN: Final = 2
_LISTED: Final = 32  # experts in a note; more are counted
_BLOCK_TOKENS: Final = 512  # summed together

Indices = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Kinds = Sequence[tuple[bool, Indices]]  # whether held out, and places among the tokens that pass an expert


@dataclass(frozen=True, slots=True)
class FewTokens:
    """Experts of a layer that saw few tokens, and were rounded for the nearest others too."""

    layer: int
    experts: tuple[int, ...]


def least_tokens(spec: ModelSpec) -> int:
    """That an expert is rounded for, as far as there are so many."""
    return int(spec.hidden_size / COLUMNS_A_TOKEN)


def note_few(spec: ModelSpec, found: Sequence[FewTokens]) -> list[str]:
    n = sum(len(few.experts) for few in found)
    layers = "; ".join(
        f"layer {few.layer}: {', '.join(map(str, few.experts)) if n <= _LISTED else len(few.experts)}" for few in found
    )
    if not n:
        return []
    return [
        f"{n} experts saw fewer than {least_tokens(spec)} calibration tokens, and were rounded for the nearest others "
        f"too: {layers}. More tokens serve them better"
    ]


class Rounder(Protocol):
    """What is done with each matrix of an expert."""

    def is_solved(self, t: TensorSpec) -> bool:
        """Whether the codes of a matrix depend on its inputs, and are not there yet."""

    def round(self, t: TensorSpec, expert: int, observed: Observed | None) -> Matrix:
        """The matrix as in the container. observed: None where `is_solved` says no."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The tokens of one model before the experts of a layer. rows: (n_tokens, hidden_size), which router and experts
    read."""

    rows: F32Array
    routing: Routing


@dataclass(frozen=True, slots=True)
class ExpertTokens:
    """Tokens that one expert is rounded for, and those that its rounding is judged by; ascending. n_routed: how many of
    all are routed to it."""

    fit: Indices
    held_out: Indices
    n_routed: int


def tokens_of(routing: Routing, expert: int, held_out: Flags, least: int) -> ExpertTokens:
    """held_out: of each token. least: tokens of both kinds together."""
    n_judged = -(-least // HELD_OUT)
    return ExpertTokens(
        _routed_or_near(routing, expert, np.flatnonzero(~held_out), least - n_judged),
        _routed_or_near(routing, expert, np.flatnonzero(held_out), n_judged),
        int(routing.chosen[:, expert].sum()),
    )


def _routed_or_near(routing: Routing, expert: int, tokens: Indices, n: int) -> Indices:
    """Those of `tokens` that are routed to the expert; where these are fewer than n, the nearest others too."""
    routed = routing.chosen[tokens, expert]
    own, others = tokens[routed], tokens[~routed]
    order = np.argsort(-routing.margins[others, expert], kind="stable")
    return np.sort(np.concatenate([own, others[order[: max(n - len(own), 0)]]]))


class ExpertLayer:
    """The experts of one layer of the original model. few: those rounded for tokens of others too."""

    def __init__(self, model: LayeredSource, layer: int, where: object, *, threads: int | None) -> None:
        """where: of the source, for error messages."""
        spec, self._where = model.spec, where
        assert spec.experts is not None
        self._spec, self._experts, self._model, self._threads = spec, spec.experts, model, threads
        tensors = spec.expert_tensors(layer)
        self.router = next(t for t in tensors if t.role == "router")
        self._biases = {t.part.removesuffix(".bias"): model.vector(t) for t in tensors if t.role == "bias"}
        self._matrices = [
            [t for t in tensors if t.role == "linear" and t.expert in (None, i)] for i in range(self._experts.n_experts)
        ]
        self.few: list[int] = []

    def stream(self, rows: F32Array, router: Matrix) -> Stream:
        """rows: finite. router: the router's matrix."""
        scores = product(router, rows, threads=self._threads)
        if "router" in self._biases:
            scores = scores + self._biases["router"]
        return Stream(rows, route(self._experts, scores))

    def outputs(self, stream: Stream) -> F32Array:
        """Of the original experts: (n_tokens, hidden_size)."""
        out = np.zeros(stream.rows.shape, np.float32)
        for i in range(self._experts.n_experts):
            tokens, expert = np.flatnonzero(stream.routing.chosen[:, i]), self._original(i)
            _add(out, stream.routing, i, tokens, expert.output(expert.inner(stream.rows[tokens])))
        return out

    def round(
        self, original: Stream, quantized: Stream, held_out: Flags, rounder: Rounder
    ) -> tuple[F32Array, F32Array]:
        """Round all experts. Returns the outputs in both streams, (n_tokens, hidden_size). held_out: of each token."""
        outs = np.zeros(original.rows.shape, np.float32), np.zeros(quantized.rows.shape, np.float32)
        least = least_tokens(self._spec)
        for i in range(self._experts.n_experts):
            own = tokens_of(quantized.routing, i, held_out, least)
            passing = original.routing.chosen[:, i] | quantized.routing.chosen[:, i]
            if any(map(rounder.is_solved, self._matrices[i])):
                passing[own.fit] = passing[own.held_out] = True
                if own.n_routed < least:
                    self.few.append(i)
            tokens = np.flatnonzero(passing)
            kinds = [(held, np.searchsorted(tokens, those)) for held, those in ((False, own.fit), (True, own.held_out))]
            x, target, expert = quantized.rows[tokens], original.rows[tokens], self._original(i)
            matrices = self._round_at("gate_up", i, expert, kinds, x, target, rounder)
            inner, target_inner = self._expert(i, matrices).inner(x), expert.inner(target)
            matrices |= self._round_at("down", i, expert, kinds, inner, target_inner, rounder)
            for out, stream, last, rows in (
                (outs[0], original, expert, target_inner), (outs[1], quantized, self._expert(i, matrices), inner)
            ):  # fmt: skip
                there = stream.routing.chosen[tokens, i]
                _add(out, stream.routing, i, tokens[there], last.output(rows[there]))
        return outs

    def _round_at(
        self, hook: str, i: int, expert: Expert, kinds: Kinds, x: F32Array, target: F32Array, rounder: Rounder
    ) -> dict[str, Matrix]:
        """x, target: the inputs at `hook` in the quantized and in the original stream."""
        here = [t for t in self._matrices[i] if READS[t.part] == hook]
        solved = [t.part for t in here if rounder.is_solved(t)]
        observed = self._observe(expert, solved, kinds, x, target) if solved else {}
        return {t.part: rounder.round(t, i, observed.get(t.part)) for t in here}

    def _observe(
        self, expert: Expert, parts: Sequence[str], kinds: Kinds, x: F32Array, target: F32Array
    ) -> dict[str, Observed]:
        def blocks() -> Iterator[tuple[bool, F32Array, F32Array]]:
            for held_out, places in kinds:
                for start in range(0, len(places), _BLOCK_TOKENS):
                    at = places[start : start + _BLOCK_TOKENS]
                    missing = target[at] - x[at]
                    yield held_out, x[at], np.concatenate([expert.product(part, missing) for part in parts], axis=1)

        together = summed(blocks(), self._where, threads=self._threads)
        assert together.residual is not None
        out, start = {}, 0
        for part in parts:
            rows = np.arange(start, start + expert.n_rows(part))
            out[part] = Observed(together.inputs, together.residual.at(rows))
            start += len(rows)
        return out

    def _original(self, i: int) -> Expert:
        return self._expert(i, {t.part: self._model.matrix(t, None if t.expert == i else i) for t in self._matrices[i]})

    def _expert(self, i: int, matrices: Mapping[str, Matrix]) -> Expert:
        return Expert(self._spec, matrices, {part: b[i] for part, b in self._biases.items()}, threads=self._threads)


def _add(out: F32Array, routing: Routing, expert: int, tokens: Indices, outputs: F32Array) -> None:
    """outputs: of `expert` for those tokens, in this order."""
    out[tokens] += routing.weights[tokens, expert][:, None] * outputs
