"""`w4conv bench FILE...`."""

from __future__ import annotations

import csv
import io
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from w4conv.cli import _output
from w4conv.cli._options import Activations, Json, KvKind, Threads
from w4conv.cli._progress import progress_bar
from w4conv.errors import UsageError

if TYPE_CHECKING:
    from w4conv.commands.bench import BenchReport, Rate, Row
    from w4conv.container import Container
    from w4conv.progress import Progress

EPILOG = """\
\b
Examples:
  w4conv bench out.w4
  w4conv bench SmolLM2-135M/ --text book.txt --html report.html
  w4conv bench SmolLM2-135M/ --schemes f16,w8a16,w4a16
  w4conv bench --shape llama-3-8b --schemes w4a16 -n 32
  w4conv bench a.w4 b.w4 --csv > bench.csv
"""
COLUMNS = (
    "model", "weights", "prefill tokens/s", "first token", "of peak", "decode ms/token", "tokens/s", "GB/s",
    "of read ceiling",
)  # fmt: skip


def bench(
    inputs: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help=".w4 files, or checkpoints to convert for this")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="NAME", help="Random weights of a known model's shape, such as llama-3-8b")
    ] = None,
    schemes: Annotated[
        str, typer.Option(metavar="S,S", help="Codings of each checkpoint or shape")
    ] = "f16,w8a16,w4a16",
    prompt: Annotated[int, typer.Option("--prompt", "-p", min=1, metavar="N", help="Tokens of the prompt")] = 512,
    n: Annotated[int, typer.Option("--tokens", "-n", min=1, metavar="N", help="Tokens to decode")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", "-r", min=1, metavar="N", help="Rounds; medians are shown")] = 5,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Measure decode behind 16, 32, 64 .. N tokens too [default: the prompt's length]"
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Measure perplexity on this text, by llama.cpp's convention")
    ] = None,
    ctx: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of a window [default: 512]")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N windows of the text")] = None,
    activations: Activations = "int16",
    kv: KvKind = "f16",
    threads: Threads = None,
    html: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write a report with pictures to this file, beside the rest")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report if it exists")] = False,
    json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV")] = False,
    markdown: Annotated[bool, typer.Option("--md", help="Write a Markdown table")] = False,
) -> None:
    """Measure prefill and decoding.

    All models are measured alternately in one process. Decoding is held against a plain read of the same mapping by the
    same threads, and prefill against dot products from registers: the ceilings of this machine. Perplexity
    is given with its increase over the first row. Converted files go to the temporary directory (TMPDIR) for the time
    of the command.
    """
    from w4conv.commands.bench import bench as measure
    from w4conv.files.apart import keep_apart, keep_origin
    from w4conv.files.target import check_target, open_target

    if json + as_csv + markdown + (html in ("-", "/dev/stdout")) > 1:
        raise UsageError("--json, --csv, --md and a report on standard output exclude one another")
    if shape is not None and text is not None:
        raise UsageError("the weights of a --shape are random, so that no perplexity is of use; leave --text out")
    if html is not None:
        keep_apart([html], input=inputs, text=text)
        check_target(Path(html), 0, overwrite=overwrite)
    with progress_bar() as progress, _opened(inputs or [], shape, schemes, threads, progress) as containers:
        for _, container in containers:
            keep_origin(html or "-", container.provenance, container.source_digests)
        report = measure(
            containers, n_prompt=prompt, n_tokens=n, rounds=rounds, context=context, text=text, ctx=ctx, chunks=chunks,
            activations=activations, kv=kv, threads=threads, progress=progress,
        )  # fmt: skip
    if html is not None:
        from w4conv.cli._report import as_html

        page = as_html(report).encode()
        with open_target(Path(html), len(page), overwrite=overwrite, signature=b"<!doctype html>") as target:
            target.write(page)
    if json:
        _output.write_json("bench", report)
    elif as_csv:
        _output.write(_as_csv(report))
    elif html not in ("-", "/dev/stdout"):
        _output.write(_as_markdown(report) if markdown else _as_text(report))


@contextmanager
def _opened(
    inputs: list[str], shape: str | None, schemes: str, threads: int | None, progress: Progress
) -> Iterator[list[tuple[str, Container]]]:
    """Everything to be measured, by name; what had to be converted is gone when the block ends."""
    from w4conv.commands.bench import check_memory
    from w4conv.commands.quantize import quantize
    from w4conv.container import open_container
    from w4conv.measure.shapes import RandomWeights

    if not inputs and shape is None:
        raise UsageError("nothing to measure: name a file, or a --shape")
    words = [word.strip() for word in schemes.split(",")]
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


