"""Tiny random models made by transformers: one of each family, and one of each of its features."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from w4conv.models import FAMILIES

torch = pytest.importorskip("torch", reason="torch is the oracle; install the oracle dependency group")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the oracle group")

F32 = npt.NDArray[np.float32]
N_TOKENS = 64
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HALF = N_TOKENS // 2


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


FACTORS = {"short_factor": [1 + i / 40 for i in range(6)], "long_factor": [2 + i / 4 for i in range(6)]}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 5}


def few_experts(kind: str) -> dict[str, Any]:
    """A handful in place of the many that a mixture of experts has by default."""
    return EXPERTS if hasattr(transformers.CONFIG_MAPPING[kind](), "num_experts_per_tok") else {}


# name -> (model_type, what differs from SIZES)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Every family as it comes, so that a new one is tested by being there.
    **{
        kind: (kind, few_experts(kind))
        for family in FAMILIES
        for kind in family.ARCHITECTURES.values()
        if kind != "gemma3"  # the multimodal one
    },
    "llama-gqa-tied-576": (
        "llama",
        {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "llama-mha-biases": (
        "llama",
        {"hidden_size": 104, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-rope-llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=HALF),
    ),
    "llama-rope-linear": ("llama", {"num_key_value_heads": 1, **rope("linear", factor=4.0)}),
    "llama-rope-dynamic": ("llama", {"max_position_embeddings": HALF, **rope("dynamic", factor=4.0)}),
    "mistral-head-dim-window": ("mistral", {"hidden_size": 96, "head_dim": 32, "sliding_window": 20}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "mixtral-window": ("mixtral", {"sliding_window": 20, **EXPERTS}),
    "qwen2-tied": ("qwen2", {"hidden_size": 128, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2-upper-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=HALF)),
    "qwen3-head-dim-24": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_moe-some-dense": (
        "qwen3_moe",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 4,
         "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "smollm3-nope": ("smollm3", {"num_hidden_layers": 4, "attention_bias": True}),
    "phi3-partial-window": (
        "phi3",
        {"sliding_window": 20, "num_key_value_heads": 4, **rope("default", partial_rotary_factor=0.5)},
    ),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": HALF,
         **rope("longrope", partial_rotary_factor=0.75, original_max_position_embeddings=HALF, **FACTORS)},
    ),
    "gemma2-window": (
        "gemma2",
        {"sliding_window": 20, "head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 3.0},
    ),
    "gemma3-two-ropes": (
        "gemma3_text",
        {"sliding_window": 20, "num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 20,
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "granite-multipliers": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "granitemoe-multipliers": (
        "granitemoe",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, **EXPERTS},
    ),
    "gpt_oss-window": (
        "gpt_oss",
        {"sliding_window": 20, "head_dim": 16, **EXPERTS,
         **rope("yarn", factor=8.0, original_max_position_embeddings=HALF, truncate=False)},
    ),
}  # fmt: skip
# Models whose rotary embedding depends on the length of the sequence, so that one pass of the oracle over all tokens
# is not what a sequence sees as it grows: "cached", token by token with a cache; "prefixes", each prefix by itself.
GROWING = {"llama-rope-dynamic": "cached", "phi3-longrope": "prefixes"}


class Case:
    """A random model of transformers, saved, with its logits and greedy tokens."""

    def __init__(self, name: str, folder: Path, model: tuple[str, dict[str, Any]] | None = None) -> None:
        """model: model_type and what differs from SIZES, where it is not one of MODELS."""
        kind, arguments = model or MODELS[name]
        torch.manual_seed(len(name))
        self.growing = GROWING.get(name, "")
        config = transformers.AutoConfig.for_model(kind, **SIZES | arguments)
        config._attn_implementation = "eager"
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for key, value in self.model.state_dict().items():
                if key.endswith(("bias", "norm.weight", "layernorm.weight", "sinks")):
                    value.add_(torch.randn_like(value) * 0.1)
                elif "embed_tokens" not in key:
                    value.mul_(4)  # attention that is not flat, tokens that differ
        self.folder = folder / name
        self.model.save_pretrained(self.folder)
        self.tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], N_TOKENS)

    @functools.cached_property
    def want(self) -> F32:
        return self.logits(self.tokens)

    def logits(self, tokens: npt.NDArray[np.integer] | list[int]) -> F32:
        """After each token."""
        ids = torch.tensor(np.asarray(tokens))[None]
        with torch.no_grad():
            if self.growing == "prefixes":
                rows = [self.model(ids[:, : i + 1]).logits[0, -1] for i in range(ids.shape[1])]
            elif self.growing == "cached":
                rows, cache = [], None
                for i in range(ids.shape[1]):
                    out = self.model(ids[:, i : i + 1], cache=cache, use_cache=True)
                    cache = out.cache
                    rows.append(out.logits[0, -1])
            else:
                rows = list(self.model(ids).logits[0])
        out: F32 = torch.stack(rows).numpy()
        return out
