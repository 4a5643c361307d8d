"""`w4conv cat FILE TENSOR`."""

from __future__ import annotations

from typing import Annotated

import typer

from w4conv.cli import _output
from w4conv.cli._options import Json, refuse_terminal

REPORT = ("w4conv.commands.cat", "Extract")
EPILOG = """\
\b
Examples:
  w4conv cat out.w4 model.norm.weight -o norm.npy
  w4conv cat out.w4 model.norm.weight | ssh host 'cat > n.npy'
  w4conv inspect out.w4 --tensors    # the names
"""


def cat(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The .w4 file; - for standard input")],
    tensor: Annotated[str, typer.Argument(metavar="TENSOR", help="Name of the tensor")],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="OUT", help="The .npy file to write; - for standard output")
    ] = "-",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists")] = False,
    json: Json = False,
) -> None:
    """Write one tensor as a NumPy file (.npy) of float32 values.

    The values are what the container means, exactly; every byte of the tensor is checked before. Without -o the file
    goes to standard output, and with --json the report then goes to standard error.
    """
    from w4conv.commands.cat import cat as extract

    refuse_terminal(file)
    written = extract(file, tensor, out, overwrite=overwrite)
    if json:
        _output.write_json("cat", written, stream=_output.report_stream(out))
