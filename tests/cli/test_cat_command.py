"""`w4conv cat`: one tensor as .npy, exactly what the container means."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from command import Runner
from w4files import SMALL_TENSORS, small_file

from w4conv.commands import cat as extraction
from w4conv.container import open_container
from w4conv.scheme import F32, QuantScheme, int4

TENSORS = SMALL_TENSORS | {
    "scalar": (F32, ()),
    "nothing": (F32, (0, 3)),
    "stack": (QuantScheme("int8", 32, "f16"), (5, 3, 40)),
    "tall": (int4(32), (100, 33)),
}


@pytest.fixture
def container(tmp_path: Path) -> Path:
    path = tmp_path / "small.w4"
    path.write_bytes(small_file(TENSORS)[0])
    return path


@pytest.mark.parametrize("name", TENSORS)
def test_values_are_those_of_the_container(
    container: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "BLOCK_NBYTES", 1000)  # several blocks even here
    report = extraction.cat(container, name, tmp_path / "t.npy")
    values = np.load(tmp_path / "t.npy")
    with open_container(container) as opened:
        expected = opened.dequantize(name)
    assert (values.dtype, values.shape) == (np.float32, TENSORS[name][1])
    assert values.tobytes() == expected.tobytes()
    assert report.nbytes == (tmp_path / "t.npy").stat().st_size


def test_standard_output_is_the_default(w4: Runner, container: Path, tmp_path: Path) -> None:
    w4("cat", container, "norm", "-o", tmp_path / "norm.npy").done()
    run = w4("cat", container, "norm", "--json")
    assert run.code == 0
    assert run.raw == (tmp_path / "norm.npy").read_bytes()
    report = json.loads(run.err)
    assert report["schema"] == "w4conv.cat/1"
    assert (report["shape"], report["scheme"]) == ([5], "f16")


def test_damage_is_found_before_anything_is_written(w4: Runner, container: Path, tmp_path: Path) -> None:
    with open_container(container) as opened:
        at = opened.tensors["norm"].parts[0].offset
    raw = bytearray(container.read_bytes())
    raw[at] ^= 1
    container.write_bytes(raw)
    run = w4("cat", container, "norm", "-o", tmp_path / "norm.npy")
    assert run.code == 3
    assert "norm: values: its bytes do not match its digest" in run.err
    assert not (tmp_path / "norm.npy").exists()
    w4("cat", container, "plain", "-o", tmp_path / "plain.npy").done()  # the others are still whole


def test_unknown_tensors_and_existing_files(w4: Runner, container: Path, tmp_path: Path) -> None:
    run = w4("cat", container, "x")
    assert run.code == 2
    assert "no tensor 'x'. It has 8, such as odd int4" in run.err
    (tmp_path / "out.npy").write_bytes(b"old")
    assert w4("cat", container, "norm", "-o", tmp_path / "out.npy").code == 4
    assert (tmp_path / "out.npy").read_bytes() == b"old"
    w4("cat", container, "norm", "-o", tmp_path / "out.npy", "--overwrite").done()


def test_a_pipe_in_and_out(w4: Runner, container: Path) -> None:
    run = w4("cat", "-", "norm", stdin=container.read_bytes())
    values = np.lib.format.read_array(io.BytesIO(run.raw))
    with open_container(container) as opened:
        np.testing.assert_array_equal(values, opened.dequantize("norm"))
