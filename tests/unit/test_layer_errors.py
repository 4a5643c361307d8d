"""Errors of layers and matrices against numpy in float64, and the heat map of them."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import pytest
from helpers import make_llama_dir

from w4conv.cli._heat_map import heat_map
from w4conv.commands.quantize import quantize
from w4conv.measure.layer_errors import LayerErrors
from w4conv.measure.layerwise import scored_logits
from w4conv.measure.perplexity import make_windows
from w4conv.models.spec import READS
from w4conv.runtime.engine import Model
from w4conv.runtime.layer_model import Captured
from w4conv.runtime.layers import LayeredContainer

F64 = npt.NDArray[np.float64]
IDS = np.random.default_rng(4).integers(0, 250, 200).tolist()


def relative(found: F64, wanted: F64) -> float:
    return float(np.mean(np.square(found - wanted).sum(1) / np.square(wanted).sum(1)))


def test_errors_are_those_of_the_outputs(tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in", dtype="F32", layers=2)
    quantize(source, tmp_path / "int4.w4", group_size=32, effort=0, scheme="w4a16")
    quantize(source, tmp_path / "keep.w4", scheme="keep", effort=0)
    windows = make_windows(IDS, convention="llama.cpp", ctx=32, bos_id=1)
    with Model(tmp_path / "int4.w4") as ours, Model(tmp_path / "keep.w4") as theirs:
        models = [LayeredContainer(m.container) for m in (ours, theirs)]
        errors = LayerErrors(threads=1)
        blocks = list(scored_logits(models, windows, observer=errors))
        plain = list(scored_logits(models, windows))  # looking on changes nothing, and only the first windows are seen
        assert all(np.array_equal(a.logits[0], b.logits[0]) for a, b in zip(blocks, plain, strict=True))
        assert len(windows.tokens) > errors.n_windows

        hidden = [model.embed(windows.tokens[: errors.n_windows]) for model in models]
        for found in errors.result():
            seen: list[list[Captured]] = [[], []]
            for side, (model, h) in enumerate(zip(models, hidden, strict=True)):
                layer = model.layer(found.layer)
                for sequence in h:
                    captured = layer.model.run(sequence, capture=True)
                    assert captured is not None
                    seen[side].append(captured)
            a, b = (h.reshape(-1, h.shape[-1]).astype(np.float64) for h in hidden)
            assert found.block == pytest.approx(relative(a, b), rel=1e-6)

            def rows(side: int, part: str, seen: list[list[Captured]] = seen) -> F64:
                return np.concatenate([getattr(c, READS[part]) for c in seen[side]]).astype(np.float64)

            def weights(side: int, part: str, layer: int = found.layer) -> F64:
                module = "self_attn" if part[0] in "qkvo" else "mlp"
                container = (ours, theirs)[side].container
                return container.dequantize(f"model.layers.{layer}.{module}.{part}.weight").astype(np.float64)

            assert {m.part for m in found.matrices} == set(READS) & {m.part for m in found.matrices}
            assert len(found.matrices) == 7
            for m in found.matrices:
                x = rows(1, m.part)
                assert m.error == pytest.approx(relative(x @ weights(0, m.part).T, x @ weights(1, m.part).T), rel=2e-3)
            for branch, part in ((found.attention, "o_proj"), (found.mlp, "down_proj")):
                wanted = rows(1, part) @ weights(1, part).T
                assert branch == pytest.approx(relative(rows(0, part) @ weights(0, part).T, wanted), rel=2e-3)


def test_a_model_has_no_error_from_itself(tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in", layers=1)
    quantize(source, tmp_path / "int4.w4", group_size=32, effort=0, scheme="w4a16")
    with Model(tmp_path / "int4.w4") as model:
        one = LayeredContainer(model.container)
        errors = LayerErrors()
        for _ in scored_logits(
            [one, one], make_windows(IDS, convention="llama.cpp", ctx=32, bos_id=1), observer=errors
        ):
            pass
    (found,) = errors.result()
    assert (found.block, found.attention, found.mlp) == (0, 0, 0)
    assert {m.error for m in found.matrices} == {0}


def test_the_heat_map() -> None:
    rows = [("0", [30.0, math.inf, None]), ("1", [20.0, 10.0, 10.0])]
    text = heat_map(title="a < b & c", subtitle="s", columns=(["x"], ["y", "z"]), rows=rows, unit="dB")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    words = [t.text for t in root.iter(f"{space}text")]
    for word in ("a < b & c", "x", "z", "30.0", "exact", "20.0", "10.0", "dB"):
        assert word in words
    cells = [r for r in root.iter(f"{space}rect") if r.get("height") == "16"]
    fills = [r.get("fill", "") for r in cells]
    assert len(cells) == 6

    def lightness(fill: str) -> int:
        return sum(int(fill[i : i + 2], 16) for i in (1, 3, 5))

    best, exact, absent, middle, worst, _ = fills
    assert best == exact
    assert absent == "#dddddd"
    assert lightness(best) > lightness(middle) > lightness(worst)
    heat_map(title="", subtitle="", columns=(["x"],), rows=[("0", [math.inf])], unit="")  # nothing to scale by
