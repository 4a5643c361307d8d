"""The Python reader on the vectors, and the vectors on the specification."""

from __future__ import annotations

import ast
import io
import re
import runpy
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vectors
from blake3 import blake3
from jsonschema import Draft202012Validator
from w4files import random_parts, small_plan, write

from w4conv import codes, scheme
from w4conv.container import open_container, read_header
from w4conv.errors import FormatError
from w4conv.scheme import QuantScheme

ROOT = Path(__file__).parents[2]
TEXTS = {name: (vectors.FORMATS / f"{name}.md").read_text() for name in ("w4-container", "w4-codes")}


def on_disk(entry: dict[str, Any], folder: Path) -> Path:
    path = folder / "vector.w4"
    path.write_bytes(vectors.raw(entry))
    return path


def musts() -> set[str]:
    """Every MUST of the texts, as text clause/number within the clause; 1.2 only defines the word."""
    found = set()
    for text, content in TEXTS.items():
        clauses = re.split(r"^\*\*(\d+\.\d+)\*\* ", content, flags=re.MULTILINE)
        for clause, body in zip(clauses[1::2], clauses[2::2], strict=True):
            n = len(re.findall(r"\bMUST\b", body)) if (text, clause) != ("w4-container", "1.2") else 0
            found |= {f"{text} {clause}/{i + 1}" for i in range(n)}
    return found


def test_every_must_has_a_vector_or_a_test() -> None:
    broken = {must for entry in vectors.FAULTY for must in entry["breaks"]}
    bound = vectors.MANIFEST["obligations"]
    assert musts() == broken | bound.keys()
    assert not broken & bound.keys()
    for where in bound.values():
        file, _, test = where.partition("::")
        functions = {f.name for f in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(f, ast.FunctionDef)}
        assert test in functions, where


