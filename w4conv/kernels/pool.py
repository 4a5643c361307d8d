"""Native threads, and the bytes of arrays as native code takes them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from w4conv import _native
from w4conv.arrays import Array
from w4conv.cpus import thread_count
from w4conv.errors import ResourceError
from w4conv.kernels.tiers import isa_tier


def native_pool(threads: int | None) -> _native.Pool:
    """Threads that wait for work, shared by all calls of as many."""
    isa_tier()  # an impossible W4CONV_ISA is an error of its own
    return _pool_of(thread_count(threads))


@functools.lru_cache(maxsize=4)
def _pool_of(n_threads: int) -> _native.Pool:
    with starting_threads():
        return _native.Pool(n_threads)


os.register_at_fork(after_in_child=_pool_of.cache_clear)  # threads stay behind in the parent


@contextlib.contextmanager
def starting_threads() -> Iterator[None]:
    """Raises ResourceError where the system starts no more native threads."""
    try:
        yield
    except _native.ThreadStartError as error:
        raise ResourceError(f"{error}. Ask for fewer with --threads, or raise the limit (ulimit -u)") from None


def as_bytes(a: Array) -> npt.NDArray[np.uint8]:
    """Flat uint8 view of a C-contiguous array (a copy of any other)."""
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)
