"""diff: against differences computed straight from the values and codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import make_llama_dir

from w4conv import codes
from w4conv.commands import diff as comparison
from w4conv.commands.diff import DiffReport, diff
from w4conv.commands.quantize import quantize
from w4conv.container import open_container
from w4conv.errors import InputError

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    source = make_llama_dir(folder / "in", dtype="F16", layers=2)
    quantize(source, folder / "int4.w4", group_size=32, effort=0, scheme="w4a16")
    quantize(source, folder / "g64.w4", group_size=64, effort=0, scheme="w4a16")
    quantize(source, folder / "nf4.w4", scheme="nf4", group_size=32, effort=0)
    quantize(source, folder / "keep.w4", scheme="keep", effort=0)
    return folder


def tensor(report: DiffReport, name: str = Q) -> comparison.TensorDifference:
    return next(t for t in report.tensors if t.name == name)


@pytest.mark.parametrize("block", [1 << 20, 40])
def test_two_containers(made: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(comparison, "_BLOCK_VALUES", block)
    monkeypatch.setattr(comparison, "_BLOCK_NBYTES", block)
    report = diff(made / "int4.w4", made / "g64.w4")
    assert not report.same
    assert (report.n_different, report.closer) == (16, None)
    with open_container(made / "int4.w4") as a, open_container(made / "g64.w4") as b:
        pooled = np.zeros(2)
        for t in report.tensors:
            x, y = (c.dequantize(t.name).astype(np.float64) for c in (a, b))
            e = y - x
            pooled += (np.square(x).sum(), np.square(e).sum())
            assert t.b_from_a is not None
            assert t.b_from_a.rmse == pytest.approx(np.sqrt(np.square(e).mean()))
            assert t.b_from_a.max_abs_error == np.abs(e).max()
            assert t.equal == (not e.any())
            assert t.same == (t.a in ("f16", "f32"))
            if not t.same:
                info = a.tensors[t.name], b.tensors[t.name]
                both = [
                    codes.unpack(i.scheme, codes._tiles(i.scheme, i.shape, c.part(t.name, "codes")), *i.shape)
                    for i, c in zip(info, (a, b), strict=True)
                ]
                assert t.codes_differing == pytest.approx((both[0] != both[1]).mean())
        assert report.b_from_a.sqnr_db == pytest.approx(10 * np.log10(pooled[0] / pooled[1]))
    assert [m.what for m in report.metadata] == ["group_size"]
    assert (report.metadata[0].a, report.metadata[0].b) == ("32", "64")


def test_the_same_file_twice(made: Path) -> None:
    report = diff(made / "int4.w4", made / "int4.w4", source=made / "in")
    assert report.same
    assert report.closer == "neither"
    assert {t.codes_differing for t in report.tensors} == {0, None}
    assert report.metadata == ()


def test_a_container_and_its_checkpoint(made: Path) -> None:
    kept = diff(made / "keep.w4", made / "in")
    assert kept.same
    lost = diff(made / "in", made / "nf4.w4")
    assert not lost.same
    assert tensor(lost).codes_differing is None
    assert (tensor(lost).a, tensor(lost).b) == ("F16", "nf4/g32")


@pytest.mark.parametrize("order", [("int4", "nf4"), ("nf4", "int4")])
def test_which_is_closer_to_a_source(made: Path, order: tuple[str, str]) -> None:
    paths = [made / f"{name}.w4" for name in order]
    report = diff(*paths, source=made / "in")
    distances, pooled = [], []
    for path in paths:
        with open_container(path) as c, open_container(made / "keep.w4") as source:
            errors = {name: np.square(c.dequantize(name) - source.dequantize(name)) for name in c.tensors}
            distances.append(errors[Q].mean() ** 0.5)
            pooled.append(sum(e.sum() for e in errors.values()))
    t = tensor(report)
    assert t.a_from_source is not None
    assert t.b_from_source is not None
    assert (t.a_from_source.rmse, t.b_from_source.rmse) == pytest.approx(distances, rel=1e-5)
    assert report.closer == "ab"[int(np.argmin(pooled))]


def test_one_code_and_one_scale(made: Path, tmp_path: Path) -> None:
    """A single differing nibble is found; a container opened so is not verified."""
    raw = bytearray((made / "int4.w4").read_bytes())
    with open_container(made / "int4.w4") as container:
        part = container.tensors[Q].parts[0]
    raw[part.offset + 5] ^= 0x30
    (tmp_path / "one.w4").write_bytes(raw)
    report = diff(made / "int4.w4", tmp_path / "one.w4")
    (changed,) = [t for t in report.tensors if not t.same]
    assert changed.name == Q
    assert changed.codes_differing == pytest.approx(1 / np.prod(changed.shape_a))


def test_other_tensors_and_shapes(made: Path, tmp_path: Path) -> None:
    other = make_llama_dir(tmp_path / "other", dtype="F16", layers=3, inner=64)
    report = diff(made / "int4.w4", other)
    assert len(report.only_in_b) == 9
    assert report.only_in_a == ()
    up = tensor(report, "model.layers.0.mlp.up_proj.weight")
    assert up.b_from_a is None
    assert not up.equal
    assert "config.json" in [m.what for m in report.metadata]
    with pytest.raises(InputError, match="once only"):
        diff("-", "-")
