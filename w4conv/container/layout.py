"""Where everything is in a `.w4` file: `formats/w4-container.md` 1 to 5 as constants, records.

    0          128       data_offset         data_offset + data_nbytes    file_nbytes
    | header   | index   | 0 | data section  | trailer: digests           |

All sizes follow from shapes, schemes and blobs, so a file is planned whole before its first byte is written.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from w4conv import codes
from w4conv.scheme import QuantScheme

SIGNATURE: Final = b"\x89W4C\r\n\x1a\n"
MAJOR: Final = 1
MINOR: Final = 1  # the newest that is read
HEADER_NBYTES: Final = 128
DIGEST_NBYTES: Final = 32
PART_ALIGNMENT: Final = 64
DATA_ALIGNMENT: Final = 4096

# w4-container 2.9, 3.2, 3.4, 3.8: caps, so that no count of a hostile file is multiplied or allocated unchecked.
MAX_INDEX_NBYTES: Final = 1 << 25
MAX_INDEX_MARKS: Final = 1 << 22
MAX_INDEX_DEPTH: Final = 64
MAX_TENSORS: Final = 1 << 16
MAX_BLOBS: Final = 1 << 10
MAX_BLOBS_NBYTES: Final = 1 << 28
MAX_PARTS: Final = 1 << 18
MAX_SOURCES: Final = 1 << 16
MAX_NAME_NBYTES: Final = 512
MAX_RANK: Final = 8
MAX_DIM: Final = (1 << 32) - 1
MAX_VALUES: Final = 1 << 48
MAX_INTEGER: Final = (1 << 53) - 1

_HEADER: Final = struct.Struct("<8sHHIQQQQIIQ32s32s")
assert _HEADER.size == HEADER_NBYTES


def digest(data: bytes | memoryview) -> bytes:
    """BLAKE3-256, the only digest of the format."""
    return blake3(data).digest()


def round_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes of the data section.

    kind: as in w4-codes 4; "blob" for a file carried verbatim.
    offset: from the start of the file. index: of its digest in the trailer.
    """

    kind: str
    offset: int
    nbytes: int
    index: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to be written. source_dtype: the checkpoint's own word for its coding, such as "BF16" or "Q4_1"."""

    name: str
    shape: tuple[int, ...]
    scheme: QuantScheme
    source_dtype: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a container and the ranges of its parts."""

    name: str
    shape: tuple[int, ...]
    scheme: QuantScheme
    source_dtype: str
    parts: tuple[Part, ...]

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, without the padding between them."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed header (w4-container 2)."""

    file_nbytes: int
    index_nbytes: int
    data_offset: int
    data_nbytes: int
    n_parts: int
    n_sources: int
    index_digest: bytes
    minor: int = 0

    def pack(self) -> bytes:
        fields = (self.file_nbytes, self.index_nbytes, self.data_offset, self.data_nbytes, self.n_parts, self.n_sources)
        head = _HEADER.pack(SIGNATURE, MAJOR, self.minor, HEADER_NBYTES, *fields, 0, self.index_digest, b"")
        head = head[:-DIGEST_NBYTES]
        return head + digest(head)

    @property
    def data_end(self) -> int:
        return self.data_offset + self.data_nbytes

    @property
    def trailer_nbytes(self) -> int:
        return DIGEST_NBYTES * (self.n_parts + self.n_sources + 1)


def unpack_header(raw: bytes) -> tuple[Any, ...]:
    """The fields of 128 bytes in file order, unchecked."""
    return _HEADER.unpack(raw)


def encode_index(index: Mapping[str, Any]) -> bytes:
    """The canonical JSON of w4-container 3.1. Raises ValueError for a float that is not finite or a lone surrogate."""
    text = json.dumps(index, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def codebook_words(scheme: QuantScheme) -> list[str]:
    """The entries of a codebook scheme as float32 bits, eight hexadecimal digits each (w4-container 3.7)."""
    return [f"{bits:08x}" for bits in codes.CODEBOOKS[scheme.kind].view("u4").tolist()]


def scheme_keys(scheme: QuantScheme) -> dict[str, Any]:
    """What the index says of a scheme (w4-container 3.7)."""
    keys: dict[str, Any] = {"scheme": scheme.kind}
    if not scheme.is_float:
        keys |= {"group_size": scheme.group_size, "scale_dtype": scheme.scale_dtype}
    if scheme.kind in codes.CODEBOOKS:
        keys["codebook"] = codebook_words(scheme)
    return keys
