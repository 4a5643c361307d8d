"""The calibration set that comes with w4conv: `--calibration builtin`.

It stands in `texts/`, one file a kind, written for this purpose and under the licence of w4conv (Apache-2.0); README.md
there tells what it holds. A line "%%" parts the documents of a text; a line of dialogues.jsonl is a dialogue, the
messages of a chat. Documents of all kinds take turns, so that sequences taken evenly from the whole have all kinds.

Dialogues take the form in which the model reads them: its own chat template, or plain text where it has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from typing import Any, Final

from blake3 import blake3

from w4conv.runtime.chat import ChatTemplate, Message, templates_of
from w4conv.runtime.template_renderer import RefusalError
from w4conv.runtime.tokenizer import Tokenizer

NAME: Final = "builtin"
VERSION: Final = 1  # goes up with any change of the documents or of their order
DIGEST: Final = "463401dff940be0f4734b9ee82b7ec2b65ae416573cc8e2d772502c5a4b1ad35"
TOKENS: Final = 32768  # by default
KINDS: Final = (
    "encyclopedia-nature.txt", "prose.txt", "encyclopedia-history.txt", "dialogues.jsonl", "encyclopedia-arts.txt",
    "code.txt", "encyclopedia-people.txt", "languages.txt", "mathematics.txt",
)  # fmt: skip
_BETWEEN: Final = "\n\n"
_PART: Final = "\n%%\n"
# Before a template: what it is told when it asks for the day, so that it says the same on any day.
_CLOCK: Final = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"
_MAX_ADDED: Final = 1000  # characters, by a template to a dialogue
_SYSTEM: Final = {"role": "system", "content": "You are a helpful assistant."}
_SPEAKERS: Final = {"system": "System", "user": "User", "assistant": "Assistant"}

Document = str | tuple[Message, ...]  # a text, or the messages of a dialogue


@dataclass(frozen=True, slots=True)
class BuiltinText:
    """The set as one model reads it. n_chat: dialogues in the form of the model's chat template; all others are plain
    text."""

    content: str
    n_chat: int

    def record(self) -> dict[str, Any]:
        """For the provenance of a container."""
        return {"set": NAME, "set_version": VERSION, "set_blake3": DIGEST, "chat_dialogues": self.n_chat}


def documents() -> list[Document]:
    """All documents in their order: each stands where its middle lies in its file, from 0 to 1."""
    placed: list[tuple[float, int, Document]] = []
    for kind, name in enumerate(KINDS):
        raw = (files("w4conv.calibration") / "texts" / name).read_bytes().decode().rstrip("\n")
        parts = raw.split("\n" if name.endswith(".jsonl") else _PART)
        ends = list(accumulate(len(part) for part in parts))
        for part, end in zip(parts, ends, strict=True):
            found: Document = tuple(json.loads(part)["messages"]) if name.endswith(".jsonl") else part
            placed.append(((end - len(part) / 2) / ends[-1], kind, found))
    return [document for _, _, document in sorted(placed, key=lambda item: item[:2])]


def digest() -> str:
    """BLAKE3, hexadecimal, of the documents in their order, dialogues as plain text: the same for every model."""
    return blake3(_join([d if isinstance(d, str) else _plain(d) for d in documents()]).encode()).hexdigest()


def builtin_text(blobs: Mapping[str, bytes], tokenizer: Tokenizer) -> BuiltinText:
    """The set as the model with these blobs reads it. Raises InputError for a template that cannot be read or exceeds
    its limits."""
    source = templates_of(blobs).get("default")
    if source is None:
        return BuiltinText(_join([d if isinstance(d, str) else _plain(d) for d in documents()]), 0)
    texts, n_chat = [], 0
    with ChatTemplate(_CLOCK + source) as template:
        for document in documents():
            chat = None if isinstance(document, str) else _in_chat_form(template, tokenizer, document)
            n_chat += bool(chat)
            texts.append(chat or (document if isinstance(document, str) else _plain(document)))
    return BuiltinText(_join(texts), n_chat)


def _in_chat_form(template: ChatTemplate, tokenizer: Tokenizer, messages: tuple[Message, ...]) -> str | None:
    """None where the template refuses it or adds too much, an empty text where it leaves all out.

    A long preamble, which would come again with each dialogue, many templates have only where no system message is
    given: then one is. Some refuse a system message: its text then leads that of the user.
    """
    first, second, *rest = messages
    merged = ({**second, "content": f"{first['content']}{_BETWEEN}{second['content']}"}, *rest)
    other = merged if first["role"] == "system" else (_SYSTEM, *messages)
    for form in (messages, other):
        try:
            text = template.render(form, special_tokens=tokenizer.special_tokens, add_generation_prompt=False)
        except RefusalError:
            continue
        if tokenizer.adds_bos:  # a sequence has one already
            text = text.removeprefix(tokenizer.special_tokens.get("bos_token", ""))
        if len(text) <= len(_plain(messages)) + _MAX_ADDED:
            return text.strip("\n")
    return None


def _plain(messages: tuple[Message, ...]) -> str:
    return _BETWEEN.join(f"{_SPEAKERS[str(m['role'])]}: {m['content']}" for m in messages)


def _join(texts: list[str]) -> str:
    return _BETWEEN.join(texts) + "\n"
