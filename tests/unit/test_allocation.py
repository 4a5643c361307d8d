"""--target-bpw: the allocation against every other one, and what a conversion makes of it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import WORDS, make_llama_dir

from w4conv import codes, kernels
from w4conv.calibration import sensitivity
from w4conv.commands.quantize import ConversionReport, quantize
from w4conv.container import open_container
from w4conv.errors import InputError, UsageError
from w4conv.quantization.allocation import MENU, Item, allocate
from w4conv.quantization.calibrated import Inputs, quick, solve
from w4conv.runtime.engine import Model
from w4conv.scheme import scheme_of

DOWN, EMBED = "model.layers.{}.mlp.down_proj.weight", "model.embed_tokens.weight"
TEXT: dict[str, Any] = {"calibration_tokens": 512, "calibration_ctx": 32}


def items(seed: int, n: int = 5) -> list[Item]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        nbytes = np.cumsum(rng.integers(1, 9, 4))
        losses = np.sort(rng.random(4) * rng.random())[::-1]
        out.append(Item(str(i), tuple(nbytes.tolist()), tuple(losses.tolist())))
    return out


@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_of_the_same_size_loses_less(seed: int) -> None:
    """Greedy on convex hulls is the optimum for the bytes that it spends, up to the first step that does not fit."""
    found = items(seed)
    for budget in range(sum(i.nbytes[0] for i in found), sum(i.nbytes[-1] for i in found) + 1):
        chosen = allocate(found, budget)
        spent = sum(i.nbytes[chosen[i.name]] for i in found)
        assert spent <= budget
        loss = sum(i.losses[chosen[i.name]] for i in found)
        best = min(
            sum(i.losses[k] for i, k in zip(found, choice, strict=True))
            for choice in itertools.product(range(4), repeat=len(found))
            if sum(i.nbytes[k] for i, k in zip(found, choice, strict=True)) <= budget
        )
        # No worse than the optimum by more than the largest single step could save.
        largest = max(a - b for i in found for a, b in itertools.pairwise(i.losses))
        assert best <= loss + 1e-12 <= best + 2 * largest + 1e-12
    assert set(allocate(found, 10**6).values()) == {3}


def test_the_matrix_that_loses_most_gets_the_bits() -> None:
    found = [Item("a", (4, 8), (1.0, 0.5)), Item("b", (4, 8), (9.0, 0.1)), Item("c", (40, 80), (9.5, 0.1))]
    assert allocate(found, 52) == {"a": 0, "b": 1, "c": 0}
    assert allocate(found, 56) == {"a": 1, "b": 1, "c": 0}
    with pytest.raises(ValueError, match="does not hold"):
        allocate(found, 47)


def test_the_menu_rises_in_size() -> None:
    bits = [s.bits + (8 if s.has_shifts else 16) / s.group_size for s in MENU]
    assert bits == sorted(bits)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_dir(tmp_path_factory.mktemp("in") / "model", dtype="F32", hidden=64, inner=256, layers=2)


def schemes(path: Path) -> dict[str, str]:
    with open_container(path) as container:
        return {name: str(t.scheme) for name, t in container.tensors.items()}


def made(report: ConversionReport) -> dict[str, str]:
    return {name: f"{r.scheme}/g{r.group}" for name, r in report.recipe[: report.n_allocated]}


@pytest.mark.parametrize("target", ["5.0", "5.5", "7"])
def test_the_container_keeps_the_budget(model: Path, tmp_path: Path, target: str) -> None:
    report = quantize(model, tmp_path / "out.w4", target_bpw=target, effort=1)
    assert float(target) - 0.35 < report.bits_per_weight <= float(target)
    found = schemes(tmp_path / "out.w4")
    assert made(report) == {name: s for name, s in found.items() if not s.startswith("f")}
    with open_container(tmp_path / "out.w4") as container:
        assert container.provenance["target_bpw"] == target.removesuffix(".0")
        assert len(container.provenance["recipe"]) == report.n_allocated == 16
    assert quantize(model, tmp_path / "again.w4", target_bpw=target, effort=1, threads=1).digest == report.digest


def test_targets_out_of_reach(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"target-bpw 3 is out of reach: from nl3/g64 to int8/g128") as told:
        quantize(model, tmp_path / "out.w4", target_bpw=3, effort=1)
    low, high = re.findall(r"has ([\d.]+) to ([\d.]+) bits", str(told.value))[0]
    for ends in (low, high):
        quantize(model, tmp_path / "out.w4", target_bpw=ends, effort=1, dry_run=True)
    for beyond in (float(low) - 0.01, float(high) + 0.01):
        with pytest.raises(UsageError, match="out of reach"):
            quantize(model, tmp_path / "out.w4", target_bpw=beyond, effort=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_bpw": "few"}, "target-bpw is 'few', expected a number"),
        ({"target_bpw": "nan"}, "expected a number"),
        ({"target_bpw": -4}, "expected a number"),
        ({"target_bpw": 5, "scheme": "w4a16"}, "leave out scheme, group-size and embeddings"),
        ({"target_bpw": 5, "group_size": 64}, "leave out"),
    ],
)
def test_options_that_contradict(model: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        quantize(model, tmp_path / "out.w4", **options)


def test_a_recipe_comes_first(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[tensors]\nembedding = {scheme = "f16"}\nhead = {group = 32}\n"*.down_proj.weight" = {method = "rtn"}\n'
    )
    report = quantize(model, tmp_path / "out.w4", target_bpw="7.5", effort=1, recipe=str(file))
    found = schemes(tmp_path / "out.w4")
    assert (found[EMBED], found["lm_head.weight"]) == ("f16", "nl4/g32")
    assert report.n_allocated == 14
    assert report.bits_per_weight <= 7.5
    file.write_text('[tensors]\n"*" = {group = 32}\n')
    with pytest.raises(UsageError, match="nothing to choose"):
        quantize(model, tmp_path / "out.w4", target_bpw=5, effort=1, recipe=str(file))


def test_a_broken_source_is_named(tmp_path: Path) -> None:
    broken = make_llama_dir(tmp_path / "model", dtype="F32", layers=1)
    raw = bytearray((broken / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    offsets = json.loads(raw[8:start])[DOWN.format(0)]["data_offsets"]
    raw[start + offsets[0] : start + offsets[0] + 4] = np.float32("nan").tobytes()
    (broken / "model.safetensors").write_bytes(raw)
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.down_proj\.weight: NaN"):
        quantize(broken, tmp_path / "out.w4", target_bpw=6, effort=1)


@pytest.mark.parametrize("of", ["layers", "parts"])
def test_losses_on_a_text_are_divergences(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """The shares of a layer add up to the divergence of the whole model with just that layer coded; those of a part are
    in proportion to it. Here codes are the nearest, as in the models that are compared."""
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 60)
    kept: dict[str, Any] = {}
    original = sensitivity.Sensitivity.from_calibration_set

    def watched(self: Any, spec: Any, sequences: Any) -> Any:
        kept["losses"], kept["sequences"] = original(self, spec, sequences), sequences
        return kept["losses"]

    def nearest(w: Any, inputs: Any, scheme: Any, *, threads: int | None) -> kernels.PackedRows:
        return kernels.quantize_rtn(w, "F32", scheme, threads=threads)

    monkeypatch.setattr(sensitivity, "quick", nearest)
    monkeypatch.setattr(sensitivity.Sensitivity, "from_calibration_set", watched)
    report = quantize(model, tmp_path / "out.w4", target_bpw=5, calibration=text, method="search", **TEXT)
    assert report.bits_per_weight <= 5
    some = kept["sequences"][np.unique(np.arange(4) * len(kept["sequences"]) // 4)]
    quantize(model, tmp_path / "base.w4", scheme="f32")
    patterns = {"*.layers.0.*": "layers.0.", "*.layers.1.*": "layers.1.", "embedding": "embed", "head": "lm_head"}
    if of == "parts":
        patterns = {f"*.{part}.weight": f"{part}." for part in ("q_proj", "o_proj", "up_proj", "down_proj")}
    measured: list[float] = []
    summed: list[float] = []
    for pattern, names in patterns.items():
        file = tmp_path / "one.toml"
        file.write_text(f'[tensors]\n"{pattern}" = {{scheme = "nl3", group = 64}}\n')
        quantize(model, tmp_path / "one.w4", scheme="f32", recipe=str(file), effort=0, overwrite=True)
        klds = []
        with Model(tmp_path / "one.w4") as one, Model(tmp_path / "base.w4") as base:
            for sequence in some:
                q, p = (np.exp(m.logits(sequence)[::2].astype(np.float64)) for m in (one, base))
                q, p = q / q.sum(1, keepdims=True), p / p.sum(1, keepdims=True)
                klds.append((p * np.log(p / q)).sum(1).mean())
        shares = [losses[0] for name, losses in kept["losses"].items() if names in name]
        assert all(s > 0 for s in shares)
        summed.append(sum(shares))
        measured.append(float(np.mean(klds)))
    if of == "parts":
        assert np.array(summed) / sum(summed) == pytest.approx(np.array(measured) / sum(measured), rel=1e-3)
    else:
        assert summed == pytest.approx(measured, rel=1e-5)
    for losses in kept["losses"].values():
        assert losses[-1] < 0.05 * losses[0]
    assert MENU[0] == scheme_of("nl3", 64)


def test_shares_fit_layers_and_parts() -> None:
    """Against one step by hand, sums, and cross ratios, which the fitting keeps."""
    alone = [{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 2.0}, {}, {"b": 0.0}]
    found: dict[int | str, float] = {0: 4.0, 1: 2.0, 3: 0.0, "a": 1.0, "b": 2.0}
    shares = sensitivity.fitted(alone, found)
    assert shares[2:] == [{}, {"b": 0.0}]
    for layer in (0, 1):
        assert sum(shares[layer].values()) == pytest.approx(found[layer])
    for name, loss in (("a", 2.0), ("b", 4.0)):  # 6 in all, one third and two thirds
        assert sum(s[name] for s in shares[:2]) == pytest.approx(loss, rel=1e-6)
    ratio = shares[0]["a"] * shares[1]["b"] / (shares[0]["b"] * shares[1]["a"])
    assert ratio == pytest.approx(1 * 2 / (3 * 2))
    assert alone[0] == {"a": 1.0, "b": 3.0}


def test_quick_rounding_loses_less_than_the_nearest() -> None:
    """Of correlated inputs, in float64; and more than the whole method."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((400, 12)) @ rng.standard_normal((12, 96)) + 0.3 * rng.standard_normal((400, 96))
    w = rng.standard_normal((32, 96)).astype(np.float32)
    h = (x.T @ x / len(x)).astype(np.float32)
    scheme = scheme_of("nl3", 32)

    def error(packed: kernels.PackedRows) -> float:
        parts = {kind: kernels.as_bytes(part) for kind, part in packed.parts().items()}
        e = codes.dequantize(scheme, w.shape, parts).astype(np.float64) - w
        return float(np.square(x @ e.T).sum())

    inputs = Inputs(h, h)
    nearest = error(kernels.quantize_rtn(w, "F32", scheme))
    assert error(quick(w, inputs, scheme)) < 0.7 * nearest
    assert error(solve(w, inputs, scheme, "gptq").packed) < error(quick(w, inputs, scheme))
