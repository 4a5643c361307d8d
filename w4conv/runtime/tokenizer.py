"""Tokenizer: text to token ids and back, from the files that travel inside a container.

The rules about BOS, in one place. `adds_bos` is whether a text starts with the BOS token by the model's own convention:
`add_bos_token` of tokenizer_config.json decides where it is given, else what the post-processor of tokenizer.json does.
`encode` puts one BOS at the start or none, never two; it adds no other special token. Special tokens spelled out in the
text are recognised as such, as the tokenizers package does it.

The bytes of a token are worked out here, not by decoding ids one at a time: byte fallback and byte-level tokens split
UTF-8 sequences, and decoders strip the space at the start of what they take for a text of its own.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken

from w4conv.errors import InputError, UsageError
from w4conv.runtime.package_tokenizer import PackageTokenizer
from w4conv.runtime.tokenizer_file import is_id, json_object

# Tokens by which chat models end a turn. A model may name only one of them as its EOS, or none.
END_OF_TURN: Final = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|return|>", "<|call|>",
)  # fmt: skip
SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Built from the blobs of a container or a source.

    n_tokens: size of the vocabulary with added tokens; the model may have more logits than that.
    bos_id: the BOS token, or None. adds_bos: see the module's text.
    special_tokens: name -> token text ("bos_token" -> "<s>"), what chat templates see.
    """

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        """Raises InputError when there is no tokenizer, or one that cannot be read."""
        if "tokenizer.json" not in blobs:
            raise InputError(
                "there is no tokenizer.json inside, so text cannot become tokens; inspect and verify (without --ppl) "
                "work without it, and Model.logits takes token ids. Put tokenizer.json beside the weights and convert "
                "again"
            )
        self._tokenizer = PackageTokenizer(blobs["tokenizer.json"])
        self._pieces = _Pieces(self._tokenizer.decoder)
        self._config = json_object(blobs, "config.json")
        self._generation = json_object(blobs, "generation_config.json")
        self._settings = json_object(blobs, "tokenizer_config.json")
        self._map = json_object(blobs, "special_tokens_map.json")
        self._add_tokens()
        self._special_ids = {i for i, t in self._tokenizer.added.items() if t.special}
        self.n_tokens = self._tokenizer.n_tokens
        self.bos_id = self._named_id("bos")
        self.adds_bos = self._adds_bos()
        self.special_tokens = self._special_tokens()

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`. add_bos: None follows the model's convention.

        Raises UsageError when a BOS is asked for and the model has none.
        """
        ids = self._tokenizer.encode(text)
        if add_bos is None:
            add_bos = self.adds_bos
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise UsageError("a BOS token was asked for, but this tokenizer names none")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` as a text of its own, without special tokens."""
        return self._tokenizer.decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to a text; none for special tokens and for ids beyond the vocabulary."""
        token = None if token_id in self._special_ids else self._tokenizer.token(token_id)
        return b"" if token is None else self._pieces.to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary has it; "<id 7>" for an id beyond it."""
        token = self._tokenizer.token(token_id)
        return f"<id {token_id}>" if token is None else token

    def stream(self, *, at_start: bool) -> StreamDecoder:
        """A decoder for tokens as they come. at_start: they begin a text rather than continue one."""
        return StreamDecoder(self, strip_space=at_start and self._pieces.strips_start)

    def stop_ids(self, *, chat: bool = False) -> frozenset[int]:
        """Every token that ends a generation: all EOS tokens the files name; with `chat`, the ends of a turn too."""
        ids = {i for source in (self._generation, self._config) for i in _ids(source.get("eos_token_id"))}
        named = self._named_id("eos")
        if named is not None:
            ids.add(named)
        if chat:
            found = {token: self._tokenizer.id(token) for token in END_OF_TURN}
            if found["<|return|>"] is not None:  # gpt-oss: a turn has several messages, each with an end of its own
                del found["<|end|>"]
            ids |= {i for i in found.values() if i is not None and i in self._special_ids}
        return frozenset(ids)

    def _add_tokens(self) -> None:
        """What tokenizer_config.json says of added tokens counts, as in transformers; named special tokens are added.

        Raises InputError for a token that would not get the id it is said to have.
        """
        known = self._tokenizer.added
        found: dict[int, AddedToken] = {}
        decoder = self._settings.get("added_tokens_decoder")
        for key, value in decoder.items() if isinstance(decoder, dict) else ():
            if key.isdecimal() and _token_text(value):
                found[int(key)] = _added_token(value, special=False)
        named = {token.content for token in (known | found).values()}
        for name in SPECIAL_NAMES:
            for value in (self._settings.get(name), self._map.get(name)):
                token_id = self._tokenizer.id(_token_text(value) or "")
                if token_id is not None and _token_text(value) not in named:
                    found.setdefault(token_id, _added_token(value, special=True))
        changed = {i: token for i, token in sorted(found.items()) if _flags(token) != _flags(known.get(i))}
        if changed:
            self._tokenizer.add(list(changed.values()))
        for token_id, token in changed.items():
            got = self._tokenizer.id(token.content)
            if got != token_id:
                raise InputError(
                    f"tokenizer_config.json: the added token {token.content!r} is said to be {token_id}, but after the "
                    f"tokens of tokenizer.json it is {got}. The two do not belong together"
                )

    def _named_id(self, kind: str) -> int | None:
        for source in (self._settings, self._map):
            token = _token_text(source.get(f"{kind}_token"))
            token_id = None if token is None else self._tokenizer.id(token)
            if token_id is not None:
                return int(token_id)
        for source in (self._config, self._generation):
            for token_id in _ids(source.get(f"{kind}_token_id")):
                return token_id
        return None

    def _adds_bos(self) -> bool:
        if self.bos_id is None:
            return False
        setting = self._settings.get("add_bos_token")
        if isinstance(setting, bool):
            return setting
        return self.bos_id == self._tokenizer.first_id()

    def _special_tokens(self) -> dict[str, str]:
        out: dict[str, str] = {}
        more = [name for name in self._settings if name.endswith("_token")]  # such as "image_token"
        for name in dict.fromkeys((*SPECIAL_NAMES, *more)):
            token = _token_text(self._settings.get(name)) or _token_text(self._map.get(name))
            if token is not None:
                out[name] = token
        for kind in ("bos", "eos"):  # where only ids are known
            token_id = self._named_id(kind)
            token = None if token_id is None else self._tokenizer.token(token_id)
            if token is not None:
                out.setdefault(f"{kind}_token", token)
        return out


class StreamDecoder:
    """Turns token ids into pieces of text as they come: never half a UTF-8 sequence, no space lost between pieces."""

    def __init__(self, tokenizer: Tokenizer, *, strip_space: bool) -> None:
        self._tokenizer = tokenizer
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that is complete with this token; may be empty."""
        piece = self._tokenizer.token_bytes(token_id)
        if self._strip_space and piece:
            piece = piece.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left: a sequence that never was completed becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class _Pieces:
    """Token text to bytes, by the decoder that tokenizer.json declares: byte-level, or spaces written as U+2581."""

    def __init__(self, decoder: object) -> None:
        steps = list(_decoder_steps(decoder))
        kinds = {str(step.get("type")) for step in steps}
        self._byte_level = "ByteLevel" in kinds
        unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if unknown or not (self._byte_level or kinds & {"Replace", "Metaspace"}):
            raise InputError(
                f"tokenizer.json: the decoder ({', '.join(sorted(kinds)) or 'none'}) is not one that w4conv knows: "
                "ByteLevel, or Replace or Metaspace with ByteFallback, Fuse and Strip"
            )
        self._byte_fallback = "ByteFallback" in kinds
        self.strips_start = any(
            (step.get("type") == "Strip" and step.get("start"))
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )

    def to_bytes(self, token: str) -> bytes:
        if self._byte_level:
            known = [_BYTE_OF.get(c) for c in token]
            # An added token may hold characters outside the alphabet; it stands for itself.
            return token.encode() if None in known else bytes(b for b in known if b is not None)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode()


def _decoder_steps(decoder: object) -> Iterable[Mapping[str, Any]]:
    if not isinstance(decoder, dict):
        return
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", []):
            yield from _decoder_steps(step)
    else:
        yield decoder


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the other 68 are written as U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


def _ids(value: object) -> list[int]:
    """Token ids out of an int, a list of ints, or nothing."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if is_id(v)]


def _added_token(value: object, *, special: bool) -> AddedToken:
    """From a string, or an object that may say more. special: where it does not say it."""
    settings = value if isinstance(value, dict) else {}
    flags = {name: settings.get(name) is True for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(_token_text(value) or "", special=settings.get("special", special) is True, **flags)


def _flags(token: AddedToken | None) -> tuple[object, ...]:
    if token is None:
        return ()
    return token.content, token.special, token.lstrip, token.rstrip, token.single_word, token.normalized


def _token_text(value: object) -> str | None:
    """A special token as its text: tokenizer_config.json writes it as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
