"""Kill conversions at random moments and look at what is there afterwards.

    python tests/crash/kill_trials.py --trials 200 --seed 1

Each trial starts a conversion in a process of its own and sends it SIGKILL after a random time, from before its first
byte to after its last. Then the target has to be absent or the whole file, nothing but `<target>.partial` may lie
beside it, and the next run, by turns with and without --resume, has to yield the same bytes as one that was never
disturbed and to leave nothing else. The source must not have changed.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from blake3 import blake3

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
# The child says when it is about to begin, so that no trial is spent on the start of the interpreter.
CHILD = """
import sys
from w4conv.commands.quantize import quantize
source, out, resume = sys.argv[1:]
print("ready", flush=True)
report = quantize(source, out, resume=resume == "resume", threads=1, effort=0, scheme="w4a16")
print(*[note for note in report.notes if note.startswith("resumed")] or ["whole"], flush=True)
"""


def convert(source: Path, out: Path, *, resume: bool, kill_after: float | None = None) -> tuple[str, float]:
    """What the child said last ("" when it was killed before), and its seconds after "ready"."""
    command = [sys.executable, "-c", CHILD, str(source), str(out), "resume" if resume else ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        started = time.perf_counter()
        if kill_after is not None:
            time.sleep(kill_after)
            child.send_signal(signal.SIGKILL)
        said = child.stdout.read()
    return said, time.perf_counter() - started


def run(n_trials: int, seed: int, *, hidden: int, layers: int) -> Counter[str]:
    """Raises AssertionError at the first trial that goes wrong; returns how the others went."""
    from helpers import make_llama_dir

    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = make_llama_dir(folder / "model", hidden=hidden, inner=2 * hidden, heads=8, layers=layers, vocab=2000)
        sources = {file: file.read_bytes() for file in source.iterdir()}
        out = folder / "out" / "model.w4"
        out.parent.mkdir()
        convert(source, out, resume=False)
        expected = blake3(out.read_bytes()).digest()
        out.unlink()
        seconds = math.inf
        for _ in range(3):
            seconds = min(seconds, convert(source, out, resume=False)[1])
            out.unlink()
        for trial in range(n_trials):
            convert(source, out, resume=trial % 3 == 0, kill_after=rng.uniform(0, seconds))
            left = {file.name for file in out.parent.iterdir()}
            assert left <= {"model.w4", "model.w4.partial"}, left
            if out.exists():
                assert blake3(out.read_bytes()).digest() == expected, (
                    f"trial {trial}: a wrong file under the target's name"
                )
                assert "model.w4.partial" not in left
                counts["complete"] += 1
                out.unlink()
            counts["partial left" if "model.w4.partial" in left else "nothing left"] += 1
            said, _ = convert(source, out, resume=trial % 2 == 0)
            counts["resumed"] += said.startswith("resumed")
            assert blake3(out.read_bytes()).digest() == expected, f"trial {trial}: the next run wrote other bytes"
            assert [file.name for file in out.parent.iterdir()] == ["model.w4"], f"trial {trial}: not cleaned up"
            out.unlink()
            counts["trials"] += 1
        assert {file: file.read_bytes() for file in source.iterdir()} == sources, "the source was changed"
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.perf_counter()
    counts = run(options.trials, options.seed, hidden=512, layers=16)
    figures = ", ".join(f"{what} {n}" for what, n in counts.items())
    print(f"{figures}; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
