"""`w4conv bench`: figures that belong together, well-formed outputs, clear errors. No speed is tested."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from command import Runner

SHORT = ("-p", 20, "-n", 3, "-r", 2, "-t", 1)


def test_figures_of_one_row_belong_together(w4: Runner, container: Path) -> None:
    report = json.loads(w4("bench", container, *SHORT, "--json").done().out)
    assert report["schema"] == "w4conv.bench/1"
    assert (report["threads"], report["rounds"]) == (1, 2)
    (row,) = report["rows"]
    prefill, decode = row["prefill"], row["decode"]
    assert (prefill["n_tokens"], decode["n_tokens"]) == (20, 3)
    for rate in (prefill["seconds"], decode["read_gbs"], decode["read_share"], row["ceiling_gbs"]):
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]
    assert 0 < decode["weight_nbytes"] <= row["weight_nbytes"] < container.stat().st_size
    # two rounds: the fastest token is the highest rate of bytes
    fastest = decode["weight_nbytes"] / decode["ms_per_token"]["low"] / 1e6
    assert decode["read_gbs"]["high"] == pytest.approx(fastest)


def test_a_checkpoint_is_measured_in_each_scheme(w4: Runner, checkpoint: Path) -> None:
    out = w4("bench", checkpoint, *SHORT, "--schemes", "f16,w4a16", "--csv").done().out
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["model"] for row in rows] == [f"{checkpoint} f16", f"{checkpoint} w4a16"]
    assert int(rows[0]["weight_nbytes"]) > int(rows[1]["weight_nbytes"])


def test_activations_of_8_bits(w4: Runner, container: Path) -> None:
    report = json.loads(w4("bench", container, *SHORT, "--activations", "int8", "--json").done().out)
    assert report["activations"] == "int8"
    w4("bench", container, *SHORT, "--activations", "int4").failed(2, "int4", "int16", "int8")


def test_perplexity_is_what_verify_says(w4: Runner, container: Path, checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox, and the fox was quick and brown. " * 6)
    measured = ("--text", text, "--ctx", 16, "--chunks", 4, "--json")
    bench = json.loads(w4("bench", checkpoint, container, *SHORT, "--schemes", "f16,w8a16", *measured).done().out)
    verify = json.loads(w4("verify", container, "--against", checkpoint, "--ppl", *measured).done().out)["perplexity"]
    assert [row["perplexity"]["increase"] is None for row in bench["rows"]] == [True, False, False]
    for ours, theirs in (("value", "value"), ("increase", "ratio")):
        wanted = verify["container"][theirs] if ours == "value" else verify["increase"][theirs]
        assert bench["rows"][2]["perplexity"][ours][theirs] == pytest.approx(
            wanted, rel=1e-3
        )  # F16 is not quite lossless
    assert (bench["text"]["n_windows"], bench["text"]["n_scored"]) == (verify["n_windows"], verify["n_scored"])


def test_the_report_is_written_beside_the_figures(w4: Runner, container: Path, tmp_path: Path) -> None:
    args = ("bench", container, *SHORT, "--html", "r.html")
    assert "tokens/s" in w4(*args).done().out
    page = (tmp_path / "r.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "tiny.w4" in page
    w4(*args).failed(4, "r.html exists already", "--overwrite")
    w4(*args, "--overwrite").done()
    assert w4("bench", container, *SHORT, "--html", "-").done().out.startswith("<!doctype html>")


def test_a_shape_needs_no_weights(w4: Runner) -> None:
    out = w4("bench", "--shape", "smollm2-135m", "--schemes", "w4a16", "-p", 4, "-n", 1, "-r", 1, "--md").done().out
    head, _, row = out.splitlines()[:3]
    assert head.count("|") == row.count("|")
    assert "smollm2-135m w4a16 | 83.8 MB" in row


def test_what_cannot_be_measured_is_refused(w4: Runner, container: Path) -> None:
    w4("bench").failed(2, "nothing to measure")
    w4("bench", "--shape", "gpt-9").failed(2, "gpt-9", "llama-3-8b")
    w4("bench", container, "-p", 10**6).failed(2, "do not fit")
    w4("bench", container, "--json", "--csv").failed(2, "exclude")
    w4("bench", container, "--json", "--html", "-").failed(2, "exclude")
    w4("bench", "--shape", "llama-3-8b", "--text", "t.txt").failed(2, "random")
    w4("bench", container, "--chunks", 3).failed(2, "--text")
    w4("bench", container, "-p", 2, "-n", 1, "--text", container, "--ctx", 10**6).failed(2, "positions")
    w4("bench", container, "-t", 1024).failed(2, "take turns", "CPUs by affinity")
    w4("bench", "absent.w4").failed(3, "absent.w4")


def test_weights_beyond_the_memory_are_refused_before_they_are_written(w4: Runner) -> None:
    code = (
        "import sys, w4conv.commands.bench as bench; from w4conv.cli.main import main;"
        "bench.available_memory = lambda: 10**9; sys.argv = ['w4conv', 'bench', '--shape', 'llama-3-8b']; main()"
    )
    w4(code=code).failed(2, "28.9 GB", "1.0 GB of memory", "measure the disk")
