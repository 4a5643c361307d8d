"""The safetensors header parser against the safetensors package: strict where it is, never looser."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile
from w4conv.sources.safetensors import read_header


def write(path: Path, header: str | bytes, data: bytes = b"", *, length: int | None = None) -> MappedFile:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return MappedFile(path)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_}
names = st.text(st.characters(categories=["L", "N"], include_characters="._-"), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)
arrays = st.tuples(st.sampled_from(sorted(NUMPY_DTYPES)), st.lists(st.integers(0, 5), max_size=4))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, arrays, max_size=8))
def test_reads_what_the_package_writes(tmp_path, tensors):
    rng = np.random.default_rng(0)
    expected = {n: rng.integers(0, 2, shape).astype(NUMPY_DTYPES[dtype]) for n, (dtype, shape) in tensors.items()}
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(expected))
    file = MappedFile(path)
    found = read_header(file)
    assert set(found) == set(expected)
    for name, place in found.items():
        assert place.dtype == tensors[name][0]
        assert place.shape == expected[name].shape
        assert file.view(place.offset, place.nbytes).tobytes() == expected[name].tobytes()


numbers = st.one_of(st.integers(-2, 12), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 1.0, True, None, "8"]))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "U8", "F4", "Q4", "", 7]),
        "shape": st.one_of(st.lists(numbers, max_size=3), st.just(4)),
        "data_offsets": st.one_of(st.lists(numbers, min_size=2, max_size=2), st.lists(numbers, max_size=3)),
    },
    optional={"other": st.just(1)},
)
plausible = st.lists(
    st.tuples(st.sampled_from(["F16", "U8", "F32"]), st.integers(0, 4), st.integers(-1, 1)), max_size=4
)


def chained(items) -> dict:
    """Mostly contiguous entries; a gap of -1 or 1 now and then breaks them."""
    header, at = {}, 0
    for i, (dtype, n, gap) in enumerate(items):
        at = max(0, at + (gap if i % 3 == 2 else 0))
        end = at + n * {"F16": 2, "U8": 1, "F32": 4}[dtype]
        header[f"t{i}"] = entry(dtype, [n], [at, end])
        at = end
    return header


headers = st.one_of(st.dictionaries(names, entries, max_size=4), plausible.map(chained))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers, st.integers(0, 40), st.binary(max_size=3))
def test_accepts_only_what_the_package_accepts(tmp_path, header, n_data, behind):
    path = tmp_path / "x.safetensors"
    file = write(path, json.dumps(header).encode() + behind.replace(b"\0", b" "), bytes(n_data))
    try:
        found = read_header(file)
    except InputError:
        return
    listed = dict(deserialize(path.read_bytes()))
    assert set(found) == set(listed)
    for name, place in found.items():
        assert list(place.shape) == listed[name]["shape"]
        assert file.view(place.offset, place.nbytes).tobytes() == bytes(listed[name]["data"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plausible.map(lambda items: chained([(d, n, 0) for d, n, _ in items])))
def test_accepts_every_contiguous_file(tmp_path, header):
    total = max((e["data_offsets"][1] for e in header.values()), default=0)
    path = tmp_path / "x.safetensors"
    assert set(read_header(write(path, json.dumps(header), bytes(total)))) == set(dict(deserialize(path.read_bytes())))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=64))
def test_any_bytes_give_a_header_or_an_input_error(tmp_path, content):
    path = tmp_path / "x.safetensors"
    for data in (content, len(content).to_bytes(8, "little") + content):
        path.write_bytes(data)
        with contextlib.suppress(InputError):
            read_header(MappedFile(path))


def test_worked_example(tmp_path):
    text = '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert len(text) == 54
    found = read_header(write(tmp_path / "x", text + "  ", bytes(8)))
    assert (found["w"].offset, found["w"].nbytes, found["w"].shape) == (64, 8, (2,))


@pytest.mark.parametrize(
    ("header", "n_data", "match"),
    [
        ({"w": entry()}, 7, "truncated; download it again"),
        ({"w": entry()}, 9, "1 bytes behind the last tensor"),
        ({"w": entry(offsets=(1, 9))}, 9, "w: expected at data offset 0, is at 1: a hole before it"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "b: .*overlaps another tensor"),
        ({"w": entry(shape=(3,))}, 8, r"w: F32 \[3\] takes 12 bytes, data_offsets hold 8"),
        ({"w": entry(shape=(2**62, 4), offsets=(0, 0))}, 0, "too large"),
        ({"w": entry(shape=(2**62, 2**62, 0), offsets=(0, 0))}, 0, "too large"),
        ({"w": entry(shape=(-1,))}, 8, "shape: -1 is not a 63-bit natural number"),
        ({"w": entry(shape=(True,))}, 8, "shape: True is not"),
        ({"w": entry(shape=(1,) * 17)}, 4, "rank 17 is over 16"),
        ({"w": entry(offsets=(8, 0))}, 8, r"data_offsets \[8, 0\] is not \[begin, end\]"),
        ({"w": entry(dtype="F12")}, 8, "unknown dtype 'F12'"),
        ({"w": {"dtype": "F32"}}, 8, "expected exactly dtype, shape and data_offsets"),
        ({"w": 3}, 8, "expected exactly dtype"),
        ({"": entry()}, 8, "not a usable tensor name"),
        ({"a\nb": entry()}, 8, "not a usable tensor name"),
        ({"n" * 2000: entry()}, 8, "not a usable tensor name"),
        ({"\ud800": entry()}, 8, "not a usable tensor name"),
        ({"__metadata__": {"format": 1}}, 0, "__metadata__ is not an object of strings"),
    ],
)
def test_each_rule_has_its_own_words(tmp_path, header, n_data, match):
    with pytest.raises(InputError, match=match):
        read_header(write(tmp_path / "x", json.dumps(header), bytes(n_data)))


def test_header_text_rules(tmp_path):
    good = json.dumps({"w": entry()})
    cases = [
        (write(tmp_path / "a", " " + good, bytes(8)), "does not start with"),
        (write(tmp_path / "b", good, bytes(8), length=2**40), "is over 100000000"),
        (
            write(tmp_path / "c", good, bytes(8), length=90_000_000),
            "the header needs 90000000 bytes, .* are left: truncated",
        ),
        (write(tmp_path / "d", good[:-1] + f', "w": {json.dumps(entry())}}}', bytes(8)), "the key 'w' stands twice"),
        (write(tmp_path / "e", b'{"\xff": 1}'), "not UTF-8"),
        (write(tmp_path / "f", '{"w": NaN}'), "NaN is not a JSON value"),
        (write(tmp_path / "g", '{"w": ' + "[" * 100_000), "nested too deeply"),
        (write(tmp_path / "h", '{"w": [' + "[]," * 9_000_000), "more than 8000000 JSON values"),
    ]
    for file, match in cases:
        with pytest.raises(InputError, match=match):
            read_header(file)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(InputError, match="0 bytes; a safetensors file starts with an 8-byte header length"):
        read_header(MappedFile(tmp_path / "empty"))


def test_duplicate_names_hide_data_from_the_package(tmp_path):
    """Why repeated keys are refused: the package keeps one and never mentions the other."""
    text = f'{{"w": {json.dumps(entry(shape=(1,), offsets=(0, 4)))}, "w": {json.dumps(entry())}}}'
    path = tmp_path / "x"
    file = write(path, text, bytes(8))
    with contextlib.suppress(SafetensorError):  # a later version of the package may refuse it as well
        assert [name for name, _ in deserialize(path.read_bytes())] == ["w"]
    with pytest.raises(InputError, match="stands twice"):
        read_header(file)
