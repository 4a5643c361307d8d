"""The three standard streams as the caller left them, and signals: what was closed stays closed, what was ignored too.

A closed descriptor would be given to the next file that is opened, so that messages could end in a model. Each is
held by /dev/null, opened for the other direction, so that its use fails as that of a closed one does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import IO

_CLOSED_AS = (os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)


def settle() -> None:
    """Give every standard stream a place, and text in UTF-8."""
    for descriptor, flags in enumerate(_CLOSED_AS):
        try:
            os.fstat(descriptor)
        except OSError:
            held = os.open(os.devnull, flags)  # the lowest number that is free is this one
            if held != descriptor:
                os.dup2(held, descriptor)
                os.close(held)
            os.set_inheritable(descriptor, True)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]  # TextIOWrapper


def abandon(stream: IO[str]) -> None:
    """A stream takes no more; what is left in its buffers must not fail again when the interpreter exits."""
    with suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def handle_signals(terminate: Callable[[int, FrameType | None], None]) -> None:
    """`terminate` for SIGTERM and SIGHUP, but where the caller ignores one, as nohup does; SIGINT is as Python has it,
    which is ignored too where a shell has put the command into the background."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, terminate)
