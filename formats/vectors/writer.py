"""Tensors and `.w4` files from w4-codes.md and w4-container.md, in the slowest and plainest way.

Nothing of w4conv is used: a third opinion beside the Python package and the C reader. Randomness is BLAKE3 in its
extended output mode, so that it is the same everywhere and for ever.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

BITS = {
    "int4": 4, "int4z": 4, "int4o": 4, "nf4": 4, "fp4": 4, "e2m1": 4, "int8": 8, "f16": 16, "bf16": 16, "f32": 32,
    "iq4nl": 4, "int8o": 8, "nl4": 4, "nl3": 3,  # from version 1.1 on
}  # fmt: skip
FLOATS = ("f16", "bf16", "f32")
PAD = {"int4": 8, "int4z": 8, "nf4": 7}  # w4-codes 3.5; 0 for the others
_NF4 = (
    "bf800000 bf3239b1 bf066b30 beca32a0 be91a24d be3d353f bdba7871 00000000 "
    "3da2faff 3e24cae3 3e7c04dd 3ead033a 3ee1a4b8 3f1007ab 3f3913b3 3f800000"
)
_FP4 = (
    "00000000 3baaaaab 3f2aaaab 3f800000 3eaaaaab 3f000000 3e2aaaab 3e800000 "
    "80000000 bbaaaaab bf2aaaab bf800000 beaaaaab bf000000 be2aaaab be800000"
)
_E2M1 = (
    "00000000 3f000000 3f800000 3fc00000 40000000 40400000 40800000 40c00000 "
    "80000000 bf000000 bf800000 bfc00000 c0000000 c0400000 c0800000 c0c00000"
)
_IQ4NL = (
    "c2fe0000 c2d00000 c2a60000 c2820000 c2440000 c20c0000 c1b00000 c1200000 "
    "3f800000 41500000 41c80000 42180000 42540000 428a0000 42b20000 42e20000"
)
_NL3 = "c2fe0000 c2900000 c2200000 c1500000 41300000 42080000 42800000 42ce0000"
NF4, FP4 = _NF4.split(), _FP4.split()  # w4-codes 2.3
CODEBOOKS = {
    "nf4": NF4, "fp4": FP4, "e2m1": _E2M1.split(), "iq4nl": _IQ4NL.split(), "nl4": _IQ4NL.split(), "nl3": _NL3.split(),
}  # fmt: skip
NEW_IN_1_1 = ("iq4nl", "int8o", "nl4", "nl3")
# w4-codes 2.6: their scales are s6, and those of no other; the shifts.
SHIFTED = {"nl4": (-12, -4, 4, 12), "nl3": (-18, -6, 6, 18)}

Index = dict[str, Any]


def digest(data: bytes | bytearray) -> bytes:
    return blake3(bytes(data)).digest()


def up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def noise(seed: str, n: int) -> bytes:
    return blake3(seed.encode()).digest(length=n) if n else b""


# Tensors (w4-codes)


@dataclass
class Tensor:
    """entry: what the index says, without offsets. parts: kind -> bytes. values: little-endian float32, row-major."""

    entry: Index
    parts: dict[str, bytes]
    values: bytes


def tensor(
    name: str,
    shape: Sequence[int],
    scheme: str,
    group_size: int = 0,
    scale_dtype: str = "f16",
    *,
    scales: Sequence[int] | None = None,
    codes: bytes | None = None,
    source_dtype: str = "F32",
) -> Tensor:
    """A tensor with codes and scales out of noise seeded by its name.

    codes: one byte a code, or the bytes of the values. scales: bits of the scales, repeated as often as needed.
    """
    entry: Index = {"name": name, "shape": list(shape), "scheme": scheme, "source_dtype": source_dtype}
    n_values = math.prod(shape)
    width = BITS[scheme] // 8 if scheme in FLOATS else 1
    raw = codes or noise(f"codes {name} {scheme}", n_values * width)
    if scheme in FLOATS and codes is None:
        raw = finite(raw, scheme)
    if len(shape) < 2:
        return Tensor(entry, {"values": raw}, as_float32(raw, scheme))

    n_matrices, n_rows, n_columns = math.prod(shape[:-2]), shape[-2], shape[-1]
    if scheme in FLOATS:
        cells = [raw[i * width : (i + 1) * width] for i in range(n_values)]
        return Tensor(
            entry, {"values": tiles(cells, bytes(width), n_matrices, n_rows, n_columns)}, as_float32(raw, scheme)
        )

    entry |= {"group_size": group_size, "scale_dtype": scale_dtype}
    if scheme in CODEBOOKS:
        entry["codebook"] = CODEBOOKS[scheme]
    size = group_size or max(n_columns, 1)
    n_groups = up(n_columns, size) // size if n_columns else 0
    n_scales = n_matrices * n_rows * n_groups
    bits = list(scales) * n_scales if scales else scale_bits(f"scales {name} {scheme}", n_scales, scale_dtype)
    zeros = [b & 15 for b in noise(f"zeros {name} {scheme}", n_scales)]
    has_offsets = scheme in ("int4o", "int8o")
    offsets = scale_bits(f"offsets {name} {scheme}", n_scales, scale_dtype) if has_offsets else []
    types = {"f16": ("<H", "<f2"), "f32": ("<I", "<f4"), "i8": ("<B", "i1"), "s6": ("<B", "u1")}
    letter, number_type = types[scale_dtype]
    per_scale, half = struct.Struct(letter), struct.Struct("<H")
    n_supers = min(n_columns, 1) if scale_dtype == "s6" else up(n_columns, 256) // 256  # w4-codes 3.3
    supers = scale_bits(f"super scales {name} {scheme}", n_matrices * n_rows * n_supers, "f16")
    super_offsets = scale_bits(f"super offsets {name} {scheme}", n_matrices * n_rows * n_supers, "f16")

    def number(bits: int, above: Sequence[int], i: int) -> np.float32:
        """A scale or an offset; i: of the value that it belongs to."""
        found = np.float32(np.frombuffer(per_scale.pack(bits), number_type)[0])
        if scale_dtype not in ("i8", "s6"):
            return found
        if scale_dtype == "s6":
            found = np.float32(bits % 64 - 64 * (bits % 64 > 31))
        place = i // n_columns * n_supers + (0 if scale_dtype == "s6" else i % n_columns // 256)
        return found * np.float32(np.frombuffer(half.pack(above[place]), "<f2")[0])

    codes_of = [b & (1 << BITS[scheme]) - 1 for b in raw]

    values = bytearray()
    with np.errstate(over="ignore"):
        for i, code in enumerate(codes_of):
            group = i // n_columns * n_groups + i % n_columns // size
            shift = np.float32(SHIFTED[scheme][bits[group] // 64] if scheme in SHIFTED else 0)
            own = level(scheme, code, zeros[group])
            value = (own + shift if scheme in SHIFTED else own) * number(bits[group], supers, i)
            if has_offsets:
                value = value + number(offsets[group], super_offsets, i)
            values += value.astype("<f4").tobytes()

    if BITS[scheme] == 8:
        packed = tiles([bytes([c]) for c in codes_of], b"\0", n_matrices, n_rows, n_columns)
    elif BITS[scheme] == 3:
        packed = three_bit_tiles(codes_of, n_matrices, n_rows, n_columns)
    else:
        packed = nibble_tiles(codes_of, PAD.get(scheme, 0), n_matrices, n_rows, n_columns)

    def grouped(numbers: Sequence[int], cell: struct.Struct, n: int) -> bytes:
        return per_group([cell.pack(b) for b in numbers], n_matrices, n_rows, n, cell.size)

    parts = {"codes": packed, "scales": grouped(bits[:n_scales], per_scale, n_groups)}
    if scale_dtype in ("i8", "s6"):
        parts["super_scales"] = grouped(supers, half, n_supers)
    if scheme == "int4z":
        parts["zero_points"] = per_group([bytes([z]) for z in zeros], n_matrices, n_rows, n_groups, 1)
    if has_offsets:
        parts["offsets"] = grouped(offsets, per_scale, n_groups)
    if has_offsets and scale_dtype == "i8":
        parts["super_offsets"] = grouped(super_offsets, half, n_supers)
    return Tensor(entry, parts, bytes(values))


def level(scheme: str, code: int, zero: int) -> np.float32:
    """w4-codes 2.1"""
    if scheme in CODEBOOKS:
        return np.frombuffer(bytes.fromhex(CODEBOOKS[scheme][code]), ">f4")[0].astype(np.float32)
    if BITS[scheme] == 8:
        return np.float32(code - 256 if code > 127 else code)
    return np.float32(code - {"int4z": zero, "int4o": 0}.get(scheme, 8))


def tiles(cells: Sequence[bytes], pad: bytes, n_matrices: int, n_rows: int, n_columns: int) -> bytes:
    """w4-codes 3.2 for whole bytes: cells in row-major order, each the bytes of a code or value."""
    per_dword = 4 // len(pad)
    out = bytearray()
    for m in range(n_matrices):
        for first_row in range(0, n_rows, 16):
            for first_column in range(0, n_columns, per_dword):
                for row in range(first_row, first_row + 16):
                    for column in range(first_column, first_column + per_dword):
                        inside = row < n_rows and column < n_columns
                        out += cells[(m * n_rows + row) * n_columns + column] if inside else pad
    return bytes(out)


def nibble_tiles(codes: Sequence[int], pad: int, n_matrices: int, n_rows: int, n_columns: int) -> bytes:
    """w4-codes 3.2 for 4 bits: byte i = code[k + i] | code[k + 4 + i] << 4."""
    out = bytearray()
    for m in range(n_matrices):
        for first_row in range(0, n_rows, 16):
            for k in range(0, n_columns, 8):
                for row in range(first_row, first_row + 16):

                    def at(column: int, row: int = row, m: int = m) -> int:
                        inside = row < n_rows and column < n_columns
                        return codes[(m * n_rows + row) * n_columns + column] if inside else pad

                    out += bytes(at(k + i) | at(k + 4 + i) << 4 for i in range(4))
    return bytes(out)


def three_bit_tiles(codes: Sequence[int], n_matrices: int, n_rows: int, n_columns: int) -> bytes:
    """w4-codes 3.2 for 3 bits: three lines hold 32 columns."""
    out = bytearray()
    for m in range(n_matrices):
        for first_row in range(0, n_rows, 16):
            for k in range(0, n_columns, 32):
                for j in range(3):
                    for row in range(first_row, first_row + 16):

                        def at(column: int, row: int = row, m: int = m) -> int:
                            inside = row < n_rows and column < n_columns
                            return codes[(m * n_rows + row) * n_columns + column] if inside else 0

                        for i in range(4):
                            whole = at(k + 8 * j + i) | at(k + 8 * j + 4 + i) << 4
                            out.append(whole | (at(k + 24 + i) >> j & 1) << 3 | (at(k + 28 + i) >> j & 1) << 7)
    return bytes(out)


def per_group(cells: Sequence[bytes], n_matrices: int, n_rows: int, n_groups: int, width: int) -> bytes:
    """w4-codes 3.4: [matrix][tile][group][16]"""
    out = bytearray()
    for m in range(n_matrices):
        for first_row in range(0, n_rows, 16):
            for group in range(n_groups):
                for row in range(first_row, first_row + 16):
                    out += cells[(m * n_rows + row) * n_groups + group] if row < n_rows else bytes(width)
    return bytes(out)


def scale_bits(seed: str, n: int, dtype: str) -> list[int]:
    """Finite scales of either sign and moderate size."""
    raw = struct.unpack(f"<{n}I", noise(seed, 4 * n))
    if dtype in ("i8", "s6"):
        return [b & 255 for b in raw]
    if dtype == "f16":
        return [(b & 0x83FF) | (8 + (b >> 16) % 10) << 10 for b in raw]
    return [(b & 0x807FFFFF) | (118 + (b >> 23) % 12) << 23 for b in raw]


def finite(raw: bytes, scheme: str) -> bytes:
    """The same bits without NaN and infinity: the top bit of the exponent cleared."""
    dtype, mask = {"f16": ("<u2", 0xBFFF), "bf16": ("<u2", 0xBFFF), "f32": ("<u4", 0xBFFFFFFF)}[scheme]
    return (np.frombuffer(raw, dtype) & np.array(mask, dtype)).astype(dtype).tobytes()


def as_float32(raw: bytes, scheme: str) -> bytes:
    """w4-codes 5.3"""
    if scheme == "bf16":
        return b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
    return np.frombuffer(raw, "<f2" if scheme == "f16" else "<f4").astype("<f4").tobytes()


# Files (w4-container)


@dataclass
class File:
    """A file before it is put together; whatever is changed here is sealed with right digests."""

    index: Index
    section: bytearray
    places: list[tuple[int, int]]
    sources: list[bytes]
    values: list[Tensor] = field(default_factory=list)
    minor: int = 0


def needs_1_1(entry: Index) -> bool:
    """w4-codes 2.1, 2.2, 2.5"""
    return entry["scheme"] in NEW_IN_1_1 or entry.get("group_size") == 16 or entry.get("scale_dtype") == "i8"


def provenance(n_sources: int = 1, **more: object) -> Index:
    files = [{"name": f"model-{i}.safetensors", "nbytes": 7 + i} for i in range(n_sources)]
    return {"tool": "vectors 1.0", "source": {"kind": "safetensors", "files": files}, **more}


def make(tensors: Sequence[Tensor] = (), blobs: Mapping[str, bytes] | None = None, origin: Index | None = None) -> File:
    """w4-container 3 and 4.2: the index, and every part in its place."""
    origin = origin if origin is not None else provenance()
    section = bytearray()
    places: list[tuple[int, int]] = []

    def place(data: bytes) -> Index:
        section.extend(bytes(up(len(section), 64) - len(section)))
        places.append((len(section), len(data)))
        section.extend(data)
        return {"nbytes": len(data), "offset": places[-1][0]}

    index: Index = {"provenance": origin, "tensors": []}
    index["blobs"] = [{"name": name, **place(data)} for name, data in (blobs or {}).items()]
    for t in tensors:
        parts = [{"kind": kind, **place(data)} for kind, data in t.parts.items()]
        index["tensors"].append({**t.entry, "parts": parts})
    section.extend(bytes(up(len(section), 64) - len(section)))
    sources = [digest(f"source {i}".encode()) for i in range(len(origin["source"]["files"]))]
    return File(index, section, places, sources, list(tensors), int(any(needs_1_1(t.entry) for t in tensors)))


def spell(index: object) -> bytes:
    """w4-container 3.1. Python sorts strings by code points."""
    return json.dumps(index, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def count_marks(text: bytes) -> int:
    """w4-container 3.2"""
    return sum(text.count(mark) for mark in (b",", b"[", b"{"))


HEADER = ("major", "minor", "header_nbytes", "file_nbytes", "index_nbytes", "data_offset", "data_nbytes", "n_parts",
          "n_sources", "reserved")  # fmt: skip


def put_together(
    file: File,
    *,
    text: bytes | None = None,
    header: Mapping[str, int] | None = None,
    gap: Callable[[bytearray], object] | None = None,
    index_digest: bytes | None = None,
    header_digest: bytes | None = None,
    part_digests: Callable[[list[bytes]], object] | None = None,
    conversion_digest: bytes | None = None,
) -> bytes:
    """The bytes of a file, everything right but what is given."""
    text = spell(file.index) if text is None else text
    between = bytearray(up(128 + len(text), 4096) - 128 - len(text))
    if gap:
        gap(between)
    digests = [digest(file.section[offset : offset + n]) for offset, n in file.places]
    if part_digests:
        part_digests(digests)
    fields = {
        "major": 1, "minor": file.minor, "header_nbytes": 128,
        "file_nbytes": 128 + len(text) + len(between) + len(file.section) + 32 * (len(digests) + len(file.sources) + 1),
        "index_nbytes": len(text), "data_offset": 128 + len(text) + len(between), "data_nbytes": len(file.section),
        "n_parts": len(file.places), "n_sources": len(file.sources), "reserved": 0,
    } | dict(header or {})  # fmt: skip
    head = b"\x89W4C\r\n\x1a\n" + struct.pack("<HHIQQQQIIQ", *(fields[name] for name in HEADER))
    head += index_digest or digest(text)
    seal = header_digest or digest(head)
    trailer = b"".join(digests + file.sources)
    last = conversion_digest or digest(seal + trailer)
    return head + seal + text + between + file.section + trailer + last
