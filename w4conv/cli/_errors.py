"""From an exception to one message on stderr and an exit code; the only place that knows both."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import textwrap
import traceback

from w4conv.cli import _output
from w4conv.errors import W4Error

DEBUG_VARIABLE = "W4CONV_DEBUG"
DIFFERS, USAGE, INPUT, OUTPUT, INTERNAL, INTERRUPTED = 1, 2, 3, 4, 5, 130

# Failed writes that no layer below could name a path for: standard output, the temporary directory.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EBADF)


def report(error: BaseException) -> int:
    """Print what went wrong; returns the exit code."""
    if os.environ.get(DEBUG_VARIABLE):
        lines = "".join(traceback.format_exception(error)).split("\n")
        _output.write("\n".join(map(_output.printable, lines)), stream=sys.stderr)
    if isinstance(error, W4Error):
        message, code = str(error), error.exit_code
    elif hasattr(error, "format_message"):  # typer's own, whose class has lived in more than one module
        message, code = _usage_message(error), USAGE
    elif isinstance(error, OSError):
        message, code = _os_message(error), OUTPUT if error.errno in _WRITE_ERRORS else INPUT
    elif isinstance(error, MemoryError):
        message, code = "out of memory. Close other programs, or use a machine with more", INTERNAL
    else:
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        message = f"internal error: {what}. This is a fault of w4conv; {DEBUG_VARIABLE}=1 shows where, for a report"
        code = INTERNAL
    print_message("error", message)
    return code


def print_message(kind: str, message: str) -> None:
    """`w4conv: kind: message` on stderr, as wide as the terminal; one line where stderr is none."""
    text = _output.printable(f"w4conv: {kind}: {message}")
    if sys.stderr.isatty():
        width = max(shutil.get_terminal_size().columns, 20)
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")
    _output.write(f"{text}\n", stream=sys.stderr)


def _usage_message(error: object) -> str:
    message = " ".join(str(error.format_message()).split()).rstrip(".")  # type: ignore[attr-defined]  # looked for above
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "w4conv"
    return f"{message}{'' if message.endswith('?') else '.'} See '{command} --help'"


def _os_message(error: OSError) -> str:
    what = f"{error.filename}: " if error.filename else ""
    reason = error.strerror or str(error)
    return f"{what}{reason}. Check that the file is there and may be used, and that there is space"
