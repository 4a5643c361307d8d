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
    w4("bench", "absent.w4").failed(3, "absent.w4")
