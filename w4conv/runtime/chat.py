"""Chat templates: messages to a prompt, in Jinja as Hugging Face models carry it.

A template is code from a stranger. It runs in jinja2's immutable sandbox, without a loader, with a budget of executed
lines and of output, and with repetition and powers bounded, so that it can neither reach out nor hang.
"""

from __future__ import annotations

import copy
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

from w4conv.errors import InputError, UsageError
from w4conv.runtime.tokenizer_file import json_object
from w4conv.sources.base import TOOL_TEMPLATE

MAX_TEMPLATE_BYTES: Final = 1 << 20
MAX_PROMPT_CHARS: Final = 1 << 24
MAX_LINES: Final = 2_000_000  # template lines executed
MAX_EXPONENT: Final = 64
# Names by which templates read what a model thought before it answered; the first is the usual one.
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_CONTINUE: Final = "CONTINUE_FINAL_MESSAGE_TAG "

Message = Mapping[str, object]


class ChatTemplate:
    """One compiled template. Raises InputError when it is too large or not valid Jinja."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_BYTES:
            raise InputError(f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_BYTES}")
        self._source = source
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InputError(f"the chat template cannot be compiled: {error}") from None

    @classmethod
    def from_blobs(cls, blobs: Mapping[str, bytes], *, tools: bool = False) -> ChatTemplate:
        """The model's template: chat_template.jinja, else `chat_template` of tokenizer_config.json.

        Beside chat_template.jinja there may be one for `tools`; a list of named templates in tokenizer_config.json
        offers "default" and "tool_use". Raises InputError when the model has no template.
        """
        for name in (*([TOOL_TEMPLATE] if tools else []), "chat_template.jinja"):
            if name in blobs and "chat_template.jinja" in blobs:
                try:
                    return cls(blobs[name].decode())
                except UnicodeDecodeError as error:
                    raise InputError(f"{name} is not UTF-8: {error}") from None
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
        documents: Sequence[object] | None = None,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """The prompt. Tokenize it with `add_bos=False`: the template writes the BOS token itself.

        Keys of a message whose value is None are left out. continue_final_message: the prompt ends with the last
        message's text, for the model to go on with; then add_generation_prompt must be off. special_tokens and
        variables become variables of the template, the latter first. Raises InputError when the template refuses the
        messages, fails, or exceeds its limits; UsageError when there is nothing to render or to continue.
        """
        if not messages:
            raise UsageError("a chat template needs at least one message")
        chat = [_plain(message) for message in messages]
        text = None
        if continue_final_message:
            if add_generation_prompt:
                raise UsageError(
                    "a message is either continued or followed by a new one: turn add_generation_prompt off"
                )
            text = self._mark_end(chat[-1])
        prompt = self._run(
            {
                **special_tokens,
                "messages": chat,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            }
        )
        return prompt if text is None else _cut_at_mark(prompt, text)

    def _mark_end(self, message: dict[str, object]) -> str:
        """Put the mark behind the text of the message, which is returned."""
        content = message.get("content")
        if isinstance(content, list):
            for part in reversed(content):
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    text: str = part["text"]
                    part["text"] = text + _CONTINUE
                    return text
        if not isinstance(content, str) or "content" not in self._source:
            raise UsageError("the last message has no text that this chat template could continue")
        message["content"] = content + _CONTINUE
        return content

    def _run(self, values: dict[str, object]) -> str:
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


def _plain(message: Message) -> dict[str, object]:
    """A copy of a message: no key without a value, thoughts under the names that templates look for."""
    out = copy.deepcopy({key: value for key, value in message.items() if value is not None})
    thought = next((out[key] for key in REASONING if key in out), None)
    return out if thought is None else {"thinking": thought, **out, "reasoning_content": thought}


def _cut_at_mark(prompt: str, text: str) -> str:
    mark = _CONTINUE.strip()
    if text.strip() not in prompt or mark not in prompt:
        raise InputError("the chat template leaves out the last message, or a part of it, so it cannot be continued")
    at = prompt.rindex(mark)
    kept = prompt[:at]
    return kept if prompt.startswith(_CONTINUE, at) else kept.rstrip()  # spaces behind the text were trimmed


class _RefusedError(jinja2.TemplateError):
    """`raise_exception` was called."""


class _LimitError(Exception):
    """A bound of this module was exceeded."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: what is set inside is not seen outside.
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Dict:
    """What a template calls `dict`, without the class's attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """What a template calls `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may call an attribute `self`
        self, *rest = args
        attributes = dict(*rest, **values)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"an attribute {name!r} that begins with an underscore")


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
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
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
