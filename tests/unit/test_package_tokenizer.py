"""Parts of a vocabulary give the tokens of the whole; the tokenizers package, given all of it, is the oracle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers import tiny_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from w4conv.errors import InputError
from w4conv.runtime import package_tokenizer
from w4conv.runtime.package_tokenizer import PackageTokenizer, _parts_of
from w4conv.runtime.tokenizer_file import TokenizerFile

LETTERS = "abcd жé▁🙂"


def byte_level(*, ignore_merges: bool = False) -> Tokenizer:
    out = tiny_tokenizer(300)
    model = json.loads(out.to_str())["model"]
    vocab = model["vocab"] | {"Ġtheand": 290, '"\\/': 291, "ĠĠĠ": 292}
    merges = [*map(tuple, model["merges"]), ("Ġthe", "and")]
    vocab = {token: i for i, token in enumerate(vocab)}
    out.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    out.normalizer = normalizers.NFC()
    out.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|a|>", "<|the|>")])
    out.add_tokens([AddedToken("of the", normalized=True), AddedToken("é")])
    return out


def pieces(*, split: bool = False) -> Tokenizer:
    """Spaces as U+2581, byte fallback, an unknown token."""
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{b:02X}>": 2 + b // 2 for b in range(0, 256, 2)}
    for piece in (*"▁abcж", "ab", "▁ab", "abc", "bc", "▁▁", "жж"):
        vocab[piece] = len(vocab)
    merges = [("a", "b"), ("▁", "ab"), ("b", "c"), ("ab", "c"), ("▁", "▁"), ("ж", "ж")]
    out = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    out.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if split:
        out.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    out.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("<new>", normalized=False)])
    return out


TOKENIZERS = {
    "bytes": byte_level(),
    "whole words": byte_level(ignore_merges=True),
    "pieces": pieces(),
    "split pieces": pieces(split=True),
}
ALL = pytest.mark.parametrize("name", TOKENIZERS)


def documents(reference: Tokenizer) -> list[bytes]:
    """Spellings of one tokenizer.json."""
    parsed = json.loads(reference.to_str())
    old = {**parsed, "model": {**parsed["model"], "merges": [" ".join(pair) for pair in parsed["model"]["merges"]]}}
    turned = {**parsed, "model": dict(reversed(parsed["model"].items()))}
    return [
        reference.to_str().encode(),
        reference.to_str(pretty=True).encode(),
        json.dumps(old).encode(),
        json.dumps(turned, indent=1).replace("/", "\\/").encode(),
    ]


@pytest.fixture
def always_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_tokenizer, "_FEW", 1 << 30)


def same(ours: PackageTokenizer, reference: Tokenizer, text: str) -> None:
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids, repr(text)


@ALL
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(
    st.text(), st.text(st.sampled_from(LETTERS)),
    st.lists(st.sampled_from(["the", " the", "and", "of the", "<|a|>", "<s>", "<new>", "  ", "ab", "abc", "é", "é"]))
    .map("".join),
))  # fmt: skip
def test_tokens_are_those_of_the_whole(name: str, text: str, always_parts: None) -> None:
    reference = TOKENIZERS[name]
    for document in documents(reference):
        ours = PackageTokenizer(document)
        same(ours, reference, text)
        assert "_whole" not in vars(ours)


@ALL
def test_tables_are_those_of_the_whole(name: str) -> None:
    reference = TOKENIZERS[name]
    added = [AddedToken("<|later|>", special=True), AddedToken("ab"), AddedToken("the"), AddedToken("<|more|>")]
    whole = Tokenizer.from_str(reference.to_str())
    whole.add_special_tokens(added[:1])
    whole.add_tokens(added[1:])
    for document in documents(reference):
        ours = PackageTokenizer(document)
        assert ours._parts is not None
        ours.add(added)
        assert ours.n_tokens == whole.get_vocab_size()
        assert {i: t.content for i, t in ours.added.items()} == {
            i: t.content for i, t in whole.get_added_tokens_decoder().items()
        }
        for i in range(ours.n_tokens + 2):
            assert ours.token(i) == whole.id_to_token(i)
        for token in (*whole.get_vocab(), "", "nothing"):
            assert ours.id(token) == whole.token_to_id(token), token
        same(ours, whole, "the ab<|later|> of<|more|>the")
        same(ours, whole, "x" * (1 << 14) + " the ab<|later|>")
        assert "_whole" in vars(ours), "a long text goes to the package whole"
        ours.add([AddedToken("<|last|>", normalized=False)])
        assert ours.encode("a<|last|>")[-1] == ours.encode("x" * (1 << 15) + "<|last|>")[-1] == ours.n_tokens - 1


def bare(**model: Any) -> Tokenizer:
    """Few characters, and added tokens that the vocabulary lacks."""
    vocab = {"a": 0, "b": 1, "ab": 2, "▁": 3, "▁a": 4, "<unk>": 5} | {f"<0x{b:02X}>": 6 + b for b in range(128)}
    out = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("▁", "a")], **model))
    out.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    out.add_special_tokens([AddedToken("<", normalized=False), AddedToken("word", normalized=False)])
    out.add_tokens([AddedToken("é"), AddedToken("▁b", single_word=False)])
    return out


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("text", [
    "aéb", "a<b", "<", "word", "a word b", "axb", "▁xa", "a.b", "▁b", "wordab",
    "a\u0301b", "<<ab>>", "日", "ab🙂ab", "",
])  # fmt: skip
@pytest.mark.parametrize("model", [
    {}, {"byte_fallback": True}, {"unk_token": "<unk>"}, {"ignore_merges": True},
    {"unk_token": "<unk>", "fuse_unk": True, "ignore_merges": True, "byte_fallback": True},
])  # fmt: skip
def test_what_only_an_added_token_has(model: dict[str, Any], text: str, as_text: bool) -> None:
    """Characters that are dropped, words that are tokens at once, and special tokens that are taken as text."""
    reference = bare(**model)
    ours = PackageTokenizer(reference.to_str().encode())
    reference.encode_special_tokens = as_text
    assert ours.encode(text, as_text=as_text) == reference.encode(text, add_special_tokens=False).ids


def test_many_texts_go_to_the_whole() -> None:
    ours = PackageTokenizer(documents(TOKENIZERS["bytes"])[0])
    for n in range(1, 7):
        same(ours, TOKENIZERS["bytes"], f"the {n}")
        assert ("_whole" in vars(ours)) == (n > 4)


def test_characters_that_only_a_normalizer_makes() -> None:
    reference = pieces()
    reference.normalizer = normalizers.Replace("x", "ж")
    ours = PackageTokenizer(reference.to_str().encode())
    same(ours, reference, "axx")
    assert "_whole" in vars(ours)


def changed(**model: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(byte_level().to_str())
    document["model"] |= model
    return document


def with_added(**fields: Any) -> dict[str, Any]:
    document = changed()
    document["added_tokens"][-1] |= fields
    return document


def test_documents_that_the_package_gets_whole() -> None:
    plain = changed()
    vocab = plain["model"]["vocab"]
    assert _parts_of(TokenizerFile(json.dumps(plain).encode()), "")[0] is not None

    def parts(document: str) -> object:
        try:
            return _parts_of(TokenizerFile(document.encode()), "")
        except InputError:
            return None, None

    text = json.dumps(plain)
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)).to_str()
    others = [
        json.dumps(changed(continuing_subword_prefix="##")),
        json.dumps(changed(end_of_word_suffix="</w>")),
        json.dumps(changed(type="WordPiece")),
        json.dumps(changed(vocab={token: 2 * i for token, i in vocab.items()})),
        json.dumps(with_added(single_word=True)),
        json.dumps(with_added(id=5)),
        unigram,
        text.replace('"vocab": {', '"vocab": {"a": 0, '),
        text.replace('"vocab": {', '"vocab": {"!": 999, '),
        text.replace('"model": {', '"model": {}, "model": {'),
        text.replace('"merges": [', '"merges": [], "merges": ['),
        text[:-1],
        text + "x",
        "",
        "[" * 100_000,
        '{"model": {"vocab": {"a": -1}, "merges": []}}',
        '{"model": {"vocab": {"\\ud800": 0}, "merges": []}}',
        '{"model": {"vocab": {"\\u00g0": 0}, "merges": []}}',
        '{"model": {"vocab": {"a": 99999999999999999999}, "merges": []}}',
        '{"model": {"vocab": {"a',
        '{"model": {"vocab": {"a\\',
    ]
    for other in others:
        assert parts(other) == (None, None), other[:80]


def test_a_vocabulary_that_does_not_fit_together_is_the_file_s_fault() -> None:
    broken = changed(merges=[["t", "q"]])
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read"):
        PackageTokenizer(json.dumps(broken).encode()).encode("tq")
