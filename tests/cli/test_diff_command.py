"""`w4conv diff`: what it prints and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

from command import Runner


def test_nothing_differs(w4: Runner, container: Path) -> None:
    found = w4("diff", container, container)
    assert found.code == 0
    assert "0 differ" in found.out
    assert found.err == ""


def test_something_differs(w4: Runner, container: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.w4"
    w4("quantize", "--effort", "0", checkpoint, other, "--scheme", "nf4", "--group-size", "32").done()
    found = w4("diff", container, other, "--source", checkpoint)
    assert (found.code, found.err) == (1, "")
    for words in ("nf4/g32", "a from source", "closer", "scheme", "SQNR dB"):
        assert words in found.out
    lines = w4("diff", container, other, "--all").out.splitlines()
    report = json.loads(w4("diff", container, other, "--json").out)
    assert sum(line.startswith("model.") for line in lines) == report["n_different"] > 0


def test_a_missing_file(w4: Runner, container: Path, tmp_path: Path) -> None:
    w4("diff", container, tmp_path / "none.w4").failed(3, "none.w4")
