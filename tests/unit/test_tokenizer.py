"""Tokenizer: BOS, stop tokens, streaming; the tokenizers package is the oracle of every text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import hard_texts, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from stories import trained
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Reference

from w4conv.errors import InputError, UsageError
from w4conv.runtime.tokenizer import Tokenizer


def blobs_of(tokenizer: Reference, **files: object) -> dict[str, bytes]:
    out = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    return out | {"tokenizer.json": tokenizer.to_str().encode()}


def spm_like() -> Reference:
    """Spaces as U+2581, byte fallback, one leading space stripped by the decoder: the shape of Llama 2's."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ("▁", "a", "b", "c", "d", "e", "é", "▁a", "▁ab"):
        vocab[piece] = len(vocab)
    tokenizer = Reference(
        models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


BYTE_LEVEL = Tokenizer(blobs_of(tiny_tokenizer(), config={"bos_token_id": 256, "eos_token_id": 257}))
SPM = Tokenizer(blobs_of(spm_like(), config={"bos_token_id": 1, "eos_token_id": 2}))
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SPM], ids=["byte-level", "spm"])


def streamed(tokenizer: Tokenizer, ids: list[int], *, at_start: bool) -> list[str]:
    decoder = tokenizer.stream(after=() if at_start else tokenizer.encode("b", add_bos=False))
    return [*(decoder.push(i) for i in ids), decoder.finish()]


def test_encode_adds_one_bos_by_the_post_processor() -> None:
    expected = tiny_tokenizer().encode("the thing").ids
    assert expected[0] == 256
    assert BYTE_LEVEL.adds_bos
    assert BYTE_LEVEL.encode("the thing") == expected
    assert BYTE_LEVEL.encode("the thing", add_bos=False) == expected[1:]
    assert BYTE_LEVEL.encode("<s>the thing") == expected, "a BOS spelled out is not doubled"
    assert BYTE_LEVEL.encode("") == [256]


@pytest.mark.parametrize(("setting", "adds"), [(True, True), (False, False), (None, False)])
def test_add_bos_token_decides_before_the_post_processor(setting: bool | None, adds: bool) -> None:
    plain = tiny_tokenizer()
    plain.post_processor = processors.ByteLevel()
    tokenizer = Tokenizer(blobs_of(plain, tokenizer_config={"bos_token": {"content": "<s>"}, "add_bos_token": setting}))
    assert tokenizer.bos_id == 256
    assert tokenizer.adds_bos is adds
    with_setting_false = Tokenizer(
        blobs_of(tiny_tokenizer(), tokenizer_config={"bos_token": "<s>", "add_bos_token": False})
    )
    assert not with_setting_false.adds_bos, "tokenizer_config.json wins over the post-processor"


def test_no_bos_known() -> None:
    plain = tiny_tokenizer()
    plain.post_processor = processors.ByteLevel()
    tokenizer = Tokenizer(blobs_of(plain))
    assert tokenizer.bos_id is None
    assert not tokenizer.adds_bos
    with pytest.raises(UsageError, match="BOS"):
        tokenizer.encode("a", add_bos=True)


def test_stop_ids_come_from_every_file() -> None:
    reference = tiny_tokenizer()
    reference.add_special_tokens([AddedToken("<|im_end|>"), AddedToken("<|endoftext|>")])
    im_end, end = reference.token_to_id("<|im_end|>"), reference.token_to_id("<|endoftext|>")
    tokenizer = Tokenizer(
        blobs_of(
            reference,
            generation_config={"eos_token_id": [257, 5]},
            config={"eos_token_id": 7},
            tokenizer_config={"eos_token": "<|endoftext|>"},
        )
    )
    assert tokenizer.stop_ids() == {257, 5, 7, end}
    assert tokenizer.stop_ids(chat=True) == {257, 5, 7, end, im_end}


def test_ends_of_a_turn_in_several_messages() -> None:
    """gpt-oss ends its thoughts with the token that ends the turn of other models."""
    ends = {}
    for words in (["<|end|>"], ["<|end|>", "<|return|>", "<|call|>"]):
        reference = tiny_tokenizer()
        reference.add_special_tokens([AddedToken(word) for word in words])
        ids = Tokenizer(blobs_of(reference)).stop_ids(chat=True)
        ends[len(words)] = {reference.id_to_token(i) for i in ids}
    assert ends == {1: {"<|end|>"}, 3: {"<|return|>", "<|call|>"}}


