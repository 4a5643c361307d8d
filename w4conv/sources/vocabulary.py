"""A vocabulary read from some file, and the tokenizer.json that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from w4conv.files.strict_json import to_json

Json = dict[str, object]

# What a token is, in the numbers that SentencePiece and GGUF share.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKEN_CHARS: Final = 1024  # splitting a piece everywhere takes time in the square of its length
SPACE: Final = "\u2581"
_BYTE_TOKENS: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class UnknownTokenizerError(Exception):
    """The file does not describe the tokenizer fully."""


@dataclass(frozen=True, slots=True)
class Added:
    """How a token is found in a text as it stands, before anything else is done to it. See AddedToken of tokenizers."""

    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id (None: unused), their types, and the ids of the special ones by name ("bos", "eos", ...).

    added: ids that are found as they stand. add_bos, add_eos: whether a text gets them.
    """

    tokens: list[str | None]
    types: list[int]
    added: Mapping[int, Added]
    special: Mapping[str, int]
    add_bos: bool
    add_eos: bool

    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens) if token is not None}

    def text_of(self, name: str) -> str | None:
        i = self.special.get(name)
        return None if i is None else self.tokens[i]

    def config(self) -> bytes:
        """tokenizer_config.json."""
        names = {f"{name}_token": self.text_of(name) for name in ("bos", "eos", "unk", "pad")}
        return as_json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **{name: text for name, text in names.items() if text is not None},
                "add_bos_token": self.add_bos,
                "add_eos_token": self.add_eos,
                "clean_up_tokenization_spaces": False,
            }
        )

    def document(self, *, normalizer: Json | None, pre_tokenizer: Json | None, decoder: Json, model: Json) -> Json:
        """tokenizer.json."""
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": i,
                    "content": self.tokens[i],
                    "single_word": added.single_word,
                    "lstrip": added.lstrip,
                    "rstrip": added.rstrip,
                    "normalized": added.normalized,
                    "special": added.special,
                }
                for i, added in sorted(self.added.items())
                if self.tokens[i]
            ],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self._post_processor(),
            "decoder": decoder,
            "model": model,
        }

    def _post_processor(self) -> Json | None:
        """Puts the first and last token around a text, where the model wants them."""
        first = self.text_of("bos") if self.add_bos else None
        last = self.text_of("eos") if self.add_eos else None
        if first is None and last is None:
            return None

        def special(token: str | None, sequence: int) -> list[Json]:
            return [{"SpecialToken": {"id": token, "type_id": sequence}}] if token else []

        def template(name: str, sequence: int) -> list[Json]:
            text: Json = {"Sequence": {"id": name, "type_id": sequence}}
            return [*special(first, sequence), text, *special(last, sequence)]

        ids = self.ids()
        return {
            "type": "TemplateProcessing",
            "single": template("A", 0),
            "pair": [*template("A", 0), *template("B", 1)],
            "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in (first, last) if t},
        }


def bpe_model(vocabulary: Vocabulary, merges: Sequence[str | list[str]], **settings: object) -> Json:
    """The part `model` of tokenizer.json for byte pair encoding; settings replace its defaults."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary.ids(),
        "merges": merges,
    } | settings


def pieces_bpe(vocabulary: Vocabulary, scores: Sequence[float]) -> Json:
    """SentencePiece's byte pair encoding: the merge that gives the piece of highest score comes first.

    The order of merges is that of the scores; pieces that can be split in several ways give a merge for each.
    """
    types = vocabulary.types
    normal = {token: i for token, i in vocabulary.ids().items() if types[i] in (NORMAL, USER_DEFINED)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, i in normal.items():
        if types[i] == USER_DEFINED:
            continue  # found in the text as it stands, never made by merging
        if len(piece) > MAX_TOKEN_CHARS:
            raise UnknownTokenizerError(f"a token is longer than {MAX_TOKEN_CHARS} characters")
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in normal and right in normal:
                merges.append((-scores[i], normal[left], normal[right], left, right))
    merges.sort()
    return bpe_model(
        vocabulary,
        [[left, right] for _, _, _, left, right in merges],
        unk_token=_unknown(vocabulary),
        fuse_unk=True,
        byte_fallback=_byte_fallback(vocabulary),
    )


def pieces_unigram(vocabulary: Vocabulary, scores: Sequence[float]) -> Json:
    """SentencePiece's unigram model: the pieces whose scores have the largest sum."""
    unknown = vocabulary.special.get("unk")
    return {
        "type": "Unigram",
        "unk_id": unknown,
        "vocab": [[token or f"[unused {i}]", scores[i]] for i, token in enumerate(vocabulary.tokens)],
        "byte_fallback": _byte_fallback(vocabulary),
    }


def pieces_document(
    vocabulary: Vocabulary, model: Json, *, prefix: Literal["always", "first", "never"], before: Sequence[Json] = ()
) -> Json:
    """tokenizer.json of SentencePiece pieces, in which spaces are U+2581.

    prefix: a space is put in front of every stretch of text between added tokens, or of the first, or of none. before:
    steps of the normalizer that come first.
    """
    spaces = list(before)
    pre_tokenizer: Json | None = None
    text: list[Json] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    text += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix != "never":
        text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if prefix == "first":
        pre_tokenizer = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    else:
        if prefix == "always":
            spaces.append({"type": "Prepend", "prepend": SPACE})
        spaces.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return vocabulary.document(
        normalizer={"type": "Sequence", "normalizers": spaces} if spaces else None,
        pre_tokenizer=pre_tokenizer,
        decoder={"type": "Sequence", "decoders": text},
        model=model,
    )


def _byte_fallback(vocabulary: Vocabulary) -> bool:
    """Whether there is a token for every byte."""
    found = {vocabulary.tokens[i] for i, kind in enumerate(vocabulary.types) if kind == BYTE}
    return found == _BYTE_TOKENS


def _unknown(vocabulary: Vocabulary) -> str | None:
    kinds = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return vocabulary.text_of("unk") or next((token for token, kind in kinds if kind == UNKNOWN), None)


def as_json(value: Json) -> bytes:
    return to_json(value, where="tokenizer.json", separators=(",", ":"))
