"""`w4conv verify FILE`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from w4conv.cli import _output
from w4conv.cli._options import Activations, Json, KvKind, SpecialTokens, Threads, one_of, refuse_terminal
from w4conv.cli._progress import progress_bar
from w4conv.errors import CheckError, OutputError

if TYPE_CHECKING:
    from w4conv.commands.verify import PerplexityReport, VerifyReport
    from w4conv.measure.distortion import Distortion
    from w4conv.measure.divergence import Divergence
    from w4conv.measure.layer_errors import LayerError
    from w4conv.measure.perplexity import Estimate, Increase
    from w4conv.measure.round_trip import RoundTrip

CONVENTIONS = ("llama.cpp", "gptq")
REPORT = ("w4conv.commands.verify", "VerifyReport")
EPILOG = """\
\b
Examples:
  w4conv verify out.w4
  w4conv verify out.w4 --against in/ --min-sqnr 18
  w4conv verify out.gguf --against out.w4
  w4conv verify out.w4 --ppl --text book.txt
  w4conv verify out.w4 --against in/ --kld --chunks 32
  w4conv verify out.w4 --against in/ --plot errors.svg
  w4conv verify out.w4 --against in/ --ppl --chunks 32 \\
      --max-ppl-increase 0.5 --json
  curl -s https://example.org/out.w4 | w4conv verify -
"""
N_WORST = 5
# Of a container's record, what its calibration was by.
CALIBRATED_ON = {
    "statistics_blake3": "statistics", "imatrix_blake3": "importance matrix",
    "set_blake3": "built-in calibration set", "text_blake3": "calibration text",
}  # fmt: skip


def verify(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The .w4 file, - for standard input; or an export of one")
    ],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="IN", help="Compare with this checkpoint, tensor by tensor; an export with the .w4 file it is of"
        ),
    ] = None,
    ppl: Annotated[bool, typer.Option("--ppl", help="Measure perplexity; with --against the source's too")] = False,
    kld: Annotated[
        bool, typer.Option("--kld", help="Measure the divergence from the source named with --against; implies --ppl")
    ] = False,
    layers: Annotated[
        bool, typer.Option("--layers", help="Say in which layers and matrices the error arises; implies --kld")
    ] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="OUT.svg", help="Draw them as a heat map; implies --layers")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Text to measure on [default: the WikiText-2 raw test split, from the file that W4CONV_WIKITEXT2 "
            "names, the user's cache, or fetched by huggingface_hub]",
        ),
    ] = None,
    ctx: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a window [default: 512; gptq: 2048]")
    ] = None,
    convention: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(CONVENTIONS),
            help="How the text is cut and scored [default: llama.cpp]",
            autocompletion=one_of(CONVENTIONS),
        ),
    ] = None,
    chunks: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N windows")] = None,
    special_tokens: SpecialTokens = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(metavar="X|X%", help="Fail when perplexity lies more than X units, or X %, above the source's"),
    ] = None,
    min_sqnr: Annotated[
        float | None, typer.Option(metavar="DB", help="Fail when the SQNR of any tensor is below DB")
    ] = None,
    activations: Activations = "int16",
    kv: KvKind = "f16",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Check a container, and what it lost.

    Always: structure and every digest. With --against: error of every tensor, and whether the codes are exactly what
    the recorded method makes of that source. With --ppl: perplexity, and its increase over the source's with the
    standard error. Exit code 1 when a check does not hold. What comes from a pipe is kept in the temporary directory
    (TMPDIR) meanwhile.

    An export (a directory, or a GGUF file) is checked against its container: every value must be the container's, or
    that value rounded to the F16 or BF16 in which it is stored.
    """
    from w4conv.commands.verify import verify as check
    from w4conv.files.overlap import known, refuse_overlap
    from w4conv.measure.texts import WIKITEXT2_VARIABLE

    refuse_terminal(file)
    if plot is not None:
        refuse_overlap([plot], container=file, source=against, text=text or os.environ.get(WIKITEXT2_VARIABLE))
    if plot is not None and (known(Path.is_file, plot) or known(Path.is_dir, plot)):
        raise OutputError(f"{plot} exists already. Name another file, or remove it")
    with progress_bar() as progress:
        report = check(
            file,
            against=against,
            ppl=ppl,
            kld=kld,
            layers=layers or plot is not None,
            text=text,
            ctx=ctx,
            convention=convention,
            chunks=chunks,
            special_tokens=special_tokens,
            max_ppl_increase=max_ppl_increase,
            min_sqnr=min_sqnr,
            activations=activations,
            kv=kv,
            threads=threads,
            progress=progress,
        )
    if plot is not None and report.perplexity is not None and report.perplexity.layers is not None:
        _draw(Path(plot), report.perplexity, file)
    if json:
        _output.write_json("verify", report)
        if not report.ok:
            raise CheckError(". ".join(report.failures))
        return
    _output.write(as_text(report))
    if not report.ok:  # the report says what did not hold
        n = len(report.failures)
        raise CheckError(f"{n} check{'s' * (n > 1)} did not hold: see FAILED in the report")


