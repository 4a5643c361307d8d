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
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

# What each command reports: schema name, module and class.
REPORTS: Final = {
    "quantize": ("w4conv.commands.quantize", "ConversionReport"),
    "calibrate": ("w4conv.commands.calibrate", "StatisticsReport"),
    "inspect": ("w4conv.commands.inspect", "Inspection"),
    "verify": ("w4conv.commands.verify", "VerifyReport"),
    "diff": ("w4conv.commands.diff", "DiffReport"),
    "cat": ("w4conv.commands.cat", "Extract"),
    "bench": ("w4conv.commands.bench", "BenchReport"),
    "export": ("w4conv.exports.report", "ExportReport"),
    "run": ("w4conv.cli._schemas", "RunReport"),
}


@dataclass(frozen=True)
class RunStatistics:
    """Times, rates and sizes of one run; rates are None where nothing was decoded. isa: the tier that was used."""

    prompt_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    first_token_seconds: float
    generated_tokens: int
    decoded_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    dropped_tokens: int
    decode_ms_per_token: float | None
    decode_tokens_per_second: float | None
    weight_bytes_per_token: int
    weight_gb_per_second: float | None
    resident_bytes: Mapping[str, int] | None
    isa: str
    threads: int
    activations: str
    kv: str


@dataclass(frozen=True)
class Sampling:
    """How tokens were chosen, by the options of run; temperature 0: always the most probable one."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True)
class RunReport:
    """model_digest: of the container. prompt: as the model reads it, with --chat in the chat template; prompt_ids: its
    tokens, BOS included. text, generated_ids: the answer. end_id: the end token behind it, None where none ended it.
    finish: "stop" (an end token), "length" (cut by -n), "context" (cut, as the context is full) or "interrupted"."""

    model_digest: str
    prompt: str
    prompt_ids: tuple[int, ...]
    text: str
    generated_ids: tuple[int, ...]
    end_id: int | None
    finish: str
    sampling: Sampling
    stats: RunStatistics


HEAD = """\
# What --json writes

<!-- Written by `python -m w4conv.cli._schemas`; edit the dataclasses, not this file. -->

One object, whose `schema` names it and its version. Fields may be added under the same name; when one goes or changes
its meaning, the number rises. Sizes are bytes, times seconds. `null` stands for what cannot be said, for a number that
is not finite, and for what the descriptions below call None.
"""
_WORDS: Final = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def report_type(command: str) -> type:
    module, name = REPORTS[command]
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
    for command in REPORTS:
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