def test_the_script_makes_the_same_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(vectors.FOLDER))
    monkeypatch.setattr(sys, "argv", ["make.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(vectors.FOLDER / "make.py"), run_name="__main__")
    assert end.value.code == 0, capsys.readouterr().out


@pytest.mark.parametrize("entry", vectors.SOUND + vectors.FAULTY, ids=vectors.name)
def test_the_manifest_describes_the_files(entry: dict[str, Any]) -> None:
    raw = vectors.raw(entry)
    assert (len(raw), blake3(raw).hexdigest()) == (entry["nbytes"], entry["blake3"])


def check_sound(entry: dict[str, Any], folder: Path) -> None:
    with open_container(on_disk(entry, folder)) as container:
        container.check()
        assert container.digest == entry["conversion_digest"]
        assert list(container.tensors) == [t["name"] for t in entry["tensors"]]
        for t in entry["tensors"]:
            info = container.tensors[t["name"]]
            assert (list(info.shape), info.scheme.kind) == (t["shape"], t["scheme"])
            values = container.dequantize(t["name"])
            assert list(values.shape) == t["shape"]
            assert blake3(values.astype("<f4").tobytes()).hexdigest() == t["values_blake3"], t["name"]


@pytest.mark.parametrize("entry", vectors.MANIFEST["valid"], ids=vectors.name)
def test_valid_files(entry: dict[str, Any], tmp_path: Path) -> None:
    check_sound(entry, tmp_path)


@pytest.mark.parametrize("entry", vectors.MANIFEST["compat"], ids=vectors.name)
def test_released_files_are_read(entry: dict[str, Any], tmp_path: Path) -> None:
    check_sound(entry, tmp_path)


@pytest.mark.parametrize("entry", vectors.FAULTY, ids=vectors.name)
def test_invalid_files(entry: dict[str, Any], tmp_path: Path) -> None:
    path = on_disk(entry, tmp_path)
    if entry["found_by"] == "verify":
        with open_container(path) as container, pytest.raises(FormatError) as error:
            container.check()
    else:
        with pytest.raises(FormatError) as error:
            open_container(path)
    assert error.value.clause == entry["clause"], error.value
    assert str(path) in str(error.value)


def stream_fault(raw: bytes) -> str | None:
    """The clause that reading a file as a stream reports, or None."""
    try:
        read_header(io.BytesIO(raw))
    except FormatError as error:
        return error.clause
    return None


@pytest.mark.parametrize("entry", vectors.SOUND + vectors.FAULTY, ids=vectors.name)
def test_streams(entry: dict[str, Any]) -> None:
    """From a stream the header, index and blobs are judged alike; size, trailer and weights cannot be (7.3)."""
    beyond = ("2.5-cut-by-a-byte", "2.5-cut-in-data", "2.5-byte-appended", "2.5-then-index-digest")
    found, expected = stream_fault(vectors.raw(entry)), entry.get("clause")
    if expected and (entry["found_by"] == "verify" or expected == "5.3" or vectors.name(entry).endswith(beyond)):
        assert found in (None, *(must.split()[1].partition("/")[0] for must in entry["breaks"]))
    else:
        assert found == expected


def test_refusing_takes_little_memory(tmp_path: Path) -> None:
    """Whatever sizes and counts a file claims, a reader allocates in proportion to the file."""
    paths = []
    for i, entry in enumerate(e for e in vectors.FAULTY if e["nbytes"] < 1 << 16):
        paths.append(tmp_path / f"{i}.w4")
        paths[-1].write_bytes(vectors.raw(entry))
    tracemalloc.start()
    try:
        for path in paths:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(FormatError):  # noqa: PT012 - either line may raise
                container = open_container(path)
                container.check()
            assert tracemalloc.get_traced_memory()[1] - before < 4 << 20, path
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("entry", vectors.SOUND, ids=vectors.name)
def test_the_schema_accepts_every_valid_index(entry: dict[str, Any]) -> None:
    schema = vectors.json.loads((vectors.FORMATS / "w4-index.schema.json").read_text())
    Draft202012Validator(schema).validate(vectors.index_of(vectors.raw(entry)))


@pytest.mark.parametrize("kind", list(scheme.KINDS))
def test_padding_changes_no_value(kind: str, tmp_path: Path) -> None:
    """A reader that has not verified gives the same values for any padding rows and columns."""
    coding = scheme.scheme_of(kind, 32)
    shape = (2, 5, 35)
    parts = random_parts(coding, shape)
    noisy = {}
    for part, data in parts.items():
        marked = mark_padding(coding, shape, part)
        assert marked.any()
        noisy[part] = np.where(marked, data ^ 0xDD, data)
    values = []
    for given in (parts, noisy):
        path = tmp_path / f"{len(values)}.w4"
        path.write_bytes(write(small_plan({"w": (coding, shape)}), {"w": given}))
        with open_container(path) as container:
            values.append(container.dequantize("w"))
    assert values[0].tobytes() == values[1].tobytes()


def mark_padding(coding: QuantScheme, shape: tuple[int, int, int], part: str) -> Any:
    """True for each byte of a part that is nothing but padding, by w4-codes 3.2 and 3.4."""
    n_matrices, n_rows, n_columns = shape
    if part in ("codes", "values"):
        n_lines = coding.n_lines(n_columns)
        dwords = np.zeros((n_matrices, 1, n_lines, 16, 4), bool)
        dwords[:, :, :, n_rows:] = True
        columns_left = n_columns - (n_columns - 1) // coding.columns_per_run * coding.columns_per_run
        if coding.bits == 3:  # of 32 columns, those of two lines are padding but for what lies between them
            assert columns_left == 3
            dwords[:, :, -2:] = True
            dwords[:, :, -3, :, columns_left:] = True
        elif coding.bits >= 8:
            dwords[:, :, -1, :, columns_left * coding.bits // 8 :] = True
        else:
            dwords[:, :, -1, :, columns_left:] = columns_left < 4  # else some byte holds a column in its low half
        return dwords.reshape(-1)
    of_row = codes.row_parts(coding)[part]
    groups = np.zeros((n_matrices, 1, of_row.n_runs(n_columns), 16, of_row.dtype.itemsize), bool)
    groups[:, :, :, n_rows:] = True
    return groups.reshape(-1)
