"""Attention and its cache against numpy in float64: KV splits, windows, 8-bit keys and values, a memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import make_llama_dir
from safetensors.numpy import load_file, save_file

from w4conv import kernels
from w4conv.commands.quantize import quantize
from w4conv.errors import UsageError
from w4conv.models.spec import ModelSpec
from w4conv.runtime.engine import KV_SINKS, Model, Session

F64 = npt.NDArray[np.float64]
WINDOW = 121  # of a budget: the most that 256 slots hold beside the first 16 and the tokens of one pass
N_TOKENS = 700  # more than two KV splits of 256 keys, and more than the windows below keep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: no window; windows of 150; large biases on the keys; the same where half of a head is rotated."""
    folder = tmp_path_factory.mktemp("attention")
    for name, window in (("all", None), ("window", 150)):
        config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
        make_llama_dir(folder / name, config=config | {"max_position_embeddings": 1024})
        quantize(folder / name, folder / f"{name}.w4", scheme="f32", effort=0)
    for name, partial in (("biased", 1.0), ("partial", 0.5)):
        config = {"attention_bias": True, "max_position_embeddings": 1024, "partial_rotary_factor": partial}
        biases = [f"{part}_proj" for part in "qkvo"]
        make_llama_dir(folder / name, config=config, biases=biases, dtype="F32")
        tensors = load_file(folder / name / "model.safetensors")
        for key in [key for key in tensors if key.endswith("k_proj.bias")]:
            tensors[key] *= 100
        save_file(tensors, folder / name / "model.safetensors")
        quantize(folder / name, folder / f"{name}.w4", scheme="f32", effort=0)
    return folder


@pytest.fixture(scope="module")
def tokens() -> npt.NDArray[np.int64]:
    return np.random.default_rng(1).integers(0, 250, N_TOKENS)


def as_bytes(rows: F64) -> F64:
    """Keys or values (n_tokens, n_heads, head_dim) as 8 bits with a scale a token and head hold them."""
    rows = rows.astype(np.float32)
    scales = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(rows / scales) * scales).astype(np.float64)


