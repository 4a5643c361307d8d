"""The figures of llama.cpp's `llama-perplexity --kl-divergence` beside those of `w4conv verify --kld`.

    python tests/bench/against_llama_perplexity.py LLAMA_PERPLEXITY BASE.gguf MODEL.gguf wiki.test.raw [--chunks 8]

Needs llama-cpp-python and gguf beside w4conv, and the tool, built from the sources that come with it. Prints
a Markdown table of three columns: what the tool says; what it would say by its documented rounding, on the logits that
llama-cpp-python gives; and what the code of `verify --kld` makes of these logits. The first two differ by the digits
that the tool prints and by float32 sums, the last two by definition alone: the tool keeps the base's log-probabilities
in 16 bits, down to 16 below the largest logit, and leaves out those of -16 and less.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llama_cpp_accuracy import F32Array, logits, open_model

from w4conv.measure.divergence import PERCENTILES, Comparison, compare_models, log_softmax
from w4conv.measure.layerwise import ScoredBlock
from w4conv.measure.perplexity import Windows

F64Array = npt.NDArray[np.float64]
NAMES = {99.9: "99.9%", 99.0: "99.0%", 95.0: "95.0%", 90.0: "90.0%", 50.0: "Median", 10.0: "10.0%", 5.0: "5.0%",
         1.0: "1.0%", 0.1: "0.1%"}  # fmt: skip


def run_tool(tool: Path, model: Path, base: Path, threads: int, *options: str | Path) -> str:
    """base: the file of the base's log-probabilities. One window at a time, as llama-cpp-python runs them here.

    Its log is at times cut short as it ends, so it is run until all is there.
    """
    command = [
        tool,
        "-m",
        model,
        "--kl-divergence-base",
        base,
        "-t",
        threads,
        "-b",
        512,
        "-ub",
        512,
        "-fa",
        "off",
        *options,
    ]
    while True:
        out = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
        if "--kl-divergence" not in options or "Same top p:" in out:
            return out


def windows_of(base: Path) -> Windows:
    """magic | i32 n_ctx, n_vocab, n_windows | i32 tokens"""
    with base.open("rb") as file:
        magic, (ctx, _, n) = file.read(8), np.frombuffer(file.read(12), "<i4")
        tokens = np.frombuffer(file.read(4 * int(ctx) * int(n)), "<i4")
    assert magic == b"_logits_"
    return Windows(tokens.reshape(n, ctx).astype(np.int64), int(ctx) // 2 + 1, tokens.size)


def stored(row: F32Array) -> F64Array:
    """Log-probabilities of the base as the tool reads them back."""
    exact, largest = log_softmax(row), row.max()
    kept = np.maximum(row, largest - np.float32(16))
    step = (largest - kept.min()) / np.float32(65535)
    return exact[row.argmax()] + (np.rint((kept - kept.min()) / step) - 65535).astype(np.float64) * float(step)


def by_their_rules(blocks: Iterator[ScoredBlock], windows: Windows) -> Comparison:
    """What `compare_models` gives, with the base rounded and cut off as by the tool."""
    n, ctx = windows.tokens.shape
    first = windows.first_target - 1
    shape = (n, ctx - 1 - first)
    out = Comparison(np.empty(shape), np.empty(shape), np.empty(shape), np.empty(shape, np.bool_))
    for block in blocks:
        for i, (row, base_row) in enumerate(zip(*block.logits, strict=True), block.start):
            place, target = (block.window, i - first), windows.tokens[block.window, i + 1]
            log_q, log_p = log_softmax(row), stored(base_row)
            kept = log_p > -16
            out.nlls[place], out.base_nlls[place] = -log_q[target], -log_p[target]
            out.klds[place] = np.dot(np.exp(log_p[kept]), (log_p - log_q)[kept])
            out.same_top[place] = np.argmax(row) == np.argmax(log_p)
    return out


def figures(c: Comparison) -> dict[str, float]:
    d = c.divergence()
    found = {"PPL": math.exp(c.nlls.mean()), "PPL of the base": math.exp(c.base_nlls.mean())}
    found["ln of their ratio"] = float((c.nlls - c.base_nlls).mean())
    found |= {"mean KLD": d.mean, "its standard error": d.stderr, "maximum": d.maximum}
    assert [p.percent for p in d.percentiles] == list(PERCENTILES)
    found |= {NAMES[p.percent]: p.value for p in d.percentiles} | {"minimum": float(c.klds.min())}
    return found | {
        "mean Δp, %": 100 * d.mean_delta_p,
        "RMS Δp, %": 100 * d.rms_delta_p,
        "same top, %": 100 * d.same_top,
    }


def printed(text: str) -> dict[str, float]:
    """The figures as the tool prints them, by our names."""

    def number(label: str, group: int = 1) -> float:
        found = re.search(rf"^\s*{label}\s*:\s*(-?[\d.]+)\s*%?(?:\s*±\s*([\d.]+))?", text, re.MULTILINE)
        assert found is not None, label
        return float(found[group])

    found = {"PPL": number(r"Mean PPL\(Q\)"), "PPL of the base": number(r"Mean PPL\(base\)")}
    found["ln of their ratio"] = number(r"Mean ln\(PPL\(Q\)/PPL\(base\)\)")
    found |= {"mean KLD": number("Mean +KLD"), "its standard error": number("Mean +KLD", 2)}
    found["maximum"] = number("Maximum KLD")
    found |= {name: number(rf"{name} +KLD") for name in NAMES.values()} | {"minimum": number("Minimum KLD")}
    return found | {
        "mean Δp, %": number("Mean +Δp"), "RMS Δp, %": number("RMS Δp"), "same top, %": number("Same top p"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tool", "base", "model", "text"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "base"
        run_tool(args.tool, args.base, file, args.threads, "-f", args.text, "-c", args.ctx, "--chunks", args.chunks)
        theirs = printed(run_tool(args.tool, args.model, file, args.threads, "--kl-divergence", "-c", args.ctx))
        windows = windows_of(file)
    first, blocks = windows.first_target - 1, []
    models = [open_model(path, args.ctx, args.threads) for path in (args.model, args.base)]
    if models[1].metadata.get("tokenizer.ggml.add_bos_token") == "true":  # the tool does so when it runs a window
        windows.tokens[:, 0] = models[1].token_bos()
    for i, tokens in enumerate(windows.tokens.tolist()):
        rows = (logits(models[0], tokens, first).copy(), logits(models[1], tokens, first).copy())
        blocks.append(ScoredBlock(i, first, rows))
    rounded, ours = (figures(f(iter(blocks), windows)) for f in (by_their_rules, compare_models))
    print(f"| | llama-perplexity | its rules | w4conv's |\n{'|---' * 4}|")
    for name, value in theirs.items():
        print(f"| {name} | {value:.6f} | {rounded[name]:.6f} | {ours[name]:.6f} |")


if __name__ == "__main__":
    main()
