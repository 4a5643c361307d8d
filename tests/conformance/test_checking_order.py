"""What both readers report of several faults (w4-container 7.6), of values of another type, and next to the caps."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vectors
from c_reader import COMPILERS, ROOT, compile_c, verdicts
from test_c_reader import code, python_verdict

sys.path.append(str(vectors.FOLDER))
from writer import File, count_marks, make, put_together, spell, tensor

Change = Callable[[File, dict[str, Any]], object]
BLOBS = {"config.json": b"{}", "b": b""}


def base() -> File:
    """Sound; the integers that are 0 and 1 stand where false and true may be put for them."""
    tensors = [tensor("w", (3, 37), "int4z", 0), tensor("x", (2, 5), "int8", 32), tensor("y", (1, 0), "nf4", 32)]
    return make([*tensors, tensor("z", (5,), "f16")], BLOBS)


def _header(**fields: int) -> Change:
    return lambda file, given: given.setdefault("header", {}).update(fields)


def _given(**more: Any) -> Change:
    return lambda file, given: given.update(more)


def _text(change: Callable[[bytes], bytes]) -> Change:
    return lambda file, given: given.setdefault("text", []).append(change)


def _put(*path: str | int, to: object) -> Change:
    def change(file: File, _: dict[str, Any]) -> None:
        at: Any = file.index
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return change


def _drop(*path: str | int) -> Change:
    def change(file: File, _: dict[str, Any]) -> None:
        at: Any = file.index
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]

    return change


def _set(at: int, to: bytes) -> Change:
    def change(file: File, _: dict[str, Any]) -> None:
        file.section[at : at + len(to)] = to

    return change


def _bad_digest(part: int) -> Change:
    return _given(part_digests=lambda digests: digests.__setitem__(part, bytes(32)))


def _spoil_gap(gap: bytearray) -> None:
    gap[-1] = 1


def _lengthen(file: File, _: dict[str, Any]) -> None:
    file.section.extend(bytes(64))


def places() -> list[int]:
    return [offset for offset, _ in base().places]


W, X, Z = ("tensors", 0), ("tensors", 1), ("tensors", 3)
_W_CODES, _W_SCALES, _W_ZEROS, _X_CODES = places()[2:6]

# (clause, change) in the order of 7.6; any two that do not undo one another may be in one file.
OPENING: list[tuple[str, Change]] = [
    ("2.3", _header(minor=7)),
    ("2.12", _given(header_digest=b"\1" * 32)),
    ("2.4", _header(header_nbytes=64)),
    ("2.6", _header(index_nbytes=2**25 + 1)),
    ("2.7", _header(data_offset=64)),
    ("2.8", _header(data_nbytes=1)),
    ("2.9", _header(n_sources=2**16 + 1)),
    ("2.10", _header(reserved=1)),
    ("2.5", _header(file_nbytes=0)),
    ("2.11", _given(index_digest=b"\2" * 32)),
    ("3.2", _text(lambda text: text + b"]" * 9 + b"[" * 75)),
    ("3.1", _text(lambda text: text.replace(b":", b": ", 1))),
    ("3.3", _put("more", to=1)),
    ("3.4", _put("blobs", 0, "nbytes", to="2")),
    ("4.2", _put("blobs", 0, "offset", to=False)),
    ("3.4", _put("blobs", 1, "name", to="config.json")),
    ("3.5", _put("provenance", "source", "kind", to=1)),
    ("3.7", _drop(*W, "scale_dtype")),
    ("3.6", _put(*W, "codebook", to=[])),
    ("3.8", _put(*W, "shape", to=[3, True])),
    ("3.9", _put(*W, "parts", 0, "kind", to="values")),
    ("4.2", _put(*W, "parts", 0, "offset", to=0)),
    ("3.9", _drop(*W, "parts", 1, "nbytes")),
    ("3.6", _put(*X, "name", to="w")),
    ("3.7", _put(*X, "group_size", to=True)),
    ("3.6", _put(*X, "source_dtype", to="")),
    ("3.8", _put(*X, "shape", to=[2**32, 1])),
    ("4.2", _put(*X, "parts", 1, "offset", to=-64)),
    ("3.6", _put(*Z, "extra", to=1)),
    ("4.4", _lengthen),
    ("4.1", _given(gap=_spoil_gap)),
    ("5.3", _given(conversion_digest=b"\3" * 32)),
]
VERIFYING: list[tuple[str, Change]] = [
    ("4.3", _set(2, b"\1")),
    ("4.5", _set(_W_CODES + 4 * 3, b"\0")),
    ("5.1", _bad_digest(3)),
    ("4.3", _set(_W_SCALES + 32, b"\1")),
    ("4.6", _set(_W_SCALES + 2, b"\0\xfc")),
    ("4.5", _set(_W_SCALES + 2 * 3, b"\1")),
    ("4.6", _set(_W_ZEROS + 15, b"\x10")),
    ("4.5", _set(_W_ZEROS + 9, b"\1")),
    ("4.5", _set(_X_CODES + 4 * 2, b"\1")),
]  # fmt: skip


def with_faults(*changes: Change) -> bytes:
    file, given = base(), {}
    for change in changes:
        change(file, given)
    text = spell(file.index)
    for edit in given.pop("text", []):
        text = edit(text)
    return put_together(file, text=text, **given)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    if not COMPILERS:
        return None
    out = tmp_path_factory.mktemp("c") / "driver"
    return compile_c(ROOT / "tests/conformance/c/w4_driver.c", out, compiler=COMPILERS[0])


def reported(driver: Path | None, files: list[bytes]) -> Iterator[tuple[int, int]]:
    """(error of opening, of verifying), on which both readers agree."""
    theirs = verdicts(driver, files) if driver else [None] * len(files)
    for raw, other in zip(files, theirs, strict=True):
        ours = python_verdict(raw)
        assert other is None or (ours.opened, ours.verified) == (other.opened, other.verified)
        yield ours.opened, ours.verified


@pytest.mark.parametrize("faults", [OPENING, VERIFYING], ids=["opening", "verifying"])
def test_each_two_faults(faults: list[tuple[str, Change]], driver: Path | None) -> None:
    singles = list(reported(driver, [with_faults(change) for _, change in faults]))
    expected = [(code(clause), 0) if faults is OPENING else (0, code(clause)) for clause, _ in faults]
    assert singles == expected
    pairs = list(itertools.combinations(range(len(faults)), 2))
    found = reported(driver, [with_faults(faults[i][1], faults[k][1]) for i, k in pairs])
    wrong = [(faults[i][0], faults[k][0], got) for (i, k), got in zip(pairs, found, strict=True) if got != expected[i]]
    assert not wrong


def test_opening_comes_before_verifying(driver: Path | None) -> None:
    files = [with_faults(late, early) for _, early in OPENING for _, late in VERIFYING[:2]]
    assert [got[0] for got in reported(driver, files)] == [code(c) for c, _ in OPENING for _ in VERIFYING[:2]]


INTEGERS = [
    (("blobs", 0, "offset"), "4.2"),
    (("blobs", 1, "nbytes"), "3.4"),
    (("provenance", "source", "files", 0, "nbytes"), "3.5"),
    ((*W, "group_size"), "3.7"),
    ((*X, "group_size"), "3.7"),
    (("tensors", 2, "shape", 0), "3.8"),
    (("tensors", 2, "shape", 1), "3.8"),
    (("tensors", 2, "parts", 0, "nbytes"), "3.9"),
    ((*W, "parts", 0, "offset"), "4.2"),
    ((*W, "parts", 1, "nbytes"), "3.9"),
]


@pytest.mark.parametrize(("path", "clause"), INTEGERS, ids=lambda p: "/".join(map(str, p)) if isinstance(p, tuple) else p)  # fmt: skip  # noqa: E501 - one line says it best
def test_nothing_else_is_an_integer(path: tuple[str | int, ...], clause: str, driver: Path | None) -> None:
    others: list[object] = [False, True, "", "0", "1", [], [0], {}, {"0": 0}, -1]
    assert set(reported(driver, [with_faults(_put(*path, to=other)) for other in others])) == {(code(clause), 0)}
    found = reported(driver, [with_faults(_put(*path, to=other)) for other in (None, 0.0, 1.0, 0.5, 2**53)])
    assert set(found) == {(301, 0)}
    marked = 123_456_789
    spellings = [b"-0", b"1e2", b"1E2", b"00", b"0x0", b"+0", b"0.", b"1e0", b"True", b"NaN"]
    edits = [_text(lambda text, s=s: text.replace(b"%d" % marked, s)) for s in spellings]
    assert set(reported(driver, [with_faults(_put(*path, to=marked), edit) for edit in edits])) == {(301, 0)}


@pytest.mark.parametrize("mark", [b",", b"[", b"{"])
def test_the_caps_are_exact(mark: bytes, driver: Path | None) -> None:
    """2^22 marks and 64 levels pass; one more of either does not."""

    def filled(n: int) -> bytes:
        file = make(blobs=BLOBS)
        file.index["provenance"]["fill"] = ""
        file.index["provenance"]["fill"] = (mark * (n - count_marks(spell(file.index)))).decode()
        assert count_marks(spell(file.index)) == n
        return put_together(file)

    assert list(reported(driver, [filled(2**22), filled(2**22 + 1)])) == [(0, 0), (302, 0)]


@pytest.mark.parametrize("kind", [list, dict])
def test_the_depth_is_exact(kind: type, driver: Path | None) -> None:
    def nested(depth: int) -> bytes:
        value: Any = kind()
        for _ in range(depth - 3):
            value = [value] if kind is list else {'"\\][{': value}
        file = base()
        file.index["provenance"]["deep"] = value
        return put_together(file)

    assert list(reported(driver, [nested(64), nested(65), nested(300)])) == [(0, 0), (302, 0), (302, 0)]
