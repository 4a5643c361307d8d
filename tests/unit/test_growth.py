"""Tokenizers that would make a text grow without bound, or hurt the tokenizers package otherwise, are refused."""

from __future__ import annotations

import base64
import json
from functools import reduce
from typing import Any

import pytest
from helpers import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

from w4conv.errors import InputError
from w4conv.runtime import package_tokenizer
from w4conv.runtime.growth import MAX_GROWTH, check_growth
from w4conv.runtime.tokenizer import Tokenizer

PLAIN = json.loads(tiny_tokenizer().to_str())
TEXT = "banana, aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac " * 20


def replace(pattern: str | dict[str, str], content: str) -> dict[str, Any]:
    return {
        "type": "Replace",
        "pattern": {"String": pattern} if isinstance(pattern, str) else pattern,
        "content": content,
    }


def chain(key: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: steps}


def charsmap(*replacements: bytes) -> str:
    return base64.b64encode((8).to_bytes(4, "little") + bytes(8) + b"\0".join(replacements) + b"\0").decode()


A = {"Sequence": {"id": "A", "type_id": 0}}
B = {"Sequence": {"id": "B", "type_id": 0}}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
TEMPLATE = {"type": "TemplateProcessing", "single": [A] * 1000, "pair": [A, B], "special_tokens": {}}
MARKS = {"<s>": {"id": "<s>", "ids": [256] * 9999, "tokens": ["<s>"] * 9999}}
MARKED = {"single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, A], "pair": [A, B], "special_tokens": MARKS}

GROW = {
    "five times a thousand": {"normalizer": chain("normalizers", [replace("a", "a" * 1000)] * 5)},
    "twice": {"normalizer": chain("normalizers", [replace("ab", "ab" * 100)] * 2)},
    "within each other": {
        "normalizer": reduce(lambda a, _: chain("normalizers", [a, a]), range(14), replace("a", "aa"))  # type: ignore[arg-type,return-value]
    },
    "without types": {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "a" * 1000}] * 5}},
    "at every place": {"normalizer": chain("normalizers", [replace({"Regex": ""}, "xx")] * 30)},
    "at the start of each line": {"normalizer": replace({"Regex": "^"}, "x" * 5000)},
    "prepended": {"normalizer": chain("normalizers", [{"type": "Prepend", "prepend": "x" * 100}] * 3)},
    "decomposed": {"normalizer": chain("normalizers", [{"type": "NFKD"}] * 40)},
    "bytes as characters": {"normalizer": chain("normalizers", [{"type": "ByteLevel"}] * 40)},
    "SentencePiece's map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"x" * 9999)}},
    "words as bytes": {"pre_tokenizer": chain("pretokenizers", [BYTE_LEVEL] * 40)},
    "spaces in front": {"pre_tokenizer": chain("pretokenizers", [METASPACE] * 40)},
    "of both": {"normalizer": replace("a", "a" * 1000), "pre_tokenizer": chain("pretokenizers", [METASPACE] * 2)},
    "decoded": {"decoder": chain("decoders", [{"type": "ByteLevel"}, *[replace("a", "a" * 1000)] * 5])},
    "decoded at every place": {"decoder": chain("decoders", [replace({"Regex": ""}, "xy")] * 20)},
    "framed": {"post_processor": chain("processors", [TEMPLATE] * 5)},
    "framed by many tokens": {"post_processor": {"type": "TemplateProcessing", **MARKED}},
}


def tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer({"tokenizer.json": json.dumps(PLAIN | changes).encode()})


@pytest.mark.parametrize("name", GROW)
def test_growth_is_refused_before_the_package_sees_the_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(package_tokenizer, "_Package")
    with pytest.raises(InputError, match=r"tokenizer\.json: .* may make a text more than 4,096 times as long"):
        tokenizer(**GROW[name])


FINE: dict[str, Any] = {
    "padding to 2^31": {"padding": {"strategy": {"Fixed": 2**31}, "direction": "Right", "pad_to_multiple_of": None,
                                    "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}},
    "padding to a multiple": {"padding": {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 2**40,
                                          "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}},
    "truncation to nothing": {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst",
                                             "stride": 0}},
    "truncation that does not advance": {"truncation": {"direction": "Right", "max_length": 2, "stride": 2,
                                                        "strategy": "LongestFirst"}},
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_what_a_text_alone_does_not_get(name: str) -> None:
    """Padding and truncation are for batches, which are not made here."""
    assert tokenizer(**FINE[name]).encode(TEXT) == tokenizer().encode(TEXT)


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
        {"normalizer": replace({"Regex": "(a|a)*b"}, "c")},
        {"normalizer": replace({"Regex": r"(a|aa)*(b|c)\1"}, "c")},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "dropout": 5.0}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"],
                   "continuing_subword_prefix": "x" * 100}},
        {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 9}},
        {"model": {"type": "Unigram", "vocab": [], "unk_id": None}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////fwAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!"}},
        {"decoder": replace({"Regex": "("}, "")},
        {"added_tokens": [{"id": -1, "content": "a"}]},
    ],
)  # fmt: skip
def test_panics_and_searches_without_end_are_input_errors(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be (read|used) by the tokenizers package"):
        tokenizer(**changes).encode(TEXT)


def test_a_text_that_becomes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_tokenizer, "MAX_TEXT_NBYTES", 1 << 20)
    grows = tokenizer(normalizer=replace("a", "a" * 1000))
    assert len(grows.encode("bcd " * 100_000)) > 100_000, "it does not grow, though it might"
    assert grows.encode("a" * 900)
    with pytest.raises(InputError, match="makes more than 1 MiB of a text of 1,100 characters"):
        grows.encode("a" * 1100)


def test_a_token_that_becomes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    import w4conv.runtime.tokenizer as module

    monkeypatch.setattr(module, "MAX_PIECE_NBYTES", 1 << 12)
    with pytest.raises(InputError, match="its decoder adds more"):
        tokenizer(decoder=replace({"Regex": ""}, "x" * 1000)).decode(tokenizer().encode("the kingdom", add_bos=False))


STEPS = st.sampled_from(
    [replace("a", "bcd"), replace("ab", "é"), replace(" ", "▁"), replace({"Regex": " {2,}"}, "▁▁"),
     replace({"Regex": "$|a"}, "xy"), {"type": "Prepend", "prepend": "▁"}, {"type": "NFC"}, {"type": "NFD"},
     {"type": "NFKC"}, {"type": "NFKD"}, {"type": "Lowercase"}, {"type": "ByteLevel"},
     {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
      "lowercase": True}, {"type": "StripAccents"}, {"type": "Nmt"}, {"type": "Strip", "strip_left": True,
                                                                     "strip_right": True}]
)  # fmt: skip
HARD = "\ufdfa\u0390\u1f82\u0130\ufb2c\ufb17a ab  é日\u0344\U0001d160"


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=3), text=st.text(alphabet=HARD, min_size=1, max_size=12))
def test_no_text_grows_more_than_the_bound_says(steps: list[dict[str, Any]], text: str) -> None:
    """The package is the oracle. One more byte at the end of a text is a place for an expression too."""
    document = PLAIN | {"normalizer": chain("normalizers", steps), "pre_tokenizer": None}
    try:
        bound, _ = check_growth(document, "")
    except InputError:
        return
    grown = Reference.from_str(json.dumps(document)).normalizer.normalize_str(text)
    assert len(grown.encode()) <= bound * (len(text.encode()) + 1)
    assert bound <= MAX_GROWTH
