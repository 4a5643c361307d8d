"""One tree of exceptions; each class stands for one exit code of the command line.

A message says what, where, expected, got, and what to do. It names the file or the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable


class W4Error(Exception):
    """Base of every error that w4conv raises on purpose."""

    exit_code = 5


class CheckError(W4Error):
    """A check of `verify` did not hold (a threshold, a digest, a round trip)."""

    exit_code = 1


class UsageError(W4Error):
    """The request itself is wrong: impossible or contradictory options."""

    exit_code = 2


class ResourceError(UsageError):
    """The request asks for more than the system grants, such as threads."""


class ClosedError(UsageError, ValueError):
    """Something was used after it was closed."""


class InputError(W4Error):
    """Something read is missing, corrupt or unsupported."""

    exit_code = 3


class FormatError(InputError):
    """A `.w4` file breaks its specification; `clause` names where, e.g. "3.2"."""

    def __init__(self, message: str, *, clause: str) -> None:
        super().__init__(f"{message} [w4-container {clause}]")
        self.clause = clause


class OutputError(W4Error):
    """Something could not be written: exists already, no space, no permission."""

    exit_code = 4


def listed(names: Iterable[str], *, most: int = 5) -> str:
    """The first few names, for a message, and how many more there are."""
    names = list(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
