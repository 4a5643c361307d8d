"""bench: prefill and decode of one model in several codings, beside read bandwidth and the dot product peak."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from w4conv import cpus, kernels
from w4conv.arguments import count, optional_count
from w4conv.arrays import F64Array
from w4conv.commands.options import has_integers, refuse_idle
from w4conv.commands.quantize import quantize
from w4conv.container import Container, open_container
from w4conv.errors import UsageError
from w4conv.measure.counters import Counters
from w4conv.measure.machine import Machine, available_memory
from w4conv.measure.perplexity import Estimate, Increase, estimate, increase, token_nlls
from w4conv.measure.shapes import RandomWeights
from w4conv.measure.speed import CURVE_TOKENS, ContextPoint, Decode, Prefill, Rate, SpeedRun, decode_curves
from w4conv.measure.text_windows import TextWindows, cut_text, settle
from w4conv.progress import Progress, Silent
from w4conv.runtime.engine import Model


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
    special_tokens: str = "parse"


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
    special_tokens: str | None = None,
    activations: str = "int16",
    kv: str = "f16",
    threads: int | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure named containers alternately: in each round each one is prefilled, read plainly, decoded and read again.

    One round before them warms caches and clocks and is not counted. context: decode is also measured behind 16, 32, 64
    .. tokens up to so many (default: the prompt's length). text: measure perplexity on this file, by llama.cpp's
    convention with windows of ctx tokens (default 512); chunks: only the first so many of them. special_tokens: "parse"
    (the default) or "text", how those that the text spells are read. activations: as of Model.

    Raises UsageError when prompt and tokens do not fit a model, or all weights together not the memory, which would
    measure the disk; InputError when a model cannot be run or the text is missing.
    """
    values = {
        "text": text,
        "ctx": ctx,
        "chunks": chunks,
        "special_tokens": special_tokens,
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
            if text is not None:  # before the longer work, so that a missing text is an error at once
                convention, length = settle(None, ctx)
                if length > model.ctx:
                    raise UsageError(f"{name}: a ctx of {length} exceeds its {model.ctx} positions; ask for less")
                cut = cut_text(
                    container, text, convention=convention, ctx=length, chunks=chunks, special_tokens=special_tokens
                )
            speed = SpeedRun(model, n_prompt=n_prompt, n_tokens=n_tokens, counters=counters)
            runs.append(_Run(name, model, speed, cut))
        progress.start((rounds + 1) * len(runs))
        for turn in range(rounds + 1):
            for run in runs:
                run.speed.measure() if turn > 0 else run.speed.warm_up()
                progress.advance(1, run.name)
        for run in runs:
            run.speed.measure_parts()
        curves = decode_curves([run.model for run in runs], context, progress)
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
class _Run:
    """One row while it is measured. cut: the text of its perplexity."""

    name: str
    model: Model
    speed: SpeedRun
    cut: TextWindows | None

    def row(self, context: tuple[ContextPoint, ...], perplexity: RowPerplexity | None) -> Row:
        tensors = self.model.container.tensors.values()
        return Row(
            name=self.name,
            schemes=", ".join(sorted({str(t.scheme) for t in tensors if len(t.shape) > 1})),
            weight_nbytes=sum(part.nbytes for t in tensors for part in t.parts),
            ceiling_gbs=self.speed.ceiling_gbs(),
            peak_gmacs=self.speed.peak_gmacs(),
            prefill=self.speed.prefill(),
            decode=self.speed.decode(),
            context=context,
            perplexity=perplexity,
        )


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
    return BenchText(
        cut.text.name, cut.text.sha256, cut.convention, ctx, n_windows, cut.windows.n_scored, cut.special_tokens
    )
