"""`w4conv quantize` beside llama.cpp's own quantizer, alternately, on an F16 GGUF file of random weights.

    python tests/bench/quantize_against_llama_cpp.py [--shape llama-3.2-1b] [--rounds 3] [--folder /dev/shm]

Needs llama-cpp-python and gguf beside w4conv. llama.cpp makes Q4_0, w4conv w4a16, each in a process of its own that
tells the seconds from the call to its return. The folder is best one in memory, else the disk is measured. Prints the
source bytes a second, the most anonymous memory seen, and the medians.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from against_llama_cpp import F16, write_gguf

from w4conv.measure.shapes import SHAPES
from w4conv.models import parse_config

OURS = """
import sys, time
from w4conv.commands.quantize import quantize
start = time.perf_counter()
quantize(sys.argv[1], sys.argv[2], scheme="w4a16", threads=int(sys.argv[3]), effort=0)
print(time.perf_counter() - start)
"""
THEIRS = """
import sys, time, ctypes, llama_cpp
quiet = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(quiet, None)
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, int(sys.argv[3])
start = time.perf_counter()
failed = llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params))
print(time.perf_counter() - start)
sys.exit(failed)
"""


def measure(code: str, source: Path, out: Path, threads: int) -> tuple[float, float]:
    """(seconds, most anonymous MB seen) of a process that converts `source`."""
    command = [sys.executable, "-c", code, str(source), str(out), str(threads)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    most = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if found := re.search(r"RssAnon:\s+(\d+) kB", status):
            most = max(most, int(found[1]))
        time.sleep(0.01)
    if process.returncode or process.stdout is None:
        raise RuntimeError(f"the conversion failed: {process.returncode}")
    out.unlink()
    return float(process.stdout.read()), most / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", default="/dev/shm")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as tmp:
        source = Path(tmp) / "f16.gguf"
        write_gguf(source, parse_config(SHAPES[args.shape]), kind=F16, head=F16)
        gb = source.stat().st_size / 1e9
        print(f"{args.shape}: {gb:.2f} GB of F16, {args.threads} threads")
        ratios, rates = [], []
        for i in range(args.rounds):
            ours, our_mb = measure(OURS, source, Path(tmp) / "out.w4", args.threads)
            theirs, their_mb = measure(THEIRS, source, Path(tmp) / "out.gguf", args.threads)
            ratios.append(theirs / ours)
            rates.append(gb / ours)
            print(
                f"round {i + 1}: w4conv {gb / ours:.2f} GB/s, {our_mb:.0f} MB; "
                f"llama.cpp {gb / theirs:.2f} GB/s, {their_mb:.0f} MB; {theirs / ours:.1f} x"
            )
        print(f"median: {statistics.median(rates):.2f} GB/s, {statistics.median(ratios):.1f} x llama.cpp")


if __name__ == "__main__":
    main()
