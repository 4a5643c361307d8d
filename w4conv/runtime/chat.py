"""Chat templates: messages to a prompt, in Jinja as Hugging Face models carry it.

A template is code from a stranger. It runs in jinja2's immutable sandbox, without a loader, with a budget of executed
lines and of output, and with repetition and powers bounded, so that it can neither reach out nor hang.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from w4conv.errors import InputError
from w4conv.runtime.tokenizer import json_object

MAX_TEMPLATE_BYTES: Final = 1 << 20
MAX_PROMPT_CHARS: Final = 1 << 24
MAX_LINES: Final = 2_000_000  # template lines executed
MAX_EXPONENT: Final = 64

Message = Mapping[str, object]


class ChatTemplate:
    """One compiled template. Raises InputError when it is too large or not valid Jinja."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_BYTES:
            raise InputError(f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_BYTES}")
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InputError(f"the chat template cannot be compiled: {error}") from None

    @classmethod
    def from_blobs(cls, blobs: Mapping[str, bytes], *, tools: bool = False) -> ChatTemplate:
        """The model's template: chat_template.jinja, else `chat_template` of tokenizer_config.json.

        A list of named templates offers "default" and "tool_use"; `tools` prefers the latter. Raises InputError when
        the model has no template.
        """
        if "chat_template.jinja" in blobs:
            try:
                return cls(blobs["chat_template.jinja"].decode())
            except UnicodeDecodeError as error:
                raise InputError(f"chat_template.jinja is not UTF-8: {error}") from None
        found = json_object(blobs, "tokenizer_config.json").get("chat_template")
        if isinstance(found, list):
            named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
            found = (named.get("tool_use") if tools else None) or named.get("default")
        if not isinstance(found, str):
            raise InputError("the model has no chat template; run it without --chat and write the prompt in full")
        return cls(found)

    def render(
        self,
        messages: Sequence[Message],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool = True,
        tools: Sequence[object] | None = None,
        **variables: object,
    ) -> str:
        """The prompt. Tokenize it with `add_bos=False`: the template writes the BOS token itself.

        special_tokens and variables become variables of the template, the latter first. Raises InputError when the
        template refuses the messages, fails, or exceeds its limits.
        """
        values: dict[str, object] = {
            **special_tokens,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        pieces: list[str] = []
        n_chars = 0
        try:
            with _line_budget(MAX_LINES):
                for piece in self._template.generate(values):
                    pieces.append(piece)
                    n_chars += len(piece)
                    if n_chars > MAX_PROMPT_CHARS:
                        raise _LimitError(f"it writes more than {MAX_PROMPT_CHARS} characters")
        except _RefusedError as error:
            raise InputError(f"the chat template refuses these messages: {error}") from None
        except Exception as error:  # whatever the template's code raises is the template's fault
            what = type(error).__name__.lstrip("_")
            raise InputError(f"the chat template failed ({what}): {error}") from None
        return "".join(pieces)


class _RefusedError(jinja2.TemplateError):
    """`raise_exception` was called."""


class _LimitError(Exception):
    """A bound of this module was exceeded."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > MAX_EXPONENT:
            raise _LimitError(f"an exponent of {right}")
        if operator == "*":
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(sequence, str | list | tuple) and len(sequence) * count > MAX_PROMPT_CHARS:
                raise _LimitError(f"a sequence repeated {count} times")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@contextmanager
def _line_budget(n_lines: int) -> Iterator[None]:
    """Raise _LimitError after `n_lines` executed lines: a loop without output would otherwise never end."""
    left = n_lines

    def trace(_frame: FrameType, _event: str, _arg: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _LimitError(f"it runs more than {n_lines} lines")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
