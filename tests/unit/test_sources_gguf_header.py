"""Crafted GGUF headers: every rule, and that no bytes lead to anything but a header or an InputError."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from helpers import make_llama_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile
from w4conv.sources import open_source
from w4conv.sources.gguf_header import GgufHeader

HUGE = 2**64 - 1


def text(value: bytes | str, *, nbytes: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if nbytes is None else nbytes) + raw


def key(name: bytes | str, type_id: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", type_id) + value


def array(type_id: int, n: int, elements: bytes) -> bytes:
    return struct.pack("<IQ", type_id, n) + elements


def info(
    name: bytes | str, dims: tuple[int, ...], type_id: int = 0, offset: int = 0, *, n_dims: int | None = None
) -> bytes:
    n = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n, *dims, type_id, offset)


def build(
    keys: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (), *, n_data: int = 0, magic=b"GGUF", version=3,
    n_tensors: int | None = None, n_keys: int | None = None, alignment: int = 32,
) -> bytes:  # fmt: skip
    counts = struct.pack(
        "<IQQ", version, len(infos) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    )
    head = magic + counts + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + bytes(n_data)


def read(tmp_path: Path, content: bytes) -> GgufHeader:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return GgufHeader(MappedFile(path))


def test_every_value_type(tmp_path):
    keys = (
        key("u8", 0, b"\xff"), key("i8", 1, b"\xff"), key("u16", 2, b"\xff\xff"), key("i16", 3, b"\xff\xff"),
        key("u32", 4, b"\xff" * 4), key("i32", 5, b"\xff" * 4), key("f32", 6, struct.pack("<f", 1.5)),
        key("bool", 7, b"\1"), key("string", 8, text("größe")),
        key("u64", 10, b"\xff" * 8), key("i64", 11, b"\xff" * 8),
        key("f64", 12, struct.pack("<d", 0.1)), key("ints", 9, array(5, 3, struct.pack("<3i", 1, -2, 3))),
        key("texts", 9, array(8, 3, text("a") + text("") + text(b"\xff"))), key("none", 9, array(8, 0, b"")),
    )  # fmt: skip
    header = read(tmp_path, build(keys))
    got = [header.integer(name) for name in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")]
    assert got == [255, -1, 65535, -1, 2**32 - 1, -1, 2**64 - 1, -1]
    assert (header.number("f32"), header.number("f64")) == (1.5, 0.1)
    assert header.flag("bool", False) is True
    assert header.text("string") == "größe"
    assert header.numbers("ints").tolist() == [1, -2, 3]
    assert header.strings("texts") == [b"a", b"", b"\xff"]
    assert (header.n_elements("texts"), header.n_elements("none"), header.n_elements("absent")) == (3, 0, 0)
    assert (header.integer("absent", 7), header.text("absent", "x"), header.flag("absent", True)) == (7, "x", True)
    for call, match in [
        (lambda: header.integer("f32"), "f32: expected an integer, got 1.5"),
        (lambda: header.integer("bool"), "bool: expected an integer, got True"),
        (lambda: header.number("u8"), "u8: expected a floating-point number, got 255"),
        (lambda: header.text("ints"), "ints: expected a string, got an array"),
        (lambda: header.integer("absent"), "absent: is missing"),
        (lambda: header.numbers("absent"), "absent: is missing"),
        (lambda: header.numbers("texts"), "texts: expected numbers, got strings"),
        (lambda: header.strings("ints"), "ints: expected strings, got numbers"),
        (lambda: header.strings("u8"), "u8: expected an array"),
    ]:
        with pytest.raises(InputError, match=match):
            call()


def test_tensor_places(tmp_path):
    infos = (info("a", (4, 3)), info("b", (32,), 8, 64), info("c", (2, 3, 5), 1, 128))
    tensors = read(tmp_path, build((), infos, n_data=128 + 60)).tensors
    start = len(build((), infos))
    assert [(t.shape, t.type_name, t.offset - start, t.nbytes) for t in tensors.values()] == [
        ((3, 4), "F32", 0, 48),
        ((32,), "Q8_0", 64, 34),
        ((5, 3, 2), "F16", 128, 60),
    ]
    wide = (key("general.alignment", 4, struct.pack("<I", 1024)),)
    infos = (info("a", (4,)), info("b", (4,), 0, 1024))
    tensors = read(tmp_path, build(wide, infos, n_data=1024 + 16, alignment=1024)).tensors
    assert [t.offset for t in tensors.values()] == [1024, 2048]


OK = (info("w", (32, 2), 2),)  # Q4_0, 36 bytes


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "starts with b''"),
        (b"GGU", "starts with b'GGU'"),
        (b"GGUF", "version needs 4 bytes at 4, 0 are left"),
        (build(magic=b"GGML"), "starts with b'GGML', not with GGUF"),
        (build(version=1), "GGUF version 1 is not supported; known are 2 and 3"),
        (build(version=4), "GGUF version 4"),
        (build(version=3 << 24), "big-endian"),
        (build()[:20], "number of metadata keys needs 8 bytes"),
        (build(n_tensors=HUGE), f"number of tensors is {HUGE}; at most"),
        (build(n_keys=HUGE), f"number of metadata keys is {HUGE}; at most"),
        (build(n_tensors=3), "number of tensors is 3; at most 0 can be here"),
        (build((key("", 0, b"\0"),)), "metadata key 0: '' is not a usable key"),
        (build((key("a\nb", 0, b"\0"),)), "is not a usable key"),
        (build((key(b"\xff", 0, b"\0"),)), "metadata key 0 is not UTF-8"),
        (build((key("k" * 70000, 0, b"\0"),)), "length of metadata key 0 is 70000; at most 65535"),
        (build((key("a", 0, b"\0"), key("a", 0, b"\0"))), "the metadata key a stands twice"),
        (build((key("a", 13, bytes(8)),)), "a: unknown value type 13"),
        (build((key("a", 7, b"\2"),)), "a: 2 is neither true nor false"),
        (build((key("a", 8, text("b", nbytes=HUGE)),)), f"length of a is {HUGE}"),
        (build((key("a", 8, text(b"\xc3\x28")),)), "a is not UTF-8"),
        (build((key("a", 9, array(9, 1, array(0, 1, b"\0"))),)), "a: arrays of value type 9 are not allowed"),
        (build((key("a", 9, array(4, HUGE, b"")),)), f"a: number of elements is {HUGE}"),
        (build((key("a", 9, array(4, 2**62, b"")),)), "a: number of elements is"),
        (build((key("a", 9, array(8, HUGE, b"")),)), f"a: number of strings is {HUGE}"),
        (build((key("a", 9, array(8, 2, text("x", nbytes=HUGE) + text("y"))),)), "a: a string starts beyond the end"),
        (build((key("a", 9, array(8, 1, text("x", nbytes=2**63))),)), "a: a string ends beyond the end"),
        (build((key("general.alignment", 4, struct.pack("<I", 0)),), OK, n_data=36), "alignment: 0 is not a power"),
        (build((key("general.alignment", 4, struct.pack("<I", 24)),), OK, n_data=36), "24 is not a power of two"),
        (build((key("general.alignment", 4, struct.pack("<I", 1 << 21)),), OK, n_data=36), "2097152 is not a power"),
        (build((key("general.alignment", 8, text("32")),), OK, n_data=36), "general.alignment: expected an integer"),
        (build((), (info("", (32,)),), n_data=128), "tensor 0: '' is not a usable name"),
        (build((), (info("n" * 64, (32,)),), n_data=128), "length of name of tensor 0 is 64; at most 63"),
        (build((), (info("w", (), n_dims=0),), n_data=128), "w: 0 dimensions, expected 1 to 4"),
        (build((), (info("w", (1,) * 5),), n_data=128), "w: 5 dimensions, expected 1 to 4"),
        (build((), (info("w", (1,), n_dims=2**32 - 1),), n_data=128), "w: 4294967295 dimensions"),
        (build((), (info("w", (0, 4)),), n_data=128), "are empty or too large"),
        (build((), (info("w", (2**63, 2**63, 2**63, 2)),), n_data=128), "are empty or too large"),
        (build((), (info("w", (2**58,)),), n_data=128), "w: needs 1152921504606846976 bytes"),
        (build((), (info("w", (32,), 4),), n_data=128), "w: unknown tensor type 4"),
        (build((), (info("w", (32,), 2**32 - 1),), n_data=128), "w: unknown tensor type 4294967295"),
        (build((), (info("w", (33,), 2),), n_data=128), r"w: rows of 33 values are not whole blocks of 32 \(Q4_0\)"),
        (build((), (info("w", (32,), 0, 32),), n_data=256), "w: expected at data offset 0, is at 32"),
        (build((), (info("v", (4,)), info("w", (4,), 0, 16)), n_data=64), "w: expected at data offset 32, is at 16"),
        (build((), (info("v", (4,)), info("w", (4,), 0, HUGE)), n_data=64), "w: expected at data offset 32"),
        (build((), (info("w", (4,)), info("w", (4,), 0, 32)), n_data=64), "the tensor w stands twice"),
        (build((), OK, n_data=35), "w: needs 36 bytes at 96, the file has 131: truncated; fetch it again"),
    ],
)  # fmt: skip
def test_each_rule_has_its_own_words(tmp_path, content, match):
    with pytest.raises(InputError, match=match):
        read(tmp_path, content)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    shape = {"layers": 1, "hidden": 32, "inner": 32, "heads": 2, "kv_heads": 1, "vocab": 260}
    return make_llama_gguf(path, qtype="Q8_0", **shape).read_bytes()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255)), max_size=4),
    st.none() | st.floats(0, 1),
)
def test_damage_gives_a_source_or_an_input_error(tmp_path, sound, changes, cut):
    content = bytearray(sound)
    for place, byte in changes:
        content[min(int(place * 9000), len(content) - 1)] = byte  # the header is about 9000 bytes
    path = tmp_path / "m.gguf"
    path.write_bytes(content[: None if cut is None else int(cut * len(content))])
    try:
        source = open_source(path)
    except InputError:
        return
    with source:
        for name, tensor in source.tensors.items():
            assert source.read(name).shape == tensor.shape


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80), st.integers(0, 3), st.integers(0, 3))
def test_any_bytes_give_a_header_or_an_input_error(tmp_path, content, n_tensors, n_keys):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + content)
    try:
        header = GgufHeader(MappedFile(path))
    except InputError:
        return
    assert len(header.tensors) == n_tensors


def test_the_header_of_the_fixture_is_where_the_damage_goes(sound, tmp_path):
    header = read(tmp_path, sound)
    assert 5000 < min(t.offset for t in header.tensors.values()) < 12000
