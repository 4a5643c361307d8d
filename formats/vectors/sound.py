"""The valid vectors: every scheme, size and shape that the texts allow, and their corner cases."""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator

from writer import BITS, FLOATS, NEW_IN_1_1, SHIFTED, File, digest, make, provenance, spell, tensor


def valid() -> Iterator[tuple[str, str, File]]:
    """(name, about, file)"""
    yield "empty", "no blob, no tensor, no source", make(origin=provenance(0))
    yield (
        "only-blobs",
        "blobs of 0, 1, 64 and 65 bytes, and the names that a blob may have",
        make(blobs={"config.json": b"", "a": b"\xff", "-_.": b"x" * 64, "Z" * 512: b"\0" * 65}),
    )
    yield "sources", "three source files, one of no bytes", make(
        origin={"tool": "", "source": {"kind": "", "files": [
            {"name": "model-00001-of-00002.safetensors", "nbytes": 0},
            {"name": "\u00fc \\ \".bin", "nbytes": 2**53 - 1},
            {"name": "config.json", "nbytes": 1}]}}
    )  # fmt: skip
    yield (
        "vectors-and-scalars",
        "rank 0 and 1, an empty vector",
        make([tensor(f"{s} {shape}", shape, s) for s in FLOATS for shape in ((), (1,), (0,), (33,))]),
    )
    yield (
        "float-matrices",
        "float schemes with padding rows and columns",
        make([tensor(f"{s} {shape}", shape, s) for s in FLOATS for shape in ((1, 1), (16, 2), (17, 3), (2, 3, 5))]),
    )
    special = {
        "f16": "0000 0080 0100 ff03 0004 ff7b fffb 0180", "bf16": "0000 0080 0100 7f00 8000 7f7f 7fff 0180",
        "f32": "00000000 00000080 01000000 ffff7f00 00008000 ffff7f7f ffff7fff 01000080",
    }  # fmt: skip
    yield (
        "float-extremes",
        "zeros of both signs, subnormal numbers, the largest ones",
        make([tensor(s, shape, s, codes=bytes.fromhex(hexed)) for s, hexed in special.items() for shape in ((2, 4),)]),
    )
    for scheme in ("int4", "int4z", "int4o", "nf4", "fp4", "e2m1", "int8"):
        yield (
            f"{scheme}",
            f"every group size and scale type of {scheme}, the last group short",
            make(
                [
                    tensor(f"g{g} {dtype}", (rows, k), scheme, g, dtype)
                    for g, rows, k in ((32, 17, 69), (64, 3, 65), (128, 2, 131), (256, 1, 257), (0, 18, 21))
                    for dtype in ("f16", "f32")
                ]
            ),
        )
    for scheme in ("iq4nl", "int8o"):
        yield (
            f"{scheme}",
            f"every group size and scale type of {scheme}, the last group short",
            make(
                [
                    tensor(f"g{g} {dtype}", (rows, k), scheme, g, dtype)
                    for g, rows, k in (
                        (16, 5, 35),
                        (32, 17, 69),
                        (64, 3, 65),
                        (128, 2, 131),
                        (256, 1, 257),
                        (0, 18, 21),
                    )
                    for dtype in ("f16", "f32", "i8")
                    if dtype != "i8" or 0 < g < 256
                ]
            ),
        )
    yield "groups-of-16", "the size of groups that version 1.1 adds", make(
        [tensor(f"{s} {d}", (3, 37), s, 16, d) for s in BITS if s not in (*FLOATS, *SHIFTED) for d in ("f16", "f32")]
    )  # fmt: skip
    sizes, empty = ((16, 257), (32, 300), (64, 256), (128, 513)), ((0, 7), (7, 0), (0, 2, 0))
    yield "two-levels", "sub-scales under super-scales, of every scheme and group size, with short ends", make(
        [tensor(f"{s} g{g} {k}", (2, k), s, g, "i8") for s in BITS if s not in (*FLOATS, *SHIFTED) for g, k in sizes]
        + [tensor(f"{s} three", (2, 17, 5), s, 32, "i8") for s in ("int4z", "int4o", "int8o")]
        + [tensor(f"{s} {shape}", shape, s, 16, "i8") for s in ("int4o", "int8") for shape in empty]
    )  # fmt: skip
    for s in SHIFTED:
        yield s, "shifts, and scales of 6 bits under one super-scale a row, of every group size, with short ends", make(
            [tensor(f"g{g} {k}", (rows, k), s, g, "s6") for rows, (g, k) in zip((2, 17, 16, 3), sizes, strict=True)]
            + [tensor("three", (2, 17, 5), s, 32, "s6")]
            + [tensor(f"every byte of {size}", (8, size * 32), s, size, "s6", scales=range(256)) for size in (16, 32)]
            + [tensor(f"{shape}", shape, s, 16, "s6") for shape in empty]
        )  # fmt: skip
    yield "tails-of-3-bits", "columns around those that three lines hold, and the places of each of 32 codes", make(
        [tensor(f"{k}", (2, k), "nl3", 16, "s6") for k in (1, 4, 8, 9, 16, 17, 23, 24, 25, 28, 29, 31, 32, 33, 56, 64)]
        + [tensor(f"7 at {at}", (1, 32), "nl3", 32, "s6", codes=bytes(7 * (k == at) for k in range(32)), scales=[1])
           for at in range(32)]
    )  # fmt: skip
    yield "version-1.1-of-a-file-of-1.0", "a file that says 1.1 and needs no more than 1.0", later(
        make([tensor("w", (2, 9), "int4", 32)])
    )  # fmt: skip
    yield "tails", "columns and rows around the size of a dword, a group and a tile", make(
        [tensor(f"{n} x {k}", (n, k), "int4", 32) for n, k in
         ((1, 1), (15, 7), (16, 8), (17, 9), (1, 31), (1, 32), (1, 33), (33, 2))]
    )  # fmt: skip
    yield (
        "ranks",
        "three and more dimensions, every matrix padded by itself",
        make(
            [
                tensor("three", (3, 2, 9), "int4", 32),
                tensor("three z", (2, 17, 5), "int4z", 0),
                tensor("three o", (2, 17, 5), "int4o", 0),
                tensor("four", (2, 2, 3, 4), "int8", 32, "f32"),
                tensor("eight", (1, 2, 1, 2, 1, 1, 2, 3), "nf4", 64),
            ]
        ),
    )
    yield "no-values", "dimensions of 0: parts of 0 bytes, listed like any other", make(
        [tensor(f"{s} {shape}", shape, s, 32 * (s not in FLOATS)) for s in ("int4z", "int4o", "int8", "f16")
         for shape in ((0, 8), (3, 0), (0, 3, 4), (2, 0, 4))]
    )  # fmt: skip
    yield (
        "scales",
        "scales of zero, below the normal range, and the largest",
        make(
            [
                tensor("f16", (2, 5), "int4", 32, scales=[0, 0x8000]),
                tensor("f16 small", (2, 5), "int8", 32, scales=[1, 0x83FF]),
                tensor("f16 large", (2, 5), "fp4", 32, scales=[0x7BFF, 0xFBFF]),
                tensor("f32 small", (2, 5), "nf4", 32, "f32", scales=[1, 0x807FFFFF]),
                tensor("f32 large", (2, 5), "int4z", 32, "f32", scales=[0x7F7FFFFF, 0xFF7FFFFF]),
                tensor("f32 large and an offset", (2, 5), "int4o", 32, "f32", scales=[0x7F7FFFFF, 0xFF7FFFFF]),
            ]
        ),
    )
    names = ["\u00fc", "u\u0308", "\U0001f600", "\uffff", " ", "a/../b", '"', "\\", '\\"', "\u00a0", "\u2028", "\u0080",
             "\u00e9" * 256, "x" * 512, "model.layers.0.self_attn.q_proj.weight"]  # fmt: skip
    yield (
        "names",
        "unusual tensor names, the longest ones, two that look alike",
        make(
            [tensor(name, (1,), "f16", source_dtype="Q4_1") for name in names]
            + [tensor("word", (1,), "f16", source_dtype="A_" * 16)]
        ),
    )
    deep: object = 1
    for _ in range(62):
        deep = [deep]
    everything = "".join(map(chr, range(0x20))) + '"\\/\x7f\u00e9\u2028\U0001f600\ufeff'
    yield (
        "provenance",
        "whatever provenance may hold: integers, nesting, every escape, the order of keys",
        make(
            origin=provenance(
                0,
                deep=deep,
                largest=2**53 - 1,
                smallest=-(2**53 - 1),
                zero=0,
                yes=True,
                no=False,
                text=everything,
                nested={
                    "": {},
                    "a": [],
                    "\uffff": 1,
                    "\U00010000": 2,
                    "B": 3,
                    "aa": 4,
                    "a\n": 5,
                    '"': 6,
                    everything: 7,
                },
            )
        ),
    )
    full = make(origin=provenance(0, fill=""))
    full.index["provenance"]["fill"] = "x" * (4096 - 128 - len(spell(full.index)))
    yield "index-fills-a-page", "no zeros between index and data", full
    over = copy.deepcopy(full)
    over.index["provenance"]["fill"] += "x"
    yield "index-passes-a-page", "one byte more: 4095 zeros", over


