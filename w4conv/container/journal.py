"""Which parts of an unfinished `.w4` file are complete. Kept in the file itself, so that a conversion can be resumed.

While a file grows, the digest of each part goes to its place in the trailer as soon as the part is complete, and a key
that stands for everything the bytes depend on goes behind the end, where it is cut off at last:

    | header, index | parts written so far | (hole) | digests of those parts, zeros | key, 32 bytes |

Nothing of this is believed: a part counts as complete only when its bytes have the digest that was noted. So it does
not matter what a crash, or a power cut between two writes, made of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from w4conv.container.layout import DIGEST_NBYTES, Part, digest
from w4conv.container.plan import Layout
from w4conv.errors import InputError
from w4conv.files.target import Target

_BLOCK_NBYTES = 1 << 22


def stamp(files: Sequence[Path]) -> bytes:
    """A stamp of files, made without reading them. Any write to one of them changes it.

    It includes the time of the last inode change (ctime), which no program can set back.
    """
    fields = []
    for file in files:
        try:
            s = file.stat()
        except OSError as error:
            raise InputError(f"{file}: {error.strerror or error}") from error
        fields.append(f"{s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}")
    return "\n".join(fields).encode()


class Journal:
    """The journal of one target. kept: digests of the first parts of the layout, complete already, whole tensors only.

    sources: a `stamp` of all that is converted. Creating it hashes what is kept, and writes the key.
    """

    def __init__(self, target: Target, layout: Layout, sources: bytes) -> None:
        self._target = target
        self._digests_at = layout.header.data_end
        key = digest(layout.header.pack() + sources)
        self.kept: list[bytes] = []
        if target.file is None:
            return
        if target.n_kept == layout.file_nbytes + len(key) and target.read_at(layout.file_nbytes, len(key)) == key:
            self.kept = self._find_complete(layout)
        target.write_at(layout.file_nbytes, key)

    def record(self, part: Part, part_digest: bytes) -> None:
        """`part` has been written whole."""
        if self._target.file is not None:
            self._target.write_at(self._place(part), part_digest)

    def _place(self, part: Part) -> int:
        return self._digests_at + DIGEST_NBYTES * part.index

    def _find_complete(self, layout: Layout) -> list[bytes]:
        complete: list[bytes] = []
        for tensor in layout.tensors.values():
            noted = [self._target.read_at(self._place(part), DIGEST_NBYTES) for part in tensor.parts]
            if noted != [self._digest_of(part) for part in tensor.parts]:
                break
            complete += noted
        return complete

    def _digest_of(self, part: Part) -> bytes:
        state = blake3()
        for offset in range(part.offset, part.end, _BLOCK_NBYTES):
            state.update(self._target.read_at(offset, min(_BLOCK_NBYTES, part.end - offset)))
        return state.digest()
