"""Streaming detokenization, by the decoder of a tokenizer.json. Joined, the pieces equal the tokenizers package's text.

A decoder is a chain of steps, each from a list of tokens to a list of tokens; the text is the last list, joined. Here a
step gets its tokens in fragments, `(text, ends)`: `ends` is true with the last fragment of a token. It passes on what
no later fragment can change, and keeps the rest. So text comes out as early as the steps allow, and never too early: a
run of byte tokens is text or not as a whole, a space at the end may be one that is stripped.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

from tokenizers import Tokenizer as _Package

Fragment = tuple[str, bool]
Json = Mapping[str, Any]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # as Rust reads a number
_BYTE_TOKEN_NBYTES: Final = 6
_EMPTY_MODEL: Final = {"type": "BPE", "vocab": {}, "merges": []}


class StreamDecoder:
    """Joined, the pieces are the decoded text of all tokens; after a `context`, what they add to its text.

    decoder: `decoder` of a tokenizer.json, as the package writes it. context: tokens before, such as those of a prompt.
    """

    def __init__(self, decoder: Json | None, context: Iterable[str] = ()) -> None:
        self._steps = _steps(decoder)
        self._known = ""  # text of the context that the steps still hold: it may be output later
        is_first = True
        for token in context:
            self.push(token)
            is_first = False
        if not is_first:
            ahead = copy.copy(self)
            ahead._steps = [step.copy() for step in self._steps]
            self._known = ahead.finish()

    def push(self, token: str) -> str:
        """Text that no later token can change; may be empty."""
        return self._new(_through(self._steps, [(token, True)]))

    def finish(self) -> str:
        """The remaining text."""
        events: list[Fragment] = []
        for step in self._steps:
            events = [e for text, ends in events for e in step.push(text, ends)] + list(step.finish())
        return self._new(events)

    def _new(self, events: list[Fragment]) -> str:
        text = "".join(text for text, _ in events)
        if self._known and text:
            same = next((i for i, (a, b) in enumerate(zip(self._known, text, strict=False)) if a != b), None)
            same = min(len(self._known), len(text)) if same is None else same
            self._known = self._known[same:] if same == len(text) else ""
            text = text[same:]
        return text


def _through(steps: Sequence[_Step], events: list[Fragment]) -> list[Fragment]:
    for step in steps:
        events = [e for text, ends in events for e in step.push(text, ends)]
    return events


class _Step(ABC):
    """One step of a decoder."""

    def copy(self) -> Self:
        return copy.copy(self)

    @abstractmethod
    def push(self, text: str, ends: bool) -> Iterator[Fragment]:
        """Output that is certain with this fragment."""

    def finish(self) -> Iterator[Fragment]:
        yield from ()


class _Spaced(_Step):
    """The default without a decoder: tokens with a space between."""

    def __init__(self) -> None:
        self._space = ""

    def push(self, text: str, ends: bool) -> Iterator[Fragment]:
        yield self._space + text, ends
        self._space = " " if ends else ""


class _Fuse(_Step):
    def push(self, text: str, ends: bool) -> Iterator[Fragment]:  # noqa: ARG002  # all tokens become one
        yield text, False

    def finish(self) -> Iterator[Fragment]:
        yield "", True


class _WholeTokens(_Step):
    """A step that needs whole tokens."""

    def __init__(self) -> None:
        self._token = ""

    def push(self, text: str, ends: bool) -> Iterator[Fragment]:
        self._token += text
        if ends:
            token, self._token = self._token, ""
            yield from self._decode(token)

    @abstractmethod
    def _decode(self, token: str) -> Iterator[Fragment]:
        """Of a whole token."""


class _ByteLevel(_WholeTokens):
    """GPT-2's characters for bytes. A token with other characters is kept."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = b""

    def _decode(self, token: str) -> Iterator[Fragment]:
        known = [_BYTE_OF.get(c) for c in token]
        raw = token.encode() if None in known else bytes(b for b in known if b is not None)
        raw = self._rest + raw
        text, n = codecs.utf_8_decode(raw, "replace", False)
        self._rest = raw[n:]
        yield text, False

    def finish(self) -> Iterator[Fragment]:
        yield self._rest.decode(errors="replace"), True


class _ByteFallback(_Step):
    """A run of tokens such as <0xE4> is text where all of it is UTF-8, else as many U+FFFD."""

    def __init__(self) -> None:
        self._token = ""
        self._passes = False  # the rest of a token that is not for a byte
        self._run = b""

    def push(self, text: str, ends: bool) -> Iterator[Fragment]:
        if not self._passes:
            text = self._token + text
            if not ends and len(text.encode()) <= _BYTE_TOKEN_NBYTES:
                self._token = text
                return
            self._token = ""
            if ends and (match := _BYTE_TOKEN.fullmatch(text)):
                self._run += bytes([int(match[1], 16)])
                return
            yield from self.finish()
        self._passes = not ends
        yield text, ends

    def finish(self) -> Iterator[Fragment]:
        run, self._run = self._run, b""
        try:
            pieces = [run.decode()] if run else []
        except UnicodeDecodeError:
            pieces = ["\ufffd"] * len(run)
        yield from ((piece, True) for piece in pieces)


