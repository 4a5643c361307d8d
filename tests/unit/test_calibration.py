"""Calibrated conversion: what is chosen, what is recorded, that the bytes depend on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from helpers import WORDS, make_llama_dir, write_safetensors

from w4conv import codes, kernels
from w4conv.calibration.text import read_calibration
from w4conv.commands.quantize import quantize
from w4conv.commands.verify import verify
from w4conv.container import open_container
from w4conv.errors import InputError, UsageError
from w4conv.quantization import calibrated
from w4conv.quantization.calibrated import Inputs, OutputResidual, output_error, solve
from w4conv.quantization.query_moments import RopeAverage
from w4conv.runtime.layers import LayeredSource
from w4conv.scheme import QuantScheme, int4, int8
from w4conv.sources import open_source

SMALL: dict[str, Any] = {"calibration_tokens": 512, "calibration_ctx": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_dir(tmp_path_factory.mktemp("in") / "model", hidden=48, inner=80)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS * 60)
    return path


def second(x: Any) -> Any:
    """Moments of rows."""
    return (x.T @ x / len(x)).astype(np.float32)


def problem(n_rows: int, n_columns: int, *, seed: int = 0) -> tuple[Any, Inputs, Any]:
    """Weights, moments of correlated inputs with a mean, and the held-out inputs themselves."""
    rng = np.random.default_rng(seed)
    mix, mean = rng.standard_normal((n_columns, n_columns)), 2 * rng.standard_normal(n_columns)
    fit, held_out = ((rng.standard_normal((n, n_columns)) @ mix + mean) for n in (8 * n_columns, 2 * n_columns))
    w = rng.standard_normal((n_rows, n_columns)).astype(np.float32)
    return w, Inputs(*(second(x) for x in (fit, held_out))), held_out


def dequantized(solution: Any, scheme: QuantScheme, shape: tuple[int, int]) -> Any:
    parts = solution.packed.raw_parts()
    return codes.dequantize(scheme, shape, parts)


@pytest.mark.parametrize(
    "scheme",
    [int4(32), int4(0), int8(64), *(QuantScheme(kind, 32, "f16") for kind in ("int4z", "nf4", "fp4"))],
    ids=str,
)
def test_methods_are_judged_by_the_outputs(scheme: QuantScheme) -> None:
    w, inputs, x = problem(20, 72)
    found = {method: solve(w, inputs, scheme, method) for method in calibrated.METHODS}
    packed = kernels.quantize_rtn(w, "F32", scheme)
    plain = codes.dequantize(scheme, w.shape, packed.raw_parts())
    assert np.array_equal(dequantized(found["rtn"], scheme, w.shape), plain)
    for s in found.values():
        wanted, got = x @ w.T.astype(np.float64), x @ dequantized(s, scheme, w.shape).T.astype(np.float64)
        np.testing.assert_allclose(s.error, np.square(got - wanted).mean() / np.square(wanted).mean(), rtol=1e-3)
    assert found["search"].error <= found["rtn"].error
    assert found["gptq"].error < 0.8 * found["rtn"].error
    assert found["best"].error == min(s.error for s in found.values())


def test_output_residual() -> None:
    """The matrix reads x; its target is w y plus a residual. The loss is the distance from the target."""
    w, _, _ = problem(20, 48)
    rng = np.random.default_rng(5)
    mix = rng.standard_normal((48, 48))
    xs, missing = [], []
    for n in (4000, 1000):
        x = (rng.standard_normal((n, 48)) @ mix).astype(np.float32)
        y = x + 0.3 * np.roll(x, 1, axis=1) + 0.1 * rng.standard_normal(x.shape)
        xs.append(x.astype(np.float64))
        missing.append((y - x) @ w.T.astype(np.float64) + 0.2 * x[:, :20])
    residuals = [(m.T @ x / len(x)).astype(np.float32) for m, x in zip(missing, xs, strict=True)]
    inputs, residual = Inputs(*(second(x) for x in xs)), OutputResidual(*residuals)
    expected = np.linalg.solve(inputs.damped.astype(np.float64), residual.fit.T.astype(np.float64)).T
    np.testing.assert_allclose(inputs.solve(residual.fit), expected, rtol=1e-3, atol=1e-4)

    def error(s: Any) -> Any:  # on the tokens held out
        return np.square(xs[1] @ (dequantized(s, int4(32), w.shape) - w).T - missing[1]).sum(axis=1).mean()

    aware, local = (solve(w, inputs, int4(32), "gptq", residual=a) for a in (residual, None))
    assert error(aware) < 0.3 * error(local)
    nothing, power = np.square(missing[1]).sum(axis=1).mean(), np.square(xs[1] @ w.T).sum(axis=1).mean()
    np.testing.assert_allclose(aware.error, (error(aware) - nothing) / power, rtol=1e-3)


def test_query_moments_weight_the_errors_of_a_head() -> None:
    """What counts is what outputs make of the vectors that they are multiplied with; here these are much alike."""
    w, inputs, x = problem(24, 96)
    rng = np.random.default_rng(7)
    vectors = rng.standard_normal((2, 500, 12)) + 6 * rng.standard_normal((2, 1, 12))
    queries = np.stack([second(v) for v in vectors])

    def error(s: Any) -> Any:
        e = (dequantized(s, int4(32), w.shape) - w).reshape(2, 12, 96).astype(np.float64)
        return sum(np.square(x @ own.T @ v.T).mean() for own, v in zip(e, vectors, strict=True))

    together, apart = solve(w, inputs, int4(32), "gptq", query_moments=queries), solve(w, inputs, int4(32), "gptq")
    assert together.method == "gptq"
    assert error(together) < 0.3 * error(apart)
    power = sum(np.square(x @ own.T @ v.T).mean() for own, v in zip(w.reshape(2, 12, 96), vectors, strict=True))
    np.testing.assert_allclose(together.error, error(together) / power, rtol=1e-3)
    alike = solve(w, inputs, int4(32), "gptq", query_moments=np.stack([np.eye(12, dtype=np.float32)] * 2))
    assert np.array_equal(dequantized(alike, int4(32), w.shape), dequantized(apart, int4(32), w.shape))


def test_keys_are_rounded_by_rope_averaged_query_moments(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama_dir(tmp_path / "model", dtype="F32", architecture="Qwen2ForCausalLM", layers=1)
    found: list[tuple[Any, Any]] = []

    def keep(w: Any, *args: Any, query_moments: Any, **options: Any) -> Any:
        found.append((w, query_moments))
        return solve(w, *args, query_moments=query_moments, **options)

    monkeypatch.setattr("w4conv.calibration.calibrator.solve", keep)
    quantize(model, tmp_path / "o.w4", calibration=text, scheme="w4a16", embeddings="f32", group_size=32, **SMALL)
    with open_source(model) as source:
        layers = LayeredSource(source)
        parts = ("q_proj.weight", "q_proj.bias", "k_proj.weight")
        w, bias, keys = (source.read(f"model.layers.0.self_attn.{part}") for part in parts)
        sequences = read_calibration(text, source.blobs, layers.spec, tokens=512, ctx=32).sequences
        inputs = [layers.layer(0).model.observe(layers.embed(s), "qkv") for s in sequences[::4]]
        heads = (np.concatenate(inputs) @ w.T + bias).reshape(-1, 2, 2, 16)  # two query heads share a head of keys
        rope_average = RopeAverage(layers.spec, 0, 32)
    expected = [rope_average.mean(second(heads[:, i].reshape(-1, 16))) for i in range(2)]
    np.testing.assert_allclose(found[1][1], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found[1][0], keys)
    assert all(queries is None for _, queries in (found[0], *found[2:]))


def test_rows_get_the_update_that_columns_get() -> None:
    """The last row of a head is rounded with the carried errors of all other rows."""
    w, inputs, _ = problem(8, 64)
    queries = second(np.random.default_rng(8).standard_normal((40, 8)) @ np.diag(range(1, 9)))  # rows are in order
    s = solve(w, inputs, int4(32), "gptq", query_moments=queries[None])
    e = dequantized(s, int4(32), w.shape).astype(np.float64) - w
    damped = queries.astype(np.float64) + np.eye(8) * np.diag(queries).mean() * calibrated.QUERY_DAMPING_PERCENT / 100
    target = (
        w[0] - np.linalg.solve(damped[:1, :1], damped[:1, 1:] @ e[1:])[0]
    )  # the best of the first row, given all others
    last = solve(target[None].astype(np.float32), inputs, int4(32), "gptq")
    assert np.array_equal(dequantized(last, int4(32), (1, 64))[0], dequantized(s, int4(32), w.shape)[0])


def test_a_method_that_fits_only_its_own_tokens_is_not_kept() -> None:
    """The tokens to fit lie along one direction that the held-out ones never take."""
    w, inputs, _ = problem(16, 64)
    direction = np.zeros(64)
    direction[:2] = 1
    misleading = Inputs((np.outer(direction, direction) * 1e6).astype(np.float32), inputs.held_out)
    rtn = solve(w, misleading, int4(32), "rtn")
    assert solve(w, misleading, int4(32), "gptq").error <= rtn.error


def test_damping_serves_other_tokens() -> None:
    """Weights fitted to few tokens of one kind, judged by tokens of another, are better with more of it."""
    rng = np.random.default_rng(6)
    w = rng.standard_normal((16, 96)).astype(np.float32)
    mix = rng.standard_normal((96, 96)) / 10 + np.eye(96)
    fit, other = second(rng.standard_normal((60, 96)) @ mix), second(rng.standard_normal((20000, 96)))
    errors = []
    for percent in (1, calibrated.DAMPING_PERCENT):
        s = solve(w, Inputs(fit, fit, damping_percent=percent), int4(32), "gptq")
        assert s.method == "gptq"
        errors.append(output_error(dequantized(s, int4(32), w.shape) - w, other))
    assert errors[1] < 0.9 * errors[0]


def test_channels_that_are_never_active() -> None:
    w, inputs, _ = problem(16, 64)
    for h in (inputs.fit, inputs.held_out):
        h[:, 5] = h[5, :] = 0
        h[:, 32:] = h[32:, :] = 0
    assert solve(w, inputs, int4(32), "best").error < 0.02
    nothing = Inputs(*np.zeros((2, 64, 64), np.float32))
    s = solve(w, nothing, int4(32), "gptq")
    assert s.error == 0
    np.testing.assert_allclose(dequantized(s, int4(32), w.shape), w, atol=0.35)


def test_moments_of_deficient_rank() -> None:
    w, _, _ = problem(16, 64)
    x = np.random.default_rng(0).standard_normal((3, 64))
    h = second(x)
    assert solve(w, Inputs(h, h), int4(32), "gptq").error < 0.01


def test_output_error_is_a_trace() -> None:
    w, inputs, _ = problem(2000, 24)
    expected = np.trace(w.astype(np.float64) @ inputs.held_out.astype(np.float64) @ w.T.astype(np.float64))
    found = [output_error(w, inputs.held_out, threads=threads) for threads in (1, 2)]
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)


@pytest.mark.parametrize("method", ["search", "awq", "gptq", "best"])
def test_bytes_depend_on_neither_threads_nor_tier(
    model: Path, text: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = set()
    for tier in kernels.isa_tiers():
        monkeypatch.setenv("W4CONV_ISA", tier)
        for threads in (1, 2):
            out = tmp_path / f"{tier}{threads}.w4"
            quantize(
                model, out, method=method, calibration=text, scheme="w4a16", threads=threads, group_size=32, **SMALL
            )
            made.add(out.read_bytes())
    assert len(made) == 1


def test_record_and_report(model: Path, text: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "o.w4", calibration=text, scheme="w4a16", **SMALL)
    assert report.method == "best"
    assert any("gptq" in note for note in report.notes)
    with open_container(tmp_path / "o.w4") as container:
        assert container.provenance["method"] == "best"
        assert container.provenance["calibration"] == {
            "text_blake3": blake3(text.read_bytes()).hexdigest(),
            "tokens": 512,
            "ctx": 32,
            "held_out_sequences": 2,
            "damping_percent": 100,
        }
    planned = quantize(model, tmp_path / "p.w4", calibration=text, scheme="w4a16", dry_run=True, **SMALL)
    assert planned.output_nbytes == report.output_nbytes


def test_outputs_of_the_model_are_nearer(model: Path, text: Path, tmp_path: Path) -> None:
    from w4conv.runtime.engine import Model
    from w4conv.runtime.tokenizer import Tokenizer

    quantize(model, tmp_path / "keep.w4", scheme="keep")
    quantize(model, tmp_path / "rtn.w4", effort=0, scheme="w4a16")
    quantize(model, tmp_path / "best.w4", calibration=text, scheme="w4a16", **SMALL)
    logits = {}
    for name in ("keep", "rtn", "best"):
        with Model(tmp_path / f"{name}.w4") as m:
            ids = Tokenizer(m.container.blobs).encode(WORDS)
            logits[name] = m.logits(ids)
    error = {name: np.square(logits[name] - logits["keep"]).mean() for name in ("rtn", "best")}
    assert error["best"] < 0.7 * error["rtn"]


@pytest.mark.parametrize("tied", [True, False])
def test_heads_in_4_bits(text: Path, tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama_dir(tmp_path / "model", hidden=48, inner=80, tied=tied)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    options = SMALL | {"embeddings": "int4", "group_size": 32, "calibration": text}
    quantize(model, tmp_path / "o.w4", **options)
    monkeypatch.setattr("w4conv.calibration.calibrator._READ_ROWS", 32)  # rows are independent, but for what is judged
    quantize(model, tmp_path / "blocks.w4", **options, threads=1)
    assert (tmp_path / "o.w4").read_bytes() == (tmp_path / "blocks.w4").read_bytes()
    report = verify(tmp_path / "o.w4", against=model)
    assert report.ok
    assert report.round_trip is not None
    same = {t.name: t.same_codes for t in report.round_trip.tensors}
    assert same["model.embed_tokens.weight"] is (None if tied else True)
    assert same[head] is None
    quantize(model, tmp_path / "rtn.w4", embeddings="int4", group_size=32, effort=0, scheme="w4a16")
    with open_container(tmp_path / "o.w4") as ours, open_container(tmp_path / "rtn.w4") as plain:
        assert (ours.dequantize(head) != plain.dequantize(head)).any()
    out = tmp_path / "out.w4"
    with pytest.raises(KeyboardInterrupt):
        quantize(model, out, resume=True, progress=Stop(3), **options)
    quantize(model, out, resume=True, **options)
    assert out.read_bytes() == (tmp_path / "o.w4").read_bytes()


@pytest.mark.parametrize("scheme", ["int4z", "nf4", "fp4"])
def test_other_schemes(model: Path, text: Path, tmp_path: Path, scheme: str) -> None:
    from w4conv.runtime.engine import Model
    from w4conv.runtime.tokenizer import Tokenizer

    options: dict[str, Any] = {"scheme": scheme, "embeddings": scheme, "group_size": 32}
    quantize(model, tmp_path / "keep.w4", scheme="keep")
    quantize(model, tmp_path / "rtn.w4", effort=0, **options)
    report = quantize(model, tmp_path / "best.w4", calibration=text, **options, **SMALL)
    assert any("gptq" in note for note in report.notes)
    assert verify(tmp_path / "best.w4", against=model).ok
    logits = {}
    for name in ("keep", "rtn", "best"):
        with Model(tmp_path / f"{name}.w4") as m:
            logits[name] = m.logits(Tokenizer(m.container.blobs).encode(WORDS))
    error = {name: np.square(logits[name] - logits["keep"]).mean() for name in ("rtn", "best")}
    assert error["best"] < 0.7 * error["rtn"]
    out = tmp_path / "out.w4"
    with pytest.raises(KeyboardInterrupt):
        quantize(model, out, calibration=text, resume=True, progress=Stop(13), **options, **SMALL)
    quantize(model, out, calibration=text, resume=True, threads=1, **options, **SMALL)
    assert out.read_bytes() == (tmp_path / "best.w4").read_bytes()


def test_verify_tells_what_it_cannot_make_again(model: Path, text: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "o.w4", calibration=text, scheme="w4a16", **SMALL)
    report = verify(tmp_path / "o.w4", against=model)
    assert report.ok
    assert report.round_trip is not None
    assert report.round_trip.same_codes is None
    same = {t.name: t.same_codes for t in report.round_trip.tensors}
    assert same["model.embed_tokens.weight"] is True
    assert same["model.norm.weight"] is True
    assert same["model.layers.1.mlp.down_proj.weight"] is None
    other = make_llama_dir(tmp_path / "other", hidden=48, inner=80, seed=1)
    report = verify(tmp_path / "o.w4", against=other)
    assert not report.ok
    assert report.round_trip is not None
    assert report.round_trip.same_codes is False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "gptq", "effort": 1}, "effort 1 rounds to nearest"),
        ({"method": "omniquant", "calibration": "t"}, "unknown method"),
        ({"method": "rtn", "effort": 3}, "effort 3 calibrates"),
        ({"method": "rtn", "calibration": "t"}, "no use"),
        ({"scheme": "bf16", "calibration": "t"}, "nothing to calibrate"),
        ({"calibration": "t", "calibration_ctx": 257}, "calibration-ctx"),
        ({"calibration": "t", "calibration_ctx": 32, "calibration_tokens": 100}, "at least 8"),
        ({"calibration": "t", "calibration_ctx": 64, "calibration_tokens": 1 << 20}, "Use a longer text"),
    ],
)
def test_options_that_make_no_sense(
    model: Path, text: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    if "calibration" in options:
        options = options | {"calibration": text}
    with pytest.raises(UsageError, match=words):
        quantize(model, tmp_path / "o.w4", **options)
    assert not (tmp_path / "o.w4").exists()


@pytest.mark.parametrize(("value", "words"), [(np.nan, "NaN at row 3, column 7"), (3e9, "beyond FP16 at row 3")])
def test_values_that_cannot_be_coded(text: Path, tmp_path: Path, value: float, words: str) -> None:
    from helpers import llama_tensors

    model = make_llama_dir(tmp_path / "in", dtype="F32")
    tensors = llama_tensors(
        hidden=64, inner=96, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=300, tied=False, biases=(), seed=0
    )
    tensors["model.layers.0.mlp.gate_proj.weight"][3, 7] = value
    write_safetensors(model / "model.safetensors", {name: ("F32", a) for name, a in tensors.items()})
    with pytest.raises(InputError, match=words):
        quantize(model, tmp_path / "o.w4", calibration=text, scheme="w4a16", **SMALL)
    assert not (tmp_path / "o.w4").exists()


class Stop:
    """Interrupts when `n` tensors are done; adds up their bytes."""

    def __init__(self, n: int = 1000) -> None:
        self.n, self.left = n, 0

    def start(self, total_nbytes: int) -> None:
        self.left = total_nbytes

    def advance(self, nbytes: int, name: str) -> None:
        self.left -= nbytes
        self.n -= 1
        if not self.n:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("whole") / "whole.w4"
    quantize(model, out, calibration=text, scheme="w4a16", **SMALL)
    return out.read_bytes()


# Stopped while a layer is rounded (its 7 matrices), and at the norm in the midst of writing one, or after both.
@pytest.mark.parametrize(
    ("n", "n_solved"), [(3, 14), (9, 14), (10, 14), (12, 7), (16, 7), (19, 7), (20, 0)],
)  # fmt: skip
def test_interrupted_and_resumed(
    model: Path, text: Path, whole: bytes, tmp_path: Path, n: int, n_solved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.w4"
    with pytest.raises(KeyboardInterrupt):
        quantize(model, out, calibration=text, scheme="w4a16", resume=True, progress=Stop(n), **SMALL)
    solved: list[str] = []

    def count(*args: Any, **options: Any) -> Any:
        solved.append(args[3])
        return solve(*args, **options)

    monkeypatch.setattr("w4conv.calibration.calibrator.solve", count)
    monkeypatch.setenv("W4CONV_ISA", "scalar")
    progress = Stop()
    report = quantize(model, out, calibration=text, scheme="w4a16", resume=True, progress=progress, threads=1, **SMALL)
    assert any(note.startswith("resumed: ") and not note.startswith("resumed: 0") for note in report.notes)
    assert out.read_bytes() == whole
    assert progress.left == 0
    assert len(solved) == n_solved
    assert any("rounding chosen" in note for note in report.notes) == (n_solved > 0)


def test_interrupted_again_and_again(model: Path, text: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    for n in (9, 11, 16, 21):
        with pytest.raises(KeyboardInterrupt):
            quantize(model, out, calibration=text, scheme="w4a16", resume=True, progress=Stop(n), **SMALL)
    quantize(model, out, calibration=text, scheme="w4a16", resume=True, **SMALL)
    assert out.read_bytes() == whole
