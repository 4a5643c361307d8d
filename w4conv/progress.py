"""Progress of a long task, told to whoever wants to show it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told from the thread that called the task, so that an implementation needs no lock."""

    def start(self, total_nbytes: int, /) -> None:
        """Called before the first `advance`, and again when a further phase begins.

        Units are bytes, or tokens where text is scored.
        """

    def advance(self, nbytes: int, name: str, /) -> None:
        """`nbytes` more are done; `name` is the tensor or file at work."""


class Silent:
    """A Progress that shows nothing."""

    def start(self, total_nbytes: int, /) -> None:
        pass

    def advance(self, nbytes: int, name: str, /) -> None:
        pass
