"""bench: prefill and decode of one model in several codings, beside read bandwidth and the dot product peak."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from w4conv import cpus, kernels
from w4conv.arguments import count, optional_count
from w4conv.arrays import F64Array
from w4conv.commands.options import has_integers, refuse_idle
from w4conv.commands.quantize import quantize
from w4conv.container import Container, open_container
from w4conv.errors import UsageError
from w4conv.measure.bandwidth import peak_gmacs, read_gbs
from w4conv.measure.counters import Counters, difference
from w4conv.measure.machine import Machine, available_memory
from w4conv.measure.perplexity import Estimate, Increase, estimate, increase, token_nlls
from w4conv.measure.shapes import RandomWeights
from w4conv.measure.text_windows import TextWindows, cut_text, settle
from w4conv.progress import Progress, Silent
from w4conv.runtime.engine import Model

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
class RowPerplexity:
    """increase: over the first row, where both have the same tokens."""

    value: Estimate
    increase: Increase | None


@dataclass(frozen=True, slots=True)
class Row:
    """One coding of the model. weight_nbytes: all its weights. ceiling_gbs: plain read of its mapping. peak_gmacs: of
    the dot product that its linear weights use, from registers. context: decode over the length of the context.
    """

    name: str
    schemes: str
    weight_nbytes: int
    ceiling_gbs: Rate
    peak_gmacs: Rate
    prefill: Prefill
    decode: Decode
    context: tuple[ContextPoint, ...]
    perplexity: RowPerplexity | None


@dataclass(frozen=True, slots=True)
class BenchText:
    """What perplexity was measured on, as in verify."""

    text: str
    text_sha256: str
    convention: str
    ctx: int
    n_windows: int
    n_scored: int


@dataclass(frozen=True, slots=True)
class BenchReport:
    """isa: the tier that was used; dot_instruction: its dot product of 16-bit integers. activations: int16 or int8.
    kv: how keys and values were kept.
    """

    isa: str
    dot_instruction: str
    activations: str
    kv: str
    threads: int
    rounds: int
    machine: Machine
    rows: tuple[Row, ...]
    text: BenchText | None


def bench(
    containers: Sequence[tuple[str, Container]],
    *,
    n_prompt: int = 512,
    n_tokens: int = 64,
    rounds: int = 5,
    context: int | None = None,
    text: str | os.PathLike[str] | None = None,
    ctx: int | None = None,
    chunks: int | None = None,
    activations: str = "int16",
    kv: str = "f16",
    threads: int | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure named containers alternately: in each round each one is prefilled, read plainly, decoded and read again.

    One round before them warms caches and clocks and is not counted. context: decode is also measured behind 16, 32, 64
    .. tokens up to so many (default: the prompt's length). text: measure perplexity on this file, by llama.cpp's
    convention with windows of ctx tokens (default 512); chunks: only the first so many of them. activations: as of
    Model.

    Raises UsageError when prompt and tokens do not fit a model, or all weights together not the memory, which would
    measure the disk; InputError when a model cannot be run or the text is missing.
    """
    values = {
        "text": text,
        "ctx": ctx,
        "chunks": chunks,
        "activations": activations if activations != "int16" else None,
    }
    kinds = [t.scheme.kind for _, container in containers for t in container.tensors.values()]
    refuse_idle("bench", values | {"has_integers": has_integers(kinds)})
    progress = progress or Silent()
    n_prompt, n_tokens = count(n_prompt, "prompt", low=1), count(n_tokens, "tokens", low=1)
    rounds, chunks = count(rounds, "rounds", low=1), optional_count(chunks, "chunks", low=1)
    context = n_prompt if context is None else count(context, "context", low=1)
    cpus.thread_count(threads)
    check_memory(sum(container.file_nbytes for _, container in containers))
    with ExitStack() as stack:
        counters = Counters()  # before the threads that are to be counted
        stack.callback(counters.close)
        runs: list[_Run] = []
        for name, container in containers:
            model = stack.enter_context(Model(container, threads=threads, kv=kv, activations=activations))
            longest = max(n_prompt + n_tokens, context + CURVE_TOKENS)
            if longest > model.ctx:
                raise UsageError(f"{name}: {longest} tokens do not fit its {model.ctx} positions; ask for fewer")
            cut = None
            if text is not None:  # before the longer work, so that a missing text is told at once
                convention, length = settle(None, ctx)
                if length > model.ctx:
                    raise UsageError(f"{name}: a ctx of {length} exceeds its {model.ctx} positions; ask for less")
                cut = cut_text(container, text, convention=convention, ctx=length, chunks=chunks)
            runs.append(_Run(name, model, n_prompt, n_tokens, counters, cut))
        progress.start((rounds + 1) * len(runs))
        for turn in range(rounds + 1):
            for run in runs:
                figures = run.measure()
                if turn > 0:
                    run.rounds.append(figures)
                progress.advance(1, run.name)
        for run in runs:
            run.measure_parts()
        curves = _curves([run.model for run in runs], context, progress)
        nlls = [_nlls(run, progress) for run in runs]
        rows = []
        for run, curve, nll in zip(runs, curves, nlls, strict=True):
            rows.append(run.row(curve, _perplexity(nll, nlls[0], run.cut, runs[0].cut)))
        first = runs[0]
        return BenchReport(
            isa=first.model.isa,
            dot_instruction=kernels.dot_instruction(),
            activations=first.model.activations,
            kv=kv,
            threads=first.model.threads,
            rounds=rounds,
            machine=Machine.here(),
            rows=tuple(rows),
            text=_text(first.cut),
        )


