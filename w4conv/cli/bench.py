"""`w4conv bench FILE...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from w4conv.cli import _output
from w4conv.cli._bench_table import as_csv as csv_of
from w4conv.cli._bench_table import as_markdown, as_text
from w4conv.cli._options import Activations, Json, KvKind, SpecialTokens, Threads
from w4conv.cli._progress import progress_bar
from w4conv.errors import UsageError
from w4conv.files.streams import is_stdout

REPORT = ("w4conv.commands.bench", "BenchReport")
EPILOG = """\
\b
Examples:
  w4conv bench out.w4
  w4conv bench SmolLM2-135M/ --text book.txt --html report.html
  w4conv bench SmolLM2-135M/ --schemes f16,w8a16,w4a16
  w4conv bench --shape llama-3-8b --schemes w4a16 -n 32
  w4conv bench a.w4 b.w4 --csv > bench.csv
"""


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
    special_tokens: SpecialTokens = None,
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
    from w4conv.commands.bench import opened
    from w4conv.files.overlap import refuse_origin, refuse_overlap
    from w4conv.files.target import check_target, open_target

    page_is_output = html is not None and is_stdout(html)
    if json + as_csv + markdown + page_is_output > 1:
        raise UsageError("--json, --csv, --md and a report on standard output exclude one another")
    if shape is not None and text is not None:
        raise UsageError("the weights of a --shape are random, so that no perplexity is of use; leave --text out")
    if html is not None:
        refuse_overlap([html], input=inputs, text=text)
        check_target(Path(html), 0, overwrite=overwrite)
    with (
        progress_bar() as progress,
        opened(inputs or [], shape, schemes=schemes.split(","), threads=threads, progress=progress) as containers,
    ):
        for _, container in containers:
            refuse_origin(html or "-", container.provenance, container.source_digests)
        report = measure(
            containers, n_prompt=prompt, n_tokens=n, rounds=rounds, context=context, text=text, ctx=ctx, chunks=chunks,
            special_tokens=special_tokens, activations=activations, kv=kv, threads=threads, progress=progress,
        )  # fmt: skip
    if html is not None:
        from w4conv.cli._report import as_html

        page = as_html(report).encode()
        with open_target(Path(html), len(page), overwrite=overwrite, signature=b"<!doctype html>") as target:
            target.write(page)
    if json:
        _output.write_json("bench", report)
    elif as_csv:
        _output.write(csv_of(report))
    elif not page_is_output:
        _output.write(as_markdown(report) if markdown else as_text(report))
