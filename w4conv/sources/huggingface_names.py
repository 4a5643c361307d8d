"""Names of stored tensors as those of the model alone: without wrappers, other parts and buffers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from w4conv.arrays import VALUE_DTYPES
from w4conv.errors import InputError, listed
from w4conv.sources.huggingface_files import Stored

# Prefixes of every name in a compiled, distributed or adapted model.
WRAPPERS: Final = ("module.", "_orig_mod.", "base_model.model.", "_fsdp_wrapped_module.", "_forward_module.")
ADAPTER_PARTS: Final = (".lora_", ".base_layer.", ".modules_to_save.", ".original_module.", ".lora_magnitude_vector")
BUFFER: Final = re.compile(
    r"\.rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$|\.rotary_pos_emb\.inv_freq$"
    r"|(^|\.)(self_attn|attn|attention)\.(masked_bias|bias|causal_mask|attention_mask|position_ids)$"
    r"|(^|\.)(position_ids|causal_mask|cached_mask)$"
)
# Endings of names in 4-bit and 8-bit formats, which store these in place of a plain weight.
PACKED_ENDINGS: Final = (
    ".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax", ".quant_map",
    ".SCB", "_blocks", "_scales", ".scales", ".biases", ".qdata", ".input_scale",
)  # fmt: skip
# Of a multimodal checkpoint: how the language part's names begin, what they are called alone, and what else there is.
LANGUAGE_PREFIXES: Final = {
    "language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head.",
}  # fmt: skip
OTHER_PARTS: Final = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower.",
    "model.vision_tower.", "model.multi_modal_projector.", "model.audio_tower.",
)  # fmt: skip


def names_of_model(found: Stored, directory: Path) -> tuple[Stored, list[str]]:
    """(tensors by the names that the model alone has, notes on those left out). Raises InputError for adapters that are
    not merged."""
    notes: list[str] = []
    return _without_buffers(_language_part(_without_wrappers(found, directory, notes), notes), notes), notes


def _without_wrappers(found: Stored, directory: Path, notes: list[str]) -> Stored:
    """Without prefixes that wrappers of training put before all names; with the `model.` that a bare backbone lacks.

    Raises InputError for adapters that are not merged.
    """
    if adapters := [name for name in found if any(part in f".{name}" for part in ADAPTER_PARTS)]:
        raise InputError(
            f"{directory}: {adapters[0]} and {len(adapters) - 1} more tensors belong to an adapter (LoRA) that is not "
            "merged. Merge it into its base model (in peft: model.merge_and_unload()) and convert the result"
        )
    taken = ""
    while prefix := next((p for p in WRAPPERS if found and all(name.startswith(p) for name in found)), ""):
        found = {name.removeprefix(prefix): place for name, place in found.items()}
        taken += prefix
    if taken:
        notes.append(f"Names are read without {taken}, which stands before all of them.")
    if "embed_tokens.weight" in found and not any(name.startswith("model.") for name in found):
        found = {(n if n.startswith("lm_head.") else f"model.{n}"): place for n, place in found.items()}
        notes.append("Names are read with model., which a bare backbone does not have.")
    return found


def _without_buffers(found: Stored, notes: list[str]) -> Stored:
    """Without buffers of old checkpoints, which follow from the config."""
    left = {name for name in found if BUFFER.search(name)}
    if left:
        notes.append(f"Left out, as they follow from the config: {listed(sorted(left), most=4)}.")
    return {name: place for name, place in found.items() if name not in left}


def _language_part(found: Stored, notes: list[str]) -> Stored:
    """The language part of a multimodal checkpoint, by the names that it has alone; other checkpoints unchanged."""
    if not any(name.startswith(tuple(LANGUAGE_PREFIXES)) for name in found):
        return found
    out = {}
    for name, place in found.items():
        prefix = next((p for p in LANGUAGE_PREFIXES if name.startswith(p)), "")
        if prefix:
            out[LANGUAGE_PREFIXES[prefix] + name.removeprefix(prefix)] = place
        elif not name.startswith(OTHER_PARTS):
            out[name] = place
    if len(out) < len(found):
        notes.append(
            f"Only the language part is read; {len(found) - len(out)} tensors of the other parts are left out."
        )
    return out


def refuse_packed(found: Stored, directory: Path) -> None:
    for name, (file, entry) in found.items():
        if looks_packed(name):
            raise InputError(
                f"{directory}: {name} belongs to a quantized checkpoint, but config.json says nothing of it, or not of "
                "this tensor. Without it, the meaning of the bytes would be a guess"
            )
        if name.endswith(".weight") and len(entry.shape) == 2 and entry.dtype.startswith("F8_"):
            raise InputError(
                f"{file.path}: {name}: stored as {entry.dtype}, and there is no scale for it ({name}_scale_inv, or "
                f"{name}_scale); without one, only F16, BF16 and F32 are supported. Convert the original model"
            )
        if name.endswith((".weight", ".bias")) and entry.dtype not in VALUE_DTYPES:
            raise InputError(f"{file.path}: {name}: stored as {entry.dtype}; only F16, BF16 and F32 are supported")


def looks_packed(name: str) -> bool:
    return name.endswith(PACKED_ENDINGS) or "quant_state" in name
