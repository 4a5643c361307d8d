"""Structure-aware damage to `.w4` files: a field, the index or the data changed and the digests made to fit again.

A blind change of a byte never gets past the digests; these get to the rules behind them.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

FIELDS = ("major", "minor", "header_nbytes", "file_nbytes", "index_nbytes", "data_offset", "data_nbytes", "n_parts",
          "n_sources", "reserved")  # fmt: skip
_FIELDS = struct.Struct("<HHIQQQQIIQ")
_BITS = (16, 16, 32, 64, 64, 64, 64, 32, 32, 64)
INTEGERS = (0, 1, 2, 7, 8, 15, 16, 31, 32, 33, 48, 63, 64, 65, 128, 256, 511, 512, 1024, 4095, 4096, 4097, 65535, 65536,
            1 << 18, 1 << 25, 1 << 28, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 48, (1 << 53) - 1, 1 << 53, 1 << 63,
            (1 << 64) - 1)  # fmt: skip
STRINGS = ("", "a", "int4", "int4z", "int4o", "nf4", "fp4", "e2m1", "iq4nl", "int8", "int8o", "i8", "f16", "bf16",
           "f32", "codes", "scales", "super_scales", "zero_points", "offsets", "values",
           "../x", ".x", "a/b", "\n", "\x7f", "\u00e9", "\U0001f600", "\\", '"',
           "x" * 512, "x" * 513)  # fmt: skip
TEXT = (b",", b"[", b"]", b"{", b"}", b'"', b":", b"\\", b"0", b"-", b"1.0", b"1e9", b" ", b"null", b"true", b"\\u0000",
        b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"[" * 70, b"9" * 20)  # fmt: skip


@dataclass(frozen=True)
class Pieces:
    """A `.w4` file taken apart. changed: header fields to write whatever is right."""

    text: bytes
    section: bytes
    n_digests: int
    sources: bytes
    changed: tuple[tuple[str, int], ...] = ()


def take_apart(raw: bytes) -> Pieces | None:
    """The pieces of a file whose header is sound enough, else None."""
    if len(raw) < 128:
        return None
    _, _, _, _, index_nbytes, data_offset, data_nbytes, n_parts, n_sources, _ = _FIELDS.unpack_from(raw, 8)
    if not 128 + index_nbytes <= data_offset <= data_offset + data_nbytes <= len(raw) or n_parts > 1 << 12:
        return None
    trailer = raw[data_offset + data_nbytes :]
    sources = trailer[32 * n_parts :][: 32 * n_sources]
    return Pieces(raw[128 : 128 + index_nbytes], raw[data_offset : data_offset + data_nbytes], n_parts, sources)


def put_together(pieces: Pieces) -> bytes:
    """A file of these pieces with right digests wherever the index says where the parts are."""
    places = _places(pieces.text)
    n_parts = pieces.n_digests if places is None else len(places)
    digests = [blake3(pieces.section[o : o + n]).digest() for o, n in places or [(0, 0)] * n_parts]
    data_offset = -(-(128 + len(pieces.text)) // 4096) * 4096
    trailer = b"".join(digests) + pieces.sources
    fields = {
        "major": 1, "minor": 0, "header_nbytes": 128, "index_nbytes": len(pieces.text), "data_offset": data_offset,
        "file_nbytes": data_offset + len(pieces.section) + len(trailer) + 32, "data_nbytes": len(pieces.section),
        "n_parts": n_parts, "n_sources": len(pieces.sources) // 32, "reserved": 0,
    } | dict(pieces.changed)  # fmt: skip
    head = b"\x89W4C\r\n\x1a\n" + _FIELDS.pack(*(fields[f] & (1 << b) - 1 for f, b in zip(FIELDS, _BITS, strict=True)))
    head += blake3(pieces.text).digest()
    seal = blake3(head).digest()
    gap = bytes(data_offset - 128 - len(pieces.text))
    return head + seal + pieces.text + gap + pieces.section + trailer + blake3(seal + trailer).digest()


def _places(text: bytes) -> list[tuple[int, int]] | None:
    try:
        index = json.loads(text)
        parts = [*index["blobs"], *(p for t in index["tensors"] for p in t["parts"])]
        places = [(int(p["offset"]), int(p["nbytes"])) for p in parts]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return [(o if 0 <= o < 1 << 40 else 0, n if 0 <= n < 1 << 40 else 0) for o, n in places]


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """One to three changes of a file; `raw` itself may be anything."""
    pieces = take_apart(raw)
    if pieces is None or rng.random() < 0.05:
        return change_bytes(raw, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        pieces = rng.choices((_change_tree, _change_text, _change_section, _change_field), (6, 3, 3, 1))[0](pieces, rng)
    return put_together(pieces)


def change_bytes(raw: bytes, rng: random.Random, tokens: tuple[bytes, ...] = (b"\0", b"\xff")) -> bytes:
    """Flip, set, remove, repeat or insert bytes somewhere."""
    at = rng.randrange(len(raw) + 1)
    span = min(rng.choice((1, 1, 2, 4, 8, 64)), len(raw) - at)
    kind = rng.randrange(6)
    if kind == 0 and span:
        return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
    if kind == 1:
        return raw[:at] + rng.randbytes(span) + raw[at + span :]
    if kind == 2:
        return raw[:at] + raw[at + span :]
    if kind == 3:
        return raw[:at] + raw[at : at + span] + raw[at:]
    if kind == 4:
        return raw[: rng.randrange(len(raw) + 1)]
    return raw[:at] + rng.choice(tokens) + raw[at:]


def _change_text(pieces: Pieces, rng: random.Random) -> Pieces:
    return replace(pieces, text=change_bytes(pieces.text, rng, TEXT))


def _change_section(pieces: Pieces, rng: random.Random) -> Pieces:
    section = bytearray(pieces.section)
    if not section or rng.random() < 0.1:
        n = max(len(section) + rng.choice((-64, -1, 1, 64)), 0)
        return replace(pieces, section=bytes(section[:n].ljust(n, b"\0")))
    for _ in range(rng.choice((1, 1, 4))):
        section[rng.randrange(len(section))] = rng.choice((0, 0x7C, 0x7F, 0x80, 0x88, 0xFC, 0xFF, rng.randrange(256)))
    return replace(pieces, section=bytes(section))


def _change_field(pieces: Pieces, rng: random.Random) -> Pieces:
    return replace(pieces, changed=(*pieces.changed, (rng.choice(FIELDS), rng.choice(INTEGERS))))


def _change_tree(pieces: Pieces, rng: random.Random) -> Pieces:
    """A value of the index replaced, removed, repeated or moved; the spelling stays canonical."""
    try:
        index = json.loads(pieces.text)
        changed = change_tree(index, rng)
        text = json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return _change_text(pieces, rng)
    return replace(pieces, text=text)


def change_tree(tree: Any, rng: random.Random) -> Any:
    """`tree` with one change at a random place."""
    holders: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            holders.append((value, key))
            if isinstance(value[key], (dict, list)):
                walk(value[key])

    if not isinstance(tree, (dict, list)):
        return tree
    walk(tree)
    if not holders:
        return random_value(rng)
    holder, key = rng.choice(holders)
    kind = rng.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, holder[rng.randrange(len(holder))])
    elif kind == 1:
        holder[rng.choice(("extra", "nbytes", "codebook", "group_size"))] = random_value(rng)
    elif kind == 2:
        other, other_key = rng.choice(holders)
        holder[key], moved = other[other_key] if _has(other, other_key) else 0, holder[key]
        if _has(other, other_key) and not isinstance(moved, (dict, list)):
            other[other_key] = moved
    elif kind == 3 and isinstance(holder[key], int):
        holder[key] += rng.choice((-64, -16, -1, 1, 16, 64))
    else:
        holder[key] = random_value(rng)
    return tree


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def random_value(rng: random.Random) -> Any:
    makers: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(INTEGERS), lambda: -rng.choice(INTEGERS), lambda: rng.choice(STRINGS), lambda: True,
        lambda: False,
        lambda: None, list, dict, lambda: [rng.choice(INTEGERS) for _ in range(rng.randrange(10))], lambda: 0.5,
    )  # fmt: skip
    return rng.choice(makers)()
