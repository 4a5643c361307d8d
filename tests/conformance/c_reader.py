"""Compiles the C reader and asks it what it makes of files."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).parent / "c" / "w4_driver.c"
WARNINGS = ["-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Wshadow", "-Werror"]
SANITIZERS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]


@dataclass(frozen=True)
class Verdict:
    """Result of the C reader: 100 * chapter + clause or 0; all values of each tensor."""

    opened: int
    verified: int
    tensors: list[npt.NDArray[np.float32]]


def compile_c(source: Path, out: Path, *, compiler: str, sanitize: bool = False) -> Path:
    """`source` as the program `out`; raises CalledProcessError on any warning."""
    flags = SANITIZERS if sanitize else ["-O2"]
    command = [compiler, *WARNINGS, *flags, "-I", str(ROOT / "formats" / "c"), "-o", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return out


def verdicts(driver: Path, files: Sequence[bytes]) -> list[Verdict]:
    """The driver's words on each file."""
    given = b"".join(struct.pack("<Q", len(raw)) + raw for raw in files)
    run = subprocess.run([driver], input=given, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()[-4000:]
    found = list(_parse(run.stdout))
    assert len(found) == len(files)
    return found


def _parse(out: bytes) -> Iterator[Verdict]:
    at = 0
    while at < len(out):
        opened, verified, n_tensors = struct.unpack_from("<iiI", out, at)
        at += 12
        tensors = []
        for _ in range(n_tensors):
            (n,) = struct.unpack_from("<Q", out, at)
            tensors.append(np.frombuffer(out, "<f4", n, at + 8))
            at += 8 + 4 * n
        yield Verdict(opened, verified, tensors)
