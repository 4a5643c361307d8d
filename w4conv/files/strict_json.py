"""The writer of JSON files and headers: without infinity and NaN, which JSON lacks; lone surrogates as escapes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from w4conv.errors import InputError


def to_json(value: object, *, where: str, special_floats: bool = False, **layout: Any) -> bytes:
    """UTF-8 text of `value`; `layout` as of json.dumps, which writes characters as they are.

    where: names the file in an error. special_floats: write infinity and NaN as transformers does in a config.json,
    {"__float__": "Infinity"}. Raises InputError for them else.
    """
    layout.setdefault("ensure_ascii", False)
    if special_floats:
        value = _tagged(value)
    try:
        text = json.dumps(value, allow_nan=False, **layout)
    except ValueError as error:
        raise InputError(f"{where}: infinity and NaN are no JSON values. Correct the number in the source") from error
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate: its escape


def made_strict(data: bytes, where: str) -> bytes:
    """A JSON file as it is, or written anew where it has the words Infinity and NaN, which Python's reader allows."""
    if b"Infinity" not in data and b"NaN" not in data:
        return data
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # not JSON: it is carried as it is
        return data
    return to_json(value, where=where, special_floats=True, indent=2) + b"\n" if has_special_floats(value) else data


def has_special_floats(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(has_special_floats(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(map(has_special_floats, value))
    return isinstance(value, float) and not math.isfinite(value)


def _tagged(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return value
