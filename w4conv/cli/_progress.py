"""A progress bar on stderr where that is a terminal; nothing at all elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from w4conv.cli._output import printable
from w4conv.progress import Progress, Silent

_NAME_WIDTH = 28


class _Bar:
    """One tqdm bar for each phase of a task."""

    def __init__(self) -> None:
        self._bar: Any = None  # tqdm has no types

    def start(self, total_nbytes: int, /) -> None:
        from tqdm import tqdm

        self.close()
        self._bar = tqdm(
            total=total_nbytes,
            file=sys.stderr,
            dynamic_ncols=True,
            leave=False,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
            ascii=not _speaks_utf8(),
        )

    def advance(self, nbytes: int, name: str, /) -> None:
        if self._bar is not None:
            self._bar.set_description_str(_shortened(name), refresh=False)
            self._bar.update(nbytes)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A Progress to hand to a use case; the bar is gone when the block ends, however it ends."""
    if not sys.stderr.isatty():
        yield Silent()
        return
    bar = _Bar()
    try:
        yield bar
    finally:
        bar.close()


def _shortened(name: str) -> str:
    """The end of a name, which is what tells tensors apart, always of one width."""
    name = printable(name)
    short = name if len(name) <= _NAME_WIDTH else ".." + name[2 - _NAME_WIDTH :]
    return short.ljust(_NAME_WIDTH)


def _speaks_utf8() -> bool:
    return (sys.stderr.encoding or "").lower().replace("-", "") == "utf8"
