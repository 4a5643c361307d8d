"""The one sink of results: text for people, or one JSON object with the name of its schema."""

from __future__ import annotations

import errno
import html
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import IO, Any, Final

from w4conv.cli import _streams
from w4conv.errors import OutputError
from w4conv.files.streams import is_stdin, is_stdout

# Characters that give orders to a terminal: controls, and those that turn the direction of text.
_ORDERS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def write_json(command: str, result: object, *, stream: IO[str] | None = None) -> None:
    """One JSON object, on stdout by default: "schema", then the fields of `result` (a dataclass or mapping)."""
    body = {"schema": f"w4conv.{command}/1", **plain(result)}
    lines = json.dumps(body, indent=2, ensure_ascii=False, allow_nan=False).split("\n")
    # What is not printable stands in strings, so that JSON has an escape for it, and the object is exact.
    safe = (line if line.isprintable() else "".join(map(_json_escaped, line)) for line in lines)
    _send("\n".join(safe) + "\n", stream or sys.stdout)


def _json_escaped(c: str) -> str:
    return c if c.isprintable() else json.dumps(c)[1:-1]


def write(text: str, *, stream: IO[str] | None = None) -> None:
    """Write and flush, so that errors of the stream show now rather than at exit. Raises OutputError for standard
    output; messages on standard error are lost where that takes none."""
    stream = stream or sys.stdout
    try:
        _send(text, stream)
    except OutputError:
        if stream is not sys.stderr:
            raise
        _streams.abandon(stream)


def _send(text: str, stream: IO[str]) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        name = "standard error" if stream is sys.stderr else "standard output"
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)
        raise OutputError(f"cannot write {name}: {reason}. Send it to a file, a pipe or /dev/null") from error


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as JSON types; numbers that JSON lacks (infinity, NaN) as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def printable(text: str) -> str:
    r"""Text from a file, a name or the command line, safe to show on a terminal and in one line.

    Characters that are not seen, give orders or turn the direction of text become escapes such as \x1b and \u202e; the
    bytes of a name that is not UTF-8 become \xff.
    """
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(c: str) -> str:
    if c.isprintable():
        return c
    if "\udc80" <= c <= "\udcff":  # as Python has the bytes of names that are not UTF-8
        return f"\\x{ord(c) - 0xDC00:02x}"
    return c.encode("unicode_escape").decode()


def markup(text: str) -> str:
    """Text for HTML and SVG: printable, with the characters of markup as entities."""
    return html.escape(printable(text))


def streamed(text: str) -> str:
    """The text of a model as `run` writes it: as it is, but for a terminal, which characters that give orders do not
    reach; they become escapes. Line feeds and tabs stay."""
    return _ORDERS.sub(lambda found: _escaped(found[0]), text) if sys.stdout.isatty() else text


def path(path: str) -> str:
    """A path that was read, as people call it."""
    return "standard input" if is_stdin(path) else path


def special_tokens(word: str) -> str:
    """Behind how a text was read: nothing where special tokens were parsed, as usual."""
    return ", special tokens as text" if word == "text" else ""


def output_path(path: str) -> str:
    """A path that was written, as people call it."""
    return "standard output" if is_stdout(path) else path


def report_stream(out: str) -> IO[str]:
    """Where the report on an output goes: standard output, unless the data goes there."""
    return sys.stderr if is_stdout(out) else sys.stdout


def nbytes(n: int | None) -> str:
    """A size to three digits: "68.4 MB" (1e6 bytes)."""
    if n is None:
        return "unknown"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            value = n / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{n} bytes"


def count(n: int) -> str:
    """A number of parameters: "134.5 M"."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return str(n)


def bits(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Lines "name   value", values in one column; on a terminal long values are wrapped within it."""
    rows = [(printable(name), printable(value)) for name, value in pairs]
    margin = max((len(name) for name, _ in rows), default=0) + 2
    if not sys.stdout.isatty():
        return "".join(f"{name.ljust(margin)}{value}\n" for name, value in rows)
    lines = textwrap.TextWrapper(
        max(shutil.get_terminal_size().columns, margin + 20),
        subsequent_indent=" " * margin,
        break_long_words=False,  # paths and digests can be copied
        break_on_hyphens=False,
    )
    out = ""
    for name, value in rows:
        lines.initial_indent = name.ljust(margin)
        out += lines.fill(value) + "\n"
    return out


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Columns two spaces apart; the first `left` to the left, the others to the right."""
    lines = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = []
    for line in lines:
        cells = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        out.append("  ".join(cells).rstrip() + "\n")
    return "".join(out)
