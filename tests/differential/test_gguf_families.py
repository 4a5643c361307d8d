"""Every family that GGUF holds: exported, read back, and run by llama.cpp where that is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from exports import export_f32
from helpers import tiny_tokenizer
from tiny_models import MODELS, SIZES, Case, rope

import w4conv
from w4conv.commands.export import export
from w4conv.errors import InputError
from w4conv.runtime.engine import Model
from w4conv.sources.gguf_architectures import BY_FAMILY

# name -> (model_type, what differs from SIZES): where the tiny model as it comes is not one that llama.cpp runs.
OWN = {
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "qwen3_moe": ("qwen3_moe", {**MODELS["qwen3_moe"][1], "norm_topk_prob": True, "moe_intermediate_size": 64}),
    "gemma2": ("gemma2", {"sliding_window": 20, "head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {"sliding_window": 20, "head_dim": 32, "query_pre_attn_scalar": 32,
                               "num_hidden_layers": 6}),
    "granite": MODELS["granite-multipliers"],
    "mistral": MODELS["mistral-full"],
    "granitemoe": ("granitemoe", {**MODELS["granitemoe-multipliers"][1], "hidden_size": 128}),
    "gpt_oss": ("gpt_oss", {**MODELS["gpt_oss-window"][1], "hidden_size": 128, "head_dim": 32,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
}  # fmt: skip
# Those with a scaled rotary embedding. llama.cpp rounds where that of gpt-oss begins and ends: with this theta there is
# nearly nothing to round.
OTHERS = {
    "phi3-longrope": MODELS["phi3-longrope"],
    "qwen2-yarn": MODELS["qwen2-yarn"],
    "gpt_oss-yarn": ("gpt_oss", {**MODELS["gpt_oss-window"][1], "head_dim": 32,
                                 **rope("yarn", rope_theta=5900.0, factor=8.0, original_max_position_embeddings=32,
                                        truncate=False)}),
}  # fmt: skip
CASES = {family: OWN.get(family, MODELS.get(family, ("", {}))) for family in BY_FAMILY} | OTHERS


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    made = Case(request.param, tmp_path_factory.mktemp("models"), CASES[request.param])
    tiny_tokenizer(SIZES["vocab_size"] - 1).save(str(made.folder / "tokenizer.json"))
    return made


def logits(path: Path, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    with Model(path, kv="f32") as model:
        return model.logits(tokens)


@pytest.mark.parametrize("scheme", ["f32", "w4a16"])
def test_read_back_it_is_the_same_model(case: Case, tmp_path: Path, scheme: str) -> None:
    w4conv.quantize(case.folder, tmp_path / "a.w4", scheme=scheme, group_size=None if scheme == "f32" else 32, effort=0)
    export_f32(tmp_path / "a.w4", tmp_path / "a.gguf", "gguf")
    w4conv.quantize(tmp_path / "a.gguf", tmp_path / "b.w4", scheme="keep", effort=0)
    want = logits(tmp_path / "a.w4", case.tokens)
    # Gemma's norms are stored with 1 added, which rounds them. Rows that are no multiple of 32 long become floats,
    # whose products take other activations.
    bound = 1e-3 if scheme == "w4a16" else 1e-5 if "gemma" in case.model.config.model_type else 0
    assert np.abs(logits(tmp_path / "b.w4", case.tokens) - want).max() <= bound * np.ptp(want)
    assert w4conv.verify(tmp_path / "b.w4", against=tmp_path / "a.gguf").ok


def test_llama_cpp_computes_the_same(case: Case, tmp_path: Path) -> None:
    """Nothing is quantized, so every mistake of order, name or metadata shows."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the consumer; it is built from source")
    w4conv.quantize(case.folder, tmp_path / "m.w4", scheme="f32", effort=0)
    export(tmp_path / "m.w4", tmp_path / "m.gguf", to="gguf")
    llm = llama_cpp.Llama(
        str(tmp_path / "m.gguf"), n_ctx=64, n_batch=64, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1
    )
    llm.eval(case.tokens.tolist())
    theirs = np.array(llm.scores[: len(case.tokens)])
    ours = logits(tmp_path / "m.w4", case.tokens)
    rows = (
        slice(len(ours) // 2, None) if case.growing else slice(None)
    )  # llama.cpp takes one set of frequencies for all
    assert np.abs(ours[rows] - theirs[rows]).max() < 2e-2 * np.abs(theirs).max()  # its keys and values are FP16


@pytest.mark.parametrize("name", ["llama-rope-dynamic", "gemma2-window", "qwen3_moe-some-dense", "gpt_oss-rounded"])
def test_what_llama_cpp_computes_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    rounded = ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1,
                           **rope("yarn", factor=8.0, original_max_position_embeddings=32)})  # fmt: skip
    case = Case(name, tmp_path, rounded if name == "gpt_oss-rounded" else None)
    tiny_tokenizer(SIZES["vocab_size"] - 1).save(str(case.folder / "tokenizer.json"))
    w4conv.quantize(case.folder, tmp_path / "m.w4", scheme="f32", effort=0)
    with pytest.raises(InputError, match="export"):
        export(tmp_path / "m.w4", tmp_path / "m.gguf", to="gguf")
    assert not (tmp_path / "m.gguf").exists()
