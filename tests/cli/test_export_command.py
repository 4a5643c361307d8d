"""`w4conv export`: report, pipes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

from command import Runner

from w4conv.cli._output import nbytes
from w4conv.cli.export import DTYPES, FORMATS
from w4conv.exports import DTYPES as LIBRARY_DTYPES
from w4conv.exports import FORMATS as LIBRARY_FORMATS


def test_words_are_those_of_the_library() -> None:
    assert LIBRARY_FORMATS == FORMATS
    assert LIBRARY_DTYPES == DTYPES


def test_report_as_text(w4: Runner, container: Path, tmp_path: Path) -> None:
    out = w4("export", container, "out.gguf", "--to", "gguf").done()
    assert out.err == ""
    for part in ("out.gguf (gguf)", nbytes((tmp_path / "out.gguf").stat().st_size), "Q4_0", "Q8_0", "yes: every value"):
        assert part in out.out
    rounded = w4("export", container, "out", "--to", "safetensors", "--dtype", "f16").done().out
    assert "no: see below" in rounded
    assert "would write" in w4("export", container, "o2", "--to", "safetensors", "--dry-run").done().out
    assert not (tmp_path / "o2").exists()


def test_report_as_json(w4: Runner, container: Path, tmp_path: Path) -> None:
    report = json.loads(w4("export", container, "out", "--to", "safetensors", "--json").done().out)
    assert report["schema"] == "w4conv.export/1"
    assert report["exact"] is True
    assert report["output_nbytes"] == sum(f.stat().st_size for f in (tmp_path / "out").iterdir())
    planned = json.loads(
        w4("export", container, "o2", "--to", "safetensors", "--dtype", "f16", "--dry-run", "--json").done().out
    )
    assert planned["exact"] is None


def test_same_bytes_by_pipe_and_file(w4: Runner, container: Path, tmp_path: Path) -> None:
    w4("export", container, "out.gguf", "--to", "gguf").done()
    piped = w4("export", container, "-", "--to", "gguf")
    assert piped.code == 0
    assert piped.raw == (tmp_path / "out.gguf").read_bytes()
    assert "standard output" in piped.err


def test_errors(w4: Runner, container: Path, checkpoint: Path, tmp_path: Path) -> None:
    w4("export", container, "o").failed(2, "Missing option '--to'")
    w4("export", container, "o", "--to", "exl2").failed(2, "unknown format 'exl2'", "gguf")
    w4("export", container, "-", "--to", "safetensors").failed(2, "standard output")
    w4("export", checkpoint, "o", "--to", "gguf").failed(3, "a directory")
    w4("export", "absent.w4", "o", "--to", "gguf").failed(3, "absent.w4")
    (tmp_path / "old.gguf").write_bytes(b"precious")
    w4("export", container, "old.gguf", "--to", "gguf").failed(4, "exists already", "--overwrite")
    assert (tmp_path / "old.gguf").read_bytes() == b"precious"
    assert [p.name for p in tmp_path.iterdir()] == ["old.gguf"]
