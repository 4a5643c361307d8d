"""A tokenizer.model of SentencePiece, written field by field."""

from __future__ import annotations

import struct

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PIECES = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("▁", NORMAL), ("a", NORMAL), ("▁a", NORMAL)]


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))


def field(number: int, value: int | bytes | float) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value % (1 << 64))


def model(
    pieces: list[tuple[str, int]] = PIECES, *, trainer: bytes = b"", normalizer: bytes = b"", rest: bytes = b""
) -> bytes:
    parts = [
        field(1, field(1, text.encode()) + field(2, -float(i)) + field(3, kind))
        for i, (text, kind) in enumerate(pieces)
    ]
    return b"".join(parts) + field(2, field(3, 2) + trainer) + field(3, field(4, 0) + normalizer) + rest
