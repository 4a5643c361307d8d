"""Damaged and hostile files: every change is found, every rule has its own error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from w4files import open_bytes, rebuild, small_file

from w4conv import scheme
from w4conv.container import open_container
from w4conv.errors import FormatError
from w4conv.scheme import QuantScheme

Index = dict[str, Any]
RAW, _ = small_file()


def clause_of(raw: bytes) -> str:
    """The clause that opening, else checking, reports."""
    with pytest.raises(FormatError) as error:
        open_bytes(raw).check()
    assert "memory" in str(error.value)
    return error.value.clause


def test_rebuild_without_a_change_is_the_identity() -> None:
    """So that what the tests below find is what they changed."""
    assert rebuild(RAW) == RAW


def test_every_changed_byte_is_found() -> None:
    damaged = bytearray(RAW)
    for i in range(len(RAW)):
        damaged[i] ^= 1 << i % 8
        clause_of(bytes(damaged))
        damaged[i] = RAW[i]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(RAW) - 1), st.integers(1, 255))
def test_any_change_of_a_byte_is_found(at: int, change: int) -> None:
    clause_of(RAW[:at] + bytes([RAW[at] ^ change]) + RAW[at + 1 :])


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "cut.w4"
    path.write_bytes(RAW)
    for n in reversed(range(len(RAW))):
        with path.open("r+b") as file:
            file.truncate(n)
        with pytest.raises(FormatError):
            open_container(path)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    for raw in (noise, RAW[:8] + noise, RAW[:16] + noise + RAW[16 + len(noise) :]):
        if raw != RAW:
            with pytest.raises(FormatError):
                open_bytes(raw).check()


def nested(depth: int) -> bytes:
    return b'{"blobs":' + b"[" * depth + b"]" * depth + b"}"


HEADERS: list[tuple[str, str, dict[str, int]]] = [
    ("header_nbytes", "2.4", {"header_nbytes": 129}),
    ("file too long", "2.5", {"file_nbytes": len(RAW) + 32}),
    ("file of 2^64 - 1", "2.5", {"file_nbytes": (1 << 64) - 1}),
    ("no index", "2.6", {"index_nbytes": 0}),
    ("huge index", "2.6", {"index_nbytes": (1 << 64) - 1}),
    ("data elsewhere", "2.7", {"data_offset": 8192}),
    ("data at 0", "2.7", {"data_offset": 0}),
    ("data not whole lines", "2.8", {"data_nbytes": 65}),
    ("huge data", "2.8", {"data_nbytes": (1 << 64) - 64}),
    ("many parts", "2.9", {"n_parts": (1 << 32) - 1}),
    ("many sources", "2.9", {"n_sources": (1 << 32) - 1}),
    ("reserved", "2.10", {"reserved": 1}),
]


@pytest.mark.parametrize(("clause", "fields"), [h[1:] for h in HEADERS], ids=[h[0] for h in HEADERS])
def test_header_rules(clause: str, fields: dict[str, int]) -> None:
    assert clause_of(rebuild(RAW, header=fields)) == clause


TEXTS: list[tuple[str, str, bytes]] = [
    ("not JSON", "3.1", b"{}}"),
    ("not UTF-8", "3.1", b'{"blobs":"\xff"}'),
    ("white space", "3.1", RAW[128:].split(b"\0")[0].replace(b":[", b": [", 1)),
    ("unsorted keys", "3.1", b'{"tensors":[],"blobs":[]}'),
    ("a key twice", "3.1", b'{"blobs":[],"blobs":[]}'),
    ("a float", "3.1", b'{"blobs":1.0}'),
    ("a long float", "3.1", b'{"blobs":1e5}'),
    ("NaN", "3.1", b'{"blobs":NaN}'),
    ("null", "3.1", b'{"blobs":null}'),
    ("nothing but null", "3.1", b"null"),
    ("a leading zero", "3.1", b'{"blobs":01}'),
    ("minus zero", "3.1", b'{"blobs":-0}'),
    ("an integer beyond 2^53", "3.1", b'{"blobs":9007199254740992}'),
    ("an integer of 5000 digits", "3.1", b'{"blobs":' + b"9" * 5000 + b"}"),
    ("an escape without need", "3.1", b'{"blobs":"\\u0041"}'),
    ("a lone surrogate", "3.1", b'{"blobs":"\\ud800"}'),
    ("nested a million deep", "3.2", nested(1 << 20)),
    ("nested 65 deep", "3.2", nested(64)),
    ("nested 64 deep, but blobs is no list of objects", "3.3", nested(63)),
    ("byte order mark", "3.1", b"\xef\xbb\xbf{}"),
    ("commas", "3.2", b"[" + b"1," * (1 << 22) + b"1]"),
    ("brackets", "3.2", b"[{" * (1 << 21) + b"["),
    ("an array", "3.3", b"[]"),
    ("a key missing", "3.3", b'{"blobs":[],"tensors":[]}'),
]


@pytest.mark.parametrize(("clause", "text"), [t[1:] for t in TEXTS], ids=[t[0] for t in TEXTS])
def test_index_text_rules(clause: str, text: bytes) -> None:
    assert clause_of(rebuild(RAW, index=text)) == clause


def put(*path: str | int, to: object) -> Callable[[Index], None]:
    """A change that sets the value at a path of keys and positions."""

    def change(index: Index) -> None:
        at: Any = index
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return change


def drop(*path: str | int) -> Callable[[Index], None]:
    def change(index: Index) -> None:
        at: Any = index
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]

    return change


def rename(position: int, name: object) -> Callable[[Index], None]:
    return put("tensors", position, "name", to=name)


FIRST, NORM = ("tensors", 0), ("tensors", 1)
RULES: list[tuple[str, str, Callable[[Index], object]]] = [
    ("unknown top key", "3.3", put("extra", to=1)),
    ("blobs no array", "3.4", put("blobs", to={})),
    ("too many blobs", "3.4", put("blobs", to=[{}] * 1025)),
    ("blob no object", "3.4", put("blobs", 0, to=[])),
    ("blob with another key", "3.4", put("blobs", 0, "mode", to=1)),
    ("blob without offset", "3.4", drop("blobs", 0, "offset")),
    ("blob above", "3.4", put("blobs", 0, "name", to="../config.json")),
    ("blob hidden", "3.4", put("blobs", 0, "name", to=".netrc")),
    ("blob not ASCII", "3.4", put("blobs", 0, "name", to="\u00e9")),
    ("blob without name", "3.4", put("blobs", 0, "name", to="")),
    ("blob with a long name", "3.4", put("blobs", 0, "name", to="a" * 513)),
    ("blob twice", "3.4", put("blobs", 1, "name", to="config.json")),
    ("blob negative", "3.4", put("blobs", 0, "nbytes", to=-1)),
    ("blob of true bytes", "3.4", put("blobs", 0, "nbytes", to=True)),
    ("blob huge", "3.4", put("blobs", 0, "nbytes", to=(1 << 28) + 1)),
    ("blob beyond the data", "4.4", put("blobs", 0, "nbytes", to=1 << 28)),
    ("provenance no object", "3.5", put("provenance", to=[])),
    ("provenance without tool", "3.5", drop("provenance", "tool")),
    ("provenance without source", "3.5", drop("provenance", "source")),
    ("source kind", "3.5", put("provenance", "source", "kind", to=1)),
    ("source with another key", "3.5", put("provenance", "source", "host", to="h")),
    ("source file with a path", "3.5", put("provenance", "source", "files", 0, "name", to="/home/u/m")),
    ("source file without size", "3.5", drop("provenance", "source", "files", 0, "nbytes")),
    ("fewer source files than digests", "3.5", put("provenance", "source", "files", to=[])),
    ("too many tensors", "3.6", put("tensors", to=[{}] * 65537)),
    ("tensor no object", "3.6", put("tensors", 0, to=1)),
    ("tensor without name", "3.6", drop(*FIRST, "name")),
    ("tensor with an empty name", "3.6", rename(0, "")),
    ("tensor with a long name", "3.6", rename(0, "\u00e9" * 257)),
    ("tensor with a line end", "3.6", rename(0, "a\n")),
    ("tensor twice", "3.6", rename(0, "norm")),
    ("tensor with another key", "3.6", put(*FIRST, "extra", to=1)),
    ("tensor without shape", "3.6", drop(*FIRST, "shape")),
    ("source_dtype", "3.6", put(*FIRST, "source_dtype", to="F 16")),
    ("source_dtype empty", "3.6", put(*FIRST, "source_dtype", to="")),
    ("float with groups", "3.6", put(*NORM, "group_size", to=32)),
    ("int4 with a codebook", "3.6", put(*FIRST, "codebook", to=[])),
    ("unknown scheme", "3.7", put(*FIRST, "scheme", to="int3")),
    ("scheme no string", "3.7", put(*FIRST, "scheme", to=["int4"])),
    ("group size", "3.7", put(*FIRST, "group_size", to=48)),
    ("huge group size", "3.7", put(*FIRST, "group_size", to=1 << 50)),
    ("group size no number", "3.7", put(*FIRST, "group_size", to="32")),
    ("scale dtype", "3.7", put(*FIRST, "scale_dtype", to="bf16")),
    ("scale dtype no string", "3.7", put(*FIRST, "scale_dtype", to=[])),
    ("nf4 without codebook", "3.7", put(*FIRST, "scheme", to="nf4")),
    ("shape no array", "3.8", put(*FIRST, "shape", to=3)),
    ("rank", "3.8", put(*FIRST, "shape", to=[1] * 9)),
    ("negative dimension", "3.8", put(*FIRST, "shape", to=[-3, 37])),
    ("huge dimension", "3.8", put(*FIRST, "shape", to=[1 << 32, 1])),
    ("huge product", "3.8", put(*FIRST, "shape", to=[1 << 31, 1 << 31])),
    ("huge product hidden by a zero", "3.8", put(*FIRST, "shape", to=[0, 1 << 31, 1 << 31])),
    ("another shape", "3.9", put(*FIRST, "shape", to=[3, 41])),
    ("quantized vector", "3.9", put(*FIRST, "shape", to=[111])),
    ("no parts", "3.9", put(*FIRST, "parts", to=[])),
    ("too many parts", "3.9", put(*FIRST, "parts", to=[{}] * 3)),
    ("part of another kind", "3.9", put(*FIRST, "parts", 0, "kind", to="values")),
    ("part of another size", "3.9", put(*FIRST, "parts", 0, "nbytes", to=256)),
    ("part with another key", "3.9", put(*FIRST, "parts", 0, "digest", to="")),
    ("fewer parts than digests", "3.9", lambda index: index["tensors"].pop()),
    ("overlap", "4.2", put(*FIRST, "parts", 1, "offset", to=128)),
    ("hole", "4.2", put(*FIRST, "parts", 1, "offset", to=512)),
    ("huge offset", "4.2", put(*FIRST, "parts", 1, "offset", to=(1 << 53) - 64)),
    ("negative offset", "4.2", put(*FIRST, "parts", 1, "offset", to=-64)),
    ("two at one place", "4.2", put("blobs", 2, "offset", to=0)),
]


@pytest.mark.parametrize(("clause", "change"), [r[1:] for r in RULES], ids=[r[0] for r in RULES])
def test_index_rules(clause: str, change: Callable[[Index], object]) -> None:
    assert clause_of(rebuild(RAW, change)) == clause


def test_errors_name_the_tensor() -> None:
    with pytest.raises(FormatError, match="odd int4: codes: nbytes is 256, but int4/g32 of shape"):
        open_bytes(rebuild(RAW, put(*FIRST, "parts", 0, "nbytes", to=256)))
    long = put(*FIRST, "source_dtype", to="x" * 100_000)
    with pytest.raises(FormatError) as error:
        open_bytes(rebuild(RAW, long))
    assert len(str(error.value)) < 300


def test_a_tensor_far_beyond_the_file_is_refused_before_it_is_touched() -> None:
    def change(index: Index) -> None:
        last = index["tensors"][-1]
        last["shape"], last["parts"][0]["nbytes"] = [1 << 24, 1 << 24], 1 << 49

    assert clause_of(rebuild(RAW, change)) == "4.4"


def test_codebooks_other_than_the_table_are_refused() -> None:
    raw, _ = small_file({"w": (QuantScheme("nf4", 32, "f16"), (1, 8))})
    for word in ("3f800001", "3F800000", 0, "3f80000"):
        assert clause_of(rebuild(raw, put("tensors", 0, "codebook", 15, to=word))) == "3.7"
    assert clause_of(rebuild(raw, put("tensors", 0, "scheme", to="fp4"))) == "3.7"


def test_data_longer_than_its_parts_is_refused() -> None:
    raw = rebuild(RAW, data=lambda section: section.extend(bytes(64)), header={"data_nbytes": data_nbytes(RAW) + 64})
    assert clause_of(raw) == "4.4"


def data_nbytes(raw: bytes) -> int:
    return int(struct.unpack_from("<Q", raw, 40)[0])


def test_bytes_between_index_and_data() -> None:
    raw = bytearray(RAW)
    raw[4095] = 1
    assert clause_of(bytes(raw)) == "4.1"


def place(tensor: int, part: int) -> int:
    """Where a part of RAW starts in the data section."""
    (n,) = struct.unpack_from("<Q", RAW, 24)
    return int(json.loads(RAW[128 : 128 + n])["tensors"][tensor]["parts"][part]["offset"])


def poke(at: int, value: int) -> Callable[[bytearray], None]:
    def change(section: bytearray) -> None:
        assert section[at] != value
        section[at] = value

    return change


CODES, SCALES, ZERO_POINTS = place(0, 0), place(0, 1), place(2, 2)
CONTENTS: list[tuple[str, str, Callable[[bytearray], None]]] = [
    ("gap after a blob", "4.3", poke(63, 1)),
    ("gap after the last vector", "4.3", poke(place(1, 0) + 63, 1)),
    ("padding row of codes", "4.5", poke(CODES + 4 * 3, 0x89)),
    ("padding column of codes", "4.5", poke(CODES + 4 * 64 + 1, 0x78)),
    ("padding row of scales", "4.5", poke(SCALES + 2 * 3, 1)),
    ("padding row of zero points", "4.5", poke(ZERO_POINTS + 17, 1)),
    ("padding row of values", "4.5", poke(place(3, 0) + 4 * 3, 1)),
    ("padding column of values is -0.0", "4.5", poke(place(3, 0) + 64 + 3, 0x80)),
    ("infinite scale", "4.6", lambda s: s.__setitem__(slice(SCALES, SCALES + 2), b"\x00\x7c")),
    ("NaN scale", "4.6", lambda s: s.__setitem__(slice(SCALES, SCALES + 2), b"\x01\xfe")),
    ("zero point of 16", "4.6", poke(ZERO_POINTS, 16)),
]


@pytest.mark.parametrize(("clause", "change"), [c[1:] for c in CONTENTS], ids=[c[0] for c in CONTENTS])
def test_contents_are_checked_even_under_right_digests(clause: str, change: Callable[[bytearray], None]) -> None:
    """These open, for opening reads no weight; `check` finds them."""
    raw = rebuild(RAW, data=change)
    open_bytes(raw)
    assert clause_of(raw) == clause


def test_damage_of_a_part_is_reported_by_its_name() -> None:
    raw = rebuild(RAW, data=poke(CODES, RAW[4096 + CODES] ^ 1), seal=False)
    with pytest.raises(FormatError, match="odd int4: codes: its bytes do not match its digest") as error:
        open_bytes(raw).check()
    assert error.value.clause == "5.1"


def test_damage_of_a_blob_is_found_when_it_is_read() -> None:
    raw = bytearray(RAW)
    raw[4096] ^= 1
    container = open_bytes(bytes(raw))
    with pytest.raises(FormatError, match=r"blob 'config\.json' does not match its digest"):
        container.blobs["config.json"]
    assert container.blobs["chat_template.jinja"] == b"x" * 64


def test_dequantizing_a_hostile_file_raises_nothing() -> None:
    raw = rebuild(RAW, data=lambda s: s.__setitem__(slice(SCALES, SCALES + 2), b"\x00\x7c"))
    values = open_bytes(raw).dequantize("odd int4")
    assert values.shape == (3, 37)
    assert not np.isfinite(values[0, 0])


def test_small_file_has_padding_of_every_kind() -> None:
    """The cases above count on it."""
    (n,) = struct.unpack_from("<Q", RAW, 24)
    tensors = json.loads(RAW[128 : 128 + n])["tensors"]
    assert [t["scheme"] for t in tensors] == ["int4", "f16", "int4z", "bf16"]
    assert [t["shape"] for t in tensors] == [[3, 37], [5], [2, 17, 9], [3, 3]]
    assert scheme.TILE_ROWS == 16


def test_random_bits_of_a_large_file_are_found(tmp_path: Path) -> None:
    """One bit in some millions, on disk, as a failing drive would have it."""
    path = tmp_path / "large.w4"
    raw, _ = small_file({f"w{i}": (scheme.int4(128), (512, 1000)) for i in range(12)} | {"v": (scheme.F32, (4096,))})
    path.write_bytes(raw)
    assert len(raw) > 3 << 20
    rng = np.random.default_rng(0)
    with path.open("r+b") as file:
        for bit in rng.integers(0, 8 * len(raw), 150).tolist():
            at, mask = bit // 8, 1 << bit % 8
            for value in (raw[at] ^ mask, raw[at]):
                with pytest.raises(FormatError) if value != raw[at] else nullcontext():
                    file.seek(at)
                    file.write(bytes([value]))
                    file.flush()
                    with open_container(path) as container:
                        container.check()
