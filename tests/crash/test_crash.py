"""Disks that are full or fail, and processes that are killed: a clear error, exit code 4, nothing half-written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import make_llama_dir
from kill_trials import run as run_kill_trials

COMPILER = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler for the shim that lets system calls fail")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_dir(tmp_path_factory.mktemp("source") / "model", hidden=128, layers=4)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shim") / "failing_calls.so"
    source = Path(__file__).parent / "c" / "failing_calls.c"
    subprocess.run([str(COMPILER), "-Wall", "-shared", "-fPIC", "-o", out, source, "-ldl"], check=True)
    return out


def quantize(model: Path, out: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, and that it leaves its source alone."""
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    command = [
        sys.executable,
        "-m",
        "w4conv",
        "quantize",
        "--effort",
        "0",
        "--scheme",
        "w4a16",
        str(model),
        str(out),
        *options,
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    return run


def assert_refused(run: subprocess.CompletedProcess[str], *words: str) -> None:
    assert run.returncode == 4, run.stderr
    assert "Traceback" not in run.stderr
    for word in words:
        assert word in run.stderr


def test_killed_at_random_moments() -> None:
    """A few trials; kill_trials.py by itself makes as many as one likes."""
    counts = run_kill_trials(6, seed=7, hidden=256, layers=4)
    assert counts["trials"] == 6


@needs_compiler
@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=["plain", "resume"])
def test_a_sync_that_fails(model: Path, shim: Path, tmp_path: Path, resume: tuple[str, ...]) -> None:
    """Even --resume keeps nothing then: after a failed sync the disk may differ from what a read gives."""
    out = tmp_path / "out.w4"
    failing = {"LD_PRELOAD": str(shim), "W4_FAIL_CALL": "fsync", "W4_FAIL_ERRNO": str(errno.EIO)}
    assert_refused(quantize(model, out, *resume, **failing), str(out), os.strerror(errno.EIO))
    assert list(tmp_path.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_write_that_fails(model: Path, shim: Path, tmp_path: Path, number: int) -> None:
    out = tmp_path / "out.w4"
    failing = {"LD_PRELOAD": str(shim), "W4_FAIL_CALL": "write", "W4_FAIL_ERRNO": str(number), "W4_FAIL_AFTER": "20"}
    assert_refused(quantize(model, out, **failing), str(out), os.strerror(number))
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_a_write_that_fails_is_resumed(model: Path, shim: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    failing = {"LD_PRELOAD": str(shim), "W4_FAIL_CALL": "write", "W4_FAIL_ERRNO": str(errno.EDQUOT), "W4_FAIL_AFTER": "40"}  # fmt: skip  # noqa: E501 - one call
    assert_refused(quantize(model, out, "--resume", **failing), os.strerror(errno.EDQUOT))
    assert [file.name for file in tmp_path.iterdir()] == ["out.w4.partial"]
    done = quantize(model, out, "--resume")
    assert done.returncode == 0
    assert "resumed:" in done.stdout
    quantize(model, tmp_path / "whole.w4")
    assert out.read_bytes() == (tmp_path / "whole.w4").read_bytes()


@needs_compiler
def test_a_directory_that_cannot_be_synced(model: Path, shim: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    failing = {"LD_PRELOAD": str(shim), "W4_FAIL_CALL": "fsyncdir", "W4_FAIL_ERRNO": str(errno.EIO)}
    assert_refused(quantize(model, out, **failing), "is complete, but", os.strerror(errno.EIO))
    assert [file.name for file in tmp_path.iterdir()] == ["out.w4"]
    failing["W4_FAIL_ERRNO"] = str(errno.EINVAL)  # a file system where directories cannot be synced at all
    assert quantize(model, out, "--overwrite", **failing).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder]).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_too_small_is_known_beforehand(model: Path, small_disk: Path) -> None:
    run = quantize(model, small_disk / "out.w4")
    assert_refused(run, "bytes are needed, but only")
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(model: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another program takes the space after the check."""
    code = """
import shutil, sys
from types import SimpleNamespace
shutil.disk_usage = lambda _: SimpleNamespace(free=10**12)
from w4conv.cli.main import main
main()
"""
    command = [
        sys.executable,
        "-c",
        code,
        "quantize",
        "--effort",
        "0",
        "--scheme",
        "w4a16",
        str(model),
        str(small_disk / "out.w4"),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert_refused(run, os.strerror(errno.ENOSPC))
    assert list(small_disk.iterdir()) == []


def test_a_read_only_disk(model: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    run = quantize(model, small_disk / "out.w4")
    assert_refused(run, "no permission to create files")


def test_a_target_that_becomes_a_directory_meanwhile(model: Path, tmp_path: Path) -> None:
    from w4conv.commands.quantize import quantize as convert
    from w4conv.errors import OutputError

    out = tmp_path / "out.w4"

    class MakeDirectory:
        def start(self, total_nbytes: int) -> None:
            out.mkdir(exist_ok=True)

        def advance(self, nbytes: int, name: str) -> None:
            pass

    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"out\.w4"):
            convert(model, out, overwrite=overwrite, progress=MakeDirectory())
        assert list(tmp_path.iterdir()) == [out]
        assert list(out.iterdir()) == []
        out.rmdir()


def test_a_directory_that_goes_meanwhile(model: Path, tmp_path: Path) -> None:
    from w4conv.commands.quantize import quantize as convert
    from w4conv.errors import OutputError

    folder = tmp_path / "folder"
    folder.mkdir()

    class Remove:
        def start(self, total_nbytes: int) -> None:
            pass

        def advance(self, nbytes: int, name: str) -> None:
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(OutputError, match=r"out\.w4"):
        convert(model, folder / "out.w4", progress=Remove())
    assert list(tmp_path.iterdir()) == []
