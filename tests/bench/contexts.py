"""Decode behind long contexts, and several tokens at once, on random weights of a real model's shape.

    python tests/bench/contexts.py [--shape llama-3.2-1b] [--contexts 64,1024,4096] [--at-once 1] [--kv f16]
    python tests/bench/contexts.py --heads 32,8,128 --contexts 1024,4096

--heads Q,KV,SIZE: in place of a shape, 8 layers that are mostly attention (hidden size 16 times the query heads, int8).
Each context is filled by running random tokens, all of them, at once; the seconds are printed. Then, in rounds, every
number of tokens is run together behind it and cut off again, between plain reads of the weights. Medians: ms of the
whole and of its attention, and the share of the plain read at which weights, keys and values were read.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from w4conv.measure.bandwidth import read_gbs
from w4conv.measure.shapes import SHAPES, RandomWeights
from w4conv.runtime.engine import Model, Session


def mostly_attention(heads: str) -> str:
    """The name of a new shape."""
    n, n_kv, head_dim = map(int, heads.split(","))
    sizes = {"hidden_size": 16 * n, "intermediate_size": 32 * n, "num_hidden_layers": 8, "vocab_size": 1024}
    of_heads = {"num_attention_heads": n, "num_key_value_heads": n_kv, "head_dim": head_dim}
    SHAPES[heads] = SHAPES["llama-3.2-1b"] | sizes | of_heads
    return heads


def measure(model: Model, session: Session, contexts: list[int], at_once: list[int], rounds: int) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.spec.vocab_size, max(contexts) + max(at_once))
    per_token = model.kv_nbytes(0) / (-(-model.ctx // 256) * 256)
    for context in contexts:
        before, start = session.n_tokens, time.perf_counter()
        session.append(tokens[before:context])
        print(f"{context:6} tokens; the last {context - before} took {time.perf_counter() - start:.2f} s", flush=True)
        found: dict[int, list[tuple[float, float, float]]] = {n: [] for n in at_once}
        for turn in range(rounds + 1):
            for n in at_once:
                model.restart_stopwatch()
                start = time.perf_counter()
                session.append(tokens[context : context + n])
                seconds = time.perf_counter() - start
                attention = model.part_seconds()["attention"]
                session.truncate(context)
                share = (model.bytes_per_token + context * per_token) / seconds / 1e9
                if turn > 0:  # the first one warms up
                    found[n].append((seconds, attention, share / read_gbs(model.container, threads=model.threads)))
        for n, figures in found.items():
            seconds, attention, share = (statistics.median(f) for f in zip(*figures, strict=True))
            nbytes = context * per_token
            print(
                f"{n:6} at once: {seconds * 1e3:.2f} ms, {share:.2f} of a plain read; attention "
                f"{attention * 1e3:.2f} ms, {nbytes / 1e6:.0f} MB at {nbytes / attention / 1e9:.1f} GB/s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--heads", metavar="Q,KV,SIZE")
    parser.add_argument("--contexts", default="64,1024,4096")
    parser.add_argument("--at-once", default="1")
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    contexts, at_once = (list(map(int, words.split(","))) for words in (args.contexts, args.at_once))
    shape, scheme = (mostly_attention(args.heads), "w8a16") if args.heads else (args.shape, "w4a16")
    SHAPES[shape]["max_position_embeddings"] = max(contexts) + max(at_once)
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp) / "random.w4"
        RandomWeights(shape, scheme=scheme).write(path)
        with Model(path, kv=args.kv, threads=args.threads) as model:
            measure(model, model.session(), sorted(contexts), at_once, args.rounds)


if __name__ == "__main__":
    main()
