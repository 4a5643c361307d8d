"""One layer by itself: the model taken layer after layer gives the bits of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import make_llama_dir

from w4conv import kernels
from w4conv.commands.quantize import quantize
from w4conv.runtime.engine import Model
from w4conv.runtime.layer_model import Captured, HeadModel, LayerModel, padded_width


@pytest.mark.parametrize("scheme", ["w4a16", "f32"])
def test_layer_by_layer_equals_the_model(tmp_path: Path, scheme: str) -> None:
    group_size = None if scheme == "f32" else 32
    quantize(make_llama_dir(tmp_path / "in"), tmp_path / "m.w4", scheme=scheme, group_size=group_size, effort=0)
    ids = np.random.default_rng(0).integers(0, 250, 130)  # more than one native call holds
    with Model(tmp_path / "m.w4", threads=2) as model:
        spec, container = model.spec, model.container
        embedding = container.dequantize("model.embed_tokens.weight")
        hidden = np.zeros((len(ids), padded_width(spec.hidden_size)), np.float32)
        hidden[:, : spec.hidden_size] = embedding[ids]
        inputs: list[Captured] = []
        for layer in range(spec.n_layers):
            tensors = [t for t in spec.tensors() if t.layer == layer]
            matrices = {
                t.part: (
                    container.tensors[t.name].scheme,
                    (t.shape[0], t.shape[1]),
                    {part.kind: container.bytes_of(part) for part in container.tensors[t.name].parts},
                )
                for t in tensors
                if t.role == "linear"
            }
            vectors = {t.part: container.dequantize(t.name) for t in tensors if t.role != "linear"}
            one = LayerModel(spec, layer, matrices, vectors, threads=1)
            captured = one.run(hidden.copy(), capture=True)
            assert captured is not None
            inputs.append(captured)
            after = {hook: hidden.copy() for hook in Captured._fields}
            for hook, x in after.items():  # as far as each hook, the same rows
                assert np.array_equal(one.observe(x, hook), getattr(captured, hook))
            assert np.array_equal(after["qkv"], hidden)
            assert np.array_equal(after["o"], after["gate_up"])
            for x, hook in ((after["gate_up"].copy(), "gate_up"), (after["gate_up"].copy(), "down")):
                assert np.array_equal(one.observe(x, hook, after_attention=True), getattr(captured, hook))
                assert np.array_equal(x, after[hook])
            assert one.run(hidden) is None
            assert np.array_equal(after["down"], hidden)
            assert not np.array_equal(after["o"], hidden)
        x = hidden[:, : spec.hidden_size].astype(np.float64)
        norm = container.dequantize("model.norm.weight")
        final = (x / np.sqrt((x * x).mean(1, keepdims=True) + spec.norm_eps) * norm).astype(np.float32)
        name = "model.embed_tokens.weight" if spec.tied_head else "lm_head.weight"
        np.testing.assert_allclose(final @ container.dequantize(name).T, model.logits(ids), rtol=2e-3, atol=2e-3)
        info = container.tensors[name]
        parts = {part.kind: container.bytes_of(part) for part in info.parts}
        head = HeadModel(spec, (info.scheme, (info.shape[0], info.shape[1]), parts), norm, threads=1)
        np.testing.assert_array_equal(head.logits(hidden), model.logits(ids))
        # The rows captured are what the products read: with the weights they give the next rows captured.
        first = inputs[0]
        prefix = "model.layers.0.mlp."
        gate, up = (
            kernels.gemm_nt(first.gate_up, container.dequantize(f"{prefix}{part}_proj.weight"))
            for part in ("gate", "up")
        )
        biases = [f"{prefix}{part}_proj.bias" for part in ("gate", "up")]
        if biases[0] in container.tensors:
            gate, up = gate + container.dequantize(biases[0]), up + container.dequantize(biases[1])
        np.testing.assert_allclose(first.down, gate / (1 + np.exp(-gate)) * up, rtol=2e-3, atol=2e-3)
        assert first.qkv.shape == (130, spec.hidden_size)
        assert first.o.shape == (130, spec.n_heads * spec.head_dim)
