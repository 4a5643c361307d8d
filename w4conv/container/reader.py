"""Open a `.w4` file: check its structure at once, map it, hand out its parts in place."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from w4conv import codes
from w4conv.arrays import Bytes
from w4conv.container import validate
from w4conv.container.integrity import check_data, check_tensor
from w4conv.container.layout import DIGEST_NBYTES, HEADER_NBYTES, SIGNATURE, Header, Part, TensorInfo, digest
from w4conv.errors import ClosedError, FormatError, InputError, OutputError
from w4conv.files.mapped import refuse_stand_in
from w4conv.progress import Progress
from w4conv.scheme import TILE_ROWS


@dataclass(frozen=True, slots=True)
class ContainerHeader:
    """Header, index and blobs: enough to inspect a container without its weights."""

    tensors: Mapping[str, TensorInfo]
    blobs: Mapping[str, bytes]
    provenance: Mapping[str, Any]
    file_nbytes: int


def read_header(stream: BinaryIO, *, where: str = "standard input") -> ContainerHeader:
    """Header, index and blobs from a stream that need not seek; reads no further than the last blob.

    Raises FormatError. The digests of the blobs are at the end of the file, so they are not checked.
    """
    raw = _read(stream, HEADER_NBYTES)
    head = validate.header(raw, where=where)
    index_raw = _read(stream, head.index_nbytes)
    if len(index_raw) < head.index_nbytes:
        raise FormatError(f"{where}: ends inside the index. Fetch it again", clause="2.5")
    index = validate.index(index_raw, head, where=where)
    position, gap_clause = HEADER_NBYTES + len(index_raw), "4.1"
    blobs = {}
    for name, part in index.blobs.items():
        gap, data = _read(stream, part.offset - position), _read(stream, part.nbytes)
        if any(gap):
            raise FormatError(f"{where}: the bytes before blob {name!r} are not zero", clause=gap_clause)
        if position + len(gap) + len(data) < part.end:
            raise FormatError(f"{where}: ends inside blob {name!r}. Fetch it again", clause="2.5")
        blobs[name] = data
        position, gap_clause = part.end, "4.3"
    return ContainerHeader(index.tensors, blobs, index.provenance, head.file_nbytes)


def _read(stream: BinaryIO, n: int) -> bytes:
    """`n` bytes, or fewer at the end of the stream. Allocates at most what has arrived plus one block."""
    blocks = []
    while n and (block := stream.read(min(n, 1 << 20))):
        blocks.append(block)
        n -= len(block)
    return b"".join(blocks)


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a device or a socket: to be read once from front to back, never mapped."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def is_container(path: Path) -> bool:
    """Whether a path is a container, by its suffix or its first bytes. A stream counts as one."""
    if path.suffix.lower() == ".w4" or is_stream(path):
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == SIGNATURE[:4]
    except OSError:
        return False


def open_container(path: str | os.PathLike[str]) -> Container:
    """Map a `.w4` file. All of w4-container 7.1 is checked; no weight is read.

    A pipe or a device is copied first, see `open_stream`. Raises InputError when it cannot be read, FormatError when it
    breaks the format.
    """
    path = Path(path)
    try:
        if is_stream(path):
            with path.open("rb") as stream:
                return open_stream(stream, name=str(path))
        with path.open("rb") as file:
            raw = file.read(HEADER_NBYTES)
            refuse_stand_in(raw, path)
            head = validate.header(raw, where=str(path))
            _check_size(str(path), os.fstat(file.fileno()).st_size, head)
            try:
                mapping = mmap.mmap(file.fileno(), head.file_nbytes, access=mmap.ACCESS_READ)
            except ValueError:  # no longer as large
                _check_size(str(path), os.fstat(file.fileno()).st_size, head)
                raise
            return Container(path, np.frombuffer(mapping, np.uint8), head, mapping, file)
    except IsADirectoryError:
        raise InputError(f"{path}: a directory, expected a .w4 file") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def open_stream(stream: BinaryIO, *, name: str = "standard input") -> Container:
    """A container that comes from a pipe: copied into the temporary directory, and gone from there when it is closed.

    Reads up to the end, and one byte beyond to see that there is none. Raises FormatError, and OutputError when the
    temporary directory (TMPDIR) has no room for it.
    """
    raw = _read(stream, HEADER_NBYTES)
    head = validate.header(raw, where=name)
    folder = tempfile.gettempdir()
    try:
        free = shutil.disk_usage(folder).free
        if free < head.file_nbytes:
            raise OutputError(
                f"{name}: {head.file_nbytes:,} bytes have to be kept in {folder}, where {free:,} are free. "
                "Let TMPDIR name a larger place, or save the file and name it"
            )
        with tempfile.TemporaryFile(prefix="w4conv-") as copy:
            size = copy.write(raw)
            while size <= head.file_nbytes and (block := stream.read(min(head.file_nbytes + 1 - size, 1 << 20))):
                size += copy.write(block)
            copy.flush()
            _check_size(name, size, head)
            mapping = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise OutputError(f"{name}: cannot be kept in {folder}: {error.strerror or error}") from error
    return Container(Path(name), np.frombuffer(mapping, np.uint8), head, mapping)


def _check_size(where: str, size: int, head: Header) -> None:
    if size != head.file_nbytes:
        change = "cut short" if size < head.file_nbytes else "appended to"
        raise FormatError(
            f"{where}: has {size:,} bytes, its header says {head.file_nbytes:,}: it was {change}. "
            "Fetch or convert it again",
            clause="2.5",
        )


class Container:
    """A mapped `.w4` file.

    path, file_nbytes, provenance: as named. tensors: name -> TensorInfo in file order. blobs: name -> bytes, the digest
    checked at each access. digest: hexadecimal, identifies the conversion. source_digests: hexadecimal, one for each
    file of provenance["source"]["files"].

    Pages come from the file when they are touched. Each access looks first whether the file has been shortened since,
    and raises InputError then; a view that was handed out before knows nothing of it.
    """

    def __init__(
        self, path: Path, mapped: Bytes, head: Header, mapping: mmap.mmap | None = None, file: BinaryIO | None = None
    ) -> None:
        """file: read for the checks at opening, since the mapping may raise SIGBUS after truncation."""

        def read(start: int, end: int) -> bytes:
            raw = mapped[start:end].tobytes() if file is None else os.pread(file.fileno(), end - start, start)
            if len(raw) < end - start:
                raise FormatError(f"{path}: was shortened while it was opened. Fetch or convert it again", clause="2.5")
            return raw

        text_end = HEADER_NBYTES + head.index_nbytes
        index = validate.index(read(HEADER_NBYTES, text_end), head, where=str(path))
        if any(read(text_end, head.data_offset)):
            raise FormatError(f"{path}: the bytes between index and data are not zero", clause="4.1")
        trailer = read(head.data_end, head.file_nbytes)
        header_digest = read(HEADER_NBYTES - DIGEST_NBYTES, HEADER_NBYTES)
        if digest(header_digest + trailer[:-DIGEST_NBYTES]) != trailer[-DIGEST_NBYTES:]:
            raise FormatError(f"{path}: the trailer does not match its digest; fetch or convert it again", clause="5.3")
        digests = [trailer[i : i + DIGEST_NBYTES] for i in range(0, len(trailer), DIGEST_NBYTES)]
        self.path = path
        self.file_nbytes = head.file_nbytes
        self.tensors = MappingProxyType(index.tensors)
        self.blobs: Mapping[str, bytes] = _Blobs(self, index.blobs)
        self._blob_parts = index.blobs
        self.provenance = index.provenance
        self.digest = digests[-1].hex()
        self.source_digests = tuple(d.hex() for d in digests[head.n_parts : -1])
        self.part_digests = tuple(digests[: head.n_parts])
        self._mapped: Bytes | None = mapped
        self._mapping = mapping  # where there is a file behind

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the mapping. Views handed out keep it alive."""
        self._mapped = self._mapping = None

    def bytes_of(self, part: Part) -> Bytes:
        """The bytes of a part in place, read-only. Raises InputError when the file has been shortened, ClosedError."""
        mapped, mapping = self._mapped, self._mapping  # another thread may close it meanwhile
        if mapped is None:
            raise ClosedError(f"{self.path} is closed")
        # SIGBUS after truncation would kill the process; `size` is the size of the file now.
        if mapping is not None and (size := mapping.size()) < self.file_nbytes:
            raise InputError(
                f"{self.path}: was shortened from {self.file_nbytes:,} to {size:,} bytes while in use. "
                "Fetch or convert it again"
            )
        return mapped[part.offset : part.end]

    def part(self, name: str, kind: str) -> Bytes:
        """A part of a tensor in place: a read-only uint8 view of the mapping. Raises KeyError when there is none."""
        for part in self.tensors[name].parts:
            if part.kind == kind:
                return self.bytes_of(part)
        raise KeyError(f"{name} has no {kind}; it has {', '.join(p.kind for p in self.tensors[name].parts)}")

    def release(self, name: str) -> None:
        """Drop the pages of a tensor from the memory of this process. The next access maps them again from the page
        cache or the file."""
        mapping = self._mapping
        if mapping is None:
            return
        for part in self.tensors[name].parts:
            start = part.offset - part.offset % mmap.PAGESIZE
            mapping.madvise(mmap.MADV_DONTNEED, start, part.end - start)

    def dequantize(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        """The values of a tensor, float32 of its original shape (w4-codes 5). Raises KeyError for an unknown name.

        rows: a slice of the first axis without a step; of a matrix, only its tiles are read, of a stack its matrices.
        """
        info = self.tensors[name]
        parts = {part.kind: self.bytes_of(part) for part in info.parts}
        if rows is None:
            return codes.dequantize(info.scheme, info.shape, parts)
        if len(info.shape) < 2:
            return codes.dequantize(info.scheme, info.shape, parts)[rows]
        start, stop, step = rows.indices(info.shape[0])
        if step != 1:
            raise ValueError(f"rows {rows} has a step")
        if stop <= start:
            return np.empty((0, *info.shape[1:]), np.float32)
        if len(info.shape) > 2:
            some = {kind: raw.reshape(info.shape[0], -1)[start:stop].reshape(-1) for kind, raw in parts.items()}
            return codes.dequantize(info.scheme, (stop - start, *info.shape[1:]), some)
        n_rows, n_columns = info.shape
        first, end = start // TILE_ROWS, codes.n_tiles(stop)
        before = first * TILE_ROWS
        tiles = {kind: raw.reshape(codes.n_tiles(n_rows), -1)[first:end].reshape(-1) for kind, raw in parts.items()}
        whole = codes.dequantize(info.scheme, (min(end * TILE_ROWS, n_rows) - before, n_columns), tiles)
        return whole[start - before : stop - before]

    def check(self, progress: Progress | None = None) -> None:
        """Check every byte: all digests, all padding, all codes and scales (w4-container 7.2).

        Raises FormatError naming the first part in file order that is wrong.
        """
        check_data(self, progress)

    def check_tensor(self, name: str) -> None:
        """The same for one tensor. Raises FormatError, and KeyError for an unknown name."""
        check_tensor(self, self.tensors[name])

    def named_parts(self) -> list[tuple[str, Part, TensorInfo | None]]:
        """(what it is, part, its tensor or None for a blob), in file order."""
        blobs = [(f"blob {name}", part, None) for name, part in self._blob_parts.items()]
        tensors = [(f"{t.name}: {part.kind}", part, t) for t in self.tensors.values() for part in t.parts]
        return [*blobs, *tensors]


class _Blobs(Mapping[str, bytes]):
    """Blobs read from the mapping when asked for."""

    def __init__(self, container: Container, parts: Mapping[str, Part]) -> None:
        self._parts = parts
        self._container = container
        self.where = str(container.path)

    def __getitem__(self, name: str) -> bytes:
        part = self._parts[name]
        data = self._container.bytes_of(part).tobytes()
        if digest(data) != self._container.part_digests[part.index]:
            raise FormatError(f"{self._container.path}: blob {name!r} does not match its digest", clause="5.1")
        return data

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
