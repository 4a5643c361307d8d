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


class MappedFile:
    """A regular file mapped for reading. Arrays over the mapping outlive `close`."""

    def __init__(self, path: Path) -> None:
        """Raises InputError when the file is missing, not a regular file, or unreadable."""
        self.path = path
        self._closed = False
        if not path.is_file():  # also keeps a pipe or a device from blocking the open
            state = "is not a regular file" if path.exists() else "is missing"
            raise InputError(f"{path}: {state}")
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

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes [offset, offset + nbytes) as a read-only view, which must lie inside the file as it was opened.

        Raises InputError when the file has shrunk since: touching the lost pages of a mapping would kill the process;
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
