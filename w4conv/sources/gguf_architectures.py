"""GGUF's names for the parts of each architecture, and its differences from the layout of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCKS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_AROUND: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS_AFTER: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GPT_OSS: Final = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
_GPT_OSS_JOINED: Final = {
    "self_attn.sinks": ("attn_sinks.weight",),
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
}
_GRANITE_MOE: Final = {"ffn_gate_inp": "block_sparse_moe.router.layer"}
_GRANITE_MOE_JOINED: Final = {
    "block_sparse_moe.input_linear.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "block_sparse_moe.output_linear.weight": ("ffn_down_exps.weight",),
}
_QWEN3_MOE: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """name: of the GGUF architecture. families: those of w4conv.models that it holds.

    interleaved: the rows of q and k are stored pair after pair. norm_offset: what the file's norms have over the
    checkpoint's. blocks: GGUF name in a layer -> module; "{}" stands for an expert, and the file has one tensor of all.
    joined: of the checkpoint's tensors that have names of their own, name in a layer -> those in a layer of the file
    that hold its rows, of two each a half. alternating: the halves' rows take turns.
    """

    name: str
    hf_name: str
    model_type: str
    families: tuple[str, ...]
    interleaved: bool = False
    norm_offset: float = 0.0
    blocks: Mapping[str, str] = field(default_factory=lambda: _BLOCKS)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alternating: bool = False


def _without(blocks: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: module for name, module in blocks.items() if name not in names}


ARCHITECTURES: Final = {
    a.name: a
    for a in (
        Architecture(
            "llama", "LlamaForCausalLM", "llama", ("llama", "mistral", "mixtral"), True, blocks=_BLOCKS | _MIXTRAL
        ),
        Architecture("qwen2", "Qwen2ForCausalLM", "qwen2", ("qwen2",)),
        Architecture("qwen3", "Qwen3ForCausalLM", "qwen3", ("qwen3",), blocks=_BLOCKS | _QK_NORMS),
        Architecture(
            "qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe", ("qwen3_moe",), blocks=_BLOCKS | _QK_NORMS | _QWEN3_MOE
        ),
        Architecture("smollm3", "SmolLM3ForCausalLM", "smollm3", ("smollm3",), True),
        Architecture(
            "phi3", "Phi3ForCausalLM", "phi3", ("phi3",),
            blocks=_without(_BLOCKS, "attn_q", "attn_k", "attn_v", "ffn_gate")
            | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ),
        Architecture(
            "gemma2", "Gemma2ForCausalLM", "gemma2", ("gemma2",), norm_offset=1.0, blocks=_BLOCKS | _NORMS_AROUND
        ),
        Architecture(
            "gemma3", "Gemma3ForCausalLM", "gemma3_text", ("gemma3",), norm_offset=1.0,
            blocks=_BLOCKS | _NORMS_AROUND | _QK_NORMS,
        ),
        Architecture(
            "olmo2", "Olmo2ForCausalLM", "olmo2", ("olmo2",),
            blocks=_without(_BLOCKS, "attn_norm", "ffn_norm") | _NORMS_AFTER | _QK_NORMS,
        ),
        Architecture("granite", "GraniteForCausalLM", "granite", ("granite",), True),
        Architecture(
            "granitemoe", "GraniteMoeForCausalLM", "granitemoe", ("granitemoe",), True,
            blocks=_without(_BLOCKS, "ffn_gate", "ffn_up", "ffn_down") | _GRANITE_MOE, joined=_GRANITE_MOE_JOINED,
        ),
        Architecture(
            "gpt-oss", "GptOssForCausalLM", "gpt_oss", ("gpt_oss",),
            blocks=_without(_BLOCKS, "ffn_norm", "ffn_gate", "ffn_up", "ffn_down") | _GPT_OSS, joined=_GPT_OSS_JOINED,
            alternating=True,
        ),
    )
}  # fmt: skip
BY_FAMILY: Final = {family: a for a in ARCHITECTURES.values() for family in a.families}
