"""Chat templates: messages to a prompt, in Jinja as Hugging Face models carry it.

A template is code from a stranger. It is compiled and rendered by a process of its own (template_process.py), whose
time and memory the system bounds whatever the template does, and which ends with this one.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from w4conv.errors import InputError, UsageError
from w4conv.files.blobs import json_object, place, text_of
from w4conv.runtime.template_renderer import Renderer
from w4conv.runtime.tokenizer import Tokenizer, settle_special_tokens
from w4conv.sources.base import TOOL_TEMPLATE

MAX_TEMPLATE_BYTES: Final = 1 << 20
MAX_MESSAGES_NBYTES: Final = 1 << 21  # as JSON
# Names by which templates read a model's reasoning; the first is the usual one.
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_MASKS: Final = 0x100000  # the first of characters that stand for special tokens in messages
_PRIVATE: Final = re.compile("[\U000f0000-\U0010ffff]")  # of private use: these, and ALIASES of package_tokenizer
_CONTINUE: Final = "CONTINUE_FINAL_MESSAGE_TAG "

Message = Mapping[str, object]


def templates_of(blobs: Mapping[str, bytes]) -> dict[str, str]:
    """The model's templates by name: "default" is what chat_template.jinja holds, else what tokenizer_config.json does.

    Beside chat_template.jinja there may be one for tools, "tool_use"; tokenizer_config.json may have a list of named
    ones. Raises InputError for what is no text.
    """
    if "chat_template.jinja" in blobs:
        files = {"default": "chat_template.jinja", "tool_use": TOOL_TEMPLATE}
        return {name: text_of(blobs, file) for name, file in files.items() if file in blobs}
    found = json_object(blobs, "tokenizer_config.json").get("chat_template")
    if found is None:
        return {}
    listed = found if isinstance(found, list) else [{"name": "default", "template": found}]
    named: dict[Any, Any] = {t.get("name"): t.get("template") for t in listed if isinstance(t, dict)}
    if len(named) < len(listed) or not all(isinstance(x, str) for pair in named.items() for x in pair):
        raise InputError(
            f"{place(blobs, 'tokenizer_config.json')}: chat_template is neither a text nor a list of named texts"
        )
    return named


class ChatTemplate:
    """One template, and the process that renders it, which is started at once and ends with this object.

    May be used by several threads, and in a process that has forked since.
    """

    def __init__(self, source: str) -> None:
        """Raises InputError when the template is too large. Other faults are raised by `check` and `render`."""
        if len(source.encode(errors="surrogatepass")) > MAX_TEMPLATE_BYTES:
            raise InputError(f"the chat template has more than {MAX_TEMPLATE_BYTES:,} bytes, the limit")
        self._source = source
        self._renderer = Renderer(source)

    @classmethod
    def from_blobs(cls, blobs: Mapping[str, bytes], *, tools: bool = False, name: str | None = None) -> ChatTemplate:
        """One of the model's templates: that of this name; else for `tools` the one named "tool_use"; else "default".

        Raises InputError when the model has no such template, saying which there are.
        """
        named = templates_of(blobs)
        if not named:
            raise InputError("the model has no chat template; run it without --chat and write the prompt in full")
        if name is None:
            name = "tool_use" if tools and "tool_use" in named else "default"
            what = "none is its default"
        else:
            what = f"none is named {name!r}"
        if name not in named:
            known = ", ".join(repr(n) for n in named)
            raise InputError(f"the model has chat templates, but {what}: {known}. Name one with --chat-template")
        return cls(named[name])

    def close(self) -> None:
        """End the process. A later rendering starts another."""
        self._renderer.stop()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise InputError when the template is not valid Jinja."""
        self._renderer.run(None)

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
        """Append the mark to the text of the message; returns the text."""
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
        try:
            request = json.dumps({"values": _as_json(values)})
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"messages and variables of a chat template must be JSON values: {error}") from None
        if len(request) > MAX_MESSAGES_NBYTES:
            raise InputError(
                f"the messages take {len(request):,} bytes; a chat template gets at most {MAX_MESSAGES_NBYTES:,}. "
                "Shorten them"
            )
        return self._renderer.run(request.encode())


def encode_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Sequence[Message], *, special_tokens: str | None = None
) -> list[int]:
    """Ids of the prompt. special_tokens: `settle_special_tokens`, of special tokens in messages; those of the template
    are special always. transformers and llama.cpp parse.

    With "text", special tokens in messages are masked, each by a private character, and the template is rendered
    again: so their places in the prompt are known. Raises InputError where the template changes them on the way.
    """
    special_tokens = settle_special_tokens(special_tokens)
    prompt = template.render(messages, special_tokens=tokenizer.special_tokens)
    ids = tokenizer.encode(prompt, add_bos=False)
    if special_tokens == "parse":
        return ids
    chars: dict[str, str] = {}
    found = tokenizer.special_texts()
    spelled = re.compile("|".join(map(re.escape, found))) if found else None

    def masked(value: object) -> object:
        if isinstance(value, str) and spelled is not None:
            value = spelled.sub(lambda m: chars.setdefault(m[0], chr(_MASKS + len(chars))), value)
            if tokenizer.special_ids(tokenizer.encode(value, add_bos=False)):
                raise unsure
        elif isinstance(value, Mapping):
            return {key: masked(item) for key, item in value.items()}
        elif isinstance(value, Sequence) and not isinstance(value, str):
            return [masked(item) for item in value]
        return value

    unsure = InputError(
        "special tokens in a message cannot be taken as text here: the chat template, or the tokenizer, changes them "
        "on the way. Leave them out, or take them as what they are with --special-tokens parse"
    )
    harmless: list[Any] = [masked(m) for m in messages]
    if chars and any(_PRIVATE.search(text) for text in (prompt, *found)):
        raise unsure
    render = template.render(harmless, special_tokens=tokenizer.special_tokens)
    control = tokenizer.special_ids(tokenizer.encode(render, add_bos=False))
    if tokenizer.special_ids(ids) == control:
        return ids
    masks = {char: text for text, char in chars.items()}
    if "".join(masks.get(c, c) for c in render) != prompt:
        raise unsure
    ids = tokenizer.encode_masked(render, masks)
    if tokenizer.special_ids(ids) != control:
        raise unsure
    return ids


def _as_json(value: object) -> object:
    """The value as JSON types. Raises TypeError for a value that JSON lacks."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key that is no string")
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_as_json(item) for item in value]
    raise TypeError(f"a value of type {type(value).__name__}")


def _plain(message: Message) -> dict[str, object]:
    """A copy of a message: without None values, its reasoning under the names that templates read."""
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