def example() -> File:
    """w4-container 8"""
    origin = {"tool": "w4conv 0.1.0", "method": "rtn",
              "source": {"kind": "safetensors", "files": [{"name": "model.safetensors", "nbytes": 8}]}}  # fmt: skip
    w = bytes([8, 9, 10, 11, 12, 13, 14, 15, 15, 0, 2, 10, 12, 8, 8, 8, 8, 15, 0, 9])
    b = struct.pack("<3f", 1, -2, 0.5)
    tensors = [tensor("w", (2, 10), "int4", 32, codes=w, scales=[0x3C00, 0x3000]), tensor("b", (3,), "f32", codes=b)]
    file = make(tensors, {"config.json": b"{}\n"}, origin)
    file.sources = [digest(b"weights\n")]
    return file


def later(file: File) -> File:
    file.minor = 1
    return file


def released(version: str) -> File:
    """The file of compat/ for a version."""
    schemes = [s for s in BITS if s not in (*FLOATS, *SHIFTED)]
    if version == "1.1":
        return make(
            [tensor(f"{s} {g}", (3, 277), s, g, "i8") for s in schemes for g in (16, 32)]
            + [tensor(f"{s} 16 f16", (3, 21), s, 16) for s in schemes]
            + [tensor(f"{s} {g}", (3, 277), s, g, "s6") for s in SHIFTED for g in (16, 32)],
            {"config.json": b"{}", "b": b"bb"},
        )
    tensors = [
        tensor(f"{scheme} {dtype}", (3, 21), scheme, size, dtype)
        for scheme in schemes
        if scheme not in NEW_IN_1_1
        for size, dtype in ((32, "f16"), (0, "f32"))
    ]
    return make([*tensors, *(tensor(s, (3, 5), s) for s in FLOATS)], {"config.json": b"{}", "b": b"bb"})
