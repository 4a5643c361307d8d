"""The model of a source: config, tensors, tokenizer and templates, checked before anything is planned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from w4conv.conversion.missing_tensors import explain_missing
from w4conv.errors import InputError, listed
from w4conv.files.blobs import config_of, parse_json_object
from w4conv.models import parse_config
from w4conv.models.generic import Inventory, generic_model
from w4conv.models.spec import ModelSpec
from w4conv.runtime.chat import ChatTemplate, templates_of
from w4conv.runtime.tokenizer import Tokenizer
from w4conv.runtime.tokenizer_file import TokenizerFile, token_ids
from w4conv.sources.base import Source
from w4conv.sources.reading import read_small

# Buffers that old checkpoints carry and that follow from the config.
HARMLESS: Final = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".attn.masked_bias")


def read_model(source: Source, *, generic: bool) -> tuple[Inventory, list[str]]:
    """The model, and notes for the user and the record. Raises InputError for what cannot be converted."""
    if generic:
        model: Inventory = generic_model(
            config_of(source.blobs), ((name, t.shape) for name, t in source.tensors.items())
        )
        notes = [
            "architecture generic: matrices are linear weights unless their names say embedding or head; "
            "what is written cannot be run"
        ]
        return model, [*notes, *_sidecar_notes(source, None), *_tensor_notes(source, model)]
    spec = known_model(source)
    return spec, [*_vocabulary_notes(source, spec), *_sidecar_notes(source, spec), *_tensor_notes(source, spec)]


def known_model(source: Source) -> ModelSpec:
    """The model by its config alone. Raises InputError for an unknown model, with what to do."""
    config = parse_json_object(source.blobs["config.json"], f"{source.path}: config.json", allow_nan=True)
    with advising_generic(source.path):
        return parse_config(config)


@contextmanager
def advising_generic(path: Path) -> Iterator[None]:
    """Adds to the error for an unknown model that it can be converted all the same. path: of the source."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}. With --architecture generic it is converted, but cannot be run") from None


def _vocabulary_notes(source: Source, spec: ModelSpec) -> list[str]:
    """A tokenizer may have fewer tokens than the model, or special ones beyond those of a text model."""
    try:
        file = TokenizerFile(source.blobs.get("tokenizer.json", b"{}"))
    except InputError:  # the next check tells
        return []
    notes = []
    own, added = file.highest_id, max(file.added, default=-1)
    if own >= spec.vocab_size:
        raise _failed(
            source,
            f"tokenizer.json has tokens up to {own}, but the model only {spec.vocab_size}: it belongs to another "
            "model. Put the right one beside the weights, or take it away to convert without a tokenizer",
        )
    if added >= spec.vocab_size:
        notes.append(
            f"tokenizer.json adds tokens up to {added}, but the model has only {spec.vocab_size}: a text with "
            "those beyond cannot be run"
        )
    return notes


def _sidecar_notes(source: Source, spec: ModelSpec | None) -> list[str]:
    """Checks tokenizer, token ids and templates; notes on those without effect. spec: None for an unknown model."""
    blobs = source.blobs
    notes = []
    tokenizer = None
    if "tokenizer.json" in blobs:
        try:
            tokenizer = Tokenizer(blobs)
        except InputError as error:
            raise _failed(source, f"{error}. Mend the file, or take it away to convert without a tokenizer") from None
    for name in ("config.json", "generation_config.json"):
        for key in ("bos_token_id", "eos_token_id"):
            try:
                ids = token_ids(blobs, name, key)
            except InputError as error:
                raise _failed(source, str(error)) from None
            if spec is not None and (beyond := [i for i in ids if not 0 <= i < spec.vocab_size]):
                notes.append(
                    f"{name}: {key} names {beyond[0]}, but the model's tokens are 0 to {spec.vocab_size - 1}: it "
                    "has no effect"
                )
    try:
        templates = templates_of(blobs)
    except InputError as error:
        raise _failed(source, str(error)) from None
    for name, template in templates.items():
        with ChatTemplate(template) as compiled:
            try:
                compiled.check()
            except InputError as error:
                notes.append(f"The chat template {name!r} cannot be used: {error}")
    path = source.path / "added_tokens.json"
    if tokenizer is not None and source.path.is_dir() and os.path.lexists(path):
        added = parse_json_object(read_small(path), str(path))
        if other := [token for token, i in added.items() if tokenizer.id(token) != i]:
            known = tokenizer.id(other[0])
            notes.append(
                f"added_tokens.json is left aside: it says that {other[0]!r} is token {added[other[0]]}, "
                f"tokenizer.json that it is {'none' if known is None else known}. Where it is right, save the "
                "tokenizer anew (in transformers: tokenizer.save_pretrained)"
            )
    return notes


def _tensor_notes(source: Source, model: Inventory) -> list[str]:
    """Checks that the source has every tensor of the model; notes on those left out."""
    notes = []
    needed = {t.name: t for t in model.tensors()}
    stored = source.tensors
    missing = [name for name in needed if name not in stored]
    if missing:
        why = explain_missing(needed.keys(), stored.keys(), model.architecture)
        raise _failed(source, f"the model needs tensors that are missing: {listed(missing)}. {why}")
    extra = [name for name in stored if name not in needed]
    if zeros := [name for name in extra if name.endswith(".bias") and not source.read(name).any()]:
        extra = [name for name in extra if name not in zeros]
        notes.append(f"left out, as {model.architecture} has no such biases and all are zero: {listed(zeros)}")
    if unknown := [name for name in extra if not name.endswith(HARMLESS)]:
        raise _failed(
            source,
            f"tensors that {model.architecture} does not have: {listed(unknown)}. "
            "The config does not belong to these weights, or the model is of a kind not supported",
        )
    if extra:
        notes.append(f"left out, since the config says as much: {listed(sorted(extra))}")
    for name, t in needed.items():
        if stored[name].shape != t.shape:
            raise _failed(source, f"{name}: shape is {stored[name].shape}, but the config asks for {t.shape}")
    return notes


def _failed(source: Source, message: str) -> InputError:
    return InputError(f"{source.path}: {message}")
