"""The output path: a file appears whole under its name or not at all; pipes and devices are written straight.

A file grows under the name `<name>.partial` beside its target, locked by the process that writes it. A leftover of
a killed process carries no lock. The next conversion to that target removes it, or continues it with --resume.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

from w4conv import arguments
from w4conv.errors import OutputError
from w4conv.files.streams import is_stdout

_BYTES_AT_ONCE = 1 << 24  # a write of this size may be interrupted; a larger one only later
_WRITEBACK_NBYTES = 1 << 26  # handed to the disk together, while what follows is made
_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h: begin to write, wait for nothing
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # file systems that have none


class _RawStream(Protocol):
    def write(self, data: memoryview, /) -> int | None: ...


class Target:
    """A sink that turns every OSError into an OutputError naming the path; a closed pipe stays a BrokenPipeError.

    file: what is written, None for pipes and devices; only a file can `seek`, `read_at` and `write_at`.
    n_kept: bytes that an interrupted process left and that are still there. removed: its leftover was deleted.
    """

    def __init__(self, stream: _RawStream, path: Path, *, file: FileIO | None = None, removed: bool = False) -> None:
        self._stream = stream
        self._path = path
        self.file = file
        self.removed = removed
        self._n_held = 0  # bytes written since the disk was last told to take them
        self.n_kept = os.fstat(file.fileno()).st_size if file else 0

    def write(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data).cast("B")
        with output_errors(self._path):
            while view:
                n = self._stream.write(view[:_BYTES_AT_ONCE]) or 0
                view = view[n:]
                self._n_held += n
        if self.file and self._n_held >= _WRITEBACK_NBYTES:
            self._n_held = 0
            _start_writeback(self.file)

    def seek(self, offset: int) -> None:
        assert self.file
        with output_errors(self._path):
            self.file.seek(offset)

    def read_at(self, offset: int, n: int) -> bytes:
        """`n` bytes, or fewer at the end of the file."""
        assert self.file
        blocks = []
        with output_errors(self._path):
            while n and (block := os.pread(self.file.fileno(), min(n, _BYTES_AT_ONCE), offset)):
                blocks.append(block)
                n, offset = n - len(block), offset + len(block)
        return b"".join(blocks)

    def write_at(self, offset: int, data: bytes) -> None:
        """A few bytes elsewhere; `write` goes on where it was."""
        assert self.file
        with output_errors(self._path):
            if os.pwrite(self.file.fileno(), data, offset) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_target(path: Path, nbytes: int, *, overwrite: bool) -> None:
    """Raise OutputError when `path` cannot take `nbytes`: it exists, its directory is missing or read-only, or full."""
    if is_stdout(path):
        return
    with output_errors(path):
        if path.is_dir():
            raise OutputError(f"{path} is a directory. Name a file in it, such as {path / 'model.w4'}")
        if _is_stream(path):
            return
        if path.exists() and not arguments.flag(overwrite, "overwrite"):
            raise OutputError(f"{path} exists already. Choose another name, or give --overwrite to replace it")
        directory = path.resolve().parent
        if not directory.is_dir():
            raise OutputError(f"{path}: the directory {directory} does not exist. Create it first")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise OutputError(f"{path}: no permission to create files in {directory}")
        free = shutil.disk_usage(directory).free + _taken(partial_of(path))
        if free < nbytes:
            raise OutputError(
                f"{path}: {nbytes:,} bytes are needed, but only {free:,} are free in {directory}. "
                "Free some space or write elsewhere"
            )


def partial_of(path: Path) -> Path:
    """The name under which the file `path` grows."""
    final = path.resolve()
    return final.with_name(f"{final.name[:200]}.partial")


@contextmanager
def open_target(
    path: Path, nbytes: int, *, overwrite: bool = False, resume: bool = False, signature: bytes | None = None
) -> Iterator[Target]:
    """A sink for `nbytes` bytes that become the file `path` when the block ends without an exception.

    A file is written under the name `partial_of(path)`, synced, cut to `nbytes`, and renamed; whatever is raised in
    between, KeyboardInterrupt too, removes it. A link is followed. `-` is standard output; it, FIFOs and devices are
    written straight. resume: take over what a killed process left, and leave what there is when something is raised.
    signature: the first bytes of the file, by which a leftover is recognised; with None, no file is taken for a
    leftover.

    Raises OutputError, also when another process is writing to `path`.
    """
    check_target(path, nbytes, overwrite=overwrite)
    if is_stdout(path):
        if sys.stdout.isatty():
            raise OutputError("standard output is a terminal. Redirect it to a file or a pipe, or name a file")
        yield Target(sys.stdout.buffer, path)
        with output_errors(path):
            sys.stdout.buffer.flush()
        return
    if _is_stream(path):
        with output_errors(path):
            stream = path.open("wb", buffering=0)
        with stream:
            yield Target(stream, path)
        return
    final, partial = path.resolve(), partial_of(path)
    with output_errors(path):
        file, removed = _claim(path, partial, signature, resume=resume)
    with file:  # closing it releases the lock, so that is last
        keep = resume
        try:
            yield Target(file, path, file=file, removed=removed)
            with output_errors(path):
                file.truncate(nbytes)
                keep = False  # after a failed sync nobody knows what the disk holds, whatever reading it back says
                os.fsync(file.fileno())
                if final.exists() and not overwrite:  # it may have appeared meanwhile
                    raise OutputError(f"{path} was created by someone else meanwhile; nothing was replaced")
                partial.replace(final)
        except BaseException:
            if not keep:
                with suppress(OSError):
                    partial.unlink()
            raise
    try:
        sync_directory(final.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"{path} is complete, but its directory could not be synced: {reason}. A power cut may lose the file"
        ) from error


def _claim(path: Path, partial: Path, signature: bytes | None, *, resume: bool) -> tuple[FileIO, bool]:
    """The file `partial`, open and locked, and whether a leftover was removed for it."""
    removed = False
    while True:
        try:
            descriptor, ours = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), True
        except FileExistsError:
            try:
                descriptor, ours = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), False
            except FileNotFoundError:  # gone meanwhile
                continue
        file = FileIO(descriptor, "r+")
        try:
            if lock_output(descriptor, path, partial, ours=ours):
                if not ours:
                    _check_leftover(file, partial, signature)
                if ours or resume:
                    return file, removed
                partial.unlink()
                removed = True
        except BaseException:
            file.close()
            raise
        file.close()


def lock_output(descriptor: int, path: Path, partial: Path, *, ours: bool) -> bool:
    """Lock what becomes `path`, a file or a directory that is open and named `partial`; False when it lost that name
    before. ours: this process made it. Raises OutputError when a living process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"{path} is being written by another process. Wait for it, or choose another name") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if not ours:
            raise OutputError(
                f"{partial} is left from another conversion, or belongs to one that runs: this file system has no "
                "locks to tell. Remove it when no conversion to it runs"
            ) from None
    try:
        named = partial.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _check_leftover(file: FileIO, partial: Path, signature: bytes | None) -> None:
    """Raise OutputError when a file of our name is not ours to remove."""
    status = os.fstat(file.fileno())
    is_ours = False
    if signature is not None and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        head = os.pread(file.fileno(), len(signature), 0)
        is_ours = signature.startswith(head) or not any(head)  # after a power cut its content may be zeros
    if not is_ours:
        raise OutputError(f"{partial} is in the way, and w4conv has not left it there. Move it elsewhere")


def _taken(partial: Path) -> int:
    """Bytes on disk of a leftover, which its removal or its completion sets free."""
    try:
        return partial.lstat().st_blocks * 512
    except OSError:
        return 0


def _is_stream(path: Path) -> bool:
    """Whether writing goes to a pipe, a device or a socket, which have no name to be renamed to."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _start_writeback(file: FileIO) -> None:
    """Have the system write what it holds of the file, so that the sync at the end has little left to wait for.

    Where it cannot be told so, the sync does it all.
    """
    start = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if start is not None:
        start.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        start(file.fileno(), 0, 0, _SYNC_FILE_RANGE_WRITE)


def sync_directory(directory: Path) -> None:
    """So that the new name outlives a power cut, where the file system can promise that."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """OSError as an OutputError that names the path; a reader that is gone stays a BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        shown = "standard output" if is_stdout(path) else path
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write {shown}: {reason}. Check the path, its permissions and the space") from error
