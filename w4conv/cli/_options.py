"""Options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from w4conv.errors import UsageError

Threads = Annotated[
    int | None,
    typer.Option("--threads", "-t", min=1, max=1024, metavar="N", help="Threads [default: CPUs this process may use]"),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to standard output")]


def one_of(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Shell completion of a fixed set of words; the library checks them."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def refuse_terminal(path: str) -> None:
    """Raises UsageError for `-` where nobody would send a file."""
    if path == "-" and sys.stdin.isatty():
        raise UsageError("standard input is a terminal; name a file, or pipe a .w4 file in")