@contextmanager
def opened(
    inputs: Sequence[str],
    shape: str | None = None,
    *,
    schemes: Sequence[str],
    threads: int | None = None,
    progress: Progress | None = None,
) -> Iterator[list[tuple[str, Container]]]:
    """Everything to be measured, by name; what had to be converted is gone when the block ends.

    inputs: `.w4` files, and checkpoints, which are converted to each of the schemes, in the temporary directory.
    shape: the name of a model, whose random weights are coded in each of the schemes.
    Raises UsageError when there is nothing to measure, or more than the memory holds; else as quantize and open.
    """
    progress = progress or Silent()
    if not inputs and shape is None:
        raise UsageError("nothing to measure: name a file, or a --shape")
    words = [word.strip() for word in schemes]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="w4conv-")))
        paths: list[tuple[str, Path]] = []
        work: list[Callable[[], object]] = []
        nbytes = 0
        for text in inputs:
            if text.endswith(".w4"):
                paths.append((text, Path(text)))
                continue
            for word in words:
                path = folder / f"{len(paths)}.w4"
                nbytes += quantize(text, path, scheme=word, dry_run=True).output_nbytes
                work.append(partial(quantize, text, path, scheme=word, threads=threads, progress=progress))
                paths.append((f"{text} {word}", path))
        for word in words if shape is not None else []:
            path = folder / f"{len(paths)}.w4"
            weights = RandomWeights(str(shape), scheme=word)
            nbytes += weights.layout.file_nbytes
            work.append(partial(weights.write, path, progress=progress))
            paths.append((f"{shape} {word}", path))
        check_memory(nbytes)  # before the work
        for make in work:
            make()
        yield [(name, stack.enter_context(open_container(path))) for name, path in paths]


def check_memory(nbytes: int) -> None:
    """Raises UsageError when so many bytes of containers cannot all stay in the page cache."""
    available = available_memory()
    if available is not None and nbytes > 0.9 * available:
        raise UsageError(
            f"all weights together take {nbytes / 1e9:.1f} GB, and {available / 1e9:.1f} GB of memory are free: that "
            "would measure the disk. Name fewer models or --schemes"
        )


@dataclass(frozen=True, slots=True)
class _Round:
    ceiling_gbs: float
    peak_gmacs: float
    prefill_seconds: float
    decode_seconds: float
    prefill_counts: Mapping[str, float]
    decode_counts: Mapping[str, float]


