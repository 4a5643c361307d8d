"""`w4conv calibrate IN TEXT`."""

from __future__ import annotations

from typing import Annotated

import typer

from w4conv.cli import _output
from w4conv.cli._options import Json, SpecialTokens, Threads
from w4conv.cli._progress import progress_bar

REPORT = ("w4conv.commands.calibrate", "StatisticsReport")
EPILOG = """\
\b
Examples:
  w4conv calibrate in/ book.txt -o in.safetensors
  w4conv calibrate in/ builtin -o in.safetensors
  w4conv quantize in/ 128.w4 --calibration in.safetensors
  w4conv quantize in/ 32.w4 --calibration in.safetensors \\
    --group-size 32 --method search
"""


def calibrate(
    source: Annotated[str, typer.Argument(metavar="IN", help="Hugging Face directory or GGUF file")],
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="UTF-8 text on which activations are observed; or builtin, the set that comes with w4conv (./builtin "
            "is a file)",
        ),
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="OUT", help="The file to write; - for standard output")],
    full: Annotated[
        bool,
        typer.Option("--full", help="Second moments of all pairs of channels too, for gptq and best; a large file"),
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of the text to use, spread over the whole [default: 16384; builtin 32768]"
        ),
    ] = None,
    ctx: Annotated[int | None, typer.Option(min=2, metavar="N", help="Tokens of a sequence [default: 512]")] = None,
    special_tokens: SpecialTokens = None,
    threads: Threads = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists")] = False,
    json: Json = False,
) -> None:
    """Observe the activations of a model on a calibration set, and save the statistics for quantize --calibration.

    They are the mean and mean square of each channel: enough for the methods search and awq, and for --target-bpw. One
    file serves any scheme and group size. With the calibration set itself, quantize rounds each matrix for the
    quantized layers before it, which takes longer and loses less.

    The report goes to standard output, or to standard error when OUT is -.
    """

    from w4conv.commands.calibrate import calibrate as observe

    with progress_bar() as progress:
        report = observe(
            source, text, out, full=full, tokens=tokens, ctx=ctx, special_tokens=special_tokens, threads=threads,
            overwrite=overwrite, progress=progress,
        )  # fmt: skip
    stream = _output.report_stream(out)
    if json:
        _output.write_json("calibrate", report, stream=stream)
        return
    kind = "means, mean squares and second moments" if full else "means and mean squares"
    pairs = [
        ("wrote", f"{_output.output_path(out)}, {_output.nbytes(report.nbytes)}"),
        ("from", f"{report.source}, {report.architecture}"),
        (
            "text",
            f"{report.text}, {report.tokens:,} tokens in sequences of {report.ctx}"
            f"{_output.special_tokens(report.special_tokens)}",
        ),
        ("holds", f"{kind} of activations at {report.n_places} hooks"),
        ("digest", report.digest),
    ]
    _output.write(_output.facts(pairs), stream=stream)
