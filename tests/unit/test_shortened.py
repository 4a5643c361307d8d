"""Files that are shortened while they are in use: an explained end, never a bare SIGBUS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from w4files import random_parts, small_file, small_plan, write

from w4conv import scheme
from w4conv.container import open_container
from w4conv.errors import InputError

# Touches pages that were there when the view was made: what no look at the size beforehand can prevent.
CHILD = """
import os, sys
from w4conv import kernels
from w4conv.container import open_container
if sys.argv[2] == "guard":
    kernels.explain_sigbus()
view = open_container(sys.argv[1]).part("large", "values")
os.truncate(sys.argv[1], 8192)
print(view.max())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "large.w4"
    path.write_bytes(small_file({"large": (scheme.F32, (100, 100))})[0])
    return path


def test_the_next_access_says_so(path: Path) -> None:
    n = path.stat().st_size
    with open_container(path) as container:
        os.truncate(path, n - 1)
        for use in (container.check, lambda: container.dequantize("large"), lambda: container.part("large", "values")):
            with pytest.raises(InputError, match=rf"was shortened from {n:,} to {n - 1:,} bytes while in use"):
                use()


def test_a_file_that_is_replaced_stays_as_it_was(path: Path, tmp_path: Path) -> None:
    """Which is what the next conversion to the same name does."""
    with open_container(path) as container:
        (tmp_path / "other").write_bytes(b"short")
        (tmp_path / "other").replace(path)
        container.check()
    path.write_bytes(small_file({"large": (scheme.F32, (100, 100))})[0])
    with open_container(path) as container:
        path.unlink()
        container.check()


@pytest.mark.parametrize("guard", ["guard", "none"])
def test_sigbus_after_truncation_ends_a_command_with_a_message(path: Path, guard: str) -> None:
    run = subprocess.run([sys.executable, "-c", CHILD, str(path), guard], capture_output=True, text=True)
    if guard == "none":  # what would be: else the other case would prove nothing
        assert run.returncode == -signal.SIGBUS
        return
    assert run.returncode == 3
    assert run.stderr.startswith("w4conv: error: a file was shortened while it was in use")
    assert run.stdout == ""


def test_the_commands_are_guarded(path: Path) -> None:
    """The command itself, with a file of one part that goes while it is read."""
    parts = {"large": random_parts(scheme.F32, (100, 100))}
    path.write_bytes(write(small_plan({"large": (scheme.F32, (100, 100))}, blobs={}), parts))
    code = f"""
import os
from w4conv.container import integrity
def shorten_and_go_on(container, part, tensor, check=integrity._check_part):
    view = container.bytes_of(part)
    os.truncate({str(path)!r}, 8192)
    view.max()
integrity._check_part = shorten_and_go_on
from w4conv.cli.main import main
main()
"""
    run = subprocess.run([sys.executable, "-c", code, "verify", str(path)], capture_output=True, text=True)
    assert run.returncode == 3, run.stderr
    assert "a file was shortened while it was in use" in run.stderr
