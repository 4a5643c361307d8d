"""The output path: a file appears whole under its name or not at all; pipes and devices are written straight."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from w4conv.errors import OutputError

STDOUT = Path("-")
_STDOUTS = (STDOUT, Path("/dev/stdout"))  # opening the latter anew would truncate a file that the shell appends to
_BYTES_AT_ONCE = 1 << 24  # a write of this size may be interrupted; a larger one only later


class _RawStream(Protocol):
    def write(self, data: memoryview, /) -> int | None: ...


class Target:
    """A sink that turns every OSError into an OutputError naming the path; a closed pipe stays a BrokenPipeError."""

    def __init__(self, stream: _RawStream, path: Path) -> None:
        self._stream = stream
        self._path = path

    def write(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data).cast("B")
        with _output_errors(self._path):
            while view:
                view = view[self._stream.write(view[:_BYTES_AT_ONCE]) or 0 :]


def check_target(path: Path, nbytes: int, *, overwrite: bool) -> None:
    """Raise OutputError when `path` cannot take `nbytes`: it exists, its directory is missing or read-only, or full."""
    if path in _STDOUTS:
        return
    with _output_errors(path):
        if path.is_dir():
            raise OutputError(f"{path} is a directory. Name a file in it, such as {path / 'model.w4'}")
        if _is_stream(path):
            return
        if path.exists() and not overwrite:
            raise OutputError(f"{path} exists already. Choose another name, or give --overwrite to replace it")
        directory = path.resolve().parent
        if not directory.is_dir():
            raise OutputError(f"{path}: the directory {directory} does not exist. Create it first")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise OutputError(f"{path}: no permission to create files in {directory}")
        free = shutil.disk_usage(directory).free
        if free < nbytes:
            raise OutputError(
                f"{path}: {nbytes:,} bytes are needed, but only {free:,} are free in {directory}. "
                "Free some space or write elsewhere"
            )


@contextmanager
def open_target(path: Path, nbytes: int, *, overwrite: bool = False) -> Iterator[Target]:
    """A sink for `nbytes` bytes that become the file `path` when the block ends without an exception.

    A file is written under a temporary name beside it (`<name>.<random>.partial`), synced, and renamed; whatever is
    raised in between, KeyboardInterrupt too, removes it. A link is followed. `-` is standard output; it, FIFOs and
    devices are written straight. Raises OutputError.
    """
    check_target(path, nbytes, overwrite=overwrite)
    if path in _STDOUTS:
        if sys.stdout.isatty():
            raise OutputError("standard output is a terminal. Redirect it to a file or a pipe, or name a file")
        yield Target(sys.stdout.buffer, path)
        with _output_errors(path):
            sys.stdout.buffer.flush()
        return
    if _is_stream(path):
        with _output_errors(path):
            stream = path.open("wb", buffering=0)
        with stream:
            yield Target(stream, path)
        return
    final = path.resolve()
    partial = final.with_name(f"{final.name[:200]}.{secrets.token_hex(4)}.partial")
    try:
        with _output_errors(path):
            stream = partial.open("xb", buffering=0)
        with stream:
            yield Target(stream, path)
            with _output_errors(path):
                os.fsync(stream.fileno())
        with _output_errors(path):
            if final.exists() and not overwrite:  # it may have appeared meanwhile
                raise OutputError(f"{path} was created by someone else meanwhile; nothing was replaced")
            partial.replace(final)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    with _output_errors(path):
        _sync_directory(final.parent)


def _is_stream(path: Path) -> bool:
    """Whether writing goes to a pipe, a device or a socket, which have no name to be renamed to."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _output_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        shown = "standard output" if path in _STDOUTS else path
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write {shown}: {reason}. Check the path, its permissions and the space") from error
