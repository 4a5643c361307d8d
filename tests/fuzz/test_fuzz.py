"""A short run of every fuzz target, the same each time. fuzz_python.py and c_reader_fuzzer.c make long ones."""

from __future__ import annotations

import random
import time
import zlib

import pytest
from targets import TARGETS, attempt

N = {"container": 1500, "safetensors": 600, "shard-index": 600, "gguf": 400, "config": 600, "tokenizer": 400}
SECONDS_AT_MOST = 20.0  # for one input; a hang, on any machine that is not far too slow


@pytest.mark.parametrize("name", TARGETS)
def test_short_run(name: str) -> None:
    target = TARGETS[name]
    rng = random.Random(zlib.crc32(name.encode()))
    pool = target.seeds()
    assert all(attempt(target, seed) for seed in pool)
    n_accepted = 0
    for _ in range(N[name]):
        raw = target.mutate(rng.choice(pool), rng)
        started = time.monotonic()
        accepted = attempt(target, raw)
        assert time.monotonic() - started < SECONDS_AT_MOST
        n_accepted += accepted
        if accepted and len(pool) < 200:  # changes add up
            pool.append(raw)
    assert n_accepted < N[name]
