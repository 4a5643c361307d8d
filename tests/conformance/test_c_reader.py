"""The C reader against the vectors and the Python reader: the same verdict, and the same value of every weight."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import vectors
from blake3 import blake3
from c_reader import COMPILERS, ROOT, WARNINGS, Verdict, compile_c, verdicts
from mutations import mutate
from w4files import open_bytes, small_file

from w4conv.errors import FormatError

pytestmark = pytest.mark.skipif(not COMPILERS, reason="no gcc and no clang to compile the C reader with")
SEED, N_MUTATED = 20260101, 2000


@pytest.fixture(scope="module", params=[(c, s) for c in COMPILERS for s in (False, True)], ids=lambda p: f"{p[0]}-asan" if p[1] else p[0])  # fmt: skip  # noqa: E501 - one line says it best
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, sanitize = request.param
    out = tmp_path_factory.mktemp("c") / "driver"
    return compile_c(ROOT / "tests/conformance/c/w4_driver.c", out, compiler=compiler, sanitize=sanitize)


def code(clause: str) -> int:
    chapter, number = clause.split(".")
    return 100 * int(chapter) + int(number)


def test_vectors(driver: Path) -> None:
    entries = vectors.SOUND + vectors.FAULTY
    for entry, verdict in zip(entries, verdicts(driver, [vectors.raw(e) for e in entries]), strict=True):
        if "clause" in entry:
            expected = (entry["code"], 0) if entry["found_by"] == "open" else (0, entry["code"])
            assert (verdict.opened, verdict.verified) == expected, entry["file"]
            assert entry["code"] == code(entry["clause"])
            continue
        assert (verdict.opened, verdict.verified) == (0, 0), entry["file"]
        found = [blake3(values.tobytes()).hexdigest() for values in verdict.tensors]
        assert found == [t["values_blake3"] for t in entry["tensors"]], entry["file"]


def python_verdict(raw: bytes) -> Verdict:
    opened = verified = 0
    values = []
    try:
        container = open_bytes(raw)
    except FormatError as error:
        return Verdict(code(error.clause), 0, [])
    try:
        container.check()
    except FormatError as error:
        verified = code(error.clause)
    for name in container.tensors:
        values.append(container.dequantize(name).reshape(-1))
    return Verdict(opened, verified, values)


def same_values(a: np.ndarray, b: np.ndarray) -> bool:  # type: ignore[type-arg]  # float32 both
    """Equal bits, any NaN being equal to any other: scales of a file that does not verify may be NaN."""
    nan = np.isnan(a)
    return a.shape == b.shape and bool((nan == np.isnan(b)).all()) and a[~nan].tobytes() == b[~nan].tobytes()


def test_mutated_files(driver: Path) -> None:
    """Files made wrong under right digests: both readers accept, or both refuse by the same clause."""
    rng = random.Random(SEED)
    sound = [vectors.raw(e) for e in vectors.SOUND] + [small_file()[0]]
    faulty = [vectors.raw(e) for e in vectors.FAULTY if e["nbytes"] < 1 << 16]
    files = [mutate(rng.choice(sound if rng.random() < 0.9 else faulty), rng) for _ in range(N_MUTATED)]
    n_sound = 0
    for raw, theirs in zip(files, verdicts(driver, files), strict=True):
        ours = python_verdict(raw)
        assert (ours.opened, ours.verified) == (theirs.opened, theirs.verified), raw
        assert len(ours.tensors) == len(theirs.tensors)
        assert all(map(same_values, ours.tensors, theirs.tensors))
        n_sound += not theirs.opened
    assert n_sound > N_MUTATED // 10  # else the mutations would say little


def test_random_truncations(driver: Path) -> None:
    raw = small_file()[0]
    lengths = [*range(0, 300), *range(4000, len(raw))]
    assert all(v.opened for v in verdicts(driver, [raw[:n] for n in lengths]))


@pytest.mark.parametrize("standard", ["c99", "c11", "c17", "gnu99", "c++11", "c++17", "c++20"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_standard_of_c_or_cpp_warns(compiler: str, standard: str, tmp_path: Path) -> None:
    source = tmp_path / "reader.c"
    source.write_text('#define W4_IMPLEMENTATION\n#include "w4_reader.h"\n')
    language = ["-x", "c++" if "++" in standard else "c", f"-std={standard}"]
    flags = [*WARNINGS[1:], "-Wsign-conversion", "-Wcast-qual", "-Wdouble-promotion", "-Wno-unused-function"]
    command = [compiler, *language, *flags, "-fsyntax-only", "-I", str(ROOT / "formats/c"), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_example_program(compiler: str, tmp_path: Path) -> None:
    program = compile_c(ROOT / "docs/examples/print_tensor.c", tmp_path / "print_tensor", compiler=compiler)
    path = tmp_path / "example.w4"
    path.write_bytes((vectors.FOLDER / "valid/worked-example.w4").read_bytes())

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True)

    assert run(str(path)).stdout == "w\tint4\t[2, 10]\nb\tf32\t[3]\n"
    assert run(str(path), "w").stdout == "0 1 2 3 4 5 6 7 7 -8\n-0.75 0.25 0.5 0 0 0 0 0.875 -1 0.125\n"
    assert run(str(path), "b").stdout == "1 -2 0.5\n"
    assert run(str(path), "x").returncode == 2
    path.write_bytes(path.read_bytes()[:-1])
    assert (run(str(path)).returncode, run(str(path)).stderr) == (3, f"{path}: breaks w4-container 2.5\n")
