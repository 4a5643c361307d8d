"""Scaled channels folded into the operations before: the same bits from the engine, the same model for transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import make_llama_dir
from tiny_models import MODELS, Case, torch

from w4conv import codes
from w4conv.models import parse_config
from w4conv.models.spec import ModelSpec
from w4conv.quantization.folding import HOOKS, FoldedSource, Folding, can_fold, n_factors
from w4conv.runtime.layers import LayeredSource
from w4conv.sources import open_source
from w4conv.sources.base import Source

FAMILIES = [name for name, (kind, arguments) in MODELS.items() if name == kind and "num_local_experts" not in arguments]
DENSE = [*FAMILIES, "llama-mha-biases", "phi3-partial-window", "gemma2-window", "granite-multipliers"]


def logits(source: Source, tokens: np.ndarray) -> np.ndarray:
    model = LayeredSource(source)
    model.kv = "f32"  # values in F16 are rounded, below 2^-14 by how small they are
    hidden = model.embed(tokens)
    for i in range(model.spec.n_layers):
        model.layer(i).model.run(hidden)
    return model.head().logits(hidden)


def some_folding(spec: ModelSpec) -> Folding:
    rng = np.random.default_rng(7)
    return Folding(
        spec,
        {
            (i, place): rng.integers(-3, 4, n_factors(spec, place)).astype(np.int8)
            for i in range(spec.n_layers)
            for place in HOOKS
            if can_fold(spec, place)
        },
    )


@pytest.mark.parametrize("name", DENSE)
def test_the_model_is_the_same(name: str, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    with open_source(case.folder) as source:
        spec = parse_config(json.loads(source.blobs["config.json"]))
        folding = some_folding(spec)
        again = Folding.parse(folding.record(), spec, "x")
        assert again.exponents.keys() == folding.exponents.keys()
        assert all(np.array_equal(again.exponents[key], e) for key, e in folding.exponents.items())
        assert {place for _, place in folding.exponents} >= {"o", "down"}
        folded = FoldedSource(source, folding)
        changed = [n for n in source.tensors if not np.array_equal(source.read(n), folded.read(n))]
        n_norms = sum(can_fold(spec, place) for place in ("qkv", "gate_up"))
        n_matrices = 2 + 2 * (n_norms > 0) if spec.fused else 4 + 3 * (n_norms > 0)
        n_biases = spec.qkv_bias + spec.mlp_bias
        assert len(changed) == spec.n_layers * (n_norms + n_matrices + n_biases)
        np.testing.assert_array_equal(logits(folded, case.tokens), logits(source, case.tokens))
        want = case.want
        state = {n: torch.from_numpy(np.array(folded.read(n), np.float32)) for n in source.tensors}
        assert not case.model.load_state_dict(state, strict=False).unexpected_keys
        del case.want
        np.testing.assert_allclose(case.logits(case.tokens), want, atol=1e-4)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_values_in_half_precision_are_scaled_exactly(dtype: str, tmp_path: Path) -> None:
    with open_source(make_llama_dir(tmp_path / "in", dtype=dtype)) as source:
        spec = parse_config(json.loads(source.blobs["config.json"]))
        folded = FoldedSource(source, some_folding(spec))

        def wide(s: Source, name: str, rows: slice | None = None) -> np.ndarray:
            values = s.read(name, rows)
            return codes.bf16_to_f32(values) if s.tensors[name].dtype == "BF16" else values.astype(np.float32)

        up, down = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "down"))
        e = some_folding(spec).exponents
        into, out = e[1, "gate_up"].astype(int), e[1, "down"].astype(int)
        np.testing.assert_array_equal(wide(folded, down), wide(source, down) * 2.0**out)
        expected = wide(source, up) * 2.0**into * 2.0 ** -out[:, None]
        np.testing.assert_array_equal(wide(folded, up), expected)
        np.testing.assert_array_equal(wide(folded, up, slice(3, 20)), expected[3:20])
        norm = "model.layers.1.post_attention_layernorm.weight"
        assert folded.tensors[norm].dtype == dtype
        np.testing.assert_array_equal(wide(folded, norm), wide(source, norm) * 2.0**-into)
        np.testing.assert_array_equal(logits(folded, np.arange(40)), logits(source, np.arange(40)))