def columns(report: BenchReport) -> tuple[str, ...]:
    return (*COLUMNS, "perplexity", "increase") if report.text is not None else COLUMNS


def labels(report: BenchReport) -> list[str]:
    """The rows' names without the folders, where that leaves them distinct."""
    names = [_output.printable(row.name) for row in report.rows]
    short = [_without_folders(name) for name in names]
    return short if len(set(short)) == len(set(names)) else names


def _without_folders(name: str) -> str:
    path, space, scheme = name.partition(" ") if name.count(" ") == 1 else (name, "", "")
    return f"{Path(path).name}{space}{scheme}"


def cells(row: Row, name: str) -> tuple[str, ...]:
    out = (
        name,
        _output.nbytes(row.weight_nbytes),
        f"{row.prefill.tokens_per_second.median:.1f}",
        f"{row.prefill.seconds.median:.3f} s",
        f"{row.prefill.peak_share.median:.0%}",
        f"{row.decode.ms_per_token.median:.2f}",
        f"{row.decode.tokens_per_second.median:.2f}",
        f"{row.decode.read_gbs.median:.1f} / {row.ceiling_gbs.median:.1f}",
        f"{row.decode.read_share.median:.0%}",
    )
    p = row.perplexity
    if p is None:
        return out
    e, i = p.value, p.increase
    value = f"{e.value:.3f} +/- {e.stderr:.3f}" if math.isfinite(e.value) else f"e^({e.log:.3f} +/- {e.log_stderr:.3f})"
    if i is None:
        return (*out, value, "-")
    if math.isfinite(i.ratio):
        return (*out, value, f"{i.ratio - 1:+.2%} +/- {i.ratio_stderr:.2%}")
    return (*out, value, f"factor e^({i.log_ratio:.3f} +/- {i.log_ratio_stderr:.3f})")


def facts(report: BenchReport) -> list[tuple[str, str]]:
    first, m = report.rows[0], report.machine
    facts = [
        ("machine", m.cpu),
        (
            "engine",
            f"{report.isa} ({report.dot_instruction}), {report.threads} threads, {report.activations} activations; "
            f"{m.allowed}",
        ),
        (
            "measured",
            f"prompt of {first.prefill.n_tokens}, {first.decode.n_tokens} tokens decoded, "
            f"medians of {report.rounds} rounds",
        ),
    ]
    if (t := report.text) is not None:
        facts.append(
            (
                "text",
                f"{t.text} (sha256 {t.text_sha256[:16]}..), {t.convention}, ctx {t.ctx}, {t.n_windows:,} windows, "
                f"{t.n_scored:,} tokens scored",
            )
        )
    return facts


def _lines(report: BenchReport) -> list[tuple[str, ...]]:
    return [cells(row, name) for row, name in zip(report.rows, labels(report), strict=True)]


def _as_text(report: BenchReport) -> str:
    return _output.facts(facts(report)) + "\n" + _output.table(columns(report), _lines(report))


def _as_markdown(report: BenchReport) -> str:
    head = columns(report)
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *_lines(report)]
    table = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
    return table + "\n" + "; ".join(value for _, value in facts(report)) + "\n"


def _as_csv(report: BenchReport) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    rates = ("prefill_seconds", "prefill_tokens_per_second", "prefill_gmacs", "prefill_peak_share",
             "decode_ms_per_token", "decode_tokens_per_second", "decode_read_gbs", "decode_read_share", "ceiling_gbs",
             "peak_gmacs")  # fmt: skip
    head = [f"{rate}_{figure}" for rate in rates for figure in ("median", "low", "high")]
    facts = ("model", "schemes", "weight_nbytes", "isa", "threads", "rounds")
    writer.writerow([*facts, *head, "perplexity", "perplexity_ratio"])
    for row in report.rows:
        p, d = row.prefill, row.decode
        values: list[Rate] = [
            p.seconds, p.tokens_per_second, p.gmacs, p.peak_share, d.ms_per_token, d.tokens_per_second, d.read_gbs,
            d.read_share, row.ceiling_gbs, row.peak_gmacs,
        ]  # fmt: skip
        figures = [figure for rate in values for figure in (rate.median, rate.low, rate.high)]
        q = row.perplexity
        given = [None if q is None else q.value.value, q.increase.ratio if q is not None and q.increase else None]
        perplexities = [None if value is None or not math.isfinite(value) else value for value in given]
        writer.writerow(
            [
                _output.printable(row.name),
                row.schemes,
                row.weight_nbytes,
                report.isa,
                report.threads,
                report.rounds,
                *figures,
                *perplexities,
            ]
        )
    return out.getvalue()
