"""Explains missing tensors: what the stored names show, and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks?|blk)\.(\d+)\.")
_EXPERT: Final = re.compile(r"\.experts?\.")
# Fused matrices of some checkpoints, and the parts that others store instead.
_FUSED: Final = {
    ".qkv_proj.": ".q_proj.", ".W_pack.": ".q_proj.", ".query_key_value.": ".q_proj.", ".Wqkv.": ".q_proj.",
    ".c_attn.": ".q_proj.", ".wqkv.": ".q_proj.", ".gate_up_proj.": ".gate_proj.", ".q_proj.": ".qkv_proj.",
    ".gate_proj.": ".gate_up_proj.",
}  # fmt: skip
_TRAINING: Final = ("optimizer.", "exp_avg", "ema.", "scheduler.")


def explain_missing(needed: Collection[str], stored: Collection[str], architecture: str) -> str:
    """A sentence or two: what the stored names say, and what to do. Every weight file is complete, so that fetching the
    checkpoint again would change nothing. needed: of the model, in its order; not all of them are stored."""
    missing = [name for name in needed if name not in stored]
    if not stored:
        return "The weight files hold no tensors"
    if prefix := _other_prefix(missing, stored):
        have, want = prefix
        return (
            f"They are there under other names: {have}NAME, expected {want}NAME. The weights are a part of a larger "
            "model, or were saved out of a wrapper: save the language model by itself"
        )
    if (moe := _experts(missing, stored)) or (moe := _fused(missing, stored)):
        return moe
    last = {int(match[1]) for name in stored if (match := _LAYER.search(name))}
    lost = {int(match[1]) for name in missing if (match := _LAYER.search(name))}
    if last and lost and min(lost) > max(last):
        return (
            f"The weights end with layer {max(last)}, but config.json asks for {max(lost) + 1} layers "
            "(num_hidden_layers): it does not belong to them, or the checkpoint was saved in parts and one of them is "
            "not here"
        )
    if any(part in name for name in stored for part in _TRAINING):
        return "The file holds the state of a training run. Save the model alone (in transformers: save_pretrained)"
    if len(missing) == len(needed):
        example = ", ".join(sorted(stored)[:2])
        return (
            f"The stored names are those of another architecture than {architecture} ({example}): config.json does not "
            "belong to these weights"
        )
    return (
        "Every weight file is complete, so the checkpoint was saved without them, or config.json belongs to another "
        "model: take both from the same place"
    )


def _other_prefix(missing: Sequence[str], stored: Collection[str]) -> tuple[str, str] | None:
    """(prefix of the stored names, prefix of the model's), where most missing tensors have another prefix."""
    for want in ("model.", ""):
        tails = {name.removeprefix(want) for name in missing if name.startswith(want)}
        found = Counter(
            name[: -len(tail)]
            for name in stored
            for tail in (_tail(name),)
            if tail in tails and name[: -len(tail)] not in ("", want)
        )
        if found and (best := found.most_common(1)[0])[1] * 2 >= len(tails):
            return best[0], want
    return None


def _tail(name: str) -> str:
    """A name from `layers.`, `embed_tokens.`, `norm.` or `lm_head.` on."""
    match = re.search(r"(?:^|(?<=\.))(?:layers\.\d+\.|embed_tokens\.|norm\.weight$|lm_head\.)", name)
    return name[match.start() :] if match else name


def _experts(missing: Sequence[str], stored: Collection[str]) -> str:
    want = next((name for name in missing if _EXPERT.search(name) or ".block_sparse_moe." in name), "")
    have = next((name for name in sorted(stored) if _EXPERT.search(name) or "_moe." in name), "")
    if want and have:
        return (
            f"Experts are stored in another layout: {have}, expected {want}. Load the model in transformers and save "
            "it again (save_pretrained)"
        )
    if want:
        return "The model has experts by its config.json, the weights have none: the two do not belong together"
    if have:
        return f"The weights have experts ({have}), the model by its config.json has none: they do not belong together"
    return ""


def _fused(missing: Sequence[str], stored: Collection[str]) -> str:
    for one, part in _FUSED.items():
        want = next((name for name in missing if part in name), "")
        have = next((name for name in sorted(stored) if one in name), "")
        if want and have:
            return (
                f"Projections are stored in another layout: {have}, expected {want}. config.json names another "
                "architecture than the one they were saved from"
            )
    return ""
