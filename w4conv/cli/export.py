"""`w4conv export FILE OUT --to FORMAT`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from w4conv.cli import _output
from w4conv.cli._options import Json, one_of
from w4conv.cli._progress import progress_bar
from w4conv.files.streams import is_stdout

if TYPE_CHECKING:
    from w4conv.exports.report import ExportReport, ExportTotal

FORMATS = ("safetensors", "gguf", "compressed-tensors", "gptq", "awq", "mlx", "onnx")
DTYPES = ("f16", "bf16", "f32")
REPORT = ("w4conv.exports.report", "ExportReport")
EPILOG = """\
\b
Examples:
  w4conv export out.w4 out.gguf --to gguf
  w4conv export out.w4 dir/ --to safetensors --dtype bf16
  w4conv export out.w4 out.gguf --to gguf --dry-run
"""


def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The .w4 file")],
    out: Annotated[
        str,
        typer.Argument(metavar="OUT", help="What to write: a file for gguf (- for standard output), else a directory"),
    ],
    to: Annotated[str, typer.Option(metavar="|".join(FORMATS), help="Format of OUT", autocompletion=one_of(FORMATS))],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DTYPES),
            help="Type of matrices that are not held coded [default: f32, exact; in 4-bit directories f16]",
            autocompletion=one_of(DTYPES),
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most bytes of tensors in one safetensors file, such as 500MB [default: 5GB]"
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan and check everything but values; write nothing")
    ] = False,
    json: Json = False,
) -> None:
    """Write a container in the format of another engine.

    Codes and scales go over as they are wherever the format has room for them; the report says what was exact and
    measures what was not. OUT appears whole or not at all. The same container and options give the same bytes.

    The report goes to standard output, or to standard error when OUT is -.
    """
    from w4conv.commands.export import export as write

    try:
        with progress_bar() as progress:
            report = write(
                file,
                out,
                to=to,
                dtype=dtype,
                max_shard_size=max_shard_size,
                overwrite=overwrite,
                dry_run=dry_run,
                progress=progress,
            )
    except KeyboardInterrupt:
        left = "what was sent is incomplete" if is_stdout(out) else f"{out} was not written"
        raise KeyboardInterrupt(f"interrupted; {left}") from None
    stream = _output.report_stream(out)
    if json:
        _output.write_json("export", report, stream=stream)
    else:
        _output.write(as_text(report), stream=stream)


def as_text(report: ExportReport) -> str:
    verb = "would write" if report.dry_run else "wrote"
    name = _output.output_path(report.out)
    files = f"{len(report.files)} files, " if len(report.files) > 1 else ""
    exact = {
        True: "yes: every value is that of the container",
        False: "no: see below what was rounded",
        None: "known only after writing: see below what is rounded",
    }[report.exact]
    pairs = [
        (verb, f"{name} ({report.format}), {files}{_output.nbytes(report.output_nbytes)}"),
        ("from", f"{report.source}, {_output.nbytes(report.input_nbytes)}"),
        ("digest", report.digest),
        ("model", f"{report.architecture}, {_output.count(report.n_parameters)} parameters"),
        ("exact", exact),
    ]
    if report.seconds is not None:
        pairs.append(("time", f"{report.seconds:.2f} s"))
    pairs += [("note", note) for note in report.notes]
    rows = [
        (t.scheme, t.becomes, _exact(t), _error(t), f"{t.n_tensors:,}", _output.count(t.n_parameters))
        for t in report.tensors
    ]
    head = ("scheme", "becomes", "exact", "max error", "tensors", "parameters")
    return _output.facts(pairs) + "\n" + _output.table(head, rows, left=4)


def _exact(total: ExportTotal) -> str:
    if total.n_exact is None:
        return "rounds"
    if total.n_exact == total.n_tensors:
        return "yes"
    return "no" if total.n_exact == 0 else f"{total.n_exact} of {total.n_tensors}"


def _error(total: ExportTotal) -> str:
    return "" if total.max_abs_error is None else f"{total.max_abs_error:.1e}" if total.max_abs_error else "0"
