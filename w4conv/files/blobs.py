"""Small files of a model, read and checked in one way, from a folder, a GGUF file or a `.w4`.

Everything here may be hostile, under right digests too. Whatever is wrong is an InputError that names file and blob.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from w4conv.errors import InputError

# Parsed JSON takes up to 30 times its text; brackets and commas are what makes it grow. Strings may hold them freely,
# so this is far above any real header, and still keeps a crafted one under a few hundred MB.
MAX_JSON_NODES: Final = 8_000_000


def json_object(blobs: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object stored as blob `name`; empty when there is none."""
    return parse_json_object(blobs[name], place(blobs, name), allow_nan=True) if name in blobs else {}


def config_of(blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """config.json, without which there is no model."""
    if "config.json" not in blobs:
        raise InputError(f"{place(blobs, 'config.json')} is missing, so the model is unknown")
    return json_object(blobs, "config.json")


def text_of(blobs: Mapping[str, bytes], name: str) -> str:
    """A text, such as a chat template."""
    return parse_text(blobs[name], place(blobs, name))


def place(blobs: Mapping[str, bytes], name: str) -> str:
    """The name of a blob in errors: with its file, where the mapping knows it as `where`."""
    where = getattr(blobs, "where", "")
    return f"{where}: {name}" if where else name


def parse_text(data: bytes, where: str) -> str:
    """UTF-8 without a byte order mark and without NUL, which no prompt should get."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8") from None
    if not text:
        raise InputError(f"{where} is empty: fetch it again, or take it away")
    if text.startswith("\ufeff"):
        raise InputError(f"{where} begins with a byte order mark; save it as UTF-8 without")
    if "\0" in text:
        raise InputError(f"{where} has a NUL at character {text.index(chr(0))}: it is damaged, or no text")
    return text


def parse_json_object(text: bytes, where: str, *, allow_nan: bool = False) -> dict[str, Any]:
    """A JSON object; `where` starts every error. Raises InputError for anything else, and for a repeated key.

    allow_nan: accept the words NaN and Infinity, which Python's writers put into config files though JSON has neither.
    """
    if sum(text.count(mark) for mark in (b"[", b"{", b",")) > MAX_JSON_NODES:
        raise InputError(f"{where}: more than {MAX_JSON_NODES} JSON values")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # set.add as a step
            raise InputError(f"{where}: the key {again!r} stands twice")
        return out

    def refuse(word: str) -> object:
        raise InputError(f"{where}: {word} is not a JSON value")

    try:
        out = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=None if allow_nan else refuse)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise InputError(f"{where}: JSON is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(out, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(out).__name__}")
    return out
