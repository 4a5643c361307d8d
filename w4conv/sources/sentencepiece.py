"""tokenizer.json rebuilt from tokenizer.model, the file of the SentencePiece library, where a directory has no other.

The file is a protobuf message, of which a few fields are needed:

    ModelProto      1: pieces, repeated   2: trainer_spec   3: normalizer_spec   5: denormalizer_spec
    pieces          1: text   2: score, float32   3: type, 1 where absent
    trainer_spec    3: model_type (1 unigram, 2 BPE, 3 word, 4 char)   24: treat_whitespace_as_suffix
                    40 to 43: ids of unk (0), bos (1), eos (2), pad (-1)
    normalizer_spec 2: precompiled_charsmap   3: add_dummy_prefix (true)   4: remove_extra_whitespaces (true)
                    5: escape_whitespaces (true)

Around a text come the special tokens that tokenizer_config.json names, as for a tokenizer.json.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from w4conv.errors import InputError
from w4conv.files.blobs import parse_json_object
from w4conv.sources.vocabulary import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Added,
    Json,
    UnknownTokenizerError,
    Vocabulary,
    as_json,
    pieces_bpe,
    pieces_document,
    pieces_unigram,
)

FILE: Final = "tokenizer.model"
ADDED: Final = "added_tokens.json"
CONFIG: Final = "tokenizer_config.json"
MAX_PIECES: Final = 1 << 22
UNIGRAM, BPE = 1, 2
TIKTOKEN: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
# Tokenizer classes that put the BOS token in front where tokenizer_config.json does not say.
ADDS_BOS: Final = ("Llama", "CodeLlama", "Gemma")

Fields = dict[int, list["int | bytes"]]


def rebuild_from_pieces(blobs: Mapping[str, bytes], *, where: str) -> dict[str, bytes]:
    """tokenizer.json, and tokenizer_config.json where `blobs` has none.

    blobs: contents by file name: tokenizer.model, and what else there is of the tokenizer. Raises InputError for a
    corrupt file, UnknownTokenizerError for one whose rules no tokenizer.json can express.
    """
    where = f"{where}/{FILE}"
    if TIKTOKEN.match(blobs[FILE]):
        raise UnknownTokenizerError(f"{FILE} is a list of tokens for tiktoken, which does not say how a text is cut")
    pieces = _Pieces.read(blobs[FILE], where)
    if pieces.model_type not in (UNIGRAM, BPE):
        raise UnknownTokenizerError(f"{FILE} holds a model of type {pieces.model_type}, neither unigram nor BPE")
    if pieces.suffix or not pieces.escapes:
        raise UnknownTokenizerError(f"{FILE} writes spaces in another way than as U+2581 in front of words")
    if UNUSED in pieces.types:
        raise UnknownTokenizerError(f"{FILE} holds pieces that only serve on the way to others")
    settings = {name: parse_json_object(blobs[name], name) for name in (CONFIG, ADDED) if name in blobs}
    vocabulary = _vocabulary(pieces, settings.get(CONFIG, {}), settings.get(ADDED, {}), where)
    scores = pieces.scores + [0.0] * (len(vocabulary.tokens) - len(pieces.scores))
    model = (pieces_bpe if pieces.model_type == BPE else pieces_unigram)(vocabulary, scores)
    prefix: Literal["always", "first", "never"] = "never"
    if pieces.dummy_prefix:
        prefix = "always" if settings.get(CONFIG, {}).get("legacy", True) in (True, None) else "first"
    document = pieces_document(vocabulary, model, prefix=prefix, before=pieces.normalizer())
    out = {"tokenizer.json": as_json(document)}
    if CONFIG not in blobs:
        out[CONFIG] = vocabulary.config()
    return out


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What of a tokenizer.model matters."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    model_type: int
    special: dict[str, int]
    suffix: bool
    charsmap: bytes
    dummy_prefix: bool
    removes_spaces: bool
    escapes: bool

    @classmethod
    def read(cls, data: bytes, where: str) -> _Pieces:
        top = _message(data, where)
        raw = top.get(1, [])
        if not raw:
            raise InputError(f"{where}: no pieces: not a SentencePiece model, or corrupt")
        if len(raw) > MAX_PIECES:
            raise InputError(f"{where}: {len(raw)} pieces; the limit is {MAX_PIECES}")
        tokens, types, scores = [], [], []
        for i, part in enumerate(raw):
            piece = _message(_bytes(part, where), f"{where}: piece {i}")
            try:
                tokens.append(_bytes(_last(piece, 1, b""), where).decode())
            except UnicodeDecodeError:
                raise InputError(f"{where}: piece {i} is not UTF-8") from None
            types.append(_integer(_last(piece, 3, NORMAL), where))
            if types[-1] == USER_DEFINED:  # found in the text as it stands, where spaces are spaces
                tokens[-1] = tokens[-1].replace(SPACE, " ")
            scores.append(_float(_last(piece, 2, 0), where))
        if not all(math.isfinite(score) for score in scores):
            raise InputError(f"{where}: a score is not finite")
        if len(set(tokens)) != len(tokens) or "" in tokens:
            raise InputError(f"{where}: a piece is empty, or there twice")
        trainer = _message(_bytes(_last(top, 2, b""), where), f"{where}: trainer_spec")
        normalizer = _message(_bytes(_last(top, 3, b""), where), f"{where}: normalizer_spec")
        if _last(_message(_bytes(_last(top, 5, b""), where), where), 2, b""):
            raise UnknownTokenizerError(f"{FILE} changes characters when tokens become text")
        special = {}
        for name, number, default in (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("pad", 43, -1)):
            i = _integer(_last(trainer, number, default), where)
            if 0 <= i < len(tokens) and types[i] in (CONTROL, UNKNOWN):
                special[name] = i

        def flag(fields: Fields, number: int, default: bool) -> bool:
            return bool(_integer(_last(fields, number, default), where))

        return cls(
            tokens,
            types,
            scores,
            model_type=_integer(_last(trainer, 3, UNIGRAM), where),
            special=special,
            suffix=flag(trainer, 24, False),
            charsmap=_bytes(_last(normalizer, 2, b""), where),
            dummy_prefix=flag(normalizer, 3, True),
            removes_spaces=flag(normalizer, 4, True),
            escapes=flag(normalizer, 5, True),
        )

    def normalizer(self) -> list[Json]:
        steps: list[Json] = []
        if self.charsmap:
            charsmap = base64.b64encode(self.charsmap).decode()
            steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
        if self.removes_spaces:
            for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " ")):
                steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
        return steps


def _vocabulary(pieces: _Pieces, config: Mapping[str, Any], more: Mapping[str, Any], where: str) -> Vocabulary:
    """The pieces, and tokens added to them: `added_tokens_decoder` of tokenizer_config.json, or added_tokens.json."""
    tokens: list[str | None] = list(pieces.tokens)
    types = list(pieces.types)
    added = {
        i: Added(special=kind != USER_DEFINED)
        for i, kind in enumerate(types)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    }
    named = {_content(config.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
    found: dict[int, tuple[object, Added]] = {}
    for text, i in more.items():
        if isinstance(i, int):
            found[i] = text, Added(special=text in named)
    decoder = config.get("added_tokens_decoder")
    for key, token in decoder.items() if isinstance(decoder, dict) else ():
        if key.isdecimal() and isinstance(token, dict):
            flags = {name: token.get(name) is True for name in ("special", "lstrip", "rstrip", "single_word")}
            found[int(key)] = token.get("content"), Added(**flags, normalized=token.get("normalized") is True)
    for i, (content, how) in sorted(found.items()):
        if not isinstance(content, str) or not content or not 0 <= i < MAX_PIECES:
            raise InputError(f"{where}: the token added as {i} has no text, or no sensible id")
        tokens += [None] * (i + 1 - len(tokens))
        types += [UNUSED] * (i + 1 - len(types))
        if tokens[i] not in (None, content):
            raise InputError(f"{where}: token {i} is {tokens[i]!r}, but {content!r} is added in its place")
        if tokens[i] is None and content in tokens:
            raise InputError(f"{where}: {content!r} is added as {i}, but is token {tokens.index(content)} already")
        tokens[i], added[i] = content, how
        types[i] = USER_DEFINED if types[i] == UNUSED else types[i]
    special = dict(pieces.special)
    for name in ("bos", "eos", "unk", "pad"):
        word = _content(config.get(f"{name}_token"))
        if word in tokens:
            special[name] = tokens.index(word)
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
    if not isinstance(add_bos, bool):
        add_bos = str(config.get("tokenizer_class", "Llama")).startswith(ADDS_BOS)
    return Vocabulary(tokens, types, added, special, add_bos, add_eos is True)


def _content(token: object) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _message(data: bytes, where: str) -> Fields:
    """Fields of a protobuf message by number: integers, raw bytes, and fixed-size values as bytes."""
    fields: Fields = {}
    for number, value in _fields(data, where):
        fields.setdefault(number, []).append(value)
    return fields


def _fields(data: bytes, where: str) -> Iterator[tuple[int, int | bytes]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(data) and shift < 64:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise InputError(f"{where}: cut off or corrupt at byte {at}")

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        if kind not in (1, 2, 5):
            raise InputError(f"{where}: corrupt at byte {at}: a field of type {kind}")
        nbytes = varint() if kind == 2 else 8 if kind == 1 else 4
        if nbytes > len(data) - at:
            raise InputError(f"{where}: cut off or corrupt: a field of {nbytes} bytes at byte {at} of {len(data)}")
        yield key >> 3, data[at : at + nbytes]
        at += nbytes


def _last(fields: Fields, number: int, default: int | bytes) -> int | bytes:
    """The value of a field that is there once; of several the last counts."""
    return fields[number][-1] if number in fields else default


def _bytes(value: int | bytes, where: str) -> bytes:
    if not isinstance(value, bytes):
        raise InputError(f"{where}: corrupt: a number where bytes are expected")
    return value


def _integer(value: int | bytes, where: str) -> int:
    if not isinstance(value, int):
        raise InputError(f"{where}: corrupt: bytes where a number is expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def _float(value: int | bytes, where: str) -> float:
    if value == 0:
        return 0.0
    if not isinstance(value, bytes) or len(value) != 4:
        raise InputError(f"{where}: corrupt: no float where one is expected")
    return float(struct.unpack("<f", value)[0])
