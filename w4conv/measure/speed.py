"""Prefill and decode of a model, beside the ceilings of the machine; in rounds, so that models can take turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from w4conv import kernels
from w4conv.measure.bandwidth import peak_gmacs, read_gbs
from w4conv.measure.counters import Counters, difference
from w4conv.progress import Progress
from w4conv.runtime.engine import Model
from w4conv.scheme import KINDS

CURVE_TOKENS: Final = 8  # decoded behind each length of the context
SHORTEST_CONTEXT: Final = 16


@dataclass(frozen=True, slots=True)
class Rate:
    """Median over the rounds, and the lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Rate:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt of n_tokens at once; seconds until its logits, which is the latency of the first token.

    gmacs: 1e9 multiplications a second in GEMMs with weights. peak_share: of the dot product peak of the same round.
    macs_per_byte: multiplications for each byte of weights read. parts: ms of each token by part of the forward pass
    (Model.part_seconds), from a run of its own. counters: see Counters, for each token.
    """

    n_tokens: int
    seconds: Rate
    tokens_per_second: Rate
    gmacs: Rate
    peak_share: Rate
    macs_per_byte: float
    parts: Mapping[str, float]
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Decode:
    """n_tokens one by one behind the prompt.

    weight_nbytes: bytes of weights that one token reads. read_gbs: these bytes a second, in GB. read_share: that as a
    share of the plain read of the same mapping just before and after. gmacs, macs_per_byte, parts, counters: as
    in Prefill.
    """

    n_tokens: int
    ms_per_token: Rate
    tokens_per_second: Rate
    weight_nbytes: int
    read_gbs: Rate
    read_share: Rate
    gmacs: Rate
    macs_per_byte: float
    parts: Mapping[str, float]
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ContextPoint:
    """The time of one token (a median) behind a context of n_tokens."""

    n_tokens: int
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class _Round:
    ceiling_gbs: float
    peak_gmacs: float
    prefill_seconds: float
    decode_seconds: float
    prefill_counts: Mapping[str, float]
    decode_counts: Mapping[str, float]


class SpeedRun:
    """A model while it is measured: a warm-up, rounds, and once its parts; then the figures."""

    def __init__(self, model: Model, *, n_prompt: int, n_tokens: int, counters: Counters) -> None:
        """n_prompt, n_tokens: random tokens of the prompt, and to decode behind it."""
        self.model = model
        self._rounds: list[_Round] = []
        self._prefill_parts: dict[str, float] = {}
        self._decode_parts: dict[str, float] = {}
        self._counters = counters
        tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, n_prompt + n_tokens)
        self._prompt, self._answer = tokens[:n_prompt], tokens[n_prompt:]
        spec, stored = model.spec, model.container.tensors
        linear = [t for t in spec.tensors() if t.role in ("linear", "router")]
        self._linear_macs = sum(spec.used_by_token(t, math.prod(t.shape)) for t in linear)
        self._head_macs = spec.vocab_size * spec.hidden_size
        nbytes = {t.part: sum(part.nbytes for part in stored[t.name].parts) for t in spec.tensors() if t.layer is None}
        self._head_nbytes = nbytes["embed_tokens" if spec.tied_head else "lm_head"]
        # All experts, as the tokens of a pass spread over them.
        layers = [t for t in spec.tensors() if t.layer is not None]
        self._layers_nbytes = sum(part.nbytes for t in layers for part in stored[t.name].parts)
        self._layers_nbytes += nbytes["norm"]
        integers = any(KINDS[stored[t.name].scheme.kind].takes_integers for t in linear)
        self._operands = model.activations if integers else "float"

    def warm_up(self) -> None:
        """A round that is not counted, for caches and clocks."""
        self._measure()

    def measure(self) -> None:
        """One round: prompt, a plain read of the mapping, tokens, another read."""
        self._rounds.append(self._measure())

    def _measure(self) -> _Round:
        model, session = self.model, self.model.session()
        peak = peak_gmacs(operands=self._operands, threads=model.threads)
        counts = [self._counters.read()]
        start = time.perf_counter()
        session.append(self._prompt)
        prefill = time.perf_counter() - start
        counts.append(self._counters.read())
        before = read_gbs(model.container, threads=model.threads)
        counts.append(self._counters.read())
        start = time.perf_counter()
        for token in self._answer:
            session.append([token])
        decode = time.perf_counter() - start
        counts.append(self._counters.read())
        after = read_gbs(model.container, threads=model.threads)
        return _Round(
            ceiling_gbs=2 / (1 / before + 1 / after),  # of both reads together
            peak_gmacs=peak,
            prefill_seconds=prefill,
            decode_seconds=decode,
            prefill_counts=difference(counts[1], counts[0]),
            decode_counts=difference(counts[3], counts[2]),
        )

    def measure_parts(self) -> None:
        """Time by part of the forward pass, in a pass of its own."""
        model, session = self.model, self.model.session()
        model.restart_stopwatch()
        session.append(self._prompt)
        self._prefill_parts = model.part_seconds()
        model.restart_stopwatch()
        for token in self._answer:
            session.append([token])
        self._decode_parts = model.part_seconds()

    def ceiling_gbs(self) -> Rate:
        """Plain read of the mapping."""
        return Rate.of([r.ceiling_gbs for r in self._rounds])

    def peak_gmacs(self) -> Rate:
        """Dot products from registers, of the operands that its linear weights use."""
        return Rate.of([r.peak_gmacs for r in self._rounds])

    def prefill(self) -> Prefill:
        n = len(self._prompt)
        passes = math.ceil(n / kernels.PASS_TOKENS)  # each reads the layers, the last one the head too
        macs = self._linear_macs * n + self._head_macs
        gmacs = [macs / r.prefill_seconds / 1e9 for r in self._rounds]
        return Prefill(
            n_tokens=n,
            seconds=Rate.of([r.prefill_seconds for r in self._rounds]),
            tokens_per_second=Rate.of([n / r.prefill_seconds for r in self._rounds]),
            gmacs=Rate.of(gmacs),
            peak_share=Rate.of([g / r.peak_gmacs for g, r in zip(gmacs, self._rounds, strict=True)]),
            macs_per_byte=macs / (passes * self._layers_nbytes + self._head_nbytes),
            parts={part: s / n * 1e3 for part, s in self._prefill_parts.items()},
            counters=_per_token([r.prefill_counts for r in self._rounds], n),
        )

    def decode(self) -> Decode:
        n, nbytes = len(self._answer), self.model.bytes_per_token
        macs = self._linear_macs + self._head_macs
        seconds = [r.decode_seconds / n for r in self._rounds]
        gbs = [nbytes / s / 1e9 for s in seconds]
        return Decode(
            n_tokens=n,
            ms_per_token=Rate.of([s * 1e3 for s in seconds]),
            tokens_per_second=Rate.of([1 / s for s in seconds]),
            weight_nbytes=nbytes,
            read_gbs=Rate.of(gbs),
            read_share=Rate.of([g / r.ceiling_gbs for g, r in zip(gbs, self._rounds, strict=True)]),
            gmacs=Rate.of([macs / s / 1e9 for s in seconds]),
            macs_per_byte=macs / nbytes,
            parts={part: s / n * 1e3 for part, s in self._decode_parts.items()},
            counters=_per_token([r.decode_counts for r in self._rounds], n),
        )


def _per_token(counts: Sequence[Mapping[str, float]], n_tokens: int) -> dict[str, float]:
    return {name: statistics.median(c[name] for c in counts) / n_tokens for name in counts[0]}


def decode_curves(models: Sequence[Model], context: int, progress: Progress) -> list[tuple[ContextPoint, ...]]:
    """Decode behind ever longer contexts, all models at each length in turn."""
    lengths = [n for i in range(32) if (n := SHORTEST_CONTEXT << i) < context] + [context]
    sessions = [model.session() for model in models]
    curves: list[list[ContextPoint]] = [[] for _ in models]
    rng = np.random.default_rng(1)
    progress.start(len(lengths) * len(models))
    for length in lengths:
        for model, session, curve in zip(models, sessions, curves, strict=True):
            tokens = rng.integers(0, model.spec.vocab_size, length + CURVE_TOKENS)
            session.append(tokens[session.n_tokens : length])
            seconds = []
            for token in tokens[length:]:
                start = time.perf_counter()
                session.append([token])
                seconds.append(time.perf_counter() - start)
            session.truncate(length)
            curve.append(ContextPoint(length, statistics.median(seconds) * 1e3))
            progress.advance(1, "decode over context")
    return [tuple(curve) for curve in curves]
