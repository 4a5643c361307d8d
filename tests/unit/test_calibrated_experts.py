"""Calibrated mixtures of experts: each expert against a rounding in numpy, from routing to codes; and what is told."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import stories
import tiny_models
from golden.checkpoints import source_of
from helpers import WORDS, tiny_tokenizer, write_safetensors
from reference_forward.gemm import multiply
from reference_forward.model import ReferenceModel, activation
from test_calibration import Stop

from w4conv import codes, kernels
from w4conv.calibration.experts import tokens_of as tokens_lent
from w4conv.calibration.sequential import SequentialCalibrator
from w4conv.calibration.text import read_calibration
from w4conv.commands.calibrate import calibrate
from w4conv.commands.export import export
from w4conv.commands.quantize import quantize
from w4conv.commands.verify import verify
from w4conv.container import Container, open_container
from w4conv.errors import UsageError
from w4conv.models import spec_of
from w4conv.models.spec import Experts
from w4conv.quantization import reference_gptq as reference
from w4conv.quantization.calibrated import MULTIPLIERS
from w4conv.runtime.experts import route
from w4conv.runtime.layers import LayeredContainer, LayeredSource
from w4conv.scheme import int4
from w4conv.sources import open_source

F32 = npt.NDArray[np.float32]
TEXT: dict[str, Any] = {"calibration_tokens": 128, "calibration_ctx": 16}
GROUP, FEW = 32, 48
KINDS = {
    "mixtral": {"hidden_size": 32, "intermediate_size": 48},
    "qwen3_moe": {
        "hidden_size": 32, "moe_intermediate_size": 40, "head_dim": 16, "num_hidden_layers": 2, "norm_topk_prob": False,
    },
    "granitemoe": {"hidden_size": 32, "intermediate_size": 40, "residual_multiplier": 0.4},
    "gpt_oss": {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "sliding_window": 20},
}  # fmt: skip


def make(folder: Path, kind: str, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """A random model with 5 experts, 2 for a token. change: edits its tensors."""
    case = tiny_models.Case(kind, folder, (kind, KINDS[kind] | tiny_models.EXPERTS))
    tiny_tokenizer(301).save(str(case.folder / "tokenizer.json"))
    if change is not None:
        from safetensors.numpy import load_file

        tensors = load_file(case.folder / "model.safetensors")
        change(tensors)
        write_safetensors(case.folder / "model.safetensors", {name: ("F32", a) for name, a in tensors.items()})
    return case.folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS * 60)
    return path


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of narrow models: so that some experts see fewer."""
    monkeypatch.setattr("w4conv.calibration.experts.COLUMNS_A_TOKEN", 32 / FEW)


# ---- the rounding of an expert in numpy, from the rows of the layer to its codes -------------------------------------


class Observed(ReferenceModel):
    """Keeps the rows that the experts of a layer read, and their router scores."""

    def experts(self, at: str, x: F32) -> F32:
        self.rows.setdefault(at, []).append(x)
        return super().experts(at, x)

    def watch(self, sequences: npt.NDArray[np.int64]) -> dict[str, F32]:
        """By layer, (n_tokens, hidden_size)."""
        self.rows: dict[str, list[F32]] = {}
        for tokens in sequences:
            self.logits(tokens.tolist())
        return {at: np.concatenate(rows) for at, rows in self.rows.items()}

    def parts(self) -> dict[str, str]:
        names = self.config.family.experts
        assert names is not None
        gate_up = {"gate_up": names.gate_up} if names.gate_up else {"gate": names.gate, "up": names.up}
        return gate_up | {"down": names.down}

    def product(self, at: str, name: str, e: int, x: F32, *, bias: bool = True) -> F32:
        y = multiply(self.matrix(at + name.format(e), 0 if "{}" in name else e), x, top=self.top)
        b = self.vector(f"{at}{name}_bias")
        return y if b is None or not bias else y + b[e]

    def inner(self, at: str, e: int, x: F32) -> F32:
        parts = self.parts()
        if "gate_up" not in parts:
            gate, up = (self.product(at, parts[part], e, x) for part in ("gate", "up"))
        else:
            both = self.product(at, parts["gate_up"], e, x)
            gate, up = (both[:, ::2], both[:, 1::2]) if self.config.family.interleaved else np.split(both, 2, axis=1)
        return activation(self.config.family.activation, gate, up)