class _Run:
    """One row while it is measured."""

    def __init__(
        self, name: str, model: Model, n_prompt: int, n_tokens: int, counters: Counters, cut: TextWindows | None
    ) -> None:
        self.name, self.model, self.cut = name, model, cut
        self.rounds: list[_Round] = []
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
        integers = has_integers(stored[t.name].scheme.kind for t in linear)
        self._operands = model.activations if integers else "float"

    def measure(self) -> _Round:
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
        model, session = self.model, self.model.session()
        model.restart_stopwatch()
        session.append(self._prompt)
        self._prefill_parts = model.part_seconds()
        model.restart_stopwatch()
        for token in self._answer:
            session.append([token])
        self._decode_parts = model.part_seconds()

    def row(self, context: tuple[ContextPoint, ...], perplexity: RowPerplexity | None) -> Row:
        model, rounds = self.model, self.rounds
        tensors = model.container.tensors.values()
        return Row(
            name=self.name,
            schemes=", ".join(sorted({str(t.scheme) for t in tensors if len(t.shape) > 1})),
            weight_nbytes=sum(part.nbytes for t in tensors for part in t.parts),
            ceiling_gbs=Rate.of([r.ceiling_gbs for r in rounds]),
            peak_gmacs=Rate.of([r.peak_gmacs for r in rounds]),
            prefill=self._prefill(),
            decode=self._decode(),
            context=context,
            perplexity=perplexity,
        )

    def _prefill(self) -> Prefill:
        n = len(self._prompt)
        passes = math.ceil(n / kernels.PASS_TOKENS)  # each reads the layers, the last one the head too
        macs = self._linear_macs * n + self._head_macs
        gmacs = [macs / r.prefill_seconds / 1e9 for r in self.rounds]
        return Prefill(
            n_tokens=n,
            seconds=Rate.of([r.prefill_seconds for r in self.rounds]),
            tokens_per_second=Rate.of([n / r.prefill_seconds for r in self.rounds]),
            gmacs=Rate.of(gmacs),
            peak_share=Rate.of([g / r.peak_gmacs for g, r in zip(gmacs, self.rounds, strict=True)]),
            macs_per_byte=macs / (passes * self._layers_nbytes + self._head_nbytes),
            parts={part: s / n * 1e3 for part, s in self._prefill_parts.items()},
            counters=_per_token([r.prefill_counts for r in self.rounds], n),
        )

    def _decode(self) -> Decode:
        n, nbytes = len(self._answer), self.model.bytes_per_token
        macs = self._linear_macs + self._head_macs
        seconds = [r.decode_seconds / n for r in self.rounds]
        gbs = [nbytes / s / 1e9 for s in seconds]
        return Decode(
            n_tokens=n,
            ms_per_token=Rate.of([s * 1e3 for s in seconds]),
            tokens_per_second=Rate.of([1 / s for s in seconds]),
            weight_nbytes=nbytes,
            read_gbs=Rate.of(gbs),
            read_share=Rate.of([g / r.ceiling_gbs for g, r in zip(gbs, self.rounds, strict=True)]),
            gmacs=Rate.of([macs / s / 1e9 for s in seconds]),
            macs_per_byte=macs / nbytes,
            parts={part: s / n * 1e3 for part, s in self._decode_parts.items()},
            counters=_per_token([r.decode_counts for r in self.rounds], n),
        )


def _per_token(counts: Sequence[Mapping[str, float]], n_tokens: int) -> dict[str, float]:
    return {name: statistics.median(c[name] for c in counts) / n_tokens for name in counts[0]}


def _curves(models: Sequence[Model], context: int, progress: Progress) -> list[tuple[ContextPoint, ...]]:
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


def _nlls(run: _Run, progress: Progress) -> F64Array | None:
    if run.cut is None:
        return None
    progress.start(run.cut.windows.tokens.size)
    return token_nlls(run.model, run.cut.windows, advance=lambda n: progress.advance(n, f"perplexity {run.name}"))


def _perplexity(
    nlls: F64Array | None, base: F64Array | None, cut: TextWindows | None, base_cut: TextWindows | None
) -> RowPerplexity | None:
    if nlls is None or base is None or cut is None or base_cut is None:
        return None
    comparable = nlls is not base and np.array_equal(cut.windows.tokens, base_cut.windows.tokens)
    return RowPerplexity(estimate(nlls), increase(nlls, base) if comparable else None)


def _text(cut: TextWindows | None) -> BenchText | None:
    if cut is None:
        return None
    n_windows, ctx = cut.windows.tokens.shape
    return BenchText(cut.text.name, cut.text.sha256, cut.convention, ctx, n_windows, cut.windows.n_scored)
