"""Names and texts from outside never give orders to a terminal, and JSON stays exact and strict."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import Runner
from helpers import make_llama_dir
from test_main_command import in_terminal

import w4conv
from w4conv.cli import _output
from w4conv.commands.export import export
from w4conv.errors import InputError
from w4conv.files.strict_json import made_strict, to_json

# Characters that must not reach a terminal, and how they are shown.
ORDERS = {
    "\x1b[31m": r"\x1b[31m", "\x9b2J": r"\x9b2J", "\u202e": r"\u202e", "\u2066": r"\u2066", "\u200f": r"\u200f",
    "\u200b": r"\u200b", "\n": r"\n", "\r": r"\r", "\x07": r"\x07", "\x7f": r"\x7f", "\ufeff": r"\ufeff",
    "\u2028": r"\u2028", os.fsdecode(b"\x9b"): r"\x9b",
    os.fsdecode(b"\xff"): r"\xff", "\U000e0041": r"\U000e0041",
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=ascii)
def test_names_of_files(w4: Runner, container: Path, tmp_path: Path, order: str) -> None:
    name = f"a{order}b.w4"
    shown = f"a{ORDERS[order]}b.w4"
    w4("inspect", name).failed(3, shown)
    shutil.copy(container, tmp_path / name)
    found = w4("verify", name).done()
    assert shown in found.out
    assert order not in (found.out + found.err).replace("\n", "", 99 if order != "\n" else 0) or order == "\n"
    exact = w4("inspect", name, "--json").done().out
    assert json.loads(exact)["path"] == name
    assert all(line.isprintable() for line in exact.splitlines())


@pytest.mark.parametrize("order", ["\x1b]0;x\x07", "\x9b2J", "\u202e", "\n"], ids=ascii)
def test_names_of_tensors_and_texts_of_models(w4: Runner, container: Path, tmp_path: Path, order: str) -> None:
    w4("cat", container, f"no{order}pe").failed(2, "pe'")  # one line, whatever the name
    make_llama_dir(tmp_path / "in", config={"architectures": [f"Half{order}Model"]})
    for args in (("inspect", "in"), ("quantize", "--effort", "0", "--scheme", "w4a16", "in", "o.w4")):
        result = w4(*args)
        assert order not in (result.out + result.err if order != "\n" else "")
        assert "Half\nModel" not in result.out + result.err


def test_html_and_svg_hold_no_markup_of_others() -> None:
    from w4conv.cli._svg import stacked_bars

    picture = stacked_bars("t\x1b<script>", [("a\u202e&b", [1.0])], [("c0", "<p>")], unit="ms")
    assert "<script>" not in picture
    assert r"t\x1b&lt;script&gt;" in picture
    assert r"a\u202e&amp;b" in picture
    import xml.etree.ElementTree as ElementTree

    ElementTree.fromstring(picture)


def test_a_prompt_that_is_not_utf8(w4: Runner, container: Path, tmp_path: Path) -> None:
    for bad in (b"a\xffb", b"\x80", b"\xed\xa0\x80"):
        w4("run", container, "-p", os.fsdecode(bad)).failed(2, "-p is not UTF-8 text", "byte 0x")
    (tmp_path / "p.txt").write_bytes(b"a\xff")
    w4("run", container, "-f", "p.txt").failed(3, "not UTF-8 text")


def test_a_name_that_cannot_be_recorded(w4: Runner, container: Path, tmp_path: Path) -> None:
    export(container, tmp_path / "m.gguf", to="gguf")
    (tmp_path / "m.gguf").rename(tmp_path / os.fsdecode(b"m\xff.gguf"))
    w4("quantize", "--effort", "0", "--scheme", "w4a16", os.fsdecode(b"m\xff.gguf"), "o.w4").failed(
        3, r"m\xff.gguf", "not UTF-8", "Rename"
    )


def test_what_a_model_says_reaches_a_terminal_without_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "a\tb\n\x1b[2J\x9b\u202eא\u200d👍"
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert _output.streamed(text) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert _output.streamed(text) == "a\tb\n\\x1b[2J\\x9b\\u202eא\u200d👍"


def test_an_error_on_a_terminal(tmp_path: Path) -> None:
    code, seen = in_terminal(["inspect", tmp_path / "\x1b[31m\u202ered.w4"])
    assert code == 3
    assert "\x1b" not in seen
    assert r"\x1b[31m\u202ered.w4" in "".join(seen.split())


def strict(text: bytes) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("to", ["safetensors", "compressed-tensors", "gptq", "mlx"])
@pytest.mark.parametrize("word", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_exports_write_strict_json_that_transformers_reads(tmp_path: Path, word: str, to: str) -> None:
    transformers = pytest.importorskip("transformers")
    source = make_llama_dir(tmp_path / "in", hidden=128, inner=128)
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace("{", '{"time_step_limit": [0.0, ' + word + "], ", 1))
    w4conv.quantize(source, tmp_path / "m.w4", group_size=64, effort=0, scheme="w4a16")
    report = export(tmp_path / "m.w4", tmp_path / "out", to=to)
    for file in (tmp_path / "out").glob("*.json"):
        strict(file.read_bytes())
    read = transformers.PreTrainedConfig.from_pretrained(tmp_path / "out").time_step_limit[1]
    expected = float(json.loads(word))
    assert math.isnan(read) if math.isnan(expected) else read == expected
    assert any("infinity and NaN" in note for note in report.notes)


def test_sidecars_are_made_strict_and_others_stay_as_they_are() -> None:
    for data in (b'{"a": 1.50}', b'{"a": "Infinity", "b": "NaN"}', b"{", b'{"\\ud800": 1}'):
        assert made_strict(data, "x") == data
    assert strict(made_strict(b'{"a": NaN, "b": [-Infinity]}', "x")) == {
        "a": {"__float__": "NaN"}, "b": [{"__float__": "-Infinity"}],
    }  # fmt: skip
    assert to_json({"half": "\ud800"}, where="x") == b'{"half": "\\ud800"}'
    with pytest.raises(InputError, match="x: infinity and NaN"):
        to_json({"a": [math.inf]}, where="x")