def moments(a: F32, b: F32) -> F32:
    """Mean of a^T b, summed in blocks of 512 tokens."""
    total = np.zeros((a.shape[1], b.shape[1]), np.float32)
    for start in range(0, len(a), 512):
        reference.gemm_tn(a[start : start + 512], b[start : start + 512], total)
    return total / np.float32(len(a))


def factor(h: F32, columns: Any, damped: F32) -> tuple[F32, F32]:
    a = h[np.ix_(columns, columns)].copy()
    np.fill_diagonal(a, damped[columns])
    found = reference.factor(a)
    assert found is not None
    return found


def gptq(w: F32, h: F32, cross: F32) -> F32:
    """The values of w after GPTQ as docs say: int4 in groups, damping of 100 %, towards the output residual."""
    n, grid = w.shape[1], codes.grid(int4(GROUP))
    diagonal = np.diag(h)
    mean = diagonal.mean(dtype=np.float64)
    damping = np.where(diagonal > 0, mean, mean)
    damped = (diagonal + damping).astype(np.float32)
    order = np.argsort(diagonal, kind="stable")
    unit, pivots = factor(h, order, damped)
    target = np.empty_like(w)
    target[:, order] = reference.solve(cross[:, order], unit, pivots)
    target = w + target
    size = min(GROUP, n)
    found = []
    for start in range(0, n, size):
        part = slice(start, min(start + size, n))
        columns = start + np.argsort(diagonal[part], kind="stable")
        own, own_pivots = factor(h, columns, damped)
        found.append(
            reference.search_scales(target[:, columns], own, own_pivots, np.array(MULTIPLIERS, np.float32), grid)
        )
    scales, q_min = (np.stack([f[i] for f in found], axis=1) for i in (0, 1))
    wide, wide_min = (np.repeat(a, size, axis=1)[:, :n] for a in (scales, q_min))
    q = np.empty(w.shape, np.int8)
    q[:, order] = reference.gptq_round(target[:, order], wide[:, order], wide_min[:, order], unit, grid)
    whole = h.copy()
    np.fill_diagonal(whole, damped)
    q, scales = reference.refine(target, q, scales, q_min, whole, size, grid, 2)
    return np.asarray(q.astype(np.float32) * np.repeat(scales, size, axis=1)[:, :n])


def rtn(w: F32) -> F32:
    packed = kernels.quantize_rtn(np.ascontiguousarray(w), "F32", int4(GROUP))
    return codes.dequantize(int4(GROUP), w.shape, packed.raw_parts())


def loss(w: F32, rounded: F32, h: F32, cross: F32) -> float:
    e = rounded.astype(np.float64) - w
    return float((e @ h * e).sum() - 2 * (e * cross).sum())


