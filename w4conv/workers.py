"""Threads of Python beside the caller."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from w4conv.errors import ResourceError

P = ParamSpec("P")
T = TypeVar("T")


class Workers(ThreadPoolExecutor):
    """An executor whose `submit` and `map` raise ResourceError where the system starts no more threads."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if "start new thread" not in str(error):
                raise
            raise ResourceError(
                f"the system starts no more threads, of which {self._max_workers} were asked for. "
                "End other programs of this user, or raise the limit (ulimit -u)"
            ) from None
