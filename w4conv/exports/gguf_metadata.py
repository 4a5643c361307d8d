"""Keys of a GGUF file: the model's settings for llama.cpp, and its tokenizer."""

from __future__ import annotations

import math
from typing import Final

from w4conv.errors import InputError
from w4conv.exports.gguf_tokenizer import tokenizer_keys
from w4conv.exports.gguf_values import Value, f32, text, u32
from w4conv.exports.model import ExportModel
from w4conv.models.rope import yarn_magnitude
from w4conv.models.spec import ModelSpec
from w4conv.sources.gguf_architectures import Architecture
from w4conv.sources.gguf_config import GEMMA_27B_LAYERS

WINDOWED: Final = ("gemma2", "gemma3", "gpt-oss")  # whose windows llama.cpp applies


def metadata(model: ExportModel, architecture: Architecture, file_type: int) -> tuple[dict[str, Value], list[str]]:
    """(keys in order, notes). Raises InputError for a tokenizer that GGUF keys cannot describe."""
    spec = model.spec
    notes: list[str] = []
    name = architecture.name
    keys = {
        "general.architecture": text(name),
        "general.type": text("model"),
        "general.file_type": u32(file_type),
        "general.quantization_version": u32(2),
    }
    numbers: dict[str, Value] = {
        "vocab_size": u32(spec.vocab_size),
        "context_length": u32(spec.max_positions),
        "embedding_length": u32(spec.hidden_size),
        "block_count": u32(spec.n_layers),
        "feed_forward_length": u32(spec.intermediate_size),
        "attention.head_count": u32(spec.n_heads),
        "attention.head_count_kv": u32(spec.n_kv_heads),
        "attention.key_length": u32(spec.head_dim),
        "attention.value_length": u32(spec.head_dim),
        "attention.layer_norm_rms_epsilon": f32(spec.norm_eps),
        "rope.dimension_count": u32(spec.rope.rotary_dim(spec.head_dim)),
        "rope.freq_base": f32(spec.rope.theta),
    }
    numbers |= _rope(model) | _experts(spec) | _factors(spec, name)
    _check(model, name)
    if windows := sorted(set(spec.sliding_windows) - {0}):
        if name in WINDOWED or len(set(spec.sliding_windows)) == 1:
            numbers["attention.sliding_window"] = u32(windows[0])
        if name not in WINDOWED:
            notes.append(
                f"the model attends to the last {windows[0]:,} tokens only; llama.cpp has no such window for "
                f"{spec.architecture}, so longer texts give other results there"
            )
    if spec.rope.scaling == "yarn" and not spec.rope.truncate:
        notes.append(
            "The yarn scaling of this model begins and ends between frequencies; llama.cpp rounds to whole ones, as it "
            "does for every gpt-oss file, so results differ slightly."
        )
    keys |= {f"{name}.{key}": value for key, value in numbers.items()}
    tokenizer, more = tokenizer_keys(model)
    return keys | tokenizer, notes + more


def _rope(model: ExportModel) -> dict[str, Value]:
    rope = model.spec.rope
    match rope.scaling:
        case "linear":
            return {"rope.scaling.type": text("linear"), "rope.scaling.factor": f32(rope.factor)}
        case "yarn":
            plain = (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, model.spec.family != "gpt_oss")
            if not plain or abs(rope.magnitude - yarn_magnitude(rope.factor)) > 1e-6:
                raise _refused(model, "a yarn scaling with settings of its own")
            return {
                "rope.scaling.type": text("yarn"),
                "rope.scaling.factor": f32(rope.factor),
                "rope.scaling.original_context_length": u32(rope.original_max_positions),
            }
        case "longrope":
            return {
                "rope.scaling.type": text("longrope"),
                "rope.scaling.attn_factor": f32(rope.magnitude),
                "rope.scaling.original_context_length": u32(rope.original_max_positions),
            }
        case "dynamic":
            raise _refused(model, "a rotary embedding that grows with the text (dynamic)")
        case _:
            return {}


def _experts(spec: ModelSpec) -> dict[str, Value]:
    if spec.experts is None:
        return {}
    return {
        "expert_count": u32(spec.experts.n_experts),
        "expert_used_count": u32(spec.experts.n_per_token),
        "expert_feed_forward_length": u32(spec.experts.intermediate_size),
    }


def _factors(spec: ModelSpec, name: str) -> dict[str, Value]:
    out: dict[str, Value] = {}
    if spec.attention_softcap:
        out["attn_logit_softcapping"] = f32(spec.attention_softcap)
    if spec.final_softcap:
        out["final_logit_softcapping"] = f32(spec.final_softcap)
    if name in ("granite", "granitemoe"):
        out |= {
            "attention.scale": f32(spec.attention_scale),
            "embedding_scale": f32(spec.embedding_scale),
            "residual_scale": f32(spec.residual_scale),
            "logit_scale": f32(spec.logits_divisor),
        }
    return out


def _check(model: ExportModel, name: str) -> None:
    """Refuse a model that llama.cpp would compute by other rules."""
    spec = model.spec
    if name in GEMMA_27B_LAYERS:
        large = spec.n_layers == GEMMA_27B_LAYERS[name]
        if not math.isclose(spec.attention_scale**-2, spec.hidden_size / spec.n_heads if large else spec.head_dim):
            raise _refused(model, f"queries scaled by {spec.attention_scale:g}")
        period = 2 if name == "gemma2" else 6
        window = max(spec.sliding_windows, default=0)
        if spec.sliding_windows != tuple(window if (i + 1) % period else 0 for i in range(spec.n_layers)):
            raise _refused(model, f"windows on other layers than those of {spec.architecture} as it was published")
        if spec.local_rope is not None and (spec.local_rope.theta, spec.local_rope.scaling) != (1e4, "default"):
            raise _refused(model, "another rotary embedding of the windowed layers")
    if name == "gpt-oss":
        window = max(spec.sliding_windows, default=0)
        if not window or spec.sliding_windows != tuple(0 if i % 2 else window for i in range(spec.n_layers)):
            raise _refused(model, "windows on other layers than every other one")
    if name == "smollm3" and spec.no_rope != tuple(range(3, spec.n_layers, 4)):
        raise _refused(model, "rotary embeddings missing in other layers than every fourth")
    if spec.experts is not None and not spec.experts.renormalized:
        raise _refused(model, "experts' weights that are not normalized")
    if spec.experts is not None and not all(spec.experts.layers):
        raise _refused(model, "layers without experts between those with")
    if spec.qkv_bias and name in ("olmo2", "gemma2", "gemma3", "qwen3", "qwen3moe", "smollm3"):
        raise _refused(model, "biases of queries, keys and values")


def _refused(model: ExportModel, what: str) -> InputError:
    return InputError(f"{model.container.path}: llama.cpp cannot run {what}, so the model is not exported to GGUF")
