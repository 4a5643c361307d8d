"""Instructions that the hot loops take, counted by callgrind: the same number every time, unlike seconds.

    python tests/bench/instructions.py [--tolerance 0.05]

Needs a C++ compiler and valgrind, which knows no AVX-512: the tiers scalar and avx2 stand for the others. Prints
instructions for each multiplication (of products) or value (of the rest), beside those in instructions.json (GCC 12.2),
and fails where one has risen by more than the tolerance. Another compiler counts differently: before a change, take its
numbers with --record.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
RECORDED = HERE / "instructions.json"
TIERS = {"scalar": ["-O2"], "avx2": ["-mavx2", "-mfma", "-mf16c"]}
ROWS, COLUMNS = 64, 1024
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
# Loop, kind, bits of the activations, tokens.
LOOPS = [
    *(("product", kind, bits, n) for kind in ("int4", "int4z", "int8") for bits in (16, 8) for n in (1, 4, 60)),
    *(("product", kind, 16, n) for kind in ("iq4nl", "nf4", "f16", "bf16", "f32") for n in (1, 60)),
    ("prepare", "int4", 16, 1),
    ("prepare", "int4", 8, 1),
    *(("quantize", kind, 16, 1) for kind in ("int4", "int4z", "int8", "nf4")),
]


def build(folder: Path, tier: str) -> Path:
    compiler = os.environ.get("CXX", "c++")
    common = [compiler, *FLAGS, f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src'}", f"-DTIER={tier}", "-pthread"]
    kernel, program = folder / f"{tier}.o", folder / tier
    subprocess.run(
        [*common, *TIERS[tier], "-c", str(NATIVE / f"src/kernels/{tier}.cpp"), "-o", str(kernel)], check=True
    )
    sources = [HERE / "instructions.cpp", NATIVE / "src/ops/pool.cpp", NATIVE / "src/kernels/unknown.cpp", kernel]
    subprocess.run([*common, *map(str, sources), "-o", str(program)], check=True)
    return program


def count(folder: Path, program: Path, loop: tuple[str, str, int, int]) -> float:
    out = folder / "callgrind.out"
    command = [
        "valgrind",
        "--tool=callgrind",
        f"--callgrind-out-file={out}",
        "--toggle-collect=void hot*",
        str(program),
    ]
    subprocess.run([*command, *map(str, loop)], check=True, capture_output=True)
    found = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"callgrind counted nothing for {loop}")
    done = {"product": ROWS * COLUMNS * loop[3], "prepare": COLUMNS, "quantize": 16 * COLUMNS}[loop[0]]
    return int(found[1]) / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--record", action="store_true", help="write the numbers found instead of comparing")
    args = parser.parse_args()
    recorded: dict[str, float] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as tmp:
        for tier in TIERS:
            program = build(Path(tmp), tier)
            for loop in LOOPS:
                name = " ".join(map(str, (tier, *loop)))
                found[name] = round(count(Path(tmp), program, loop), 4)
                print(f"{name:32}{found[name]:10.4f}{recorded.get(name, float('nan')):10.4f}", flush=True)
    if args.record:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
        return
    risen = [name for name, n in found.items() if n > recorded.get(name, n) * (1 + args.tolerance)]
    if risen:
        sys.exit("more instructions than recorded: " + ", ".join(risen))


if __name__ == "__main__":
    main()
