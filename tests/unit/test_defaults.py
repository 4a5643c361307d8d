"""What a conversion does where little is said: presets, efforts, and what contradicts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import WORDS, make_llama_dir, make_llama_gguf

from w4conv.commands.quantize import quantize
from w4conv.container import open_container
from w4conv.conversion.defaults import PRESETS, TOKENS
from w4conv.errors import InputError, UsageError

QUICK: dict[str, Any] = {"calibration_tokens": 512, "calibration_ctx": 32}
LINEAR = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_dir(tmp_path_factory.mktemp("in") / "model", hidden=64, inner=96, layers=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS * 60)
    return path


def record(path: Path) -> dict[str, Any]:
    with open_container(path) as container:
        schemes = {name: str(t.scheme) for name, t in container.tensors.items() if len(t.shape) == 2}
        return {**container.provenance, "schemes": schemes}


def test_nothing_said(model: Path, tmp_path: Path) -> None:
    """The context of the tiny model, 256 tokens, is shorter than the usual sequences."""
    report = quantize(model, tmp_path / "o.w4")
    found = record(tmp_path / "o.w4")
    assert (report.effort, report.scheme, report.group_size, report.method) == (2, "nl4", 32, "best")
    assert set(found["schemes"].values()) == {"nl4/g32"}
    calibration = found["calibration"]
    assert (calibration["set"], calibration["tokens"], calibration["ctx"]) == ("builtin", TOKENS[2], 256)
    same = quantize(
        model, tmp_path / "said.w4", scheme="nl4", group_size=32, method="best", calibration="builtin", effort=2,
        calibration_tokens=8192, threads=1,
    )  # fmt: skip
    assert same.digest == report.digest


def test_three_times_more_with_effort_3(model: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "o.w4", effort=3, dry_run=True)
    assert report.effort == 3
    quantize(model, tmp_path / "o.w4", effort=3, calibration_ctx=256)
    assert record(tmp_path / "o.w4")["calibration"]["tokens"] == 32768


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(model: Path, tmp_path: Path, preset: str) -> None:
    quantize(model, tmp_path / "o.w4", preset=preset, **QUICK)
    found = record(tmp_path / "o.w4")
    groups = {"balanced": {"nl4/g32"}, "quality": {"nl4/g16"}}
    if preset in groups:
        assert set(found["schemes"].values()) == groups[preset]
        assert "target_bpw" not in found
    else:
        assert found["target_bpw"] == "4.05"
        assert any(scheme.startswith("nl3") for scheme in found["schemes"].values())


def test_the_founding_format(model: Path, tmp_path: Path) -> None:
    """To nearest: no calibration, and codes that follow from the values alone."""
    report = quantize(model, tmp_path / "o.w4", scheme="w4a16", group_size=128, effort=0)
    found = record(tmp_path / "o.w4")
    assert (report.effort, found["method"], found["schemes"][LINEAR]) == (0, "rtn", "int4/g128")
    assert "calibration" not in found


def test_effort_1_shares_out_the_same_bytes(model: Path, tmp_path: Path) -> None:
    equal = quantize(model, tmp_path / "equal.w4", effort=0)
    shared = quantize(model, tmp_path / "shared.w4", effort=1)
    assert shared.bits_per_weight <= equal.bits_per_weight
    assert len(set(record(tmp_path / "shared.w4")["schemes"].values())) > 1
    assert "calibration" not in record(tmp_path / "shared.w4")


@pytest.mark.parametrize(
    ("options", "effort"),
    [
        ({"scheme": "w4a16"}, 2), ({"scheme": "nf4", "group_size": 32}, 2), ({"group_size": 64}, 2),
        ({"scheme": "w8a16"}, 0),
        ({"scheme": "bf16"}, 0), ({"scheme": "keep"}, 0), ({"method": "rtn"}, 0), ({"method": "gptq"}, 2),
        ({"architecture": "generic"}, 0), ({"target_bpw": 5}, 2), ({"embeddings": "f16"}, 2),
    ],
)  # fmt: skip
def test_effort_by_itself(model: Path, tmp_path: Path, options: dict[str, Any], effort: int) -> None:
    assert quantize(model, tmp_path / "o.w4", dry_run=True, **options).effort == effort


def test_usual_groups(model: Path, tmp_path: Path) -> None:
    for scheme, size in (("nl4", 32), ("nl3", 32), ("w4a16", 128), ("nf4", 128)):
        assert quantize(model, tmp_path / "o.w4", scheme=scheme, effort=0, dry_run=True).group_size == size
    assert quantize(model, tmp_path / "o.w4", group_size=64, effort=0, dry_run=True).scheme == "nl4"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "best"}, "unknown preset 'best'; choose one of smallest, balanced, quality"),
        ({"preset": "quality", "scheme": "w4a16"}, "so does scheme"),
        ({"preset": "balanced", "group_size": 32}, "so does group-size"),
        ({"preset": "balanced", "target_bpw": 4.5}, "so does target-bpw"),
        ({"preset": "smallest", "embeddings": "int8"}, "so does embeddings"),
        ({"preset": "smallest", "effort": 0}, "preset smallest chooses schemes by sensitivity"),
        ({"effort": 4}, "effort is 4, expected 0 to 3"),
        ({"effort": -1}, "effort"),
        ({"effort": 0, "calibration": "builtin"}, "effort 0 takes no calibration set"),
        ({"effort": 1, "method": "gptq"}, "effort 1 rounds to nearest"),
        ({"effort": 1, "scheme": "w4a16"}, "scheme says them"),
        ({"effort": 0, "target_bpw": 5}, "target-bpw chooses schemes by sensitivity"),
        ({"effort": 2, "method": "rtn"}, "effort 2 calibrates, and method rtn does not"),
        ({"effort": 2, "scheme": "bf16"}, "nothing to calibrate"),
        ({"effort": 2, "architecture": "generic"}, "cannot be run"),
        ({"group_size": "row"}, "group size row is beyond nl4, the usual scheme"),
        ({"effort": 0, "calibration_tokens": 512}, "--calibration-tokens has no effect as nothing is calibrated"),
    ],
)
def test_contradictions(model: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        quantize(model, tmp_path / "o.w4", **options)
    assert not list(tmp_path.iterdir())


def test_a_text_of_ones_own_has_the_tokens_of_the_effort(model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fewer than the 8,192 asked for"):
        quantize(model, tmp_path / "o.w4", calibration=text)
    with pytest.raises(UsageError, match="fewer than the 32,768 asked for"):
        quantize(model, tmp_path / "o.w4", calibration=text, effort=3)


def test_without_a_tokenizer_it_says_what_to_do(tmp_path: Path) -> None:
    bare = make_llama_dir(tmp_path / "bare", layers=1, tokenizer=False)
    with pytest.raises(InputError, match=r"no tokenizer\.json, without which no calibration set.*--effort 0"):
        quantize(bare, tmp_path / "o.w4")
    assert quantize(bare, tmp_path / "o.w4", effort=0).effort == 0


def test_what_is_quantized_already_is_kept_unless_one_asks(tmp_path: Path) -> None:
    path = make_llama_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    kept = quantize(path, tmp_path / "k.w4", dry_run=True)
    assert (kept.scheme, kept.effort) == ("keep", 0)
    for options in ({"preset": "balanced"}, {"effort": 2}):
        assert quantize(path, tmp_path / "k.w4", dry_run=True, **options).scheme == "nl4"


def test_an_effort_is_a_whole_number(model: Path, tmp_path: Path) -> None:
    assert quantize(model, tmp_path / "o.w4", effort=np.int64(0), dry_run=True).effort == 0
    for wrong in (1.5, "2", True):
        with pytest.raises(UsageError, match="effort"):
            quantize(model, tmp_path / "o.w4", effort=wrong, dry_run=True)  # type: ignore[arg-type]
