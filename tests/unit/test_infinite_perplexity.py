"""A broken model's perplexity lies beyond float64: its logarithm is reported, JSON stays strict, thresholds fail."""

from __future__ import annotations

import json
import math
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_llama_dir
from typer.testing import CliRunner

from w4conv import quantize, verify
from w4conv.cli._heat_map import heat_map
from w4conv.cli._output import plain
from w4conv.cli.main import app
from w4conv.errors import InputError
from w4conv.measure.perplexity import estimate, increase

# Of the model and of its source, -ln p of a few tokens.
NLLS: dict[str, tuple[list[float], list[float]]] = {
    "ordinary": ([2.5, 3.0, 1.0], [2.0, 2.5, 1.5]),
    "just below": ([709.0, 709.5, 709.7], [2.0, 2.5, 1.5]),
    "just above": ([709.0, 710.0, 711.0], [2.0, 2.5, 1.5]),
    "far above": ([5e4, 6e4, 1e5], [2.0, 2.5, 1.5]),
    "largest logits": ([6.8e38, 6.8e38, 0.0], [2.0, 2.5, 1.5]),
    "one token": ([1e4], [1.0]),
    "constant": ([800.0, 800.0, 800.0], [1.0, 1.0, 1.0]),
    "both, ratio finite": ([900.0, 950.0, 1000.0], [890.0, 955.0, 1001.0]),
    "both, ratio infinite": ([9000.0, 9500.0, 9900.0], [890.0, 955.0, 1001.0]),
    "both, the same": ([900.0, 950.0, 1000.0], [900.0, 950.0, 1000.0]),
    "the source alone": ([2.0, 2.5, 1.5], [5e4, 6e4, 1e5]),
    "below float64's smallest ratio": ([0.0, 0.0, 0.0], [746.0, 800.0, 900.0]),
}


def exponential(x: Decimal) -> float:
    try:
        return float(x.exp())
    except OverflowError:
        return math.inf


@pytest.mark.parametrize("case", NLLS)
def test_logarithms_are_finite_and_the_rest_follows(case: str) -> None:
    nlls, base = (np.array(values) for values in NLLS[case])
    found, rise = estimate(nlls), increase(nlls, base)
    with localcontext() as context:
        context.prec, context.Emax = 60, 10**17
        exact = [Decimal(v) for v in nlls.tolist()]
        log = sum(exact) / len(exact)
        log_ratio = sum(a - Decimal(b) for a, b in zip(exact, base.tolist(), strict=True)) / len(exact)
        small = abs(log) < 10**5
        value, ratio = (exponential(x) if small else math.inf for x in (log, log_ratio))
    assert found.log == pytest.approx(float(log))
    assert found.value == pytest.approx(value, rel=1e-10)
    assert rise.log_ratio == pytest.approx(float(log_ratio))
    assert rise.ratio == pytest.approx(ratio, rel=1e-10)
    if len(nlls) > 1:
        assert found.log_stderr == pytest.approx(nlls.std(ddof=1) / math.sqrt(len(nlls)))
        assert found.log_stderr < math.inf
        assert rise.log_ratio_stderr < math.inf
    assert (found.stderr < math.inf) == (value < math.inf and len(nlls) > 1)
    assert not any(math.isnan(x) for x in (found.value, found.stderr, rise.difference_stderr, rise.ratio_stderr))
    json.dumps(plain(found), allow_nan=False)
    json.dumps(plain(rise), allow_nan=False)


# Which tensors of the model are multiplied by what, and whether its perplexity lies beyond float64.
BROKEN: dict[str, tuple[dict[str, float], str]] = {
    "head": ({"lm_head.weight": 1e5}, "infinite"),
    "head, far": ({"lm_head.weight": 1e30}, "infinite"),
    "final norm": ({"model.norm.weight": -1e6}, "infinite"),
    "all but the sign": ({"lm_head.weight": -1e5}, "infinite"),
    "not finite": ({"lm_head.weight": 1e37, "model.norm.weight": 1e10}, "no number"),
    "not finite inside": ({"model.layers.1.mlp.down_proj.weight": 1e37, "model.layers.1.mlp.up_proj.weight": 1e37},
                          "no number"),
}  # fmt: skip


