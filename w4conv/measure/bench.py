"""bench: prefill and decode of one model in several codings, beside the read ceiling of the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from w4conv.container import Container
from w4conv.errors import UsageError
from w4conv.measure.bandwidth import read_gbs
from w4conv.progress import Progress, Silent
from w4conv.quantization.generic import refuse_to_run
from w4conv.runtime.engine import Model


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
    """A prompt of n_tokens at once; seconds until its logits, which is the latency of the first token."""

    n_tokens: int
    seconds: Rate
    tokens_per_second: Rate


@dataclass(frozen=True, slots=True)
class Decode:
    """n_tokens one by one behind the prompt.

    weight_nbytes: bytes of weights that one token reads. read_gbs: these bytes a second, in GB. read_share: that as a
    share of the plain read of the same mapping in the same round.
    """

    n_tokens: int
    ms_per_token: Rate
    tokens_per_second: Rate
    weight_nbytes: int
    read_gbs: Rate
    read_share: Rate


@dataclass(frozen=True, slots=True)
class Row:
    """One coding of the model. weight_nbytes: all its weights. ceiling_gbs: plain read of its mapping."""

    name: str
    schemes: str
    weight_nbytes: int
    ceiling_gbs: Rate
    prefill: Prefill
    decode: Decode


@dataclass(frozen=True, slots=True)
class BenchReport:
    isa: str
    threads: int
    rounds: int
    rows: tuple[Row, ...]


def bench(
    containers: Sequence[tuple[str, Container]],
    *,
    n_prompt: int = 512,
    n_tokens: int = 64,
    rounds: int = 5,
    threads: int | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure named containers alternately: in each round each one is read plainly, prefilled and decoded once.

    One round before them warms caches and clocks and is not counted. Raises UsageError when prompt and tokens do not
    fit a model, InputError when a model cannot be run.
    """
    progress = progress or Silent()
    for name, container in containers:
        refuse_to_run(name, container.provenance)
    models = [Model(container, threads=threads) for _, container in containers]
    for (name, _), model in zip(containers, models, strict=True):
        if n_prompt + n_tokens > model.ctx:
            raise UsageError(
                f"{name}: {n_prompt} + {n_tokens} tokens do not fit its {model.ctx} positions; ask for fewer"
            )
    try:
        progress.start((rounds + 1) * len(models))
        figures: list[list[tuple[float, float, float]]] = [[] for _ in models]
        for turn in range(rounds + 1):
            for i, model in enumerate(models):
                measured = _measure(model, n_prompt, n_tokens)
                if turn > 0:
                    figures[i].append(measured)
                progress.advance(1, containers[i][0])
        rows = tuple(
            _row(name, model, n_prompt, n_tokens, measured)
            for (name, _), model, measured in zip(containers, models, figures, strict=True)
        )
        return BenchReport(models[0].isa, models[0].threads, rounds, rows)
    finally:
        for model in models:
            model.close()


def _measure(model: Model, n_prompt: int, n_tokens: int) -> tuple[float, float, float]:
    """(ceiling in GB/s, seconds of the prefill, seconds of the decoding)."""
    ceiling = read_gbs(model.container, threads=model.threads)
    tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, n_prompt + n_tokens)
    session = model.session()
    start = time.perf_counter()
    session.append(tokens[:n_prompt])
    middle = time.perf_counter()
    for token in tokens[n_prompt:]:
        session.append([token])
    return ceiling, middle - start, time.perf_counter() - middle


def _row(name: str, model: Model, n_prompt: int, n_tokens: int, figures: list[tuple[float, float, float]]) -> Row:
    ceilings, prefills, decodes = zip(*figures, strict=True)
    gbs = [model.bytes_per_token * n_tokens / seconds / 1e9 for seconds in decodes]
    tensors = model.container.tensors.values()
    return Row(
        name=name,
        schemes=", ".join(sorted({str(t.scheme) for t in tensors if len(t.shape) > 1})),
        weight_nbytes=sum(part.nbytes for t in tensors for part in t.parts),
        ceiling_gbs=Rate.of(ceilings),
        prefill=Prefill(n_prompt, Rate.of(prefills), Rate.of([n_prompt / s for s in prefills])),
        decode=Decode(
            n_tokens,
            Rate.of([s / n_tokens * 1e3 for s in decodes]),
            Rate.of([n_tokens / s for s in decodes]),
            model.bytes_per_token,
            Rate.of(gbs),
            Rate.of([g / c for g, c in zip(gbs, ceilings, strict=True)]),
        ),
    )
