"""`w4conv bench FILE...`."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from w4conv.cli import _output
from w4conv.cli._options import Json, Threads
from w4conv.cli._progress import progress_bar
from w4conv.errors import UsageError

if TYPE_CHECKING:
    from w4conv.container import Container
    from w4conv.measure.bench import BenchReport, Rate, Row
    from w4conv.progress import Progress

EPILOG = """\
\b
Examples:
  w4conv bench out.w4
  w4conv bench SmolLM2-135M/ --schemes f16,w8a16,w4a16
  w4conv bench --shape llama-3-8b --schemes w4a16 -n 32
  w4conv bench a.w4 b.w4 --csv > bench.csv
"""
COLUMNS = (
    "model", "weights", "prefill tokens/s", "first token", "decode ms/token", "tokens/s", "GB/s", "of read ceiling",
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
    threads: Threads = None,
    json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV")] = False,
    markdown: Annotated[bool, typer.Option("--md", help="Write a Markdown table")] = False,
) -> None:
    """Measure prefill and decoding.

    All models are measured alternately in one process, and decoding is held against a plain read of the same mapping
    by the same threads: the ceiling of this machine at this hour. Converted files go to the temporary directory
    (TMPDIR) for the time of the command.
    """
    from w4conv.measure.bench import bench as measure

    if json + as_csv + markdown > 1:
        raise UsageError("--json, --csv and --md exclude one another")
    with progress_bar() as progress, _opened(inputs or [], shape, schemes, threads, progress) as containers:
        report = measure(
            containers, n_prompt=prompt, n_tokens=n, rounds=rounds, threads=threads, progress=progress
        )  # fmt: skip
    if json:
        _output.write_json("bench", report)
    elif as_csv:
        _output.write(_as_csv(report))
    else:
        _output.write(_as_markdown(report) if markdown else _as_text(report))


@contextmanager
def _opened(
    inputs: list[str], shape: str | None, schemes: str, threads: int | None, progress: Progress
) -> Iterator[list[tuple[str, Container]]]:
    """Everything to be measured, by name; what had to be converted is gone when the block ends."""
    from w4conv.container import open_container
    from w4conv.convert import quantize
    from w4conv.measure.shapes import write_random

    if not inputs and shape is None:
        raise UsageError("nothing to measure: name a file, or a --shape")
    words = [word.strip() for word in schemes.split(",")]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="w4conv-")))
        paths: list[tuple[str, Path]] = []
        for text in inputs:
            if text.endswith(".w4"):
                paths.append((text, Path(text)))
                continue
            for word in words:
                path = folder / f"{len(paths)}.w4"
                quantize(text, path, scheme=word, threads=threads, progress=progress)
                paths.append((f"{text} {word}", path))
        for word in words if shape is not None else []:
            path = folder / f"{len(paths)}.w4"
            write_random(path, str(shape), scheme=word, progress=progress)
            paths.append((f"{shape} {word}", path))
        yield [(name, stack.enter_context(open_container(path))) for name, path in paths]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        _output.nbytes(row.weight_nbytes),
        f"{row.prefill.tokens_per_second.median:.1f}",
        f"{row.prefill.seconds.median:.3f} s",
        f"{row.decode.ms_per_token.median:.2f}",
        f"{row.decode.tokens_per_second.median:.2f}",
        f"{row.decode.read_gbs.median:.1f} / {row.ceiling_gbs.median:.1f}",
        f"{row.decode.read_share.median:.0%}",
    )


def _facts(report: BenchReport) -> list[tuple[str, str]]:
    first = report.rows[0]
    return [
        ("engine", f"{report.isa}, {report.threads} threads"),
        (
            "measured",
            f"prompt of {first.prefill.n_tokens}, {first.decode.n_tokens} tokens decoded, "
            f"medians of {report.rounds} rounds",
        ),
    ]


def _as_text(report: BenchReport) -> str:
    return _output.facts(_facts(report)) + "\n" + _output.table(COLUMNS, map(_cells, report.rows))


def _as_markdown(report: BenchReport) -> str:
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *map(_cells, report.rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "\n" + "; ".join(value for _, value in _facts(report)) + "\n"


def _as_csv(report: BenchReport) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    rates = ("prefill_seconds", "prefill_tokens_per_second", "decode_ms_per_token", "decode_tokens_per_second",
             "decode_read_gbs", "decode_read_share", "ceiling_gbs")  # fmt: skip
    head = [f"{rate}_{figure}" for rate in rates for figure in ("median", "low", "high")]
    writer.writerow(["model", "schemes", "weight_nbytes", "isa", "threads", "rounds", *head])
    for row in report.rows:
        values: list[Rate] = [
            row.prefill.seconds, row.prefill.tokens_per_second, row.decode.ms_per_token, row.decode.tokens_per_second,
            row.decode.read_gbs, row.decode.read_share, row.ceiling_gbs,
        ]  # fmt: skip
        figures = [figure for rate in values for figure in (rate.median, rate.low, rate.high)]
        writer.writerow([row.name, row.schemes, row.weight_nbytes, report.isa, report.threads, report.rounds, *figures])
    return out.getvalue()
