"""The language part of a multimodal checkpoint, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import w4conv

torch = pytest.importorskip("torch", reason="torch is the oracle; install the oracle dependency group")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the oracle group")

TEXT: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20,
    "max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def test_gemma3_with_a_vision_part(tmp_path: Path) -> None:
    """Its config lies under text_config, its names have a prefix, and 1 is added to its norms once."""
    torch.manual_seed(1)
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("norm.weight"):
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(tmp_path / "in")
    report = w4conv.quantize(tmp_path / "in", tmp_path / "out.w4", scheme="f32", effort=0)
    assert report.architecture == "Gemma3ForConditionalGeneration"
    assert any("Only the language part is read" in note for note in report.notes)
    ids = np.random.default_rng(2).integers(3, 301, 40)
    with torch.no_grad():
        expected = model(torch.tensor(ids)[None]).logits[0].numpy()
    with w4conv.Model(tmp_path / "out.w4", kv="f32") as ours:
        got = ours.logits(ids)
    assert np.ptp(expected) > 1
    assert np.abs(got - expected).max() < 1e-4
