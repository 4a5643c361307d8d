"""docs/tutorial.md runs as written on the demo's model, and README.md shows what its five commands print."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/tutorial.md"
TIMEOUT = 600
Outputs = dict[str, str]


def one_line(command: str) -> str:
    return re.sub(r"\s*\\\n\s*", " ", command)


def steps(page: str) -> list[tuple[str, str]]:
    """The steps of the page, in order: (name, text) of a file, or ("", command) of a shell."""
    found = []
    pattern = r"^```toml\n(# (\S+\.toml)[\s\S]*?)^```$|^ {4}.*(?:\n {4}.*)*$"
    for block in re.finditer(pattern, page, re.MULTILINE):
        if block[2]:
            found.append((block[2], block[1]))
        else:
            lines = re.sub(r"^ {4}", "", block[0], flags=re.MULTILINE)
            found += [("", command) for command in one_line(lines).splitlines()]
    return found


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "docs/demo/demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = demo
    spec.loader.exec_module(demo)
    return demo


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load_demo()


@pytest.fixture(scope="module")
def outputs(demo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """Standard output of every command of the tour, each run once; its exit code is what the page says.

    The example in Python of README.md runs behind them, on the directory that they have made.
    """
    folder = tmp_path_factory.mktemp("tour")
    try:
        demo.prepare(folder)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"the demo's model cannot be fetched: {error}")
    programs = folder / "programs"  # `w4conv` and `python3` are those under test
    programs.mkdir()
    for name, run in (("w4conv", f'"{sys.executable}" -m w4conv'), ("python3", f'"{sys.executable}"')):
        (programs / name).write_text(f'#!/bin/sh\nexec {run} "$@"\n')
        (programs / name).chmod(0o755)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    found: Outputs = {}
    for name, text in steps(PAGE.read_text()):
        if name:
            (folder / name).write_text(text)
            continue
        done = subprocess.run(
            ["bash", "-c", text], cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT
        )
        said = re.search(r"# exit code (\d+)", text)
        assert done.returncode == (int(said[1]) if said else 0), f"{text}\n{done.stdout}\n{done.stderr}"
        found[text] = done.stdout
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=TIMEOUT)
    return found


def test_steps_are_the_indented_blocks() -> None:
    page = "Say:\n\n    one \\\n      --a\n    two\n\n```toml\n# m.toml: y\nz = 1\n```\n\n```sh\nno\n```\n\n    three\n"
    assert steps(page) == [("", "one --a"), ("", "two"), ("m.toml", "# m.toml: y\nz = 1\n"), ("", "three")]


@pytest.mark.services
def test_the_tour_runs_as_written(outputs: Outputs) -> None:
    said = {command.split(" #")[0].strip(): out for command, out in outputs.items()}
    assert any(out.strip() == "134515008" for out in said.values())  # the parameters, counted by a script
    (kept,) = (out for command, out in said.items() if command.startswith("w4conv verify kept.w4"))
    assert re.search(r"^all tensors +exact ", kept, re.MULTILINE)
    (failed,) = (command for command in outputs if "# exit code 1: +" in command)
    increase = re.search(r"^increase .*\(\+(\d+\.\d+)%", outputs[failed], re.MULTILINE)
    assert increase is not None
    assert failed.endswith(f"# exit code 1: +{float(increase[1]):.0f} %")
    (told,) = (out for command, out in said.items() if "What is the capital of France?" in command)
    assert told.strip().endswith(".")


@pytest.mark.services
def test_the_readme_shows_what_its_commands_print(demo: ModuleType, outputs: Outputs) -> None:
    """The five commands are among those of the tour, so that they run once."""
    written = (ROOT / "README.md").read_text().split(demo.BEGIN)[1].split(demo.END)[0]
    parts = written.strip().removeprefix("```text\n").removesuffix("\n```").split("\n\n")
    assert len(parts) == len(demo.STEPS) == 5
    for step, part in zip(demo.STEPS, parts, strict=True):
        expected = demo.excerpt(step, outputs[one_line(step.command)])
        assert part == expected, f"run: python docs/demo/demo.py --readme\n{expected}"
