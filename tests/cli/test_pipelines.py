"""Containers through pipes, FIFOs and /dev/stdin: the same answers as from a file, and no waiting or crashing."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from command import COMMAND, TIMEOUT, Runner, environment
from w4files import rebuild, small_file


def report(w4: Runner, *args: object, **options: object) -> dict[str, object]:
    found: dict[str, object] = json.loads(w4(*args, "--json", **options).done().out)
    del found["path"]
    return found


def test_a_conversion_through_a_pipe_is_verified(checkpoint: Path, tmp_path: Path) -> None:
    """quantize IN - | tee file | verify -"""
    with subprocess.Popen(
        [*COMMAND, "quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "-"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as first:
        assert first.stdout
        raw = first.stdout.read()
    run = subprocess.run([*COMMAND, "verify", "-"], input=raw, capture_output=True, env=environment(), timeout=TIMEOUT)
    assert run.returncode == 0
    assert b"standard input, " in run.stdout
    subprocess.run(
        [*COMMAND, "quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, tmp_path / "out.w4"],
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "out.w4").read_bytes() == raw


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_data_on_standard_output_stands_alone(w4: Runner, checkpoint: Path, container: Path, name: str) -> None:
    """The report goes to standard error, by whatever name the output is called."""
    run = w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, name, "--json").done()
    assert run.raw == container.read_bytes()
    assert json.loads(run.err)["schema"] == "w4conv.quantize/1"
    run = w4("export", container, name, "--to", "gguf").done()
    assert run.raw.startswith(b"GGUF")
    assert run.err.split()[:4] == ["wrote", "standard", "output", "(gguf),"]
    assert b"standard output" not in run.raw
    assert w4("cat", container, "model.norm.weight", "-o", name, "--json").done().raw.startswith(b"\x93NUMPY")


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input(w4: Runner, container: Path, command: str, name: str) -> None:
    expected = report(w4, command, container)
    found = report(w4, command, name, stdin=container.read_bytes())
    if command == "inspect":  # its digest stands at the end of the file, which is not read
        expected["digest"] = None
    assert found == expected


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_fifo(w4: Runner, container: Path, tmp_path: Path, command: str) -> None:
    fifo = tmp_path / "fifo.w4"
    os.mkfifo(fifo)

    def feed() -> None:
        with suppress(BrokenPipeError):  # inspect has read enough
            fifo.write_bytes(container.read_bytes())

    thread = threading.Thread(target=feed)
    thread.start()
    found = report(w4, command, fifo)
    thread.join()
    assert found["nbytes"] == container.stat().st_size


def test_a_stream_that_is_cut_or_goes_on(w4: Runner, container: Path, tmp_path: Path) -> None:
    raw = container.read_bytes()
    env = {"TMPDIR": str(tmp_path)}
    for wrong in (raw[:-1], raw[:5000], raw + b"\0"):
        w4("verify", "-", stdin=wrong, env=env).failed(3, "standard input: has", "[w4-container 2.5]")
    w4("verify", "-", stdin=b"").failed(3, "standard input: the file is empty")
    w4("verify", "-", stdin=b"GGUF" * 50).failed(3, "not a .w4 file")
    assert list(tmp_path.glob("w4conv-*")) == []


def test_a_stream_that_is_larger_than_the_temporary_directory(w4: Runner) -> None:
    """A header may claim anything: it is refused before a byte is copied."""
    raw = small_file()[0]
    n = (1 << 53) - 64
    huge = rebuild(raw, header={"data_nbytes": n, "file_nbytes": n + len(raw) - int.from_bytes(raw[40:48], "little")})
    w4("verify", "-", stdin=huge).failed(4, "have to be kept in", "TMPDIR")


def test_links_and_devices(w4: Runner, container: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link.w4").symlink_to(container)
    w4("verify", tmp_path / "link.w4").done()
    (tmp_path / "loop.w4").symlink_to("loop.w4")
    w4("verify", tmp_path / "loop.w4").failed(3, "loop.w4")
    w4("verify", "/dev/null").failed(3, "the file is empty")
    w4("inspect", "/dev/zero").failed(3, "not a .w4 file")
    os.mkfifo(tmp_path / "fifo")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", tmp_path / "fifo", tmp_path / "out.w4").failed(3, "fifo")
    (tmp_path / "in").mkdir()
    for file in checkpoint.iterdir():
        (tmp_path / "in" / file.name).symlink_to(file)
    (tmp_path / "in" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "in" / "model.safetensors")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", tmp_path / "in", tmp_path / "out.w4").failed(
        3, "model.safetensors", "not a regular file"
    )


def test_a_sparse_file_of_a_petabyte_claims_nothing(w4: Runner, container: Path, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse.w4"
    sparse.write_bytes(container.read_bytes())
    os.truncate(sparse, 1 << 43)
    w4("verify", sparse).failed(3, "it was appended to")
    os.truncate(sparse, 0)
    os.truncate(sparse, 1 << 43)
    w4("verify", sparse).failed(3, "not a .w4 file")
