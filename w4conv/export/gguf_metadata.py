"""Keys of a GGUF file: what llama.cpp must know of a model, and its tokenizer."""

from __future__ import annotations

from w4conv.export.gguf_tokenizer import tokenizer_keys
from w4conv.export.gguf_values import Value, f32, text, u32
from w4conv.export.model import ExportModel


def metadata(model: ExportModel, architecture: str, file_type: int) -> tuple[dict[str, Value], list[str]]:
    """(keys in order, notes). Raises InputError for a tokenizer that cannot be told to llama.cpp."""
    spec = model.spec
    notes: list[str] = []
    keys = {
        "general.architecture": text(architecture),
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
        "rope.dimension_count": u32(spec.head_dim),
        "rope.freq_base": f32(spec.rope.theta),
    }
    if spec.rope.scaling == "linear":
        numbers |= {"rope.scaling.type": text("linear"), "rope.scaling.factor": f32(spec.rope.factor)}
    if windows := sorted(set(spec.sliding_windows) - {0}):
        if len(set(spec.sliding_windows)) == 1:
            numbers["attention.sliding_window"] = u32(windows[0])
        notes.append(
            f"the model attends to the last {windows[0]:,} tokens only; llama.cpp has no such window for "
            f"{spec.architecture}, so longer texts give other results there"
        )
    keys |= {f"{architecture}.{name}": value for name, value in numbers.items()}
    tokenizer, more = tokenizer_keys(model)
    return keys | tokenizer, notes + more
