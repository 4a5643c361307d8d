"""The engine under three sanitizers (address, undefined behaviour, threads) on the lowest and highest tier; avxvnni."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from w4conv import kernels

NATIVE = Path(__file__).parents[2] / "native"
PROGRAM = Path(__file__).with_name("engine_digest.cpp")
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
AVX512 = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
TIERS: dict[str, list[str]] = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    # Encoded as AVX-512: few machines that run these tests have AVX-VNNI.
    "avxvnni": ["-mavx2", "-mfma", "-mf16c", "-mavx512vl", "-mavx512vnni"],
    "avx512": AVX512,
    "avx512vnni": [*AVX512, "-mavx512vnni"],
}
# Tiers that are compiled as their dot product alone, and whose kernels they take besides.
BASES = {"avxvnni": "avx2", "avx512vnni": "avx512"}

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to build with"),
]


def digest(folder: Path, tier: str, sanitizers: str) -> str:
    """Build the program for one tier, run it, and return the digest that it prints; a finding fails the run."""
    program = folder / f"{tier}-{sanitizers.replace(',', '-')}"
    include = [f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src'}"]
    common = ["-std=c++20", "-O1", "-g", "-ffp-contract=off", "-Wno-psabi"]
    common += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
    common += ["-pthread", *include]
    kernels_ = [NATIVE / "src/kernels/unknown.cpp"]
    for name in filter(None, (tier, BASES.get(tier))):  # vector flags are for a tier's own file alone, as in the build
        kernels_.append(folder / f"{program.name}-{name}.o")
        source = NATIVE / "src/kernels" / f"{name}.cpp"
        subprocess.run([str(COMPILER), *common, *TIERS[name], "-c", str(source), "-o", str(kernels_[-1])], check=True)
    tables = [f"-DTIER={BASES[tier]}", f"-DDOT_TIER={tier}"] if tier in BASES else [f"-DTIER={tier}"]
    sources = [
        PROGRAM,
        *(f for room in ("ops", "engine") for f in sorted((NATIVE / "src" / room).glob("*.cpp"))),
        *kernels_,
    ]
    subprocess.run([str(COMPILER), *common, *tables, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_no_sanitizer_finds_anything_and_all_agree(tmp_path: Path) -> None:
    lowest, highest = kernels.isa_tiers()[0], kernels.isa_tiers()[-1]
    runs = [(lowest, "address,undefined"), (highest, "address,undefined"), (highest, "thread")]
    if "avx512vnni" in kernels.isa_tiers():
        runs.append(("avxvnni", ""))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilers, side by side
        digests = list(pool.map(lambda run: digest(tmp_path, *run), runs))
    assert len(digests[0]) == 16
    assert set(digests) == {digests[0]}
