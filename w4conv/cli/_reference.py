"""docs/cli.md out of the commands themselves: `python -m w4conv.cli._reference > docs/cli.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import typer
import typer.main

from w4conv.cli.main import app

HEAD = """\
# Command-line reference

<!-- Written by `python -m w4conv.cli._reference`; edit the commands, not this file. -->

With `--json` a command writes one object, whose `schema` (such as `w4conv.verify/1`) names its fields. Fields may be
added under the same name; when one changes its meaning or goes, the number rises. Sizes are bytes, times seconds. What
cannot be said, or is not finite, is `null`.
"""


def reference() -> str:
    """The whole page as Markdown."""
    # typer's command objects have no public type of their own
    group: Any = typer.main.get_command(app)
    parts = [HEAD, *_page(group, "w4conv")]
    for name, command in group.commands.items():
        parts += _page(command, f"w4conv {name}")
    return "\n".join(parts)


def _page(command: Any, path: str) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    words = [path, *(a.metavar for a in arguments), "[OPTIONS]"]
    if hasattr(command, "commands"):
        words.append("COMMAND ...")
    yield f"## {path}\n"
    yield f"    {' '.join(words)}\n"
    yield inspect.cleandoc(command.help).replace("\f", "") + "\n"
    if arguments:
        yield _table(("argument", "meaning"), [(a.metavar, a.help) for a in arguments])
    # The two options about shell completion look different from shell to shell.
    yield _table(("option", "meaning"), [(_flags(o), _help(o)) for o in options if not o.name.endswith("_completion")])
    yield from _epilog(command.epilog)


def _flags(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar}"
    return ", ".join(sorted(option.opts, key=len)) + value


def _help(option: Any) -> str:
    hidden = option.is_flag or option.default is None or option.default in ("", ())
    return option.help if hidden else f"{option.help} [default: {option.default}]"


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _epilog(epilog: str) -> Iterator[str]:
    """Blocks that begin with a backspace are shown as they are; their first line may be a title."""
    for block in inspect.cleandoc(epilog).split("\b\n"):
        lines = block.strip("\n").splitlines()
        if not lines:
            continue
        if lines[0].endswith(":"):
            yield lines.pop(0) + "\n"
            yield "\n".join(f"  {line}" if line.startswith("  ") else line for line in lines) + "\n"
        else:
            yield "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
