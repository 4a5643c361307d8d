"""Every pair of rotary embeddings, of full and of windowed layers, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import HALF, Case

import w4conv

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": HALF,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": HALF},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": HALF,
        "short_factor": [1 + i / 40 for i in range(8)], "long_factor": [2 + i / 4 for i in range(8)],
    },
}  # fmt: skip


@pytest.mark.parametrize("local", KINDS)
@pytest.mark.parametrize("full", KINDS)
def test_pairs_of_ropes(tmp_path: Path, full: str, local: str) -> None:
    """On both sides of the length at which longrope changes, by prefixes, as a growing sequence sees them."""
    settings = {
        "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {**KINDS[full], "rope_theta": 1e6},
            "sliding_attention": {**KINDS[local], "rope_theta": 1e4},
        },
    }  # fmt: skip
    case = Case(f"{full}-{local}", tmp_path, ("gemma3_text", settings))
    w4conv.quantize(case.folder, tmp_path / "m.w4", scheme="f32", effort=0)
    with w4conv.Model(tmp_path / "m.w4", kv="f32") as model:
        got = model.logits(case.tokens)
        for n in (HALF, len(case.tokens)):
            want = case.logits(case.tokens[:n])
            first = HALF if n > HALF and "longrope" in (full, local) else 0  # what came before had the short factors
            assert np.ptp(want) > 1
            assert np.abs(got[first:n] - want[first:]).max() < 1e-4
        greedy = list(model.generate(case.tokens[: HALF - 1], max_tokens=3))
        for i, token in enumerate(greedy):
            assert token == case.logits([*case.tokens[: HALF - 1], *greedy[:i]])[-1].argmax()
        session = model.session()
        session.append(case.tokens[:40])
        session.truncate(10)
        assert np.abs(session.append(case.tokens[10:20])[0] - got[19]).max() == 0


@pytest.mark.parametrize(("full", "local"), [(HALF, 12), (12, HALF), (40, 41), (2, 60), (HALF, HALF)])
def test_two_longropes(tmp_path: Path, full: int, local: int) -> None:
    """Each changes at its own length: every prefix, at once, one by one, and in pieces."""
    short = {**KINDS["longrope"], "rope_theta": 1e4}
    settings = {
        "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {**short, "original_max_position_embeddings": full},
            "sliding_attention": {**short, "original_max_position_embeddings": local},
        },
    }  # fmt: skip
    case = Case("two", tmp_path, ("gemma3_text", settings))
    want = np.stack([case.logits(case.tokens[: n + 1])[-1] for n in range(len(case.tokens))])
    w4conv.quantize(case.folder, tmp_path / "m.w4", scheme="f32", effort=0)
    with w4conv.Model(tmp_path / "m.w4", kv="f32") as model:
        got = model.logits(case.tokens)
        assert np.abs(got - want).max() < 1e-4
        session = model.session()
        assert all(np.array_equal(session.append([t])[0], row) for t, row in zip(case.tokens, got, strict=True))
        for n in (50, 20, 5, 36):
            session = model.session()
            session.append(case.tokens)
            session.truncate(n)
            assert np.array_equal(session.append(case.tokens[n:])[0], got[-1])
