"""The installed command as a subprocess, a tiny checkpoint, and its container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import make_llama_dir

COMMAND = (sys.executable, "-m", "w4conv")
TIMEOUT = 120


@dataclass
class Result:
    code: int
    out: str
    err: str
    raw: bytes

    def failed(self, code: int, *parts: str) -> None:
        """Exit code, and exactly one message on stderr that holds `parts`."""
        assert self.code == code, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("w4conv: error: ")
        for part in parts:
            assert part in lines[0]

    def done(self) -> Result:
        assert self.code == 0, (self.code, self.out, self.err)
        return self


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A clean one: nothing that the user of the tests has set changes what is tested."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("W4CONV_", "_W4CONV", "COLUMNS", "NO_COLOR"))}
    return keep | {"PYTHONWARNINGS": "error"} | dict(extra or {})


Runner = Callable[..., Result]


@pytest.fixture
def w4(tmp_path: Path) -> Runner:
    """w4("quantize", path, ..., stdin=b"", env={}, code=None): run the command in an empty directory.

    code: Python to run instead of the module; it ends by calling main().
    """

    def run(
        *args: object, stdin: bytes = b"", env: Mapping[str, str] | None = None, code: str | None = None, **popen: Any
    ) -> Result:
        command = COMMAND if code is None else (sys.executable, "-c", code)
        popen.setdefault("stdout", subprocess.PIPE)
        done = subprocess.run(
            [*command, *map(str, args)],
            input=stdin,
            stderr=subprocess.PIPE,
            env=environment(env),
            cwd=tmp_path,
            timeout=TIMEOUT,
            check=False,
            **popen,
        )
        raw = done.stdout or b""
        shown = done.stderr if raw.startswith(b"\x89W4C") else raw + done.stderr
        assert b"\x1b" not in shown, "no escape sequences where there is no terminal"
        return Result(done.returncode, raw.decode(errors="replace"), done.stderr.decode(), raw)

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_dir(tmp_path_factory.mktemp("in") / "tiny", tied=True)


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    out = tmp_path_factory.mktemp("out") / "tiny.w4"
    subprocess.run(
        [*COMMAND, "quantize", str(checkpoint), str(out)], check=True, capture_output=True, env=environment()
    )
    return out