def scale(directory: Path, factors: dict[str, float]) -> Path:
    """Multiply tensors of an F32 checkpoint in place."""
    path = directory / "model.safetensors"
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    for name, factor in factors.items():
        a, b = (start + offset for offset in header[name]["data_offsets"])
        raw[a:b] = (np.frombuffer(raw[a:b], "<f4") * np.float32(factor)).tobytes()
    path.write_bytes(raw)
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("the thing and the end of it. " * 20)
    return path


def strict(document: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(document, parse_constant=refuse)


@pytest.mark.parametrize("options", [[], ["--kld"], ["--layers"]])
@pytest.mark.parametrize("case", BROKEN)
def test_verify_says_so_and_thresholds_fail(case: str, options: list[str], text: Path, tmp_path: Path) -> None:
    good = make_llama_dir(tmp_path / "good", dtype="F32")
    factors, what = BROKEN[case]
    broken = scale(make_llama_dir(tmp_path / "broken", dtype="F32"), factors)
    quantize(broken, tmp_path / "m.w4", scheme="f32", effort=0)
    words = ["verify", str(tmp_path / "m.w4"), "--against", str(good), "--ppl", "--text", str(text), "--ctx", "16"]
    words += ["--chunks", "2", *options]
    for limit in ("1000000000", "1000000000%"):
        done = CliRunner().invoke(app, [*words, "--max-ppl-increase", limit, "--json"])
        assert done.exit_code == 1
        report = strict(done.stdout)
        assert any("perplexity" in f or "divergence" in f for f in report["failures"])
    if what == "infinite":
        found = report["perplexity"]["container"]
        assert found["value"] is None
        assert 709 < found["log"] < math.inf
        assert "e^" in CliRunner().invoke(app, words).stdout
    else:
        assert report["perplexity"] is None
        assert any("not finite" in f for f in report["failures"])


def test_a_broken_source_is_an_input_error(text: Path, tmp_path: Path) -> None:
    source = scale(make_llama_dir(tmp_path / "hf", dtype="F32"), BROKEN["not finite"][0])
    quantize(make_llama_dir(tmp_path / "good", dtype="F32"), tmp_path / "m.w4", scheme="f32", effort=0)
    for options in ({"ppl": True}, {"kld": True}):
        with pytest.raises(InputError, match=r"source yields|hf: the model"):
            verify(tmp_path / "m.w4", against=source, text=text, ctx=16, chunks=2, **options)  # type: ignore[arg-type]  # bools


@pytest.mark.parametrize("form", ["", "--json", "--csv", "--md"])
def test_bench_says_so(form: str, text: Path, tmp_path: Path) -> None:
    paths = []
    for name, factors in {"good": {}, "broken": BROKEN["head"][0]}.items():
        source = scale(make_llama_dir(tmp_path / name, dtype="F32"), factors)
        quantize(source, tmp_path / f"{name}.w4", scheme="f32", effort=0)
        paths.append(str(tmp_path / f"{name}.w4"))
    words = [
        "bench",
        *paths,
        "-p",
        "4",
        "-n",
        "2",
        "--rounds",
        "1",
        "--text",
        str(text),
        "--ctx",
        "16",
        "--chunks",
        "2",
    ]
    done = CliRunner().invoke(app, [*words, *([form] if form else [])])
    assert done.exit_code == 0, done.output
    if form == "--json":
        rows = strict(done.stdout)["rows"]
        assert rows[0]["perplexity"]["value"]["value"] is not None
        assert rows[1]["perplexity"]["value"]["value"] is None
        assert rows[1]["perplexity"]["value"]["log"] > 709
        assert rows[1]["perplexity"]["increase"]["log_ratio"] > 700
    elif form != "--csv":
        assert "e^(" in done.stdout
    assert "nan" not in done.stdout.lower()


def test_a_layer_whose_error_is_no_number_is_not_called_exact() -> None:
    picture = heat_map(
        title="t",
        subtitle="s",
        columns=(["block"],),
        rows=[("0", [30.0]), ("1", [math.nan]), ("2", [math.inf])],
        unit="u",
    )
    assert picture.count(">exact<") == 1
    assert ">nan<" in picture
