"""Options that several commands share."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from w4conv.errors import InputError, UsageError
from w4conv.files.streams import is_stdin


def _can_run(threads: int | None) -> int | None:
    """Raises UsageError for more threads than could run at a time."""
    if threads is None or threads == 1:
        return threads  # without a look at the machine
    from w4conv import cpus

    allowed = cpus.allowed_cpus()
    if threads > allowed.most_threads:
        raise UsageError(
            f"{threads} threads would take turns on what this process may use: {allowed}. "
            f"Ask for at most {allowed.most_threads}, or leave --threads out for {allowed.default_threads}"
        )
    return threads


Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", "-t", min=1, max=1024, metavar="N", callback=_can_run,
        help="Threads [default: cores this process may use]",
    ),
]  # fmt: skip
Activations = Annotated[
    str,
    typer.Option(
        metavar="int16|int8",
        help="Integer type of activations in GEMMs with integer weights; int8 is faster and less exact",
        autocompletion=lambda incomplete: [w for w in ("int16", "int8") if w.startswith(incomplete)],
    ),
]
KvKind = Annotated[
    str,
    typer.Option(
        "--kv", metavar="f16|int8|f32",
        help="How keys and values are kept; int8 takes half the memory and is less exact",
        autocompletion=lambda incomplete: [w for w in ("f16", "int8", "f32") if w.startswith(incomplete)],
    ),
]  # fmt: skip
SpecialTokens = Annotated[
    str | None,
    typer.Option(
        metavar="parse|text",
        help="What special tokens are that the text spells, such as <|im_end|>: those tokens, or text [default: parse]",
        autocompletion=lambda incomplete: [w for w in ("parse", "text") if w.startswith(incomplete)],
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to standard output")]


def one_of(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Shell completion of a fixed set of words; the library checks them."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def refuse_terminal(path: str) -> None:
    """Raises UsageError for `-` where nobody would send a file, InputError where nothing can come."""
    if is_stdin(path) and fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:  # see _streams
        raise InputError("standard input is closed. Name a file, or pipe a .w4 file in")
    if is_stdin(path) and sys.stdin.isatty():
        raise UsageError("standard input is a terminal; name a file, or pipe a .w4 file in")
