"""What the machine can read: the ceiling that decoding is held against."""

from __future__ import annotations

import time

from w4conv import kernels
from w4conv.container import Container

LEAST_NBYTES = 1 << 16  # smaller parts say more of the calls than of the memory


def read_gbs(container: Container, *, threads: int) -> float:
    """GB/s (1e9 bytes) of one plain read of the container's parts in place, by the same threads as decoding.

    Parts below 64 KiB are passed over, unless there are no others.
    """
    parts = [part for t in container.tensors.values() for part in t.parts]
    parts = [part for part in parts if part.nbytes >= LEAST_NBYTES] or parts
    start = time.perf_counter()
    nbytes = sum(kernels.read(container.bytes_of(part), threads=threads) for part in parts)
    return nbytes / (time.perf_counter() - start) / 1e9
