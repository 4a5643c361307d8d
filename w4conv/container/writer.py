"""Write a planned `.w4` file in one pass, never seeking: a pipe gets the same bytes as a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from w4conv.container.layout import DATA_ALIGNMENT, DIGEST_NBYTES, PART_ALIGNMENT, Part, digest
from w4conv.container.plan import Layout

Block = bytes | npt.NDArray[np.generic]


class Sink(Protocol):
    """A binary stream whose `write` takes all bytes given."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class Log(Protocol):
    """Records parts as they become complete (journal.py).

    kept: digests of the first parts of tensors, which are in the sink already.
    """

    kept: list[bytes]

    def record(self, part: Part, part_digest: bytes, /) -> None: ...


class Writer:
    """Writes the parts of a layout in file order, each in blocks of any size, and the gaps between them.

    Creating it writes header, index and blobs; `finish` writes the trailer. Raises ValueError when a block belongs to
    another part than the one due, is too long, or a part is missing at the end: faults of the caller, never of data.

    log: its kept parts are not written again; the sink then needs `seek`.
    """

    def __init__(self, sink: Sink, layout: Layout, *, log: Log | None = None) -> None:
        self._sink = sink
        self._log = log
        self._layout = layout
        self._position = 0
        self._digests: list[bytes] = []
        self._due: Iterator[tuple[str, Part]] = iter(layout.parts())
        head = layout.header.pack()
        self._header_digest = head[-DIGEST_NBYTES:]
        # w4-container 1.1: header, index, zeros, blobs
        self._write(head + layout.index)
        self._pad_to(DATA_ALIGNMENT)
        for part, data in layout.blobs:
            self._pad_to(PART_ALIGNMENT)
            assert self._position == part.offset
            self._write(data)
            self._digests.append(digest(data))
        if log and log.kept:
            self._skip(log.kept)
        self._next_part()

    @property
    def due(self) -> str | None:
        """Name of the next tensor to write; None after the last."""
        return None if self._part is None else self._name

    def write(self, name: str, kind: str, block: Block) -> None:
        """Append a block to a part of a tensor; `name` and `kind` have to be those of the part that is due."""
        if self._part is None or (name, kind) != (self._name, self._part.kind):
            due = "the end" if self._part is None else f"{self._name} {self._part.kind}"
            raise ValueError(f"{name} {kind} was written while {due} is due")
        view = (
            memoryview(block) if isinstance(block, bytes) else np.ascontiguousarray(block).reshape(-1).view("u1").data
        )
        excess = self._position + len(view) - self._part.end
        if excess > 0:
            raise ValueError(f"{name} {kind}: {excess} bytes too many")
        self._write(view)
        self._hash.update(view)
        if self._position == self._part.end:
            self._digests.append(self._hash.digest())
            if self._log:
                self._log.record(self._part, self._digests[-1])
            self._next_part()

    def finish(self, source_digests: Iterable[bytes]) -> str:
        """Write the trailer (w4-container 5); returns the conversion digest in hexadecimal.

        source_digests: BLAKE3-256 of each file that the provenance lists, in its order.
        """
        if self._part is not None:
            missing = self._part.end - max(self._position, self._part.offset)
            raise ValueError(f"{self._name} {self._part.kind}: {missing} bytes are missing")
        sources = list(source_digests)
        if len(sources) != self._layout.header.n_sources:
            raise ValueError(f"{len(sources)} source digests, the layout has {self._layout.header.n_sources}")
        self._pad_to(PART_ALIGNMENT)
        digests = b"".join([*self._digests, *sources])
        conversion = digest(self._header_digest + digests)
        self._write(digests + conversion)
        assert self._position == self._layout.file_nbytes
        return conversion.hex()

    def _skip(self, kept: list[bytes]) -> None:
        for part_digest, (_, part) in zip(kept, self._due, strict=False):
            self._digests.append(part_digest)
            self._position = part.end
        self._sink.seek(self._position)  # type: ignore[attr-defined]  # see `log`

    def _next_part(self) -> None:
        """Go to the next part that has bytes."""
        self._part: Part | None = None
        for name, part in self._due:
            if part.nbytes:
                self._name, self._part, self._hash = name, part, blake3()
                self._pad_to(PART_ALIGNMENT)
                return
            self._digests.append(digest(b""))
            if self._log:
                self._log.record(part, self._digests[-1])

    def _pad_to(self, alignment: int) -> None:
        self._write(bytes(-self._position % alignment))

    def _write(self, data: bytes | memoryview) -> None:
        self._sink.write(data)
        self._position += len(data)