def tokens_of(model: Observed, at: str, rows: F32, e: int, held_out: Any) -> tuple[list[Any], int]:
    """(tokens to fit and those held out, how many are routed to e): those routed to it, then by how far its score is
    below the second best."""
    names = model.config.family.experts
    assert names is not None
    scores = model.with_bias(at + names.router, model.linear(at + names.router, rows))
    second = -np.sort(-scores, axis=1)[:, 1]
    order = np.argsort(-(scores[:, e] - second), kind="stable")
    routed = scores[:, e] >= second
    assert (routed.sum(axis=0) == (np.argsort(-scores, axis=1)[:, :2] == e).any(axis=1).sum()).all()
    out = []
    for kind, least in ((~held_out, FEW - FEW // 8), (held_out, FEW // 8)):
        of_kind = order[kind[order]]
        out.append(np.sort(of_kind[: max(least, int((routed & kind).sum()))]))
    return out, int(routed.sum())


def sequences_of(model: Path, text: Path) -> npt.NDArray[np.int64]:
    with open_source(model) as source:
        return read_calibration(text, source.blobs, spec_of(source.blobs), tokens=128, ctx=16).sequences


def expected(
    container: Container, source: Container, sequences: npt.NDArray[np.int64]
) -> tuple[dict[tuple[str, int], F32], dict[int, tuple[int, ...]]]:
    """Values of each matrix of each expert, by tensor and expert; by layer, experts that see few tokens.

    container: what is checked; it gives the layers before, and an expert's gate and up for its down.
    """
    quantized, original = Observed(container), Observed(source)
    x, exact = quantized.watch(sequences), original.watch(sequences)
    held_out = np.repeat(np.arange(len(sequences)) % 8 == 4, sequences.shape[1])
    out, few = {}, dict[int, tuple[int, ...]]()
    for layer, at in enumerate(x):
        for e in range(5):
            sets, n_routed = tokens_of(quantized, at, x[at], e, held_out)
            if n_routed < FEW:
                few[layer] = (*few.get(layer, ()), e)
            inner, exact_inner = quantized.inner(at, e, x[at]), original.inner(at, e, exact[at])
            for part, name in original.parts().items():
                w = np.asarray(original.matrix(at + name.format(e), 0 if "{}" in name else e).levels, np.float32)
                rows, target = (inner, exact_inner) if part == "down" else (x[at], exact[at])
                missing = original.product(at, name, e, target - rows, bias=False)
                h, cross = ([moments(a[t], rows[t]) for t in sets] for a in (rows, missing))
                tried = [rtn(w), gptq(w, h[0], cross[0])]
                losses = [loss(w, values, h[1], cross[1]) for values in tried]
                out[at + name.format(e), e] = tried[int(losses[1] < losses[0])]
    return out, few


@pytest.mark.parametrize("kind", KINDS)
def test_experts_equal_the_reference(kind: str, text: Path, tmp_path: Path) -> None:
    """Some see few tokens; of gpt-oss one sees none."""

    def change(tensors: dict[str, Any]) -> None:
        for name, a in tensors.items():
            if name.endswith("router.bias"):
                a[1] = -1e3

    model = make(tmp_path, kind, change)
    report = quantize(
        model, tmp_path / "o.w4", calibration=text, method="gptq", scheme="w4a16", group_size=GROUP, **TEXT
    )
    quantize(model, tmp_path / "keep.w4", scheme="f32", effort=0)
    sequences = sequences_of(model, text)
    with open_container(tmp_path / "o.w4") as container, open_container(tmp_path / "keep.w4") as keep:
        want, few = expected(container, keep, sequences)
        for (name, e), values in want.items():
            got = container.dequantize(name)
            np.testing.assert_array_equal(got[e] if got.ndim == 3 else got, values, err_msg=f"{name} {e}")
        routers = [t for t in spec_of(container.blobs).tensors() if t.role == "router"]
        for t in routers:
            np.testing.assert_array_equal(container.dequantize(t.name), keep.dequantize(t.name))
        assert len(routers) == 2
        assert len(want) == 2 * 5 * (3 if kind in ("mixtral", "qwen3_moe") else 2)
    assert {few.layer: few.experts for few in report.few_tokens} == few
    assert few
    assert kind != "gpt_oss" or all(1 in experts for experts in few.values())
    assert any(f"fewer than {FEW} calibration tokens" in note for note in report.notes)


def test_streams_are_the_engine_s(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states behind each layer, one of them dense: of the source, and of the container."""
    model = tiny_models.Case("qwen3_moe-some-dense", tmp_path).folder
    tiny_tokenizer(301).save(str(model / "tokenizer.json"))
    found: list[tuple[F32, ...]] = []
    run = SequentialCalibrator._run_layer

    def keep(self: Any, layer: int) -> None:
        run(self, layer)
        found.append(tuple(hidden.copy() for hidden in self._hidden))

    monkeypatch.setattr(SequentialCalibrator, "_run_layer", keep)
    quantize(model, tmp_path / "o.w4", calibration=text, scheme="w4a16", embeddings="f32", group_size=32, **TEXT)
    sequences = sequences_of(model, text)
    with open_source(model) as source, open_container(tmp_path / "o.w4") as container:
        for i, layered in enumerate((LayeredSource(source), LayeredContainer(container))):
            hidden = layered.embed(sequences)
            for layer in range(4):
                one = layered.layer(layer).model
                for sequence in hidden:
                    one.run(sequence)
                np.testing.assert_array_equal(found[layer][i], hidden)


def test_nearest_tokens_are_lent() -> None:
    """Five tokens, three experts, one a token. Expert 2 sees token 4 only."""
    scores = np.array([[9, 0, 1], [0, 9, 2], [9, 0, 8], [0, 9, 7], [0, 0, 9]], np.float32)
    experts = Experts(3, 1, 8, "router", {}, (True,))
    routing = route(experts, scores)
    assert routing.chosen.argmax(axis=1).tolist() == [0, 1, 0, 1, 2]
    np.testing.assert_array_equal(routing.weights[routing.chosen], np.ones(5))
    nobody = np.zeros(5, np.bool_)
    for few, want in ((1, [4]), (2, [2, 4]), (3, [2, 3, 4]), (4, [1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])):
        got = tokens_lent(routing, 2, nobody, few + -(-few // 7))
        assert (got.fit.tolist(), got.held_out.tolist(), got.n_routed) == (want, [], 1)


@pytest.mark.parametrize("method", ["search", "best"])
def test_bytes_depend_on_neither_threads_nor_tier(
    text: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tmp_path, "gpt_oss")
    made = set()
    for tier in kernels.isa_tiers():
        monkeypatch.setenv("W4CONV_ISA", tier)
        for threads in (1, 2):
            out = tmp_path / f"{tier}{threads}.w4"
            quantize(
                model, out, method=method, calibration=text, scheme="w4a16", threads=threads, group_size=32, **TEXT
            )
            made.add(out.read_bytes())
    assert len(made) == 1


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_interrupted_and_resumed(kind: str, text: Path, tmp_path: Path) -> None:
    """Again and again, while attention or experts are rounded, and in the midst of writing a layer."""
    model = make(tmp_path, kind)
    quantize(model, tmp_path / "whole.w4", calibration=text, scheme="w4a16", **TEXT)
    out, n, n_stops = tmp_path / "out.w4", 3, 0
    while not out.exists():
        try:
            quantize(model, out, calibration=text, scheme="w4a16", resume=True, progress=Stop(n), threads=1, **TEXT)
        except KeyboardInterrupt:
            n, n_stops = n + 5, n_stops + 1
    assert out.read_bytes() == (tmp_path / "whole.w4").read_bytes()
    assert n_stops > 4


def test_recipes_for_experts_and_routers(text: Path, tmp_path: Path) -> None:
    """Matrices that no method rounds are run as they are stored, and the router routes as it is stored."""
    model = make(tmp_path, "mixtral")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        '[tensors]\n"*.block_sparse_moe.gate.weight" = {scheme = "int8"}\n"*.experts.1.*" = {scheme = "bf16"}\n'
        '"*.experts.2.w1.weight" = {scheme = "int8", method = "rtn"}\n'
    )
    report = quantize(model, tmp_path / "o.w4", calibration=text, scheme="w4a16", recipe=str(recipe), **TEXT)
    verified = verify(tmp_path / "o.w4", against=model)
    assert verified.ok
    assert {t.scheme for t in report.schemes} >= {"bf16", "int8/g128", "int4/g128"}
    with open_container(tmp_path / "o.w4") as container:
        assert str(container.tensors["model.layers.0.block_sparse_moe.experts.1.w2.weight"].scheme) == "bf16"


def test_a_trained_mixture_loses_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On text that neither training nor calibration has seen."""
    monkeypatch.undo()  # as many tokens of an expert as by default
    model, seen, unseen = stories.trained_experts()
    for name, text in (("seen", seen), ("unseen", unseen)):
        (tmp_path / f"{name}.txt").write_text(text)
    options: dict[str, Any] = {"calibration_tokens": 4096, "calibration_ctx": 64, "calibration": tmp_path / "seen.txt"}
    quantize(model, tmp_path / "rtn.w4", scheme="w4a16", effort=0)
    quantize(model, tmp_path / "best.w4", scheme="w4a16", **options)
    found = {}
    for name in ("rtn", "best"):
        report = verify(
            tmp_path / f"{name}.w4", against=model, kld=True, text=tmp_path / "unseen.txt", ctx=64, chunks=24
        )
        assert report.perplexity is not None
        assert report.perplexity.divergence is not None
        found[name] = report.perplexity.divergence.mean
    assert found["best"] < 0.6 * found["rtn"]


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe"])
@pytest.mark.parametrize("calibrated", [True, False])
def test_budget_of_bits(kind: str, calibrated: bool, text: Path, tmp_path: Path) -> None:
    """The experts of a layer get one scheme for each part."""
    model = make(tmp_path, kind)
    options: dict[str, Any] = TEXT | {"calibration": text} if calibrated else {"effort": 1}
    report = quantize(model, tmp_path / "o.w4", target_bpw=6, **options)
    assert report.bits_per_weight <= 6
    rules = report.recipe[: report.n_allocated]
    with open_container(tmp_path / "o.w4") as container:
        tensors = [t for t in spec_of(container.blobs).tensors() if t.role in ("linear", "embedding", "head")]
        for t in tensors:
            ((_, rule),) = [r for r in rules if fnmatch.fnmatchcase(t.name, r[0])]
            assert str(container.tensors[t.name].scheme) == f"{rule.scheme}/g{rule.group}"
    assert len(rules) == 2 + 2 * (4 + (3 if kind == "mixtral" else 2))
    again = quantize(model, tmp_path / "again.w4", target_bpw=6, threads=1, **options)
    assert again.digest == report.digest


def test_budget_of_bits_beside_a_recipe(tmp_path: Path) -> None:
    """Where a rule speaks of one expert, the others are named one by one."""
    model = make(tmp_path, "mixtral")
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[tensors]\n"*.layers.1.*.experts.3.w1.weight" = {group = 64}\n')
    report = quantize(model, tmp_path / "o.w4", target_bpw=6, recipe=str(recipe), effort=1)
    names = [name for name, _ in report.recipe[: report.n_allocated]]
    at = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"
    assert [n for n in names if n.endswith("w1.weight")] == [
        at.format(0, "*"),
        *(at.format(1, e) for e in (0, 1, 2, 4)),
    ]
    with open_container(tmp_path / "o.w4") as container:
        assert str(container.tensors[at.format(1, 3)].scheme) == "nl4/g64"


def test_what_knows_dense_models_only(text: Path, tmp_path: Path) -> None:
    model = make(tmp_path, "mixtral")
    with pytest.raises(UsageError, match="MixtralForCausalLM is a mixture of experts: choose best, gptq or search"):
        quantize(model, tmp_path / "o.w4", calibration=text, method="awq", **TEXT)
    with pytest.raises(UsageError, match="quantize it with --calibration TEXT"):
        calibrate(model, text, tmp_path / "s.safetensors", tokens=128, ctx=16)
    dense = tiny_models.Case("llama", tmp_path).folder
    tiny_tokenizer(301).save(str(dense / "tokenizer.json"))
    calibrate(dense, text, tmp_path / "s.safetensors", tokens=128, ctx=16)
    with pytest.raises(UsageError, match="Name a text, or builtin"):
        quantize(model, tmp_path / "o.w4", calibration=tmp_path / "s.safetensors")
    assert not (tmp_path / "o.w4").exists()


def test_experts_quantized_already(text: Path, tmp_path: Path) -> None:
    """Of a GGUF file, whose experts are stacks in 4 bits there; kept or rounded a second time."""
    model = make(tmp_path, "mixtral")
    quantize(model, tmp_path / "plain.w4", scheme="w4a16", group_size=32, effort=0)
    export(tmp_path / "plain.w4", tmp_path / "m.gguf", to="gguf")
    report = quantize(tmp_path / "m.gguf", tmp_path / "o.w4", calibration=text, scheme="nl4", group_size=32, **TEXT)
    assert any("rounded a second time" in note for note in report.notes)
    assert verify(tmp_path / "o.w4", against=tmp_path / "m.gguf").ok


@pytest.mark.parametrize("kept", [True, False])
def test_experts_in_mxfp4(kept: bool, text: Path, tmp_path: Path) -> None:
    """Rounded a second time, or kept while attention is rounded."""
    model = source_of("gpt_oss-mxfp4", tmp_path)
    tiny_tokenizer(288).save(str(model / "tokenizer.json"))
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[tensors]\n"*.mlp.experts.*" = {scheme = "keep"}\n')
    options: dict[str, Any] = {"recipe": str(recipe)} if kept else {"requantize": True}
    quantize(model, tmp_path / "o.w4", calibration=text, **options, **TEXT)
    assert verify(tmp_path / "o.w4", against=model).ok
    with open_container(tmp_path / "o.w4") as container:
        scheme = container.tensors["model.layers.1.mlp.experts.down_proj"].scheme
        assert scheme.kind == ("e2m1" if kept else "nl4")
