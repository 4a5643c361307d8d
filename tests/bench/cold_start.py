"""A cold process: seconds until the first token beside those of the prefill, and what stays in memory.

    python tests/bench/cold_start.py --tokenizer SmolLM2-135M-Instruct/tokenizer.json [--shape llama-3-8b] [--rounds 5]
    python tests/bench/cold_start.py --tokenizer ... --context 4096 [--text wiki.test.raw]

Random int4 weights of a model's shape, with a real tokenizer, in a file in the page cache. Each round starts
`w4conv run` anew and takes the time until its first output. --context: instead, run so many tokens through the model
and print the memory of the process; they are random ones, or those that a text begins with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from w4conv.measure.shapes import SHAPES, RandomWeights
from w4conv.runtime.engine import Model
from w4conv.runtime.generation import resident_memory
from w4conv.runtime.tokenizer import Tokenizer
from w4conv.scheme import TILE_ROWS


def first_token(path: Path) -> tuple[float, float]:
    """(seconds from the start of the process to its output, seconds of its prefill)."""
    command = [sys.executable, "-m", "w4conv", "run", str(path), "-p", "Once upon a time", "-n", "1", "--json"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        if process.stdout is None:
            raise RuntimeError("no output")
        head = process.stdout.read(1)
        seconds = time.perf_counter() - start
        stats = json.loads(head + process.stdout.read())["stats"]
    return seconds, stats["prefill_seconds"]


def memory_of_a_context(path: Path, n: int, text: Path | None) -> None:
    with Model(path, ctx=n) as model:
        if text is None:
            tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, n)
        else:
            beginning = text.read_text()[: 16 * n]
            tokens = np.array(Tokenizer(model.container.blobs).encode(beginning)[:n])
        before = resident_memory()
        model.session().append(tokens)
        used = [len(np.unique(tokens // rows)) for rows in (1, TILE_ROWS)]
        print(f"{tokens.size} tokens, {used[0]} different ones in {used[1]} tiles of the embedding")
        print(
            f"before: {before}; behind them: {resident_memory()}; weights of a token: {model.bytes_per_token:,} bytes"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int)
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp) / "model.w4"
        blobs = {"tokenizer.json": args.tokenizer.read_bytes()}
        RandomWeights(args.shape, scheme="w4a16", blobs=blobs).write(path)
        sizes = path.stat().st_size / 1e9, args.tokenizer.stat().st_size / 1e6
        print(f"{args.shape}: {sizes[0]:.2f} GB, of which the tokenizer {sizes[1]:.1f} MB")
        if args.context is not None:
            memory_of_a_context(path, args.context, args.text)
            return
        first_token(path)  # the page cache
        rests = []
        for i in range(args.rounds):
            seconds, prefill = first_token(path)
            rests.append(seconds - prefill)
            print(
                f"round {i + 1}: first token after {seconds:.3f} s, prefill {prefill:.3f} s, the rest {rests[-1]:.3f} s"
            )
        print(f"median of the rest: {statistics.median(rests):.3f} s")


if __name__ == "__main__":
    main()
