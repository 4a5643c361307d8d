"""Fixtures: the command as a subprocess, a tiny checkpoint, and its container."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command import COMMAND, TIMEOUT, Result, Runner, default_signals, environment
from helpers import make_llama_dir


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
        popen.setdefault("preexec_fn", default_signals)
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
        is_binary = raw.startswith((b"\x89W4C", b"\x93NUMPY", b"GGUF")) or raw[4:9] == b"\0\0\0\0{"  # safetensors
        shown = done.stderr if is_binary else raw + done.stderr
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
        [*COMMAND, "quantize", "--effort", "0", "--scheme", "w4a16", str(checkpoint), str(out)],
        check=True,
        capture_output=True,
        env=environment(),
    )
    return out
