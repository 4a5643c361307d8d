"""The tables of bench: what a file is called stays one cell and plain text, in CSV, in Markdown and on a terminal."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import make_llama_dir
from markdown_it import MarkdownIt

from w4conv.cli._bench_table import as_csv, as_markdown, as_text
from w4conv.commands.bench import BenchReport, BenchText, RowPerplexity, bench
from w4conv.commands.quantize import quantize
from w4conv.container import open_container
from w4conv.measure.perplexity import estimate

NAMES = (
    "=1+1.w4", "+a.w4", "-a.w4", "@SUM(A1).w4", "=cmd|' /C calc'!A1.w4", "\uff1d1.w4", "a|b.w4", "a\\|b.w4", "a\\.w4",
    "`a`.w4", "*a* _b_ ~~c~~.w4", "<script>alert(1)</script>.w4", "[a](javascript:b).w4", "![a](b).w4", "&lt;.w4",
    'a"b,c;=d.w4', "$a$.w4", "a,b.w4", "folder/=a.w4", " a.w4", "| --- |.w4",
)  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    folder = tmp_path_factory.mktemp("bench")
    quantize(make_llama_dir(folder / "in"), folder / "m.w4", group_size=32, effort=0, scheme="w4a16")
    with open_container(folder / "m.w4") as container:
        return bench([("a", container), ("b", container)], n_prompt=4, n_tokens=1, rounds=1, context=16)


def named(report: BenchReport, name: str) -> BenchReport:
    """Two rows, the first of that name; perplexity measured on a text of that name too."""
    text = BenchText(name, "0" * 64, "llama.cpp", 16, 1, 8)
    measured = [replace(row, perplexity=RowPerplexity(estimate(np.ones(8)), None)) for row in report.rows]
    return replace(report, rows=(replace(measured[0], name=name), measured[1]), text=text)


@pytest.mark.parametrize("name", NAMES)
def test_csv(report: BenchReport, name: str) -> None:
    text = as_csv(named(report, name))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [len(row) for row in rows] == [len(next(csv.reader(io.StringIO(text))))] * 2
    found = rows[0]["model"]
    assert found[0] not in "=+-@\uff1d\uff0b\uff0d\uff20\t\r"
    assert Path(found) == Path(name), "the same path still"
    # a spreadsheet that has ; for the separator sees the name as one field too
    assert next(csv.reader(text.splitlines()[1:2], delimiter=";"))[0].startswith(found)


@pytest.mark.parametrize("name", NAMES)
def test_markdown(report: BenchReport, name: str) -> None:
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(as_markdown(named(report, name)))
    inlines = [token for token in tokens if token.type == "inline"]
    kinds = {child.type for token in inlines for child in token.children or ()}
    assert kinds == {"text"} or kinds == {"text", "text_special"}
    n = len([token for token in tokens if token.type == "th_open"])
    assert len(inlines) == 3 * n + 1, "head, two rows and the facts"
    shown = ["".join(child.content for child in token.children or ()) for token in inlines]
    assert shown[n] == Path(name).name.strip()
    assert name in shown[-1]


@pytest.mark.parametrize("name", ["a\nb.w4", "\x1b[2J.w4", "\t=a.w4", "\r+a.w4"])
def test_control_characters_become_escapes(report: BenchReport, name: str) -> None:
    shown = repr(name)[1:-1]
    changed = named(report, name)
    assert next(csv.DictReader(io.StringIO(as_csv(changed))))["model"] == shown
    assert f"| {shown.replace(chr(92), 2 * chr(92)).replace('[', chr(92) + '[')} |" in as_markdown(changed)
    assert any(line.startswith(shown) for line in as_text(changed).splitlines())