class _Strip(_Step):
    """Takes up to `start` characters `content` from the start of a token, and of the rest up to `stop` from its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._left = start
        self._held = ""

    def push(self, text: str, ends: bool) -> Iterator[Fragment]:
        if self._left:
            bare = text.lstrip(self._content)
            cut = min(len(text) - len(bare), self._left)
            self._left = 0 if bare else self._left - cut
            text = text[cut:]
        text = self._held + text
        n = min(len(text) - len(text.rstrip(self._content)), self._stop)
        kept = len(text) - n
        self._held = "" if ends else text[kept:]
        if ends:
            self._left = self._start
        yield text[:kept], ends


class _Replace(_Step):
    """A string, which is not empty."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._held = ""

    def push(self, text: str, ends: bool) -> Iterator[Fragment]:
        *before, rest = (self._held + text).split(self._pattern)
        n = 0  # how much of the rest may be the start of one
        if not ends:
            longest = min(len(rest), len(self._pattern) - 1)
            n = next((n for n in range(longest, 0, -1) if rest.endswith(self._pattern[:n])), 0)
        kept = len(rest) - n
        self._held = rest[kept:]
        yield self._content.join([*before, rest[:kept]]), ends


class _Metaspace(_Step):
    """Its character is a space, but nothing in the first token, where one was put in front of the text."""

    def __init__(self, replacement: str, at_start: str) -> None:
        self._replacement, self._becomes = replacement, at_start

    def push(self, text: str, ends: bool) -> Iterator[Fragment]:
        yield text.replace(self._replacement, self._becomes), ends
        if ends:
            self._becomes = " "


class _PerToken(_WholeTokens):
    """A step of the package that does the same to every token."""

    def __init__(self, step: Json) -> None:
        super().__init__()
        self._package = _package_decoder(step)

    def _decode(self, token: str) -> Iterator[Fragment]:
        yield self._package.decode([token]), True


class _WordPiece(_PerToken):
    """To every token but the first."""

    _before: tuple[str, ...] = ()

    def _decode(self, token: str) -> Iterator[Fragment]:
        yield self._package.decode([*self._before, token]), True
        self._before = ("",)  # empty, a first token adds nothing


class _Ctc(_PerToken):
    """Leaves out a token that repeats the one before it, and tokens that become empty."""

    _last: str | None = None

    def _decode(self, token: str) -> Iterator[Fragment]:
        text = "" if token == self._last else self._package.decode([token])
        self._last = token
        if text:
            yield text, True


class _Suffixes(_PerToken):
    """The mark for the end of a word is a space, but nothing in the last token."""

    _held: str | None = None

    def _decode(self, token: str) -> Iterator[Fragment]:
        if self._held is not None:
            yield self._package.decode([self._held, ""]), True
        self._held = token

    def finish(self) -> Iterator[Fragment]:
        if self._held is not None:
            yield self._package.decode([self._held]), True


class _AtTheEnd(_WholeTokens):
    """Unknown steps: the package decodes all tokens at the end."""

    def __init__(self, steps: Sequence[Json]) -> None:
        super().__init__()
        self._package = _package_decoder({"type": "Sequence", "decoders": steps})
        self._tokens: list[str] = []

    def copy(self) -> Self:
        out = super().copy()
        out._tokens = list(self._tokens)
        return out

    def _decode(self, token: str) -> Iterator[Fragment]:
        self._tokens.append(token)
        yield from ()

    def finish(self) -> Iterator[Fragment]:
        yield self._package.decode(self._tokens), True


_KINDS: Final[Mapping[str, Callable[[Json], _Step]]] = {
    "BPEDecoder": _Suffixes,
    "ByteFallback": lambda _: _ByteFallback(),
    "ByteLevel": lambda _: _ByteLevel(),
    "CTC": _Ctc,
    "Fuse": lambda _: _Fuse(),
    "Metaspace": lambda step: _Metaspace(step["replacement"], " " if step["prepend_scheme"] == "never" else ""),
    "Replace": lambda step: (
        _Replace(step["pattern"]["String"], step["content"]) if step["pattern"].get("String") else _PerToken(step)
    ),
    "Strip": lambda step: _Strip(step["content"], step["start"], step["stop"]),
    "WordPiece": _WordPiece,
}


def flat_steps(decoder: Json | None) -> Iterator[Json]:
    """The steps of a decoder, of sequences within sequences too."""
    if decoder is not None and decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from flat_steps(step)
    elif decoder is not None:
        yield decoder


def _steps(decoder: Json | None) -> list[_Step]:
    if decoder is None:
        return [_Spaced()]
    steps = list(flat_steps(decoder))
    n = next((i for i, step in enumerate(steps) if step["type"] not in _KINDS), len(steps))
    return [_KINDS[step["type"]](step) for step in steps[:n]] + ([_AtTheEnd(steps[n:])] if n < len(steps) else [])


def _package_decoder(step: Json) -> Any:
    return _Package.from_str(json.dumps({"model": _EMPTY_MODEL, "decoder": step})).decoder


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are kept, the other 68 become U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()
