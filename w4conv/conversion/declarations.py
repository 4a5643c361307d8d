"""Contradictions between config.json and the tensors: which of them counts, and a sentence that says so.

transformers decides which. What it would fill with random numbers, or refuse, is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from w4conv import codes
from w4conv.errors import InputError, UsageError
from w4conv.files.blobs import config_of
from w4conv.models import parse_config
from w4conv.sources.base import Source

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
HEADS: Final = ("stored", "tied")
TIED: Final = "tie_word_embeddings"
DTYPES: Final = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
ROPE_ALIASES: Final = {"su": "longrope"}


def settle_declarations(source: Source, head: str | None = None) -> None:
    """Settle contradictions of a source of a known model: its head, its config.json and its `warnings`.

    head: "stored" takes lm_head.weight as it is, "tied" the embedding; None does as transformers: a stored head that
    differs from the embedding counts, whatever `tie_word_embeddings` says; an equal one is stored once. Where the
    declaration is not followed, `tie_word_embeddings` in the source's config.json is changed, so that whatever reads
    it agrees with the tensors. Raises InputError, UsageError.
    """
    config = config_of(source.blobs)
    warnings = [*_of_types(config, source), *_of_ropes(config)]
    warnings += _settle_head(source, config, head)
    source.warnings = (*source.warnings, *warnings)
    source.notes = (*source.notes, *warnings)


def _settle_head(source: Source, config: dict[str, Any], head: str | None) -> Iterator[str]:
    if head not in (None, *HEADS):
        raise UsageError(f"head is {head!r}, expected {' or '.join(HEADS)}")
    tied = declared = parse_config(config).tied_head
    says = f"{TIED} is {str(declared).lower()}"
    tensors = source.tensors
    if HEAD not in tensors:
        if head == "stored":
            raise UsageError(f"{source.path} has no {HEAD}: leave out head, or say tied")
        if not declared and head is None and EMBEDDING in tensors:
            raise InputError(
                f"{source.path}: the model needs tensors that are missing: {HEAD}, as {says} in config.json; "
                "transformers would fill it with random numbers. It may be a bare backbone: save the whole "
                "model; or, if the embedding is the head, say so with --head tied"
            )
        tied = declared or head == "tied"
        if tied and not declared:
            yield f"There is no {HEAD}, though {says}: the embedding is the head, as asked."
    elif EMBEDDING not in tensors:
        if declared:
            source.rename(HEAD, EMBEDDING)
            yield f"There is no {EMBEDDING}: as {says}, {HEAD} is the embedding too."
    elif declared or head == "tied":
        n_differ = _rows_that_differ(source)
        tied = head == "tied" or (head is None and not n_differ)
        n_rows = tensors[EMBEDDING].shape[0]
        differs = f"{HEAD} differs from {EMBEDDING} in {n_differ} of {n_rows} rows"
        if tied:
            source.tensors = {name: t for name, t in tensors.items() if name != HEAD}
        if not n_differ and tied:
            source.notes = (*source.notes, f"{HEAD} equals {EMBEDDING} and is stored once")
        elif tied:
            yield f"{differs} ({says}): it is left out, as asked."
        elif n_differ:
            asked = "asked" if head else "transformers does; --head tied takes the embedding"
            yield f"{differs}, though {says}: the stored head is used, as {asked}."
    if tied != declared:
        config[TIED] = tied
        source.blobs = {**source.blobs, "config.json": json.dumps(config, indent=2).encode()}


def _rows_that_differ(source: Source) -> int:
    first, second = source.tensors[EMBEDDING], source.tensors[HEAD]
    if first.shape != second.shape:
        raise InputError(
            f"{source.path}: {HEAD} has shape {second.shape} and {EMBEDDING} {first.shape}, but {TIED} makes them one. "
            "The files do not belong together"
        )
    count = 0
    for rows in source.row_blocks(EMBEDDING):
        a = codes.as_f32(source.read(EMBEDDING, rows), first.dtype)
        count += int((a != codes.as_f32(source.read(HEAD, rows), second.dtype)).any(axis=1).sum())
    return count


def _of_types(config: Mapping[str, Any], source: Source) -> Iterator[str]:
    """The declared type of the weights against the stored one of unquantized matrices."""
    names = [config.get(key) for key in ("dtype", "torch_dtype")]
    if None not in names and names[0] != names[1]:
        yield f"config.json has dtype {_word(names[0])} and torch_dtype {_word(names[1])}; transformers takes dtype."
    declared = next((name for name in names if name is not None), None)
    found = {t.dtype for t in source.tensors.values() if len(t.shape) > 1 and not t.is_quantized}
    if source.kind != "gguf" and isinstance(declared, str) and declared in DTYPES and found - {DTYPES[declared]}:
        yield (
            f"config.json says that weights are {declared}, but matrices are stored as {', '.join(sorted(found))}: "
            "the stored type counts; transformers casts them."
        )


def _of_ropes(config: Mapping[str, Any]) -> Iterator[str]:
    """Settings of rotary embeddings that are given twice."""
    if isinstance(inner := config.get("text_config"), dict):
        yield from _of_ropes(inner)
    objects: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if isinstance(value, dict) and value:
            inner = {kind: own for kind, own in value.items() if isinstance(own, dict)}
            objects |= {f"{key}.{kind}": own for kind, own in inner.items()} or {key: value}
    both = [config.get(key) for key in ("rope_scaling", "rope_parameters")]
    if all(both) and both[0] != both[1]:
        yield "config.json has rope_scaling and rope_parameters, which differ: rope_scaling is used."
    for where, own in objects.items():
        words = [own.get(key) for key in ("rope_type", "type")]
        if None not in words and _alias(words[0]) != _alias(words[1]):
            yield f"{where} has rope_type {_word(words[0])}, type {_word(words[1])}: rope_type is used."
        local = where.endswith(".sliding_attention")
        for key in ("rope_theta", "partial_rotary_factor"):
            outer = "rope_local_base_freq" if local and key == "rope_theta" else key
            values = config.get(outer), own.get(key)
            if None not in values and values[0] != values[1]:
                yield _twice(outer, where, values, used="inner")
        key = "original_max_position_embeddings"
        values = config.get(key), own.get(key)
        if None not in values and values[0] != values[1]:
            yield _twice(key, where, values, used="outer")
        longest, original, factor = config.get("max_position_embeddings"), own.get(key), own.get("factor")
        if words[0] == "yarn" or (words[0] is None and words[1] == "yarn"):
            numbers = [n for n in (longest, original, factor) if isinstance(n, int | float) and n]
            if len(numbers) == 3 and numbers[0] / numbers[1] not in (1, numbers[2]):
                yield (
                    f"{where}: factor {_word(factor)} times {original} positions is not max_position_embeddings "
                    f"{_word(longest)}; the factor is used, as in transformers."
                )


def _twice(key: str, where: str, values: tuple[object, object], *, used: str) -> str:
    outer, inner = (_word(value) for value in values)
    return f"config.json has {key} {outer}, its {where} {inner}: the {used} one is used, as in transformers."


def _alias(word: object) -> object:
    return ROPE_ALIASES.get(word, word) if isinstance(word, str) else word


def _word(value: object) -> str:
    return str(value)[:40]
