"""Write and read `.w4` files: what goes in comes out, whatever the way."""

from __future__ import annotations

import io
import json
import os
import stat
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from w4files import (
    ALL_SCHEMES,
    BLOBS,
    PROVENANCE,
    SCHEMES_OF_1_1,
    SMALL_TENSORS,
    as_bytes,
    open_bytes,
    random_parts,
    small_file,
    small_plan,
    write,
)

from w4conv import codes, scheme
from w4conv.container import Writer, open_container, read_header
from w4conv.errors import FormatError, InputError
from w4conv.scheme import QuantScheme

SHAPES: list[tuple[int, ...]] = [(1, 1), (17, 33), (2, 5, 9), (16, 128), (0, 7), (7, 0), (3, 0, 2)]
TENSORS = {f"{s!r} {shape}": (s, shape) for s in (*ALL_SCHEMES, *SCHEMES_OF_1_1) for shape in SHAPES} | {
    f"{s} {shape}": (s, shape) for s in (scheme.F16, scheme.BF16, scheme.F32) for shape in [(), (0,), (1,), (37,)]
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.w4"
    path.write_bytes(small_file()[0])
    return path


def test_every_scheme_and_shape_comes_back(tmp_path: Path) -> None:
    raw, parts = small_file(TENSORS)
    (tmp_path / "all.w4").write_bytes(raw)
    with open_container(tmp_path / "all.w4") as container:
        container.check()
        assert list(container.tensors) == list(TENSORS)
        for name, (coding, shape) in TENSORS.items():
            info = container.tensors[name]
            assert (info.name, info.scheme, info.shape, info.source_dtype) == (name, coding, shape, "F32")
            assert {p.kind: p.nbytes for p in info.parts} == codes.part_sizes(coding, shape)
            assert info.nbytes == sum(len(p) for p in parts[name].values())
            for part in info.parts:
                assert part.offset % 64 == 0
                assert container.part(name, part.kind).tobytes() == parts[name][part.kind].tobytes()
            expected = codes.dequantize(coding, shape, parts[name])
            assert np.array_equal(container.dequantize(name), expected)


def test_the_container_says_what_it_holds(small: Path) -> None:
    with open_container(str(small)) as container:
        assert container.path == small
        assert container.file_nbytes == small.stat().st_size
        assert dict(container.blobs) == BLOBS
        assert "absent" not in container.blobs
        assert container.provenance == PROVENANCE
        assert container.source_digests == ("00" * 32,)
        assert container.digest == small.read_bytes()[-32:].hex()
        with pytest.raises(KeyError, match="has no scales; it has values"):
            container.part("norm", "scales")
        with pytest.raises(KeyError):
            container.dequantize("absent")


def test_views_are_in_place_read_only_and_outlive_the_container(small: Path) -> None:
    container = open_container(small)
    view = container.part("odd int4", "codes")
    copy = view.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0
    container.close()
    container.close()
    assert view.tobytes() == copy
    with pytest.raises(ValueError, match="is closed"):
        container.part("odd int4", "codes")


def test_bytes_do_not_depend_on_the_size_of_blocks() -> None:
    raw, parts = small_file()
    for block in (1, 7, 64, 1000):
        assert write(small_plan(SMALL_TENSORS), parts, block) == raw


def test_a_stream_that_cannot_seek_gets_the_same_bytes() -> None:
    raw, parts = small_file()
    reading, writing = os.pipe()
    received: list[bytes] = []

    def receive() -> None:
        with os.fdopen(reading, "rb") as stream:
            received.append(stream.read())

    thread = threading.Thread(target=receive)
    thread.start()
    with os.fdopen(writing, "wb", buffering=0) as stream:
        layout = small_plan(SMALL_TENSORS)
        writer = Writer(stream, layout)
        for name, part in layout.parts():
            writer.write(name, part.kind, parts[name][part.kind])
        writer.finish([bytes(32)])
    thread.join()
    assert received == [raw]


def test_the_trailer_holds_the_digests_of_all_parts() -> None:
    raw, parts = small_file()
    blobs = [blake3(data).digest() for data in BLOBS.values()]
    tensors = [blake3(p.tobytes()).digest() for t in parts.values() for p in t.values()]
    digests = b"".join([*blobs, *tensors, bytes(32)])
    assert raw.endswith(digests + blake3(raw[96:128] + digests).digest())


def test_a_file_without_anything() -> None:
    provenance = {"tool": "t", "source": {"kind": "none", "files": []}}
    raw = write(small_plan({}, {}, provenance), {})
    assert len(raw) == 4096 + 32
    with open_bytes(raw) as container:
        container.check()
        assert not container.tensors
        assert not container.blobs


def test_names_and_notes_may_be_in_any_script() -> None:
    notes = ['ein "Wort" \\ \u2028 \n\x01 \x7f', "重み", "\U0001f40d"]
    tensors = {"слой.0": (scheme.F32, (1,)), "größe": (scheme.F32, (2,))}
    parts = {name: random_parts(*t) for name, t in tensors.items()}
    raw = write(small_plan(tensors, {}, PROVENANCE | {"notes": notes}), parts)
    assert "重み".encode() in raw
    container = open_bytes(raw)
    assert container.provenance["notes"] == notes
    assert list(container.tensors) == list(tensors)


# Writing


def test_the_writer_refuses_parts_out_of_turn() -> None:
    layout = small_plan({"a": (scheme.F32, (2,)), "b": (scheme.F32, (1,))})
    writer = Writer(io.BytesIO(), layout)
    with pytest.raises(ValueError, match="b values was written while a values is due"):
        writer.write("b", "values", b"1234")
    writer.write("a", "values", b"1234")
    with pytest.raises(ValueError, match="a values: 1 bytes too many"):
        writer.write("a", "values", b"12345")
    with pytest.raises(ValueError, match="a values: 4 bytes are missing"):
        writer.finish([bytes(32)])
    writer.write("a", "values", b"1234")
    with pytest.raises(ValueError, match="b values: 4 bytes are missing"):
        writer.finish([bytes(32)])
    writer.write("b", "values", b"1234")
    with pytest.raises(ValueError, match="while the end is due"):
        writer.write("b", "values", b"1234")
    with pytest.raises(ValueError, match="0 source digests, the layout has 1"):
        writer.finish([])


@pytest.mark.parametrize(
    ("tensors", "blobs", "clause"),
    [
        ({"": (scheme.F32, ())}, {}, "3.6"),
        ({"a\n": (scheme.F32, ())}, {}, "3.6"),
        ({"a": (scheme.F32, (1,) * 9)}, {}, "3.8"),
        ({"a": (scheme.F32, (1 << 32,))}, {}, "3.8"),
        ({}, {"../x": b""}, "3.4"),
        ({}, {".hidden": b""}, "3.4"),
    ],
)
def test_what_a_reader_refuses_cannot_be_planned(tensors: Any, blobs: dict[str, bytes], clause: str) -> None:
    with pytest.raises(FormatError) as error:
        small_plan(tensors, blobs)
    assert error.value.clause == clause


def test_a_quantized_vector_cannot_be_planned() -> None:
    with pytest.raises(ValueError, match="no rows and columns"):
        small_plan({"a": (scheme.int4(), (8,))})


# Reading a stream


class Trickle(io.RawIOBase):
    """A pipe that gives a few bytes at a time and remembers how many."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self.taken = raw, 0

    def readable(self) -> bool:
        return True

    def read(self, n: int = -1) -> bytes:
        assert n >= 0, "the reader asked for everything"
        block = self._raw[self.taken : self.taken + min(n, 100)]
        self.taken += len(block)
        return block


def test_the_header_is_read_from_a_pipe_no_further_than_the_last_blob() -> None:
    raw, _ = small_file()
    stream = Trickle(raw)
    header = read_header(stream)  # type: ignore[arg-type]  # a BinaryIO but for methods that nobody calls
    container = open_bytes(raw)
    assert header.blobs == BLOBS
    assert header.tensors == container.tensors
    assert header.provenance == PROVENANCE
    assert header.file_nbytes == len(raw)
    assert stream.taken == 4096 + 64 + 64  # config.json, then 64 bytes of chat template


def test_a_pipe_that_ends_early_is_an_error() -> None:
    raw, _ = small_file()
    for n in range(4096 + 64 + 64):
        with pytest.raises(FormatError):
            read_header(io.BytesIO(raw[:n]))


def test_a_pipe_with_bytes_in_its_gaps_is_an_error() -> None:
    raw = bytearray(small_file()[0])
    for at, clause in ((4095, "4.1"), (4096 + 63, "4.3")):
        changed = raw.copy()
        changed[at] = 1
        with pytest.raises(FormatError) as error:
            read_header(io.BytesIO(changed))
        assert error.value.clause == clause


# Files that are no containers


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the file is empty"),
        (b"\x89W4C\r", "ends inside the signature: 5 bytes"),
        (b"\x89W4C\r\n\x1a\n" + bytes(10), "ends inside the header: 18 bytes of 128"),
        (b"\x89W4C\n\x1a\n" + bytes(200), "transferred as text"),
        (b"GGUF" + bytes(200), "not a .w4 file: it starts with 47 47 55 46"),
    ],
)
def test_other_files_are_recognised(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "other.w4"
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=message) as error:
        open_container(path)
    assert str(path) in str(error.value)


def test_paths_that_cannot_be_opened(tmp_path: Path, small: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        open_container(tmp_path / "absent.w4")
    with pytest.raises(InputError, match="a directory"):
        open_container(tmp_path)
    with pytest.raises(FormatError, match="/dev/null: the file is empty"):
        open_container("/dev/null")
    with pytest.raises(FormatError, match=r"/dev/zero: not a .w4 file"):
        open_container("/dev/zero")


@pytest.mark.parametrize(("major", "minor"), [(2, 0), (0, 0), (1, 2), (513, 0)])
def test_other_versions_are_refused_by_name(small: Path, major: int, minor: int) -> None:
    raw = bytearray(small.read_bytes())
    struct.pack_into("<HH", raw, 8, major, minor)  # digests are left wrong: the version is looked at first
    small.write_bytes(raw)
    with pytest.raises(FormatError, match=rf"version {major}\.{minor}, but this w4conv reads 1\.1") as error:
        open_container(small)
    assert error.value.clause == "2.3"


def test_a_file_of_another_size_says_both_sizes(small: Path) -> None:
    n = small.stat().st_size
    with small.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(FormatError, match=f"has {n + 1:,} bytes, its header says {n:,}: it was appended to") as error:
        open_container(small)
    assert error.value.clause == "2.5"
    os.truncate(small, n - 1)
    with pytest.raises(FormatError, match=f"has {n - 1:,} bytes, its header says {n:,}: it was cut short"):
        open_container(small)


def test_opening_leaves_the_file_alone(small: Path) -> None:
    small.chmod(stat.S_IRUSR)
    before = small.read_bytes()
    with open_container(small) as container:
        container.check()
    assert small.read_bytes() == before


def test_check_reports_progress(small: Path) -> None:
    total: list[int] = []
    seen: list[tuple[int, str]] = []

    class Recorder:
        def start(self, total_nbytes: int) -> None:
            total.append(total_nbytes)

        def advance(self, nbytes: int, name: str) -> None:
            seen.append((nbytes, name))

    with open_container(small) as container:
        container.check(Recorder())
        names = [f"blob {name}" for name in BLOBS]
        names += [f"{t.name}: {p.kind}" for t in container.tensors.values() for p in t.parts]
    assert [name for _, name in seen] == names
    assert total == [sum(n for n, _ in seen)]


def test_index_is_canonical_json() -> None:
    raw, _ = small_file()
    (n,) = struct.unpack_from("<Q", raw, 24)
    text = raw[128 : 128 + n].decode()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert list(json.loads(text)) == ["blobs", "provenance", "tensors"]


def test_codebooks_travel_in_the_index() -> None:
    raw, _ = small_file({"w": (QuantScheme("nf4", 64, "f16"), (2, 2))})
    (n,) = struct.unpack_from("<Q", raw, 24)
    (tensor,) = json.loads(raw[128 : 128 + n])["tensors"]
    words = np.array([int(word, 16) for word in tensor["codebook"]], np.uint32)
    assert as_bytes(words).tobytes() == codes.CODEBOOKS["nf4"].tobytes()


@pytest.mark.parametrize(("codings", "minor"), [(ALL_SCHEMES, 0), *(([s], 1) for s in SCHEMES_OF_1_1)])
def test_a_file_says_the_lowest_version_that_can_hold_it(codings: list[QuantScheme], minor: int) -> None:
    tensors = {f"{i}": (coding, (2, 40)) for i, coding in enumerate([QuantScheme("f16"), *codings])}
    raw, _ = small_file(tensors)
    assert struct.unpack_from("<HH", raw, 8) == (1, minor)


@pytest.mark.parametrize("coding", [*ALL_SCHEMES, *SCHEMES_OF_1_1], ids=repr)
@pytest.mark.parametrize("shape", [(37, 9), (0, 9), (9, 0), (32, 8)], ids=str)
def test_rows_are_those_of_the_whole(coding: QuantScheme, shape: tuple[int, ...]) -> None:
    container = open_bytes(small_file({"w": (coding, shape)})[0])
    whole = container.dequantize("w")
    for start, stop in [(0, 0), (0, 37), (16, 32), (3, 5), (15, 17), (32, None), (36, 100), (20, 10), (-3, None)]:
        rows = slice(start, stop)
        assert np.array_equal(container.dequantize("w", rows), whole[rows]), rows
    with pytest.raises(ValueError, match="has a step"):
        container.dequantize("w", slice(0, 8, 2))


def test_rows_of_vectors_and_stacks() -> None:
    container = open_bytes(small_file()[0])
    for name in ("norm", "zero points"):
        assert np.array_equal(container.dequantize(name, slice(1, 3)), container.dequantize(name)[1:3])