def oracle(
    model: Model, tokens: npt.NDArray[np.int64], *, window: int = 0, n_sinks: int = 0, int8: bool = False
) -> F64:
    """Logits after each token, in float64."""
    spec, n = model.spec, len(tokens)
    weight = {t.name: model.container.dequantize(t.name).astype(np.float64) for t in spec.tensors()}
    distance = np.arange(n)[:, None] - np.arange(n)
    visible = distance >= 0
    if window:
        visible &= (distance < window) | (np.arange(n) < n_sinks)
    x = weight["model.embed_tokens.weight"][tokens]
    for layer in range(spec.n_layers):
        at = f"model.layers.{layer}."
        normed = norm(spec, x, weight[at + "input_layernorm.weight"])
        q, k, v = (
            (normed @ weight[f"{at}self_attn.{part}_proj.weight"].T).reshape(n, -1, spec.head_dim) for part in "qkv"
        )
        biases = {part: weight.get(f"{at}self_attn.{part}_proj.bias", np.zeros(spec.head_dim)) for part in "qkv"}
        q_bias, k_bias, v_bias = (biases[part].reshape(-1, spec.head_dim) for part in "qkv")
        q, k, v = rotate(spec, q + q_bias), rotate(spec, k), v + v_bias
        if int8:
            k, v = as_bytes(k), as_bytes(v)
        k = k + rotate(spec, np.broadcast_to(k_bias, k.shape))  # never in 8 bits
        out = np.empty_like(q)
        for head in range(spec.n_heads):
            of = head // (spec.n_heads // spec.n_kv_heads)
            scores = np.where(visible, q[:, head] @ k[:, of].T / np.sqrt(spec.head_dim), -np.inf)
            p = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = p @ v[:, of] / p.sum(1, keepdims=True)
        x = x + out.reshape(n, -1) @ weight[f"{at}self_attn.o_proj.weight"].T
        x = x + weight.get(f"{at}self_attn.o_proj.bias", 0.0)
        normed = norm(spec, x, weight[at + "post_attention_layernorm.weight"])
        gate, up = (normed @ weight[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight[f"{at}mlp.down_proj.weight"].T
    head_name = "model.embed_tokens.weight" if spec.tied_head else "lm_head.weight"
    logits: F64 = norm(spec, x, weight["model.norm.weight"]) @ weight[head_name].T
    return logits


def norm(spec: ModelSpec, x: F64, weight: F64) -> F64:
    out: F64 = x / np.sqrt((x * x).mean(1, keepdims=True) + spec.norm_eps) * weight
    return out


def rotate(spec: ModelSpec, x: F64) -> F64:
    angles = np.arange(len(x))[:, None, None] * np.array(spec.rope.inverse_frequencies(spec.head_dim))
    a, b, rest = np.split(x, [angles.shape[-1], 2 * angles.shape[-1]], axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def in_pieces(session: Session, tokens: npt.NDArray[np.int64], sizes: list[int]) -> npt.NDArray[np.float32]:
    assert sum(sizes) == len(tokens)
    pieces = np.split(tokens, np.cumsum(sizes)[:-1])
    return np.concatenate([session.append(piece, all_logits=True) for piece in pieces])


@pytest.mark.parametrize(
    ("name", "kv", "budget"),
    [
        ("all", "f32", False),
        ("all", "f16", True),
        ("all", "int8", False),
        ("window", "f32", True),
        ("window", "f16", False),
        ("window", "int8", True),
        ("biased", "f32", False),
        ("biased", "int8", True),
        ("partial", "int8", False),
    ],
)
def test_logits_equal_numpy_whatever_the_tier_the_threads_and_the_pieces(
    folder: Path, tokens: npt.NDArray[np.int64], name: str, kv: str, budget: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"kv": kv}
    if budget:
        with Model(folder / f"{name}.w4", kv=kv) as model:
            options["kv_memory"] = model.kv_nbytes(WINDOW)
    results = []
    for tier, threads, sizes in (
        ("scalar", 1, [300, 97, 303]),
        *((tier, 2, [N_TOKENS]) for tier in kernels.isa_tiers()[1:]),
        (kernels.isa_tiers()[-1], 2, [250] + [1] * 20 + [5] * 50 + [1] * 180),
    ):
        monkeypatch.setenv("W4CONV_ISA", tier)
        with Model(folder / f"{name}.w4", threads=threads, **options) as model:
            session = model.session()
            results.append(in_pieces(session, tokens, sizes))
            n_dropped = session.n_dropped
            if len(results) == 1:
                window = WINDOW if budget else 150 if name == "window" else 0
                assert model.kv_window == (WINDOW if budget else 0)
                n_sinks = KV_SINKS if budget else 0
                want = oracle(model, tokens, window=window, n_sinks=n_sinks, int8=kv == "int8")
    assert n_dropped == (N_TOKENS + 1 - WINDOW - KV_SINKS if budget else 0)
    error = np.abs(results[0] - want).max() / np.ptp(want)
    assert error < {"f32": 1e-5, "f16": 1e-3, "int8": 1e-3}[kv]
    assert len({r.tobytes() for r in results}) == 1


@pytest.mark.parametrize("budget", [False, True])
def test_a_session_can_be_cut_anywhere(folder: Path, tokens: npt.NDArray[np.int64], budget: bool) -> None:
    """Also where others have taken the slots of keys that are visible again then."""
    with Model(folder / "window.w4") as model:
        nbytes = model.kv_nbytes(WINDOW) if budget else None
    with Model(folder / "window.w4", kv_memory=nbytes) as model:
        want = model.logits(tokens)
        session = model.session()
        # 480, 479 and 237, 236: the deepest cuts that leave all keys in place, with a budget and the window alone.
        for n, cut in ((400, 395), (600, 480), (600, 479), (700, 300), (600, 237), (600, 236), (500, 0), (130, 110)):
            np.testing.assert_array_equal(session.append(tokens[session.n_tokens : n])[0], want[n - 1])
            session.truncate(cut)
            again = session.append(tokens[cut : cut + 3], all_logits=True)
            np.testing.assert_array_equal(again, want[cut : cut + 3])


def test_windows_and_budgets_hold_memory(folder: Path) -> None:
    with Model(folder / "all.w4") as model, Model(folder / "window.w4") as windowed:
        spec = model.spec
        per_token = spec.n_layers * spec.n_kv_heads * (spec.head_dim + -(-spec.head_dim // 16) * 16)
        assert model.kv_nbytes(0) == 1024 * per_token * 2
        assert windowed.kv_nbytes(0) == 512 * per_token * 2
        # Smaller windows than the budget asks for are the model's own, without attention sinks.
        assert windowed.kv_nbytes(200) == windowed.kv_nbytes(0)
        assert windowed.kv_nbytes(WINDOW) == 256 * per_token * 2
    for kv, nbytes in (("f32", 4), ("int8", 1)):
        with Model(folder / "all.w4", kv=kv) as model:
            scales = 2 * 4 * spec.n_layers * spec.n_kv_heads if kv == "int8" else 0
            assert model.kv_nbytes(0) == 1024 * (per_token * nbytes + scales)
    with Model(folder / "all.w4") as model:
        whole, least = model.kv_nbytes(0), model.kv_nbytes(64)
    for budget, window in ((whole, 0), (whole - 1, None), (least, WINDOW)):
        with Model(folder / "all.w4", kv_memory=budget) as model:
            assert window is None or model.kv_window == window
            assert model.kv_nbytes(model.kv_window) <= budget
    with pytest.raises(UsageError, match=f"{least - 1:,}.*{least:,}.*{whole:,}"):
        Model(folder / "all.w4", kv_memory=least - 1)
