"""verify: is a container whole, how far is it from its source, and what does the difference cost?"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w4conv import cpus
from w4conv.arguments import optional_count, real
from w4conv.arrays import F64Array
from w4conv.commands.options import has_integers, refuse_idle
from w4conv.container import Container, open_container, open_stream
from w4conv.conversion.declarations import HEADS, settle_declarations
from w4conv.errors import FormatError, InputError, UsageError
from w4conv.files.streams import is_stdin
from w4conv.measure.divergence import Divergence, compare_models
from w4conv.measure.exported import compare_export
from w4conv.measure.layer_errors import LayerError, LayerErrors
from w4conv.measure.layerwise import Observer, ScoredBlock, layered_nlls, scored_logits
from w4conv.measure.perplexity import Estimate, Increase, NotFiniteError, estimate, increase, token_nlls
from w4conv.measure.round_trip import RoundTrip, check_fits, compare, named_alike
from w4conv.measure.text_windows import cut_text, settle
from w4conv.models.generic import GENERIC
from w4conv.progress import Progress, Silent
from w4conv.quantization.folding import folded_as_recorded
from w4conv.runtime.engine import Model
from w4conv.runtime.layers import LayeredContainer, LayeredModel, LayeredSource
from w4conv.sources import Source, open_source


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """A perplexity and everything it depends on.

    text_tokens: of the whole text, BOS included; n_windows and n_scored: what was measured of it. activations, kv: of
    the container's model. source, increase: the source in the same run, and how far the container's perplexity lies
    above. divergence and layers: from the source, errors of the layers, if asked.
    """

    text: str
    text_sha256: str
    text_tokens: int
    convention: str
    ctx: int
    adds_bos: bool
    n_windows: int
    n_scored: int
    activations: str
    kv: str
    container: Estimate
    source: Estimate | None
    increase: Increase | None
    divergence: Divergence | None = None
    layers: tuple[LayerError, ...] | None = None
    special_tokens: str = "parse"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """ok: every check held; failures: a sentence for each that did not.

    intact: structure and every digest are right; otherwise nothing else was measured. digest identifies the conversion.
    Of an export checked against its container, path and nbytes are the export's, digest and intact the container's.
    """

    path: str
    nbytes: int
    digest: str
    n_tensors: int
    ok: bool
    failures: tuple[str, ...]
    intact: bool
    round_trip: RoundTrip | None = None
    perplexity: PerplexityReport | None = None


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    ppl: bool = False,
    kld: bool = False,
    layers: bool = False,
    text: str | os.PathLike[str] | None = None,
    ctx: int | None = None,
    convention: str | None = None,
    chunks: int | None = None,
    special_tokens: str | None = None,
    max_ppl_increase: float | str | None = None,
    min_sqnr: float | None = None,
    activations: str = "int16",
    kv: str = "f16",
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check every byte of the container `path`; compare it with the checkpoint `against`; measure its perplexity.

    Or, where `path` is a directory or a GGUF file: check that it is an export of the container `against`. Every value
    must be the container's, or that value rounded to the F16 or BF16 in which it is stored; settings and tokenizer too.

    path: "-" is standard input; it, pipes and devices are copied into the temporary directory for that time.
    ppl: on `text`, by default the WikiText-2 raw test split; with `against` the source's too, of which one layer is in
    memory at a time. convention: "llama.cpp" (default) or "gptq"; ctx:
    default 512 and 2048; chunks: only the first so many windows. See measure/perplexity.py.
    special_tokens: whether those that the text spells are taken as such ("parse", the default), or as "text".
    kld: the divergence from the source too, both models side by side (measure/divergence.py); implies ppl.
    layers: the error of each layer and matrix too, on the first windows (measure/layer_errors.py); implies kld.
    max_ppl_increase: most by which the perplexity may lie above the source's: 0.5 units, or "2%" of the source's.
    min_sqnr: dB that every tensor must reach.
    activations: with which the container's model runs, "int16" or "int8" (docs/numerics.md 2).
    kv: how that model keeps keys and values, "f16", "int8" or "f32" (docs/numerics.md 5).

    Checks that do not hold are failures in the report; a container whose logits are not finite is one, and has no
    perplexity there. Raises FormatError when the file cannot be opened at all,
    InputError when `against` is no source of this model or a text is missing, UsageError, OutputError.
    """
    values = dict(locals())
    refuse_idle("verify", values | {"is_container": not _is_checkpoint(Path(path))})
    kld = kld or layers
    if kld and against is None:
        raise UsageError("divergence and errors of layers are those from the source: name it with --against")
    ppl = ppl or kld
    cpus.thread_count(threads)
    if min_sqnr is not None:
        min_sqnr = real(min_sqnr, "min-sqnr")
    ctx, chunks = optional_count(ctx, "ctx", low=1), optional_count(chunks, "chunks", low=1)
    limit = None if max_ppl_increase is None else _Limit.parse(str(max_ppl_increase))
    progress = progress or Silent()
    if _is_checkpoint(Path(path)):
        if ppl:
            raise UsageError(
                f"perplexity is measured of .w4 files, and {path} is none. Measure the one it was made from"
            )
        if against is None:
            raise UsageError(f"{path} is no .w4 file: name the one that it was exported from with --against")
        return _verify_export(Path(path), Path(against), min_sqnr, progress)

    with open_stream(sys.stdin.buffer) if is_stdin(path) else open_container(path) as container:

        def report(
            failures: list[str], *, intact: bool = True, round_trip: RoundTrip | None = None,
            perplexity: PerplexityReport | None = None,
        ) -> VerifyReport:  # fmt: skip
            head = (str(path), container.file_nbytes, container.digest, len(container.tensors))
            return VerifyReport(*head, not failures, tuple(failures), intact, round_trip, perplexity)

        refuse_idle(
            "verify", values | {"has_integers": has_integers(t.scheme.kind for t in container.tensors.values())}
        )
        try:
            container.check(progress)
        except FormatError as error:
            return report([str(error)], intact=False)
        measurement = None
        if ppl:  # before the longer work, so that a missing or short text is an error at once
            measurement = _Measurement(
                container,
                text,
                convention,
                ctx,
                chunks,
                activations,
                kv,
                threads,
                special_tokens,
            )
        round_trip = perplexity = None
        failures: list[str] = []
        if against is not None:
            with _open_against(container, against) as source:
                check_fits(container, source)
                round_trip = compare(container, source, threads=threads, progress=progress)
            failures += _round_trip_failures(round_trip, min_sqnr)
        if measurement is not None:
            try:
                perplexity = measurement.run(against, progress, kld=kld, layers=layers)
                failures += _perplexity_failures(perplexity, limit)
            except NotFiniteError as error:
                failures.append(str(error))
        return report(failures, round_trip=round_trip, perplexity=perplexity)