def as_text(report: VerifyReport) -> str:
    state = "intact: structure and every digest are right" if report.intact else "DAMAGED"
    if report.round_trip is not None and report.round_trip.source_kind == "w4":
        state += " (of the container)"
    parts = [
        _output.facts(
            [
                ("file", f"{_output.path(report.path)}, {_output.nbytes(report.nbytes)}, {report.n_tensors:,} tensors"),
                ("digest", report.digest),
                ("integrity", state),
            ]
        )
    ]
    if report.round_trip is not None:
        parts.append(round_trip_text(report.round_trip))
    if report.perplexity is not None:
        parts.append(perplexity_text(report.perplexity))
    parts.append(
        "ok: every check held\n"
        if report.ok
        else "".join(f"FAILED: {_output.printable(failure)}\n" for failure in report.failures)
    )
    return "\n".join(parts)


def round_trip_text(r: RoundTrip) -> str:
    if r.source_kind == "w4":
        held = sum(t.same_codes is True for t in r.tensors)
        exact = sum(t.distortion.sqnr_db is None for t in r.tensors)
        pairs = [
            ("against", r.source),
            ("values", f"{exact} of {len(r.tensors)} tensors exact, {held - exact} rounded"),
        ]
        return _output.facts([*pairs, *_notes(r)]) + "\n" + _table(r)
    same = "same bytes as recorded"
    if r.changed_files:
        same = f"other bytes than recorded: {', '.join(r.changed_files)}"
    made = {
        True: ("its own, as they are" if r.method == "keep" else f"exactly what {r.method} makes of it")
        + (", or its very values" if r.notes else ""),
        False: f"NOT what {r.method} makes of it",
        None: _not_reproduced(r),
    }[r.same_codes]
    pairs = [("against", f"{r.source} ({r.source_kind})"), ("source files", same), ("codes", made)]
    return _output.facts([*pairs, *_notes(r)]) + "\n" + _table(r)


def _notes(r: RoundTrip) -> list[tuple[str, str]]:
    return [("note", note) for note in r.notes]


def _table(r: RoundTrip) -> str:
    worst = sorted(
        (t for t in r.tensors if t.distortion.sqnr_db is not None), key=lambda t: t.distortion.sqnr_db or 0.0
    )[:N_WORST]
    rows = [("all tensors", *_cells(r.overall))]
    if r.quantized is not None:
        rows.append(("quantized", *_cells(r.quantized)))
    rows += [(f"lowest {i}: {t.name}", *_cells(t.distortion)) for i, t in enumerate(worst, 1)]
    columns = ("", "SQNR dB", "worst group", "RMSE", "max error", "cosine")
    return _output.table(columns, rows)


def _not_reproduced(r: RoundTrip) -> str:
    n = sum(t.same_codes is None for t in r.tensors)
    record = r.calibration or {}
    key, words = next((pair for pair in CALIBRATED_ON.items() if pair[0] in record), ("", "calibration text"))
    needs = f"its {words}" + (f", blake3 {str(record[key])[:16]}.." if key else "")
    return f"{n} matrices not reproduced: {r.method} needs {needs}; all others exactly as recorded"


