"""The names of standard input and standard output among paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

STDOUT: Final = Path("-")
# Opening one of the others anew would truncate a file that the shell appends to.
_STDOUTS: Final = (STDOUT, *map(Path, ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")))


def is_stdin(path: str | os.PathLike[str]) -> bool:
    """Whether an input is standard input: "-". Its other names are pipes or files like any."""
    return Path(path) == Path("-")


def is_stdout(path: str | os.PathLike[str]) -> bool:
    """Whether an output is standard output: "-", or a path by which the system names it."""
    return Path(path) in _STDOUTS
