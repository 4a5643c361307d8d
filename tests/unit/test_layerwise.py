"""Models run layer by layer beside each other: the bits of the whole model, with one layer of weights at a time."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_llama_dir

from w4conv.commands.quantize import quantize
from w4conv.commands.verify import verify
from w4conv.errors import InputError
from w4conv.measure import layerwise
from w4conv.measure.divergence import compare_models
from w4conv.measure.layerwise import scored_logits
from w4conv.measure.perplexity import Windows, make_windows
from w4conv.models.spec import TensorSpec
from w4conv.runtime.engine import Model
from w4conv.runtime.layers import LayeredContainer, LayeredModel, LayeredSource
from w4conv.sources import open_source

IDS = np.random.default_rng(4).integers(0, 250, 200)


def windows(ctx: int = 48) -> Windows:
    return make_windows(IDS.tolist(), convention="llama.cpp", ctx=ctx, bos_id=1)


@contextmanager
def layered(source: Path, container: Path) -> Iterator[tuple[LayeredContainer, LayeredSource, Model]]:
    with ExitStack() as stack:
        model = stack.enter_context(Model(container))
        opened = stack.enter_context(open_source(source))
        yield LayeredContainer(model.container), LayeredSource(opened), model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_logits_are_those_of_the_whole_model(tmp_path: Path, dtype: str, tied: bool) -> None:
    source = make_llama_dir(tmp_path / "in", dtype=dtype, tied=tied)
    quantize(source, tmp_path / "int4.w4", group_size=32, effort=0, scheme="w4a16")
    quantize(source, tmp_path / "keep.w4", scheme="keep", effort=0)
    w = windows()
    with layered(source, tmp_path / "int4.w4") as (container, opened, int4), Model(tmp_path / "keep.w4") as keep:
        wanted = [[model.logits(window) for window in w.tokens] for model in (int4, keep)]
        n = 0
        for block in scored_logits([container, opened], w, threads=2):
            for logits, whole in zip(block.logits, wanted, strict=True):
                rows = slice(block.start, block.start + len(logits))
                np.testing.assert_array_equal(logits, whole[block.window][rows])
            n += len(block.logits[0])
        assert n == w.n_scored


def test_divergence_is_that_of_a_direct_computation(tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in", dtype="BF16")
    quantize(source, tmp_path / "int4.w4", group_size=32, effort=0, scheme="w4a16")
    quantize(source, tmp_path / "keep.w4", scheme="keep", effort=0)
    w = windows()
    with layered(source, tmp_path / "int4.w4") as (container, opened, int4), Model(tmp_path / "keep.w4") as keep:
        found = compare_models(scored_logits([container, opened], w), w)
        direct = []
        for window in w.tokens:
            q, p = (np.exp(m.logits(window).astype(np.float64)) for m in (int4, keep))
            q, p = q / q.sum(1, keepdims=True), p / p.sum(1, keepdims=True)
            direct.append((p * np.log(p / q)).sum(1)[w.first_target - 1 : -1])
    np.testing.assert_allclose(found.klds, direct, rtol=1e-7, atol=1e-12)
    assert found.klds.mean() > 1e-6


def test_batches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama_dir(tmp_path / "in")
    quantize(source, tmp_path / "int4.w4", group_size=32, effort=0, scheme="w4a16")
    w = windows()
    done: list[int] = []
    with layered(source, tmp_path / "int4.w4") as (container, opened, _):
        whole = list(scored_logits([container, opened], w))
        monkeypatch.setattr(layerwise, "HIDDEN_NBYTES", 3 * 48 * 128 * 4)  # room for three windows of two models
        parts = list(scored_logits([container, opened], w, advance=lambda n, _: done.append(n)))
    assert done == [3 * 48] * 2 + [48] * 2
    assert [b[:2] for b in whole] == [b[:2] for b in parts]
    for a, b in zip(whole, parts, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))


def test_one_layer_of_the_source_is_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama_dir(tmp_path / "in", layers=4)
    quantize(source, tmp_path / "int4.w4", effort=0, scheme="w4a16")
    original, held, most = LayeredSource.matrix, [], 0

    def watched(self: LayeredSource, t: TensorSpec) -> Any:
        nonlocal most
        matrix = original(self, t)
        held.append(weakref.ref(matrix[2]["values"]))
        most = max(most, sum(ref() is not None for ref in held))
        return matrix

    monkeypatch.setattr(LayeredSource, "matrix", watched)
    with layered(source, tmp_path / "int4.w4") as (container, opened, _):
        models: list[LayeredModel] = [container, opened]
        for _ in scored_logits(models, windows()):
            pass
    assert len(held) == 4 * 7 + 1
    assert most == 7


def test_a_broken_source_is_told(tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in", dtype="F32")
    quantize(source, tmp_path / "int4.w4", effort=0, scheme="w4a16")
    with layered(source, tmp_path / "int4.w4") as (_, opened, _):
        read = opened._source.read

        def broken(name: str, rows: slice | None = None) -> Any:
            values = read(name, rows).copy()
            if name.endswith("layers.1.mlp.up_proj.weight"):
                values[3, 5] = np.nan
            return values

        opened._source.read = broken  # type: ignore[method-assign]  # a source that breaks on the way
        with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight: NaN at row 3, column 5"):
            list(scored_logits([opened], windows()))


def test_nothing_is_written_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama_dir(tmp_path / "in")
    quantize(source, tmp_path / "int4.w4", effort=0, scheme="w4a16")
    text = tmp_path / "t.txt"
    text.write_text("the thing and the end of it. " * 40)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a temporary file")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    for options in ({"ppl": True}, {"kld": True}):
        assert verify(tmp_path / "int4.w4", against=source, text=text, ctx=16, chunks=2, **options).ok
