"""docs/json.md out of the reports that the commands write: `python -m w4conv.cli._schemas > docs/json.md`.

`schema` says the same as a JSON Schema, to which the tests hold what the commands really write.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

from w4conv.cli.main import COMMANDS

HEAD = """\
# What --json writes

<!-- Written by `python -m w4conv.cli._schemas`; edit the dataclasses, not this file. -->

One object, whose `schema` names it and its version. Fields may be added under the same name; when one goes or changes
its meaning, the number rises. Sizes are bytes, times seconds. `null` stands for what cannot be said, for a number that
is not finite, and for what the descriptions below call None.
"""
_WORDS: Final = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def report_type(command: str) -> type:
    module, name = importlib.import_module(f"w4conv.cli.{command}").REPORT
    found: type = getattr(importlib.import_module(module), name)
    return found


def schema(command: str) -> dict[str, Any]:
    """JSON Schema of what a command writes."""
    out = _schema(report_type(command))
    out["properties"]["schema"] = {"const": f"w4conv.{command}/1"}
    out["required"] = ["schema", *out["required"]]
    return out


def _schema(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if is_dataclass(hint):
        members = {name: _schema(member) for name, member in _members(hint)}
        return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if origin is tuple and arguments[-1] is not Ellipsis:
            return {"type": "array", "prefixItems": [_schema(a) for a in arguments], "maxItems": len(arguments)}
        return {"type": "array", "items": _schema(arguments[0])}
    if hint is float:
        return {"type": ["number", "null"]}  # null where it is not finite
    return {"type": _WORDS[hint]}


def _members(cls: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    return [(field.name, hints[field.name]) for field in fields(cls)]


def page() -> str:
    """docs/json.md"""
    parts = [HEAD]
    seen: list[Any] = []
    for command in COMMANDS:
        cls = report_type(command)
        parts.append(f"## w4conv.{command}/1\n\nof `w4conv {command}`.\n")
        parts += _table(cls, seen)
    while pending := [cls for cls in seen if f"### {cls.__name__}\n" not in parts]:
        for cls in pending:
            parts += [f"### {cls.__name__}\n", *_table(cls, seen)]
    return "\n".join(parts)


def _table(cls: Any, seen: list[Any]) -> Iterator[str]:
    yield inspect.cleandoc(cls.__doc__ or "") + "\n"
    lines = ["| field | type |", "|---|---|"]
    for name, hint in _members(cls):
        for nested in _dataclasses(hint):
            if nested not in seen:
                seen.append(nested)
        lines.append(f"| `{name}` | {_words(hint)} |")
    yield "\n".join(lines) + "\n"


def _dataclasses(hint: Any) -> Iterator[Any]:
    if is_dataclass(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from _dataclasses(argument)


def _words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return "any"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(f'"{argument}"' for argument in arguments)
    if is_dataclass(hint):
        name = getattr(hint, "__name__", "")
        return f"[{name}](#{name.lower()})"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"object of {_words(arguments[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if origin is tuple and arguments[-1] is not Ellipsis:
            return f"array of {', '.join(map(_words, arguments))}"
        return f"array of {_words(arguments[0])}"
    return _WORDS[hint]


if __name__ == "__main__":
    sys.stdout.write(page())
