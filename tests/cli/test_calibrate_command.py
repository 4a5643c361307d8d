"""`w4conv calibrate`: statistics to a file or to standard output, for quantize to use and verify to name."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Runner


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the thing and her other hand " * 40)
    return path


SMALL = ("--tokens", "128", "--ctx", "16")


def test_from_text_to_container(w4: Runner, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    said = w4("calibrate", checkpoint, text, "-o", "s.safetensors", *SMALL).done()
    digest = next(line.split()[1] for line in said.out.splitlines() if line.startswith("digest"))
    assert "128 tokens in sequences of 16" in said.out
    piped = w4("calibrate", checkpoint, text, "-o", "-", *SMALL).done()
    assert piped.raw == (tmp_path / "s.safetensors").read_bytes()
    assert digest in piped.err
    said = w4("quantize", checkpoint, "o.w4", "--scheme", "w4a16", "--calibration", "s.safetensors").done()
    assert "awq: channels scaled" in said.out
    said = w4("verify", "o.w4", "--against", checkpoint).done()
    assert f"awq needs its statistics, blake3 {digest[:16]}.." in said.out


def test_errors(w4: Runner, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    w4("calibrate", checkpoint, text, *SMALL).failed(2, "--out")
    w4("calibrate", checkpoint, "absent.txt", "-o", "s", *SMALL).failed(3, "absent.txt")
    w4("calibrate", "absent", text, "-o", "s").failed(3, "absent")
    w4("calibrate", checkpoint, text, "-o", "s", "--tokens", "10000", "--ctx", "16").failed(2, "text.txt")
    (tmp_path / "s").write_text("mine")
    w4("calibrate", checkpoint, text, "-o", "s", *SMALL).failed(4, "exists already")
    assert (tmp_path / "s").read_text() == "mine"