def _cells(d: Distortion) -> tuple[str, ...]:
    worst = "" if d.worst_group is None else f"{d.worst_group.sqnr_db:.2f}"
    sqnr = "exact" if d.sqnr_db is None else f"{d.sqnr_db:.2f}"
    return sqnr, worst, f"{d.rmse:.2e}", f"{d.max_abs_error:.2e}", "" if d.cosine is None else f"{d.cosine:.6f}"


def perplexity_text(p: PerplexityReport) -> str:
    pairs = [
        ("text", f"{p.text} (sha256 {p.text_sha256[:16]}..), {p.text_tokens:,} tokens"),
        (
            "convention",
            f"{p.convention}, ctx {p.ctx}, {p.n_windows:,} windows, {p.n_scored:,} tokens scored, "
            f"{'with' if p.adds_bos else 'no'} BOS{_output.special_tokens(p.special_tokens)}",
        ),
        (
            "perplexity",
            _estimate(p.container)
            + (f" with {p.activations} activations" if p.activations != "int16" else "")
            + (f", {p.kv} keys and values" if p.kv != "f16" else ""),
        ),
    ]
    if p.source is not None and p.increase is not None:
        pairs += [("source", _estimate(p.source)), ("increase", _increase(p.increase))]
    if p.divergence is not None:
        pairs += _divergence(p.divergence)
    text = _output.facts(pairs)
    return text if p.layers is None else text + "\n" + _layer_table(p.layers)


def _layer_table(layers: tuple[LayerError, ...]) -> str:
    parts = [m.part for m in layers[0].matrices]
    rows = []
    for e in layers:
        found = {m.part: m.error for m in e.matrices}
        cells = (e.block, e.attention, e.mlp, *(found.get(part) for part in parts))
        rows.append((str(e.layer), *("" if c is None else f"{_decibels(c):.1f}" for c in cells)))
    head = ("layer: SQNR dB", "block", "attention", "mlp", *(part.removesuffix("_proj") for part in parts))
    return _output.table(head, rows)


def _draw(path: Path, p: PerplexityReport, file: str) -> None:
    from w4conv.cli._heat_map import heat_map

    assert p.layers is not None
    parts = [m.part for m in p.layers[0].matrices]
    rows = []
    for e in p.layers:
        found = {m.part: m.error for m in e.matrices}
        cells = [e.block, e.attention, e.mlp, *(found.get(part) for part in parts)]
        rows.append((str(e.layer), [None if c is None else _decibels(c) for c in cells]))
    picture = heat_map(
        title=f"Error of {Path(file).name} by layer",
        subtitle="block, attention, mlp: in the run of the model; matrices: each by itself on the source's inputs",
        columns=(("block", "attention", "mlp"), [part.removesuffix("_proj") for part in parts]),
        rows=rows,
        unit="SQNR of outputs, dB: dark is far from the source",
    )
    try:
        with path.open("x", encoding="utf-8") as out:
            out.write(picture)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from error


def _decibels(error: float) -> float:
    """inf where there is no error, NaN where it is not finite."""
    if error == 0:
        return math.inf
    return -10 * math.log10(error) if error > 0 else math.nan


def _divergence(d: Divergence) -> list[tuple[str, str]]:
    return [
        ("KLD", f"{d.mean:.5f} +/- {d.stderr:.5f}, at most {d.maximum:.4f}"),
        ("KLD percentiles", ", ".join(f"{p.percent:g} % {p.value:.5f}" for p in d.percentiles)),
        ("same top token", f"{d.same_top:.2%} +/- {d.same_top_stderr:.2%}"),
        ("delta p", f"mean {d.mean_delta_p:+.3%}, RMS {d.rms_delta_p:.3%}"),
    ]


def _estimate(e: Estimate) -> str:
    if math.isfinite(e.value):
        return f"{e.value:.4f} +/- {e.stderr:.4f}"
    return f"e^({e.log:.4f} +/- {e.log_stderr:.4f}), beyond any float64"


def _increase(i: Increase) -> str:
    if math.isfinite(i.difference) and math.isfinite(i.ratio):
        return f"{i.difference:.4f} +/- {i.difference_stderr:.4f} ({i.ratio - 1:+.2%} +/- {i.ratio_stderr:.2%})"
    return f"by a factor of e^({i.log_ratio:.4f} +/- {i.log_ratio_stderr:.4f})"
