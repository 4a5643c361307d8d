"""A short run of every fuzz target, the same each time. fuzz_python.py and c_reader_fuzzer.c make long ones."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
import zlib
from pathlib import Path

import pytest
from targets import TARGETS, attempt

ROOT = Path(__file__).parents[2]
N = {
    "container": 1500,
    "safetensors": 600,
    "shard-index": 600,
    "gguf": 400,
    "config": 600,
    "blobs": 100,
    "tokenizer": 400,
    "tokenizer.model": 400,
}
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


@pytest.mark.parametrize(
    ("target", "compiler", "fuzzer", "more"),
    [
        ("container", "clang", "c_reader_fuzzer.c", ["-Iformats/c"]),
        ("tokenizer", "clang++", "vocabulary_fuzzer.cpp", ["-std=c++20", "-Inative/src", "native/src/vocabulary.cpp"]),
    ],
)
def test_short_run_of_compiled_code(target: str, compiler: str, fuzzer: str, more: list[str], tmp_path: Path) -> None:
    """libFuzzer with both sanitizers, from sound inputs on."""
    clang, program, source = shutil.which(compiler), tmp_path / "fuzzer", ROOT / "tests/fuzz" / fuzzer
    flags = ["-g", "-O1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", *more]
    if not clang or subprocess.run([clang, *flags, "-o", program, source], capture_output=True, cwd=ROOT).returncode:
        pytest.skip("there is no clang with libFuzzer")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, raw in enumerate(TARGETS[target].seeds()):
        (corpus / f"seed-{i}").write_bytes(raw)
    options = ["-runs=5000", "-seed=1", "-max_len=32768", f"-artifact_prefix={tmp_path}/"]
    run = subprocess.run([program, *options, corpus], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
