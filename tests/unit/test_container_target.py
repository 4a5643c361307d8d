"""Output paths: a file appears whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from w4conv.errors import OutputError
from w4conv.files.streams import STDOUT
from w4conv.files.target import check_target, open_target


def put(
    path: Path, data: bytes = b"new", *, overwrite: bool = False, then: Callable[[], object] = lambda: None
) -> None:
    """Write `data`; `then` happens before the target is closed."""
    with open_target(path, len(data), overwrite=overwrite) as target:
        target.write(data)
        then()


def fail(exception: type[BaseException]) -> Callable[[], object]:
    def raise_it() -> None:
        raise exception("stop")

    return raise_it


def test_a_file_appears_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "out.w4"
    with open_target(path, 3) as target:
        target.write(b"n")
        assert not path.exists()
        assert [p.suffix for p in tmp_path.iterdir()] == [".partial"]
        target.write(memoryview(b"ew"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    put(tmp_path / "out.w4")
    assert (tmp_path / "out.w4").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, OutputError])
def test_whatever_is_raised_leaves_nothing(tmp_path: Path, exception: type[BaseException]) -> None:
    path = tmp_path / "out.w4"
    with pytest.raises(exception, match="stop"):
        put(path, then=fail(exception))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "out.w4"
    path.write_bytes(b"old")
    with pytest.raises(OutputError, match=r"exists already.*--overwrite"):
        put(path)
    assert path.read_bytes() == b"old"
    with pytest.raises(ValueError, match="stop"):
        put(path, overwrite=True, then=fail(ValueError))
    assert path.read_bytes() == b"old"
    put(path, overwrite=True)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.w4"
    with pytest.raises(OutputError, match="meanwhile"):
        put(path, then=lambda: path.write_bytes(b"other"))
    assert path.read_bytes() == b"other"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "out.w4"
    link.symlink_to("elsewhere/real.w4")
    put(link)
    assert link.is_symlink()
    assert (tmp_path / "elsewhere/real.w4").read_bytes() == b"new"


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"is a directory\. Name a file in it"):
        put(tmp_path)
    with pytest.raises(OutputError, match=r"does not exist\. Create it first"):
        put(tmp_path / "absent/out.w4")
    with pytest.raises(OutputError, match="Not a directory"):
        put(tmp_path / "file/out.w4")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="name too long"):
        put(tmp_path / ("a" * 300))
    long = tmp_path / ("a" * 255)
    put(long)
    assert long.read_bytes() == b"new"


def test_too_little_space_is_known_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"1,000,000,000,000,000,000 bytes are needed, but only [\d,]+ are free"):
        check_target(tmp_path / "out.w4", 10**18, overwrite=False)


@contextmanager
def nobody() -> Iterator[None]:
    """Root may write everywhere: for a while this process is somebody else."""
    root = os.geteuid() == 0
    if root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)


def test_a_directory_without_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        with nobody(), pytest.raises(OutputError, match="no permission"):
            put(Path(folder) / "out.w4")
        assert list(Path(folder).iterdir()) == []
        Path(folder).chmod(0o755)


def test_a_full_disk_is_an_output_error() -> None:
    with pytest.raises(OutputError, match=os.strerror(errno.ENOSPC)):
        put(Path("/dev/full"))
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_a_device_is_written_straight() -> None:
    put(Path("/dev/null"))
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_fifo_is_written_straight(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(fifo.read_bytes()))
    thread.start()
    put(fifo, b"x" * 200_000)  # more than a pipe holds
    thread.join()
    assert received == [b"x" * 200_000]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_closed_pipe_stays_a_broken_pipe(tmp_path: Path) -> None:
    """So that the command line can end quietly."""
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        put(Path(f"/dev/fd/{writing}"), b"x" * 200_000)
    os.close(writing)


@pytest.mark.parametrize("path", [STDOUT, Path("/dev/stdout"), Path("/dev/fd/1"), Path("/proc/self/fd/1")], ids=str)
def test_standard_output(path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    put(path)
    assert capfdbinary.readouterr().out == b"new"


def test_a_terminal_gets_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(OutputError, match="is a terminal"):
        put(STDOUT)
