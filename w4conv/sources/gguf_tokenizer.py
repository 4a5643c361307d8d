"""tokenizer.json, tokenizer_config.json and chat_template.jinja, rebuilt from GGUF metadata.

GGUF names how a text is cut before the merges (`tokenizer.ggml.pre`) but does not describe it: only names whose rules
are known are rebuilt. A tokenizer that would be guesswork is left out, with a note; the weights convert without it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import numpy as np

from w4conv.sources._files import MAX_TOKENIZER_BYTES, parse_json_object
from w4conv.sources.gguf_cuts import CUTS, Json
from w4conv.sources.gguf_header import GgufHeader

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type
# GGUF does not say which tokens swallow the spaces after them; the models that have such are known by name.
PHI3_NAMES: Final = ("phi-3", "phi3")
PHI3_PLAIN: Final = ("<unk>", "<s>", "<|endoftext|>")
ORIGINAL: Final = "tokenizer.huggingface.json"  # as some writers keep it
MAX_TOKEN_CHARS: Final = 1024  # splitting a piece everywhere takes time in the square of its length
SPACE: Final = "\u2581"


class _UnknownTokenizerError(Exception):
    """The metadata do not say enough to rebuild the tokenizer."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id (None: unused), their types, and the ids of the special ones by name ("bos", "eos", ...).

    takes_spaces: whether added tokens other than those of PHI3_PLAIN swallow the spaces after them.
    """

    tokens: list[str | None]
    types: list[int]
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    takes_spaces: bool

    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens) if token is not None}

    def added(self) -> list[Json]:
        """Tokens that are found in a text as they stand, before anything else is done to it."""
        return [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": self.takes_spaces and token not in PHI3_PLAIN,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]

    def text_of(self, name: str) -> str | None:
        i = self.special.get(name)
        return None if i is None else self.tokens[i]


def rebuild_tokenizer(header: GgufHeader) -> tuple[dict[str, bytes], list[str]]:
    """(blobs by file name, notes). Raises InputError where the metadata contradict each other."""
    blobs: dict[str, bytes] = {}
    notes: list[str] = []
    if "tokenizer.chat_template" in header:
        blobs["chat_template.jinja"] = header.text("tokenizer.chat_template").encode()
    try:
        model = header.text("tokenizer.ggml.model", "none")
        vocabulary = _read_vocabulary(header, model)
        blobs["tokenizer_config.json"] = _json(_tokenizer_config(vocabulary))
        blobs["tokenizer.json"] = _tokenizer_json(header, model, vocabulary)
        if model == "gpt2" and _pre(header) == "default" and ORIGINAL not in header:
            notes.append(
                "How the model's own tokenizer cuts a text is not recorded (tokenizer.ggml.pre): it is cut as "
                "llama.cpp does then, and some tokens may differ."
            )
    except _UnknownTokenizerError as error:
        notes.append(
            f"There is no tokenizer.json: {error}. The result cannot turn text into tokens; for that, convert the "
            "Hugging Face directory of the model."
        )
    return blobs, notes


def _tokenizer_json(header: GgufHeader, model: str, vocabulary: _Vocabulary) -> bytes:
    if ORIGINAL in header:
        text = header.text(ORIGINAL).encode()
        if len(text) > MAX_TOKENIZER_BYTES:
            raise header.error(ORIGINAL, f"{len(text)} bytes, at most {MAX_TOKENIZER_BYTES}")
        parse_json_object(text, f"{header.path}: {ORIGINAL}")
        return text
    if model == "gpt2":
        return _json(_byte_level(header, vocabulary))
    return _json(_sentence_pieces(header, vocabulary))


def _read_vocabulary(header: GgufHeader, model: str) -> _Vocabulary:
    prefix = "tokenizer.ggml."
    if model not in ("gpt2", "llama"):
        raise _UnknownTokenizerError(f"the tokenizer model {model!r} cannot be rebuilt")
    raw = header.strings(f"{prefix}tokens")
    types = [1] * len(raw)
    if f"{prefix}token_type" in header:
        types = header.numbers(f"{prefix}token_type").tolist()
    if len(types) != len(raw):
        raise header.error(f"{prefix}token_type", f"{len(types)} types for {len(raw)} tokens")
    try:
        texts = [token.decode() for token in raw]
    except UnicodeDecodeError:
        raise _UnknownTokenizerError("a token is not UTF-8") from None
    tokens = [None if kind == UNUSED else text for text, kind in zip(texts, types, strict=True)]
    used = [token for token in tokens if token is not None]
    if len(set(used)) != len(used):
        raise _UnknownTokenizerError("two tokens are the same text")
    special: dict[str, int] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if f"{prefix}{key}_token_id" in header:
            special[name] = header.integer(f"{prefix}{key}_token_id")
            if not 0 <= special[name] < len(tokens):
                raise header.error(f"{prefix}{key}_token_id", f"{special[name]} is none of the {len(tokens)} tokens")
    # Where the file is silent, llama.cpp adds the first token for pieces and for some of the cuts.
    cut = CUTS.get(_pre(header))
    implied = model == "llama" or (cut is not None and cut.adds_bos)
    add_bos = header.flag(f"{prefix}add_bos_token", implied)
    add_eos = header.flag(f"{prefix}add_eos_token", False)
    names = f"{header.text('general.architecture', '')} {header.text('general.name', '')}".lower()
    phi3 = model == "llama" and any(name in names for name in PHI3_NAMES)
    return _Vocabulary(tokens, types, special, add_bos, add_eos, takes_spaces=phi3)


def _pre(header: GgufHeader) -> str:
    return header.text("tokenizer.ggml.pre", "default")


def _tokenizer_config(vocabulary: _Vocabulary) -> Json:
    names = {f"{name}_token": vocabulary.text_of(name) for name in ("bos", "eos", "unk", "pad")}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: text for name, text in names.items() if text is not None},
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
    }


def _byte_level(header: GgufHeader, vocabulary: _Vocabulary) -> Json:
    """Byte-level BPE: a text is cut by `tokenizer.ggml.pre`, its bytes become letters, letters are merged."""
    cut = CUTS.get(_pre(header))
    if cut is None:
        raise _UnknownTokenizerError(f"how it cuts a text (tokenizer.ggml.pre is {_pre(header)!r}) is not known")
    ids = vocabulary.ids()
    model: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": cut.whole_words,
        "vocab": ids,
        "merges": _merges(header, ids),
    }
    return _assembled(
        vocabulary,
        normalizer={"type": "NFC"} if cut.nfc else None,
        pre_tokenizer=cut.pre_tokenizer(),
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        model=model,
    )


def _merges(header: GgufHeader, ids: dict[str, int]) -> list[str]:
    """Merges as "left right"; no byte-level token holds a space."""
    lines = [line.decode(errors="replace") for line in header.strings("tokenizer.ggml.merges")]
    for line in lines:
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise _UnknownTokenizerError(f"the merge {line[:40]!r} is not of two tokens to a third")
    return lines


def _sentence_pieces(header: GgufHeader, vocabulary: _Vocabulary) -> Json:
    """SentencePiece BPE: the merge that gives the piece of highest score comes first.

    The order of merges is that of the scores; pieces that can be split in several ways give a merge for each.
    """
    key = "tokenizer.ggml.scores"
    scores = header.numbers(key).astype(np.float64).tolist()
    if len(scores) != len(vocabulary.tokens):
        raise header.error(key, f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    normal = {token: i for token, i in vocabulary.ids().items() if vocabulary.types[i] in (1, USER_DEFINED)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, i in normal.items():
        if vocabulary.types[i] == USER_DEFINED:
            continue  # found in the text as it stands, never made by merging
        if len(piece) > MAX_TOKEN_CHARS:
            raise _UnknownTokenizerError(f"a token is longer than {MAX_TOKEN_CHARS} characters")
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in normal and right in normal:
                merges.append((-scores[i], normal[left], normal[right], left, right))
    merges.sort()
    bytes_found = {vocabulary.tokens[i] for i, kind in enumerate(vocabulary.types) if kind == BYTE}
    byte_fallback = bytes_found == {f"<0x{byte:02X}>" for byte in range(256)}
    unknown = vocabulary.text_of("unk") or next(
        (t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == UNKNOWN), None
    )
    model: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": vocabulary.ids(),
        "merges": [[left, right] for _, _, _, left, right in merges],
    }
    prefixed = header.flag("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    text: list[Json] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    text += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefixed:
        spaces.insert(0, {"type": "Prepend", "prepend": SPACE})
        text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _assembled(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": spaces},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": text},
        model=model,
    )


def _assembled(
    vocabulary: _Vocabulary, *, normalizer: Json | None, pre_tokenizer: Json | None, decoder: Json, model: Json
) -> Json:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(vocabulary),
        "decoder": decoder,
        "model": model,
    }


def _post_processor(vocabulary: _Vocabulary) -> Json | None:
    """Puts the first and last token around a text, where the model wants them."""
    first = vocabulary.text_of("bos") if vocabulary.add_bos else None
    last = vocabulary.text_of("eos") if vocabulary.add_eos else None
    if first is None and last is None:
        return None

    def special(token: str | None, sequence: int) -> list[Json]:
        return [{"SpecialToken": {"id": token, "type_id": sequence}}] if token else []

    def template(name: str, sequence: int) -> list[Json]:
        text: Json = {"Sequence": {"id": name, "type_id": sequence}}
        return [*special(first, sequence), text, *special(last, sequence)]

    ids = vocabulary.ids()
    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in (first, last) if t},
    }


def _json(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