def _open_against(container: Container, against: str | os.PathLike[str]) -> Source:
    """The checkpoint, read as the container records that it was."""
    provenance: Mapping[str, Any] = container.provenance
    zero15 = provenance.get("gptq_zero15")
    generic = provenance.get("architecture") == GENERIC
    source = open_source(Path(against), raw=generic, gptq_zero15=zero15 if zero15 in (0, 16) else None)
    head = provenance.get("head")
    try:
        if not generic and named_alike(container, source):  # else the error is that they are two models
            settle_declarations(source, head if head in HEADS else None)
    except BaseException:
        source.close()
        raise
    return folded_as_recorded(source, provenance, container.blobs, container.path)


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is a directory or a GGUF file, which an export may be and a container is not."""
    if not path.is_file():
        return path.is_dir()
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False  # an error where it is opened


def _verify_export(path: Path, against: Path, min_sqnr: float | None, progress: Progress) -> VerifyReport:
    with open_source(path) as source, open_container(against) as container:
        nbytes = sum(file.stat().st_size for file in source.files)

        def report(failures: list[str], *, intact: bool, round_trip: RoundTrip | None = None) -> VerifyReport:
            head = (str(path), nbytes, container.digest, len(source.tensors))
            return VerifyReport(*head, not failures, tuple(failures), intact, round_trip)

        try:
            container.check(progress)
        except FormatError as error:
            return report([str(error)], intact=False)
        round_trip, failures = compare_export(container, source, progress)
        failures += [] if min_sqnr is None else _low_sqnr(round_trip, min_sqnr)
        return report(failures, intact=True, round_trip=round_trip)


class _Measurement:
    """Perplexity of a container, prepared: text cut into windows of tokens."""

    def __init__(
        self, container: Container, text: str | os.PathLike[str] | None, convention: str | None, ctx: int | None,
        chunks: int | None, activations: str, kv: str, threads: int | None, special_tokens: str | None,
    ) -> None:  # fmt: skip
        self._container, self._activations, self._kv, self._threads = container, activations, kv, threads
        convention, self._ctx = settle(convention, ctx)
        with Model(container, threads=threads, ctx=self._ctx, kv=kv, activations=activations):
            pass  # a model that cannot be run, or not with this ctx, is an error before the longer work
        self._cut = cut_text(
            container, text, convention=convention, ctx=self._ctx, chunks=chunks, special_tokens=special_tokens
        )
        self._windows = self._cut.windows

    def run(
        self, against: str | os.PathLike[str] | None, progress: Progress, *, kld: bool = False, layers: bool = False
    ) -> PerplexityReport:
        theirs = divergence = None
        errors = LayerErrors(threads=self._threads, activations=self._activations) if layers else None
        if against is None:
            ours = self._nlls(progress)
        else:
            with _open_against(self._container, against) as source:
                base = LayeredSource(source, threads=self._threads)
                if kld:
                    ours_layered = LayeredContainer(self._container, activations=self._activations, kv=self._kv)
                    compared = compare_models(self._scored([ours_layered, base], progress, errors), self._windows)
                    ours, theirs, divergence = compared.nlls, compared.base_nlls, compared.divergence()
                else:
                    ours = self._nlls(progress)
                    try:
                        theirs = layered_nlls(self._scored([base], progress), self._windows)
                    except NotFiniteError as error:
                        raise InputError(f"{against}: {error}") from None
        return PerplexityReport(
            text=self._cut.text.name,
            text_sha256=self._cut.text.sha256,
            text_tokens=self._windows.n_text_tokens,
            convention=self._cut.convention,
            ctx=self._ctx,
            adds_bos=self._cut.adds_bos,
            n_windows=len(self._windows.tokens),
            n_scored=self._windows.n_scored,
            activations=self._activations,
            kv=self._kv,
            special_tokens=self._cut.special_tokens,
            container=estimate(ours),
            source=None if theirs is None else estimate(theirs),
            increase=None if theirs is None else increase(ours, theirs),
            divergence=divergence,
            layers=None if errors is None else errors.result(),
        )

    def _scored(
        self, models: Sequence[LayeredModel], progress: Progress, observer: Observer | None = None
    ) -> Iterator[ScoredBlock]:
        progress.start(self._windows.tokens.size * models[0].spec.n_layers)
        return scored_logits(models, self._windows, threads=self._threads, observer=observer, advance=progress.advance)

    def _nlls(self, progress: Progress) -> F64Array:
        progress.start(self._windows.tokens.size)
        with Model(
            self._container, threads=self._threads, ctx=self._ctx, kv=self._kv, activations=self._activations
        ) as model:
            return token_nlls(model, self._windows, advance=lambda n: progress.advance(n, "perplexity"))


def _round_trip_failures(round_trip: RoundTrip, min_sqnr: float | None) -> list[str]:
    out = []
    if round_trip.same_codes is False:
        others = [t.name for t in round_trip.tensors if t.same_codes is False]
        out.append(
            f"{others[0]}{f' and {len(others) - 1} more tensors' if others[1:] else ''}: the bytes are not what "
            f"{round_trip.method} makes of {round_trip.source}; it is another checkpoint, or the container was altered"
        )
    return out if min_sqnr is None else out + _low_sqnr(round_trip, min_sqnr)


def _low_sqnr(round_trip: RoundTrip, min_sqnr: float) -> list[str]:
    low = [
        (t.distortion.sqnr_db, t.name)
        for t in round_trip.tensors
        if t.distortion.sqnr_db is not None and t.distortion.sqnr_db < min_sqnr
    ]
    if not low:
        return []
    sqnr, name = min(low)
    return [f"SQNR is below {min_sqnr} dB in {len(low)} tensors; the lowest is {sqnr:.2f} dB in {name}"]


@dataclass(frozen=True, slots=True)
class _Limit:
    """A largest increase, in units of perplexity or in percent of the source's."""

    words: str
    value: float
    percent: bool

    @classmethod
    def parse(cls, words: str) -> _Limit:
        try:
            value = float(words.removesuffix("%"))
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UsageError(f'max-ppl-increase is {words!r}, expected a number such as 0.5, or a share such as "2%"')
        return cls(words, value, words.endswith("%"))


def _perplexity_failures(report: PerplexityReport, limit: _Limit | None) -> list[str]:
    if limit is None or report.increase is None:
        return []
    i = report.increase
    found = (i.ratio - 1) * 100 if limit.percent else i.difference
    if found <= limit.value and math.isfinite(report.container.value):  # NaN, of two infinite ones, is not at most
        return []
    if math.isfinite(i.difference) and math.isfinite(i.ratio):
        rise = f"{i.difference:.4f} ({i.ratio - 1:.2%}) over the source's"
    else:
        rise = f"a factor of e^{i.log_ratio:.4f} over the source's, to e^{report.container.log:.4f}"
    return [f"perplexity rises by {rise}; at most {limit.words} is allowed"]
