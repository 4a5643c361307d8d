"""What --json writes is what docs/json.md says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Runner
from jsonschema import Draft202012Validator

from w4conv.cli._schemas import page, schema
from w4conv.cli.main import COMMANDS


def test_the_page_is_up_to_date() -> None:
    path = Path(__file__).parents[2] / "docs" / "json.md"
    assert path.read_text() == page(), "run: python -m w4conv.cli._schemas > docs/json.md"


def test_every_command_is_described() -> None:
    from w4conv.cli.main import app

    assert {command.callback.__name__ for command in app.registered_commands if command.callback} == set(COMMANDS)


@pytest.mark.parametrize(
    "args",
    [
        ("quantize", "--effort", "0", "--scheme", "w4a16", "{checkpoint}", "out.w4"),
        ("quantize", "--effort", "0", "--scheme", "w4a16", "{checkpoint}", "out.w4", "--dry-run"),
        ("calibrate", "{checkpoint}", "{text}", "-o", "out.safetensors", "--tokens", "128", "--ctx", "16"),
        ("inspect", "{container}"),
        ("inspect", "{checkpoint}"),
        ("verify", "{container}"),
        ("verify", "{container}", "--against", "{checkpoint}"),
        ("diff", "{container}", "{container}"),
        ("cat", "{container}", "model.norm.weight", "-o", "norm.npy"),
        ("export", "{container}", "out.gguf", "--to", "gguf"),
        ("run", "{container}", "-p", "a", "-n", "2"),
        ("bench", "{container}", "-n", "2", "--prompt", "2", "--rounds", "1"),
    ],
    ids=" ".join,
)
def test_output_follows_its_schema(
    w4: Runner, container: Path, checkpoint: Path, tmp_path: Path, args: tuple[str, ...]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the thing and her other hand " * 40)
    words = [arg.format(container=container, checkpoint=checkpoint, text=text) for arg in args]
    written = json.loads(w4(*words, "--json").done().out)
    Draft202012Validator(schema(args[0])).validate(written)
