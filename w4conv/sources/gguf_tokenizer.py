"""tokenizer.json, tokenizer_config.json and chat_template.jinja, rebuilt from GGUF metadata.

GGUF names the cut of a text before the merges (`tokenizer.ggml.pre`) but does not describe it: only names with known
rules are rebuilt. Any other tokenizer is left out, with a note; the weights convert without it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from w4conv.files.blobs import parse_json_object
from w4conv.sources.base import TOOL_TEMPLATE
from w4conv.sources.gguf_cuts import CUTS
from w4conv.sources.gguf_header import GgufHeader
from w4conv.sources.reading import MAX_TOKENIZER_BYTES
from w4conv.sources.vocabulary import (
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Added,
    Json,
    UnknownTokenizerError,
    Vocabulary,
    as_json,
    bpe_model,
    pieces_bpe,
    pieces_document,
)

# GGUF does not say which tokens take the spaces after them; models with such tokens are known by name.
PHI3_NAMES: Final = ("phi-3", "phi3")
PHI3_PLAIN: Final = ("<unk>", "<s>", "<|endoftext|>")
ORIGINAL: Final = "tokenizer.huggingface.json"  # as some writers keep it


def rebuild_tokenizer(header: GgufHeader) -> tuple[dict[str, bytes], list[str]]:
    """(blobs by file name, notes). Raises InputError where the metadata contradict each other."""
    blobs: dict[str, bytes] = {}
    notes: list[str] = []
    if "tokenizer.chat_template" in header:
        blobs["chat_template.jinja"] = header.text("tokenizer.chat_template").encode()
    if "tokenizer.chat_template.tool_use" in header:
        blobs[TOOL_TEMPLATE] = header.text("tokenizer.chat_template.tool_use").encode()
    try:
        model = header.text("tokenizer.ggml.model", "none")
        vocabulary = _read_vocabulary(header, model)
        blobs["tokenizer_config.json"] = vocabulary.config()
        blobs["tokenizer.json"] = _tokenizer_json(header, model, vocabulary)
        if model == "gpt2" and _pre(header) == "default" and ORIGINAL not in header:
            notes.append(
                "How the model's own tokenizer cuts a text is not recorded (tokenizer.ggml.pre): it is cut as "
                "llama.cpp does then, and some tokens may differ."
            )
    except UnknownTokenizerError as error:
        notes.append(
            f"There is no tokenizer.json: {error}. The result cannot turn text into tokens; for that, convert the "
            "Hugging Face directory of the model."
        )
    return blobs, notes


def _tokenizer_json(header: GgufHeader, model: str, vocabulary: Vocabulary) -> bytes:
    if ORIGINAL in header:
        text = header.text(ORIGINAL).encode()
        if len(text) > MAX_TOKENIZER_BYTES:
            raise header.error(ORIGINAL, f"{len(text)} bytes, at most {MAX_TOKENIZER_BYTES}")
        parse_json_object(text, f"{header.path}: {ORIGINAL}")
        return text
    if model == "gpt2":
        return as_json(_byte_level(header, vocabulary))
    return as_json(_sentence_pieces(header, vocabulary))


def _read_vocabulary(header: GgufHeader, model: str) -> Vocabulary:
    prefix = "tokenizer.ggml."
    if model not in ("gpt2", "llama"):
        raise UnknownTokenizerError(f"the tokenizer model {model!r} cannot be rebuilt")
    raw = header.strings(f"{prefix}tokens")
    types = [1] * len(raw)
    if f"{prefix}token_type" in header:
        types = header.numbers(f"{prefix}token_type").tolist()
    if len(types) != len(raw):
        raise header.error(f"{prefix}token_type", f"{len(types)} types for {len(raw)} tokens")
    try:
        texts = [token.decode() for token in raw]
    except UnicodeDecodeError:
        raise UnknownTokenizerError("a token is not UTF-8") from None
    tokens = [None if kind == UNUSED else text for text, kind in zip(texts, types, strict=True)]
    used = [token for token in tokens if token is not None]
    if len(set(used)) != len(used):
        raise UnknownTokenizerError("two tokens are the same text")
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
    added = {
        i: Added(special=kind != USER_DEFINED, rstrip=phi3 and token not in PHI3_PLAIN)
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    return Vocabulary(tokens, types, added, special, add_bos, add_eos)


def _pre(header: GgufHeader) -> str:
    return header.text("tokenizer.ggml.pre", "default")


def _byte_level(header: GgufHeader, vocabulary: Vocabulary) -> Json:
    """Byte-level BPE: a text is cut by `tokenizer.ggml.pre`, its bytes become letters, letters are merged."""
    cut = CUTS.get(_pre(header))
    if cut is None:
        raise UnknownTokenizerError(f"how it cuts a text (tokenizer.ggml.pre is {_pre(header)!r}) is not known")
    return vocabulary.document(
        normalizer={"type": "NFC"} if cut.nfc else None,
        pre_tokenizer=cut.pre_tokenizer(),
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        model=bpe_model(vocabulary, _merges(header, vocabulary.ids()), ignore_merges=cut.whole_words),
    )


def _merges(header: GgufHeader, ids: dict[str, int]) -> list[str]:
    """Merges as "left right"; no byte-level token holds a space."""
    lines = [line.decode(errors="replace") for line in header.strings("tokenizer.ggml.merges")]
    for line in lines:
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise UnknownTokenizerError(f"the merge {line[:40]!r} is not of two tokens to a third")
    return lines


def _sentence_pieces(header: GgufHeader, vocabulary: Vocabulary) -> Json:
    key = "tokenizer.ggml.scores"
    scores = header.numbers(key).astype(np.float64).tolist()
    if len(scores) != len(vocabulary.tokens):
        raise header.error(key, f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    prefix = header.flag("tokenizer.ggml.add_space_prefix", True)
    return pieces_document(vocabulary, pieces_bpe(vocabulary, scores), prefix="always" if prefix else "never")
