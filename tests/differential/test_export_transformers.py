"""Exported directories in transformers: plain ones, and compressed-tensors through the package of that name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exports import converted

import w4conv
from w4conv.commands.export import export
from w4conv.errors import InputError
from w4conv.exports import FORMATS, STACKED

torch = pytest.importorskip("torch", reason="torch is the oracle; install the oracle dependency group")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the oracle group")

IDS = np.random.default_rng(0).integers(0, 300, 24).tolist()


def reference(path: Path, tmp_path: Path) -> np.ndarray:
    """Our engine in float32 on the very values of the container."""
    export(path, tmp_path / "f32", to="safetensors")
    w4conv.quantize(tmp_path / "f32", tmp_path / "f32.w4", scheme="f32", effort=0)
    with w4conv.Model(tmp_path / "f32.w4", kv="f32") as model:
        return model.logits(IDS)


def logits(directory: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_safetensors(tmp_path: Path, architecture: str) -> None:
    path = converted(tmp_path, architecture=architecture)
    expected = reference(path, tmp_path)
    assert np.abs(logits(tmp_path / "f32") - expected).max() < 1e-3


@pytest.mark.filterwarnings("default")  # of the package's own
@pytest.mark.parametrize("group_size", [32, 64, "row"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_compressed_tensors(tmp_path: Path, group_size: int | str, scheme: str) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is the consumer; install the oracle group")
    path = converted(tmp_path, group_size=group_size, scheme=scheme, inner=128)
    report = export(path, tmp_path / "out", to="compressed-tensors", dtype="f32")
    assert report.exact
    assert np.abs(logits(tmp_path / "out") - reference(path, tmp_path)).max() < 1e-3


@pytest.mark.filterwarnings("default")  # of the package's own
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Gemma2", {"head_dim": 32}),
        ("Phi3", {"pad_token_id": 0}),
        ("Qwen3Moe", {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    ],
)
def test_further_families(tmp_path: Path, name: str, settings: dict[str, int]) -> None:
    """A family of norms and caps of its own, one of fused matrices, one of experts."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is the consumer; install the oracle group")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=256, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "in")
    path = tmp_path / "m.w4"
    w4conv.quantize(tmp_path / "in", path, group_size=32, effort=0, scheme="w4a16")
    assert export(path, tmp_path / "out", to="compressed-tensors", dtype="f32").exact
    assert w4conv.verify(tmp_path / "out", against=path).ok
    assert np.abs(logits(tmp_path / "out") - reference(path, tmp_path)).max() < 1e-3


@pytest.mark.parametrize(("name", "settings"), [("GptOss", {"head_dim": 32}), ("GraniteMoe", {})])
def test_stacks_of_experts(tmp_path: Path, name: str, settings: dict[str, int]) -> None:
    """In one tensor, as transformers has them; formats that hold matrices one by one refuse them."""
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=300, max_position_embeddings=256, num_local_experts=3, num_experts_per_tok=2, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "in")
    path = tmp_path / "m.w4"
    w4conv.quantize(tmp_path / "in", path, group_size=32, effort=0, scheme="w4a16")
    expected = reference(path, tmp_path)
    assert np.abs(logits(tmp_path / "f32") - expected).max() < 1e-3
    assert w4conv.verify(tmp_path / "f32", against=path).ok
    for to in sorted(set(FORMATS) - set(STACKED)):
        with pytest.raises(InputError, match="holds the matrices of all experts in one tensor, for which"):
            export(path, tmp_path / "out", to=to)
