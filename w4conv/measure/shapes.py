"""Containers of a known model's shape with random weights: to measure speed without a download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from w4conv import codes
from w4conv.container import SIGNATURE, Layout, TensorPlan, Writer, plan
from w4conv.errors import UsageError
from w4conv.files.target import open_target
from w4conv.models import parse_config
from w4conv.progress import Progress, Silent
from w4conv.quantization.recipe import make_recipe


def _config(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    }


SHAPES: Final = {
    "smollm2-135m": _config(576, 1536, 30, 9, 3, 49152, tied=True),
    "qwen2.5-0.5b": _config(896, 4864, 24, 14, 2, 151936, tied=True)
    | {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6},
    "llama-3.2-1b": _config(2048, 8192, 16, 32, 8, 128256, tied=True),
    "mistral-7b": _config(4096, 14336, 32, 32, 8, 32000, tied=False)
    | {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2.5-7b": _config(3584, 18944, 28, 28, 4, 152064, tied=False)
    | {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6},
    "llama-3-8b": _config(4096, 14336, 32, 32, 8, 128256, tied=False),
}
SCALE: Final = 0.002  # keeps the activations of random weights finite
NOISE_NBYTES: Final = 1 << 22


class RandomWeights:
    """A container of the named shape (a key of SHAPES) with random codes and small floats.

    scheme: as for quantize, without "keep". blobs: files to hold beside config.json, such as a tokenizer.
    Raises UsageError for an unknown shape.
    """

    def __init__(self, shape: str, *, scheme: str, blobs: Mapping[str, bytes] | None = None) -> None:
        if shape not in SHAPES:
            raise UsageError(f"unknown shape {shape!r}; known are {', '.join(SHAPES)}")
        recipe = make_recipe(scheme=scheme, group_size=128, embeddings=None)
        spec = parse_config(SHAPES[shape])
        choices = recipe.choices(spec)
        self._tensors = [TensorPlan(t.name, t.shape, choices[t.name].coding("F32"), "F32") for t in spec.tensors()]
        record = {"tool": "w4conv bench", "source": {"kind": "random", "files": []}}
        config = {"config.json": json.dumps(SHAPES[shape]).encode()}
        self.layout: Layout = plan(self._tensors, config | dict(blobs or {}), record)

    def write(self, path: Path, *, progress: Progress | None = None) -> None:
        progress = progress or Silent()
        rng = np.random.default_rng(0)
        noise = rng.integers(0, 256, NOISE_NBYTES, np.uint8)
        small = rng.standard_normal(NOISE_NBYTES // 4).astype(np.float32) * np.float32(0.02)
        narrowed = {"f32": small, "f16": small.astype(np.float16), "bf16": codes.f32_to_bf16(small)}
        with open_target(path, self.layout.file_nbytes, signature=SIGNATURE) as target:
            writer = Writer(target, self.layout)
            progress.start(self.layout.file_nbytes)
            for t in self._tensors:
                for kind, nbytes in codes.part_sizes(t.scheme, t.shape).items():
                    block = noise
                    if kind == "scales":
                        block = np.full(min(nbytes, NOISE_NBYTES) // 2, SCALE, np.float16).view(np.uint8)
                    elif kind == "values":
                        values = np.ones(t.shape, np.float32) if len(t.shape) < 2 else narrowed[t.scheme.kind]
                        block = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
                    for start in range(0, nbytes, block.size):
                        writer.write(t.name, kind, block[: nbytes - start])
                    progress.advance(nbytes, t.name)
            writer.finish([])
