"""calibrate: a checkpoint and a calibration set in, statistics of activations out."""

from __future__ import annotations

import os
from dataclasses import dataclass

from w4conv.arguments import optional_count, path_of
from w4conv.calibration.resolve import calibration_path, resolve_text, text_file
from w4conv.calibration.statistics import StatisticsLayout, observe
from w4conv.commands.options import refuse_idle
from w4conv.conversion.declarations import settle_declarations
from w4conv.cpus import thread_count
from w4conv.errors import UsageError
from w4conv.files.overlap import refuse_overlap
from w4conv.files.target import check_target, open_target
from w4conv.models import spec_of
from w4conv.progress import Progress, Silent
from w4conv.sources import open_source


@dataclass(frozen=True, slots=True)
class StatisticsReport:
    """Statistics written. n_places: hooks of all layers, and the head. full: with second moments. digest: BLAKE3 of the
    file."""

    source: str
    text: str
    out: str
    architecture: str
    tokens: int
    ctx: int
    special_tokens: str
    n_places: int
    full: bool
    nbytes: int
    digest: str


def calibrate(
    src: str | os.PathLike[str],
    text: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    full: bool = False,
    tokens: int | None = None,
    ctx: int | None = None,
    special_tokens: str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> StatisticsReport:
    """Observe the checkpoint `src` on a text, and write the statistics that `quantize(calibration=out)` takes.

    text: a UTF-8 file, or "builtin", the set that comes with w4conv; a file of that name is "./builtin", or a Path.
    full: with second moments of all pairs of channels, which the methods gptq and best need; they are large.
    tokens: so many of the text (16384; 32768 of the built-in set), spread over it, in sequences of ctx (512).
    special_tokens: "parse" (the default) or "text", how those that the text spells are read. The same input gives the
    same bytes.
    Raises UsageError, InputError, OutputError.
    """
    src, path, out = path_of(src, "src"), calibration_path(text), path_of(out, "out")
    progress = progress or Silent()
    refuse_idle("calibrate", {"out": out, "overwrite": overwrite})
    thread_count(threads)
    tokens, ctx = optional_count(tokens, "tokens", low=1), optional_count(ctx, "ctx", low=1)
    given = text_file(path, tokens=tokens, ctx=ctx, special_tokens=special_tokens)
    refuse_overlap([out], source=src, text=path)
    with open_source(src) as source:
        settle_declarations(source)
        spec = spec_of(source.blobs)
        if spec.experts is not None:
            raise UsageError(
                f"{src}: statistics serve dense models, and {spec.architecture} is a mixture of experts. quantize it "
                "with --calibration TEXT, which observes each expert"
            )
        cut = resolve_text(given, source, spec)
        layout = StatisticsLayout(source, spec, cut, full=full)
        check_target(out, layout.nbytes, overwrite=overwrite)
        progress.start(layout.n_hooks)
        with open_target(out, layout.nbytes, overwrite=overwrite, signature=layout.signature) as target:
            digest = layout.write(target, observe(source, spec, cut.sequences, full=full, threads=threads), progress)
    return StatisticsReport(
        source=str(src), text=str(text), out=str(out), architecture=spec.architecture, tokens=cut.sequences.size,
        ctx=given.ctx, special_tokens=given.special_tokens, n_places=layout.n_hooks, full=full, nbytes=layout.nbytes,
        digest=digest,
    )  # fmt: skip
