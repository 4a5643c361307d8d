"""BLAKE3 digests of whole files, taken by a thread beside other work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from blake3 import blake3

from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile
from w4conv.workers import Workers

_BLOCK_NBYTES = 1 << 22


class FileDigests:
    """Hashes files in order as a context manager; leaving it early stops the thread.

    with FileDigests(files) as digests:
        ...
        digests.result()  # one 32-byte digest a file, in order

    `result` waits and raises InputError when a file cannot be read, or has changed since the thread was started.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._stamps = [_stamp(file) for file in files]
        self._files = files
        self._stop = threading.Event()
        self._pool = Workers(1, thread_name_prefix="digest")
        self._digests: list[Future[bytes]] = []

    def __enter__(self) -> FileDigests:
        self._digests = [self._pool.submit(self._hash, file) for file in self._files]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def result(self) -> list[bytes]:
        digests = [future.result() for future in self._digests]
        for file, stamp in zip(self._files, self._stamps, strict=True):
            if _stamp(file) != stamp:
                raise InputError(f"{file} was changed while it was read. Run again when nothing writes to it")
        return digests

    def _hash(self, path: Path) -> bytes:
        state = blake3()
        file = MappedFile(path)
        file.read_ahead()
        for start in range(0, file.nbytes, _BLOCK_NBYTES):
            if self._stop.is_set():
                break
            state.update(file.view(start, min(_BLOCK_NBYTES, file.nbytes - start)).data)
        return state.digest()


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    return status.st_ino, status.st_size, status.st_mtime_ns
