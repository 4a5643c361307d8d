"""Read bandwidth and dot product peak of the machine: the ceilings of decode and prefill."""

from __future__ import annotations

import time
from dataclasses import replace

from w4conv import kernels
from w4conv.container import Container


def read_gbs(container: Container, *, threads: int) -> float:
    """GB/s (1e9 bytes) of one plain read of all tensors in place, by the same threads as decoding."""
    parts = [part for t in container.tensors.values() for part in t.parts]
    first = min(parts, key=lambda part: part.offset)
    end = max(part.offset + part.nbytes for part in parts)
    whole = replace(first, nbytes=end - first.offset)  # one call: many small ones would measure the calls
    start = time.perf_counter()
    nbytes = kernels.read(container.bytes_of(whole), threads=threads)
    return nbytes / (time.perf_counter() - start) / 1e9


def peak_gmacs(*, operands: str, threads: int) -> float:
    """1e9 multiplications a second of the dot product that the tier in use has for "int16", "int8" or "float"."""
    start = time.perf_counter()
    n = kernels.multiply_registers(operands=operands, threads=threads)
    return n / (time.perf_counter() - start) / 1e9
