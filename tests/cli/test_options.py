"""Every option of every command acts, or is a usage error that names it and says why."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import typer.main
from command import Runner
from helpers import make_llama_dir

import w4conv
from w4conv.cli.main import app
from w4conv.commands import options
from w4conv.commands.export import export
from w4conv.commands.options import COMMANDS, FLAGS, refuse_idle
from w4conv.errors import UsageError


def test_the_table_has_every_option_of_every_command() -> None:
    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]  # a group
    assert commands.keys() == COMMANDS.keys()
    for name, command in commands.items():
        found = {p.name: p.opts for p in command.params if p.param_type_name == "option"}
        assert found.keys() == COMMANDS[name].keys(), name
        for option, words in found.items():
            assert f"--{FLAGS.get(option, option.replace('_', '-'))}" in words


def test_every_need_can_fail() -> None:
    """A need whose check never refuses would be none."""
    tried = [
        {}, {"out": "-"}, {"dry_run": True, "out": "x"}, {"json": True}, {"scheme": "f16"}, {"temperature": 0.0},
        {"to": "gguf"}, {"to": "onnx"}, {"inputs": ["a.w4"]}, {"html": "-"}, {"rounds_again": False},
        {"has_integers": False}, {"has_floats": False}, {"is_container": False}, {"calibrates": False},
    ]  # fmt: skip
    for command, table in COMMANDS.items():
        for option, needs in table.items():
            for need in needs:
                assert not all(need.acts(values) for values in tried), (command, option)
                assert any(need.acts(values) for values in ALL_ACT), (command, option)


ALL_ACT: tuple[dict[str, object], ...] = (
    {
        "out": "absent.w4", "html": "absent.html", "calibration": "t", "against": "in", "ppl": True, "text": "t",
        "temperature": 1.0, "to": "safetensors", "shape": "llama-3-8b", "scheme": "w4a16", "chat": True,
    },
    {"json": True},
)  # fmt: skip

IDLE = [
    ("quantize {hf} o.w4 --effort 0 --calibration-tokens 64", "--calibration-tokens"),
    ("quantize {hf} o.w4 --scheme w8a16 --calibration-ctx 64", "--calibration-ctx"),
    ("quantize {hf} o.w4 --scheme f16 --group-size 64", "--group-size"),
    ("quantize {hf} o.w4 --scheme keep --group-size row", "--group-size"),
    ("quantize {hf} o.w4 --scheme bf16 --method rtn", "--method"),
    ("quantize {hf} o.w4 --requantize", "--requantize"),
    ("quantize {hf} o.w4 --requantize --scheme w4a16", "--requantize"),
    ("quantize {hf} - --overwrite", "--overwrite"),
    ("quantize {hf} /dev/null --overwrite", "--overwrite"),
    ("quantize {hf} o.w4 --resume --dry-run", "--resume"),
    ("quantize {hf} /dev/null --resume", "--resume"),
    ("quantize {hf} o.w4 --dry-run -t 1", "--threads"),
    ("calibrate {hf} text.txt -o - --overwrite", "--overwrite"),
    ("inspect {w4} --tensors --json", "--tensors"),
    ("verify {w4} --chunks 1", "--chunks"),
    ("verify {w4} --kv f16", "--kv"),
    ("verify {w4} --activations int16 --against {hf}", "--activations"),
    ("verify {w4} --max-ppl-increase 1 --against {hf}", "--max-ppl-increase"),
    ("verify {w4} --max-ppl-increase 1 --ppl", "--max-ppl-increase"),
    ("verify {w4} --min-sqnr 5", "--min-sqnr"),
    ("verify {w4} -t 1", "--threads"),
    ("verify {floats} --ppl --activations int8", "--activations"),
    ("verify {gguf} --against {w4} -t 1", "--threads"),
    ("diff {w4} {w4} --all --json", "--all"),
    ("run {w4} -p a --seed 7", "--seed"),
    ("run {w4} -p a --chat-template default", "--chat-template"),
    ("verify {w4} --special-tokens text", "--special-tokens"),
    ("run {w4} -p a --seed 0 --temperature 0", "--seed"),
    ("run {w4} -p a --top-k 5", "--top-k"),
    ("run {w4} -p a --top-p 1", "--top-p"),
    ("run {w4} -p a --min-p 0.1", "--min-p"),
    ("run {floats} -p a --activations int8", "--activations"),
    ("export {w4} o.gguf --to gguf --max-shard-size 1MB", "--max-shard-size"),
    ("export {w4} o --to onnx --max-shard-size 5GB", "--max-shard-size"),
    ("export {w4} - --to gguf --overwrite", "--overwrite"),
    ("export {w4} o.gguf --to gguf --dtype f16", "--dtype"),
    ("bench {w4} --schemes nf4", "--schemes"),
    ("bench {w4} --chunks 1", "--chunks"),
    ("bench {w4} --ctx 16", "--ctx"),
    ("bench {w4} --special-tokens text", "--special-tokens"),
    ("quantize {hf} o.w4 --special-tokens text", "--special-tokens"),
    ("bench {w4} --overwrite", "--overwrite"),
    ("bench {w4} --html - --overwrite", "--overwrite"),
    ("bench {floats} --activations int8 -n 1 -p 1 -r 1", "--activations"),
    ("cat {w4} model.norm.weight --overwrite", "--overwrite"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("options")
    hf = make_llama_dir(folder / "hf", tied=True)
    w4conv.quantize(hf, folder / "m.w4", effort=0, scheme="w4a16")
    w4conv.quantize(hf, folder / "f.w4", scheme="f16", effort=0)
    export(folder / "m.w4", folder / "m.gguf", to="gguf")
    return {"hf": hf, "w4": folder / "m.w4", "floats": folder / "f.w4", "gguf": folder / "m.gguf"}


@pytest.mark.parametrize(("line", "option"), IDLE, ids=[line for line, _ in IDLE])
def test_idle_options_are_refused(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the thing and her other hand " * 40)
    command = typer.main.get_command(app)
    with (
        pytest.raises(UsageError, match=rf"^{option} has no effect "),
        command.make_context("w4conv", line.format(**places).split()) as context,
    ):
        command.invoke(context)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"], "refused before anything is written"


@pytest.mark.parametrize(("words", "name"), [
    (["quantize", "", "o.w4"], "IN"), (["quantize", "{hf}", ""], "OUT"), (["inspect", ""], "PATH"),
    (["quantize", "{hf}", "o.w4", "--calibration", ""], "--calibration"),
    (["verify", "{w4}", "--against="], "--against"),
    (["diff", "{w4}", ""], "B"), (["bench", "{w4}", ""], "FILE"), (["bench", "{w4}", "--html", ""], "--html"),
    (["run", "{w4}", "-p", "a", "--special-tokens", ""], "--special-tokens"), (["run", "{w4}", "-f", ""], "--file"),
    (["cat", "{w4}", ""], "TENSOR"), (["export", "{w4}", "", "--to", "gguf"], "OUT"),
])  # fmt: skip
def test_empty_words_are_refused(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str
) -> None:
    """As a variable of a script gives them that was never set; Path("") would be the current directory."""
    monkeypatch.chdir(tmp_path)
    command = typer.main.get_command(app)
    with (
        pytest.raises(UsageError, match=rf"{name}\S* is empty\. Give it a value"),
        command.make_context("w4conv", [word.format(**places) for word in words]) as context,
    ):
        command.invoke(context)
    assert not list(tmp_path.iterdir())


def test_options_that_act_are_taken(w4: Runner, places: dict[str, Path]) -> None:
    for line in (
        "quantize {hf} a.w4 --scheme f16 --embeddings int8 --group-size 64 -t 1 --overwrite",
        "quantize {hf} b.w4 --target-bpw 5 --dry-run -t 1",
        "export {floats} c --to safetensors --dtype bf16 --max-shard-size 20k",
        "export {floats} d.gguf --to gguf --dry-run --overwrite",
        "run {w4} -p a -n 2 --temperature 0.5 --seed 0 --top-k 0",
        "cat {w4} model.norm.weight -o n.npy --overwrite --json",
    ):
        w4(*line.format(**places).split()).done()


def test_the_api_has_the_same_rule(places: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "o.w4"
    for call in (
        lambda: w4conv.quantize(places["hf"], out, calibration_tokens=64, effort=0, scheme="w4a16"),
        lambda: w4conv.quantize(places["hf"], out, requantize=True, effort=0, scheme="w4a16"),
        lambda: w4conv.quantize(places["hf"], out, scheme="keep", group_size=64, effort=0),
        lambda: w4conv.verify(places["w4"], min_sqnr=3.0),
        lambda: w4conv.verify(places["w4"], activations="int8"),
        lambda: export(places["w4"], tmp_path / "o.gguf", to="gguf", max_shard_size=5),
    ):
        with pytest.raises(UsageError, match="has no effect"):
            call()
    assert not list(tmp_path.iterdir())
    assert inspect.getdoc(options) is not None
    refuse_idle("run", {"temperature": 0.0}, ())