def test_an_added_token_that_cannot_have_its_id() -> None:
    size = tiny_tokenizer().get_vocab_size()
    added = {str(size + 7): {"content": "<|new|>", "special": True}}
    with pytest.raises(InputError, match=rf"'<\|new\|>' is said to be {size + 7}, but .* it is {size}\."):
        Tokenizer(blobs_of(tiny_tokenizer(), tokenizer_config={"added_tokens_decoder": added}))


def test_without_generation_config_the_ends_come_from_the_other_files() -> None:
    assert Tokenizer(blobs_of(tiny_tokenizer(), config={"eos_token_id": [7, 257]})).stop_ids() == {7, 257}
    assert Tokenizer(blobs_of(tiny_tokenizer(), tokenizer_config={"eos_token": "</s>"})).stop_ids() == {257}
    assert Tokenizer(blobs_of(tiny_tokenizer(), special_tokens_map={"eos_token": "</s>"})).stop_ids() == {257}
    assert Tokenizer(blobs_of(tiny_tokenizer())).stop_ids() == frozenset()


def test_special_tokens_for_templates() -> None:
    tokenizer = Tokenizer(
        blobs_of(tiny_tokenizer(), tokenizer_config={"pad_token": "<pad>"}, config={"bos_token_id": 256})
    )
    assert tokenizer.special_tokens == {"pad_token": "<pad>", "bos_token": "<s>"}


@BOTH
def test_stream_never_splits_utf8(tokenizer: Tokenizer) -> None:
    text = "a é 你好 🙂 b"
    pieces = streamed(tokenizer, tokenizer.encode(text), at_start=True)
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@BOTH
def test_stream_keeps_the_space_between_prompt_and_continuation(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" a", add_bos=False)[-1:]  # one token, which begins with a space
    assert "".join(streamed(tokenizer, ids, at_start=False)) == " a"
    assert "".join(streamed(tokenizer, ids, at_start=True)) == tokenizer.decode(ids)


@BOTH
def test_stream_ends_an_unfinished_sequence_as_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("你", add_bos=False)
    pieces = streamed(tokenizer, ids[:-1], at_start=False)
    assert pieces[-1] == ("�" if tokenizer is BYTE_LEVEL else "��"), "one for a sequence, or one for each byte token"
    assert "�" not in "".join(pieces[:-1])
    # ... and an invalid byte does not swallow what follows it.
    assert "".join(streamed(tokenizer, [*ids[:-1], *tokenizer.encode("b", add_bos=False)], at_start=False)).endswith(
        "b"
    )


def test_special_and_unknown_ids_have_no_text() -> None:
    assert streamed(BYTE_LEVEL, [256, 257, 299, 100_000], at_start=False)[:2] == ["", ""]
    assert BYTE_LEVEL.text_token(100_000) is None


@BOTH
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_stream_gives_back_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(streamed(tokenizer, tokenizer.encode(text), at_start=True)) == text


def test_stream_equals_library_decode_on_a_real_tokenizer() -> None:
    path: Path = trained() / "tokenizer.json"
    tokenizer = Tokenizer({"tokenizer.json": path.read_bytes()})
    reference = Reference.from_file(str(path))
    text = (trained() / "sample_greedy.txt").read_text() + " café 日本"
    ids = reference.encode(text).ids
    assert tokenizer.encode(text, add_bos=False) == ids[1:]
    assert "".join(streamed(tokenizer, ids, at_start=True)) == reference.decode(ids) == text


@pytest.mark.parametrize("name", ["llama-spm", "qwen2", "gpt-2", "llama-bpe"])
def test_stream_gives_back_hard_texts(name: str) -> None:
    """Texts that other projects test their tokenizers with, through a tokenizer of ours."""
    for case in hard_texts(name):
        assert "".join(streamed(BYTE_LEVEL, BYTE_LEVEL.encode(case, add_bos=False), at_start=False)) == case


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer.json"),
        (b"{", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"model": {}}', "cannot be read"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_tokenizers_are_input_errors(content: bytes | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tokenizer({} if content is None else {"tokenizer.json": content})


def test_what_the_package_raises_over_a_file_when_it_is_used_is_the_file_s_fault() -> None:
    """Found by fuzzing: a model that is read without complaint, and cannot encode anything."""
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    document = {"version": "1.0", "model": {"type": "Unigram", "vocab": []}, "decoder": decoder}
    tokenizer = Tokenizer({"tokenizer.json": json.dumps(document).encode()})
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be used by the tokenizers package: .*unk_id"):
        tokenizer.encode("a")
