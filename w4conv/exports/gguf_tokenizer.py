"""A tokenizer as GGUF keys. llama.cpp knows the cut of a text by name; only exact matches are exported.

Byte-level BPE carries its merges ("gpt2"). SentencePiece BPE ("llama") carries a score for each piece, and the merge
that gives the piece of highest score comes first: the score of a piece is minus the rank of the first merge to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from w4conv.errors import InputError
from w4conv.exports.gguf_values import Value, boolean, f32s, i32s, text, texts, u32
from w4conv.exports.model import ExportModel
from w4conv.files.blobs import json_object
from w4conv.runtime.chat import templates_of
from w4conv.runtime.detokenize import flat_steps
from w4conv.runtime.tokenizer import END_OF_TURN, Tokenizer
from w4conv.sources.gguf_cuts import CUTS, flat, name_of
from w4conv.sources.vocabulary import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED

Json = Mapping[str, Any]

MARKS = r"\p{M}"


def tokenizer_keys(model: ExportModel) -> tuple[dict[str, Value], list[str]]:
    """(keys, notes). Raises InputError for a tokenizer that GGUF keys cannot describe."""
    if "tokenizer.json" not in model.blobs:
        keys = {"tokenizer.ggml.model": text("none")}
        return keys, ["There is no tokenizer in the container: llama.cpp can load the file for token ids only."]
    where = f"{model.container.path}: tokenizer.json"
    document = json_object(model.blobs, "tokenizer.json")
    tokenizer = Tokenizer(model.blobs)
    bpe = document.get("model", {})
    if bpe.get("type") != "BPE" or bpe.get("continuing_subword_prefix") or bpe.get("end_of_word_suffix"):
        raise InputError(f"{where}: only BPE tokenizers can be exported to GGUF, this one is {bpe.get('type')}")
    tokens, types = _tokens(document, model.spec.vocab_size, where)
    merges = [" ".join(m) if isinstance(m, list) else str(m) for m in bpe["merges"]]
    notes: list[str] = []
    if _is_pieces(document):
        keys = _pieces(document, tokens, types, bpe["merges"], where)
    else:
        pre = _cut(document, where)
        keys = {"tokenizer.ggml.model": text("gpt2"), "tokenizer.ggml.pre": text(pre)}
        keys |= _lists(tokens, types)
        keys["tokenizer.ggml.merges"] = texts(merges)
        if any(MARKS in step for step in CUTS[pre].steps):
            notes.append(
                "llama.cpp cuts words at combining marks (of Hindi, Thai, Khmer), which this tokenizer does not: such "
                "text may become other tokens there, as it does with every file of this kind."
            )
        if document.get("normalizer"):
            notes.append(
                "The tokenizer brings text into Unicode form NFC first; llama.cpp expects it to be so already."
            )
    if not _decodes_alike(document, keys):
        notes.append(
            "llama.cpp makes text of tokens in its own way, which is not that of this tokenizer's decoder: the text of "
            "an answer may differ there, in spaces for instance. Its tokens do not."
        )
    if any(t.get("lstrip") or t.get("rstrip") for t in document.get("added_tokens") or ()):
        notes.append(
            "Some special tokens take the spaces beside them away; llama.cpp does so only for models it knows."
        )
    keys |= _special(tokenizer, model, {token: i for i, token in enumerate(tokens)})
    templates = templates_of(model.blobs)
    for name, key in (("default", "tokenizer.chat_template"), ("tool_use", "tokenizer.chat_template.tool_use")):
        if name in templates:
            keys[key] = text(templates[name])
    return keys, notes


def _tokens(document: Json, vocab_size: int, where: str) -> tuple[list[str], list[int]]:
    """(text, type) of each id of the model; ids without a token are unused."""
    by_id = {int(i): str(token) for token, i in document["model"]["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    for added in document.get("added_tokens") or ():
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    for added in document.get("added_tokens") or ():  # a multimodal tokenizer may have some that a text model has not
        if added["id"] >= vocab_size:
            del by_id[added["id"]]
    if by_id and max(by_id) >= vocab_size:
        raise InputError(f"{where}: it has a token {max(by_id)}, but the model only {vocab_size} tokens")
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    return tokens, [kinds.get(i, UNUSED) for i in range(vocab_size)]


def _lists(tokens: list[str], types: list[int]) -> dict[str, Value]:
    return {"tokenizer.ggml.tokens": texts(tokens), "tokenizer.ggml.token_type": i32s(types)}


def _cut(document: Json, where: str) -> str:
    """The name by which llama.cpp knows how this tokenizer cuts a text."""
    name = name_of(document)
    if name is None and document["model"].get("ignore_merges") and _merges_reach_every_token(document):
        name = name_of({**document, "model": {**document["model"], "ignore_merges": False}})
    if name is None:
        raise InputError(
            f"{where}: how it cuts a text is not among the ways that can be told to llama.cpp "
            f"({', '.join(CUTS)}), so its tokens would differ there. Export to another format"
        )
    return name


def _merges_reach_every_token(document: Json) -> bool:
    """Whether merges make of every token that token, so that to take whole words as they are changes nothing."""
    bare = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    model = {**document["model"], "ignore_merges": False}
    merging = tokenizers.Tokenizer.from_str(json.dumps({**document, **bare, "model": model, "added_tokens": []}))
    added = {token["content"] for token in document.get("added_tokens") or ()}  # found in a text before it is cut
    tokens = [token for token in model["vocab"] if token not in added]
    encoded = merging.encode_batch_fast(tokens, add_special_tokens=False)
    return all(e.ids == [model["vocab"][token]] for token, e in zip(tokens, encoded, strict=True))


def _is_pieces(document: Json) -> bool:
    """Whether spaces are written as U+2581, by the normalizer or a Metaspace step."""
    steps = [*flat(document.get("normalizer"), "normalizers"), *flat(document.get("pre_tokenizer"), "pretokenizers")]
    return any(step.get("content") == SPACE or step.get("type") == "Metaspace" for step in steps)


def _pieces(
    document: Json, tokens: list[str], types: list[int], merges: list[list[str] | str], where: str
) -> dict[str, Value]:
    normalizers = list(flat(document.get("normalizer"), "normalizers"))
    steps = list(flat(document.get("pre_tokenizer"), "pretokenizers"))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    if replace in normalizers:  # no space is left to split at
        steps = [step for step in steps if step.get("pattern") != {"String": " "}]
    if not steps and normalizers in ([prepend, replace], [replace]):
        prefix = prepend in normalizers
    elif (
        not normalizers
        and len(steps) == 1
        and steps[0].get("prepend_scheme", "always") in ("always", "first", "never")
        and not steps[0].get("split")
    ):
        prefix = steps[0].get("prepend_scheme", "always") != "never"
    else:
        raise InputError(f"{where}: how it writes spaces cannot be told to llama.cpp. Export to another format")
    if document["model"].get("byte_fallback"):
        for i, token in enumerate(tokens):
            if types[i] == NORMAL and len(token) == 6 and token.startswith("<0x"):
                types[i] = BYTE
    unknown = document["model"].get("unk_token")
    if unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        ranks.setdefault(left + right, rank)
    scores = [float(-ranks.get(t, len(merges))) if k == NORMAL else 0.0 for t, k in zip(tokens, types, strict=True)]
    lists = _lists(tokens, types)
    return {
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.pre": text("default"),
        "tokenizer.ggml.tokens": lists["tokenizer.ggml.tokens"],
        "tokenizer.ggml.scores": f32s(scores),
        "tokenizer.ggml.token_type": lists["tokenizer.ggml.token_type"],
        "tokenizer.ggml.add_space_prefix": boolean(prefix),
    }


def _decodes_alike(document: Json, keys: Mapping[str, Value]) -> bool:
    """Whether llama.cpp makes the same text of tokens: bytes, or pieces whose U+2581 is a space."""
    steps = list(flat_steps(document.get("decoder")))
    if keys["tokenizer.ggml.model"] == text("gpt2"):
        return [step.get("type") for step in steps] == ["ByteLevel"]
    pieces = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if steps and steps[0].get("type") == "Metaspace":
        spaced = steps[0].get("replacement") == SPACE and steps[0].get("prepend_scheme", "always") != "never"
        return steps[1:] in ([], pieces[1:], pieces[2:]) and boolean(spaced) == keys["tokenizer.ggml.add_space_prefix"]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    prefix = keys["tokenizer.ggml.add_space_prefix"] == boolean(True)
    return steps == [*pieces, *([strip] if prefix else [])]


def _special(tokenizer: Tokenizer, model: ExportModel, ids: Mapping[str, int]) -> dict[str, Value]:
    found: dict[str, int | None] = {
        "bos": tokenizer.bos_id,
        "eos": ids.get(tokenizer.special_tokens.get("eos_token", "")),
        "unknown": ids.get(tokenizer.special_tokens.get("unk_token", "")),
        "padding": ids.get(tokenizer.special_tokens.get("pad_token", "")),
    }
    stops = tokenizer.stop_ids(chat=True)
    turns = [ids[token] for token in END_OF_TURN if ids.get(token) in stops and ids[token] != found["eos"]]
    if turns:
        found["eot"] = turns[0]
    keys = {
        f"tokenizer.ggml.{name}_token_id": u32(i)
        for name, i in found.items()
        if i is not None and 0 <= i < model.spec.vocab_size
    }
    return keys | {
        "tokenizer.ggml.add_bos_token": boolean(tokenizer.adds_bos),
        "tokenizer.ggml.add_eos_token": boolean(False),
    }
