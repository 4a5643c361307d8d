"""A tokenizer.json, read without building a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from w4conv import _native
from w4conv.errors import InputError
from w4conv.files.blobs import json_object, parse_json_object, place


class TokenizerFile:
    """settings: the document as JSON. Of a BPE model only tokens of one or two bytes, and their merges: the rest is in
    `vocabulary`, which takes a fraction of the time and memory.
    added: id -> added token.
    """

    def __init__(self, document: bytes, where: str = "tokenizer.json") -> None:
        """Raises InputError, which begins with `where`, when it is not a JSON object."""
        self.vocabulary: _native.Vocabulary | None
        try:
            self.vocabulary = _native.Vocabulary(document)
            text = self.vocabulary.shortened("", set(), "")
        except ValueError:
            self.vocabulary, text = None, document
        self.settings = parse_json_object(text, where, allow_nan=True)
        self.added = {
            token["id"]: str(token.get("content"))
            for token in _list(self.settings.get("added_tokens"))
            if isinstance(token, dict) and is_id(token.get("id"))
        }
        self._own = {} if self.vocabulary is not None else _tokens(self.model.get("vocab"))

    @property
    def model(self) -> dict[str, Any]:
        model = self.settings.get("model")
        return model if isinstance(model, dict) else {}

    @property
    def n_tokens(self) -> int:
        """Tokens of the model and added ones; a token that is both counts once."""
        if self.vocabulary is None:
            return len(self._own | self.added)
        return len(self.vocabulary) + sum(self.vocabulary.token(i) is None for i in self.added)

    @property
    def highest_id(self) -> int:
        """The highest id of the model's own tokens, without added ones; -1 where there are none."""
        if self.vocabulary is None:
            return max((i for i in self._own if i not in self.added), default=-1)
        ids = range(self.vocabulary.n_ids - 1, -1, -1)
        return next((i for i in ids if i not in self.added and self.vocabulary.token(i) is not None), -1)

    def token(self, token_id: int) -> str | None:
        """An added one, where the model has one of that id too."""
        if token_id in self.added:
            return self.added[token_id]
        if self.vocabulary is None:
            return self._own.get(token_id)
        found = self.vocabulary.token(token_id)
        return None if found is None else found.decode(errors="replace")


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def token_ids(blobs: Mapping[str, bytes], name: str, key: str) -> list[int]:
    """`eos_token_id` or `bos_token_id` of a config: none, one or a list. Some may lie outside a vocabulary.

    Raises InputError, as transformers does, for anything else: a text, a fraction, a list with such in it.
    """
    found = json_object(blobs, name).get(key)
    values = found if isinstance(found, list) else [] if found is None else [found]
    for value in values:
        if type(value) is not int:
            raise InputError(
                f"{place(blobs, name)}: {key} is {json.dumps(found)[:60]}; expected a token id or a list of them. "
                "Write the id as a whole number"
            )
    return values


def is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tokens(vocab: object) -> dict[int, str]:
    """id -> token, of a mapping the other way, or of a list of [token, score]."""
    if isinstance(vocab, dict):
        return {i: token for token, i in vocab.items() if is_id(i)}
    return {i: str(entry[0]) for i, entry in enumerate(_list(vocab)) if isinstance(entry, list) and entry}
