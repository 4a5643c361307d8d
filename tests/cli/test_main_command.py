"""The command as a whole: help, version, terminals, completion, what is loaded; and its reference page."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from command import COMMAND, TIMEOUT, Runner, environment
from helpers import make_llama_dir

import w4conv
from w4conv.cli._reference import reference

COMMANDS = ("quantize", "calibrate", "inspect", "verify", "run")


def in_terminal(args: list[object], columns: int = 60) -> tuple[int, str]:
    """Run in a terminal of `columns`: (exit code, what a user sees)."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, columns))
    process = subprocess.Popen(
        [*COMMAND, *map(str, args)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment({"TERM": "xterm"}),
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # EIO: the last process has closed the terminal
            break
        seen += block
    os.close(leader)
    return process.wait(TIMEOUT), seen.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_fits_a_narrow_window(w4: Runner, command: str) -> None:
    out = w4(command, "--help", env={"COLUMNS": "60"}).done().out
    assert f"w4conv {command}" in out.split("Examples:")[1]
    assert max(map(len, out.splitlines())) <= 60
    assert w4(command, "-h", env={"COLUMNS": "60"}).out == out


def test_root_help_documents_exit_codes(w4: Runner) -> None:
    out = w4("--help", env={"COLUMNS": "60"}).done().out
    for code in (0, 1, 2, 3, 4, 5, 130):
        assert re.search(rf"^ +{code}  \w", out, re.MULTILINE)
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 60
    bare = w4(env={"COLUMNS": "60"})
    assert (bare.code, bare.out, bare.err) == (2, "", out)


def test_version(w4: Runner) -> None:
    out = w4("--version").done().out
    assert out.startswith(f"w4conv {w4conv.__version__}\n")
    assert "ISA tiers: scalar" in out
    assert "build: " in out
    assert "in use: scalar" in w4("--version", env={"W4CONV_ISA": "scalar"}).done().out
    w4("--version", env={"W4CONV_ISA": "sse9"}).failed(2, "sse9")


def test_a_full_disk_under_standard_output(w4: Runner, container: Path) -> None:
    for args in (["--help"], ["--version"], ["inspect", container], ["verify", container, "--json"]):
        with Path("/dev/full").open("wb") as full:
            w4(*args, stdout=full).failed(4, "No space left")


def test_typing_errors(w4: Runner) -> None:
    w4("quantise").failed(2, "No such command 'quantise'", "'quantize'", "w4conv --help")
    w4("--verison").failed(2, "--verison", "--version")
    w4("inspect", "a", "b").failed(2, "b", "w4conv inspect --help")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("w4conv ver", {"verify"}),
        ("w4conv quantize in out --scheme w", {"w4a16", "w8a16"}),
        ("w4conv verify o --convention ", {"llama.cpp", "gptq"}),
        ("w4conv run o --ch", {"--chat", "--chat-template"}),
    ],
)
def test_shell_completion(w4: Runner, words: str, expected: set[str]) -> None:
    env = {"_W4CONV_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert set(w4(env=env).out.split()) == expected


def test_only_what_is_needed_is_loaded(w4: Runner) -> None:
    heavy = ("numpy", "tokenizers", "jinja2", "gguf", "tqdm", "w4conv._native", "rich")
    code = (
        "import sys, json\nfrom w4conv.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print('\\n' + json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    )
    assert json.loads(w4("--help", code=code).out.splitlines()[-1]) == []
    imports = "import sys, w4conv, w4conv.runtime.engine, w4conv.commands.quantize"
    package = f"{imports}; print({{'typer', 'tqdm'}} & set(sys.modules))"
    assert w4(code=package).done().out == "set()\n"


def test_numpy_starts_no_threads(container: Path) -> None:
    code = (
        "import os, sys; from w4conv.cli.main import main\n"
        f"sys.argv = ['w4conv', 'inspect', {str(container)!r}]\n"
        "try: main()\nexcept SystemExit: import numpy; print(len(os.listdir('/proc/self/task')), file=sys.stderr)"
    )
    env = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.stderr == "1\n"


def test_the_api_functions_stay_functions(w4: Runner, container: Path) -> None:
    code = "import sys, w4conv\nfor _ in range(2): print(w4conv.verify(sys.argv[1]).ok, callable(w4conv.quantize))"
    assert w4(container, code=code).done().out == "True True\nTrue True\n"


def test_errors_are_wrapped_for_a_terminal(tmp_path: Path) -> None:
    name = "a-rather-long-name-of-a-file-that-is-not-there.w4"
    code, seen = in_terminal(["inspect", tmp_path / "x" / name])
    assert code == 3
    assert "\x1b" not in seen
    lines = seen.splitlines()
    assert lines[0].startswith("w4conv: error:")
    assert any(line.strip().endswith(f"{name}:") for line in lines), "names are not broken, so that they can be copied"


def test_a_terminal_shows_progress_and_a_clean_report(tmp_path: Path, checkpoint: Path) -> None:
    code, seen = in_terminal(["quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, tmp_path / "o.w4"])
    assert code == 0
    assert "100%|" in seen or "%|" in seen
    report = seen.rsplit("\r", 1)[-1]  # what is left on the screen after the bar is gone
    assert re.match(r"\s*wrote ", report)
    code, seen = in_terminal(["inspect", tmp_path / "o.w4"])
    assert code == 0
    shown = [line for line in seen.splitlines() if "digest" not in line and "/" not in line]
    assert max(map(len, shown)) <= 60
    code, seen = in_terminal(["quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "-"])
    assert code == 4
    assert "standard output is a terminal" in " ".join(seen.split())
    code, seen = in_terminal(["inspect", "-"])
    assert code == 2
    assert "standard input is a terminal" in " ".join(seen.split())
    code, seen = in_terminal(["run", tmp_path / "o.w4"])
    assert code == 2
    assert "no prompt" in seen


def test_no_progress_on_a_terminal_where_stderr_is_a_file(tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in")
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(
            [*COMMAND, "quantize", "--effort", "0", "--scheme", "w4a16", source, tmp_path / "o.w4"],
            stderr=log,
            stdout=log,
            check=True,
        )
    assert "%|" not in (tmp_path / "log").read_text()


def test_text_is_utf8_in_any_locale(w4: Runner, tmp_path: Path) -> None:
    make_llama_dir(tmp_path / "größe")
    for locale in ("C", "POSIX", "C.UTF-8"):
        found = json.loads(w4("inspect", "größe", "--json", env={"LC_ALL": locale}).done().out)
        assert found["path"] == "größe"


def test_half_a_character_in_a_file_does_not_break_the_output(w4: Runner, tmp_path: Path) -> None:
    make_llama_dir(tmp_path / "in", config={"architectures": ["\ud800Half"]})
    assert "\\ud800Half" in w4("inspect", "in").done().out
    assert json.loads(w4("inspect", "in", "--json").done().out)["architecture"] == "\ud800Half"


def test_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert page.read_text() == reference(), "run: python -m w4conv.cli._reference > docs/cli.md"


def test_main_is_the_installed_script() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["w4conv"].split(":")
    code = f"from {module} import {function}; {function}()"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, env=environment(), check=True)
    assert done.stdout.startswith(b"w4conv ")
