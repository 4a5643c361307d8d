"""Files mapped for reading, each once in a process: a page that two of its readers touch is mapped for both."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from w4conv.errors import ClosedError, InputError

# By device, inode and size. A mapping keeps its inode, so that no other file takes that number.
_MAPPINGS: Final[WeakValueDictionary[tuple[int, int, int], mmap.mmap]] = WeakValueDictionary()


# Files that are often fetched by mistake: how they begin, what to call them, what to do.
_POINTERS: Final = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer", "run `git lfs pull` there, or fetch the file"),
    (b"version https://hawser.github.com/spec/", "a Git LFS pointer", "run `git lfs pull` there, or fetch the file"),
    (b"# xet version", "a pointer into a store of large files", "fetch the file that it names"),
)
_PAGES: Final = (
    (b"<!doctype html", "a web page", "fetch the file again, by its address for downloads"),
    (b"<html", "a web page", "fetch the file again, by its address for downloads"),
    (b"<head", "a web page", "fetch the file again, by its address for downloads"),
    (b"<?xml", "an XML document, perhaps a server's error", "fetch the file again"),
    (b"<error>", "a server's error in XML", "fetch the file again"),
    (b"entry not found", "a server's error", "fetch the file again"),
    (b"repository not found", "a server's error", "fetch the file again"),
    (b"invalid username or password", "a server's error", "fetch the file again, signed in"),
    (b"access to model ", "a server's error", "ask for access to the model, then fetch the file again"),
    (b"404: not found", "a server's error", "fetch the file again"),
    (b"access denied", "a server's error", "fetch the file again, signed in"),
)
HEAD_NBYTES: Final = 256


def refuse_stand_in(head: bytes, where: object, *, text: bool = False) -> None:
    """Raise InputError for a file fetched by mistake: a Git LFS pointer, a web page, a server's error.

    head: the first HEAD_NBYTES of the file. text: it may well be a page; only pointers are refused.
    """
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:64].lower()
    for mark, what, advice in _POINTERS if text else (*_POINTERS, *_PAGES):
        if begin.startswith(mark):
            raise InputError(f"{where} is {what}, not the file itself; {advice}")


class MappedFile:
    """A regular file mapped for reading. Arrays over the mapping outlive `close`."""

    def __init__(self, path: Path) -> None:
        """Raises InputError when the file is missing, not a regular file, or unreadable."""
        self.path = path
        self._closed = False
        if not path.is_file():  # also keeps a pipe or a device from blocking the open
            raise InputError(f"{path}: {_what_instead(path)}")
        try:
            with path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                self.nbytes = status.st_size
                key = status.st_dev, status.st_ino, self.nbytes
                self._map = _MAPPINGS.get(key)
                if self._map is None and self.nbytes:
                    self._map = _MAPPINGS[key] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
        refuse_stand_in(self.view(0, min(self.nbytes, HEAD_NBYTES)).tobytes(), path)

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes [offset, offset + nbytes) as a read-only view, which must lie inside the file as it was opened.

        Raises InputError when the file has shrunk since: SIGBUS after truncation would kill the process;
        ClosedError after `close`.
        """
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"{self.path}: bytes {offset} to {offset + nbytes} are outside the file")
        mapping = self._map
        if self._closed:
            raise ClosedError(f"{self.path} is closed")
        if mapping is None or nbytes == 0:
            return np.empty(0, np.uint8)
        now = mapping.size()  # of the file as it is now, by whatever name
        if now < self.nbytes:
            raise InputError(f"{self.path}: shrank from {self.nbytes} to {now} bytes since it was opened; start again")
        return np.frombuffer(mapping, np.uint8, nbytes, offset)

    def read_ahead(self) -> None:
        """Tell the system that all of it is going to be read in order."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_SEQUENTIAL)

    def close(self) -> None:
        self._closed = True
        self._map = None


def _what_instead(path: Path) -> str:
    """What a path is that is not a regular file."""
    try:
        if path.is_symlink() and not path.exists():
            return f"a link to {path.readlink()}, which is not there; fetch the file again, or take the link away"
    except OSError as error:  # links in a circle
        return f"cannot be read: {error.strerror or error}"
    if path.is_dir():
        return "is a directory, expected a file"
    return "is not a regular file" if path.exists() else "is missing"
