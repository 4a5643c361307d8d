"""tokenizer.model: the message read field by field, added tokens, files that lie. Its tokens: tests/differential."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import make_llama_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import NORMAL, PIECES, UNUSED, field, model
from tokenizers import Tokenizer as Reference

from w4conv.errors import InputError
from w4conv.runtime.tokenizer import Tokenizer
from w4conv.sources import open_source
from w4conv.sources.sentencepiece import rebuild_from_pieces
from w4conv.sources.vocabulary import UnknownTokenizerError


def rebuilt(data: bytes, **files: object) -> dict[str, bytes]:
    blobs = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    return blobs | rebuild_from_pieces(blobs | {"tokenizer.model": data}, where="dir")


def test_a_model_written_by_hand() -> None:
    blobs = rebuilt(model())
    tokenizer = Tokenizer(blobs)
    assert tokenizer.encode("a a") == [1, 5, 5]
    assert tokenizer.encode("<s>a") == [1, 5]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    # ids of the special tokens where the model's own are not the usual ones; -1 means none
    other = Tokenizer(rebuilt(model(trainer=field(41, 2) + field(42, -1))))
    assert (other.bos_id, other.special_tokens.get("eos_token")) == (2, None)
    without_prefix = Tokenizer(rebuilt(model(normalizer=field(3, 0))))
    assert without_prefix.encode("a a") == [1, 4, 5]


def test_whether_a_bos_is_added() -> None:
    def adds(**config: object) -> bool:
        return Tokenizer(rebuilt(model(), tokenizer_config={"bos_token": "<s>"} | config)).adds_bos

    assert adds()
    assert adds(tokenizer_class="LlamaTokenizer")
    assert not adds(tokenizer_class="BaichuanTokenizer")
    assert not adds(tokenizer_class="LlamaTokenizer", add_bos_token=False)
    assert adds(tokenizer_class="BaichuanTokenizer", add_bos_token=True)


def test_tokens_added_beside_the_pieces() -> None:
    by_name = rebuilt(model(), added_tokens={"<|im_end|>": 8, "word": 9}, tokenizer_config={"eos_token": "<|im_end|>"})
    tokenizer = Tokenizer(by_name)
    assert tokenizer.encode("a<|im_end|>word", add_bos=False) == [5, 8, 9]
    assert tokenizer.decode([5, 8, 9]) == "aword"
    assert tokenizer.stop_ids() == {8}
    flags = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False, "special": True}
    decoder = {str(i): {"content": t} | flags for i, t in ((6, "<|x|>"), (2, "</s>"))}
    document = json.loads(rebuilt(model(), tokenizer_config={"added_tokens_decoder": decoder})["tokenizer.json"])
    assert {t["id"]: t["rstrip"] for t in document["added_tokens"]} == {0: False, 1: False, 2: True, 6: True}


def test_where_a_space_is_put_in_front() -> None:
    """`legacy` of tokenizer_config.json: after every special token, or at the start of the text alone."""
    for legacy, ids in ((None, [5, 2, 5]), (True, [5, 2, 5]), (False, [5, 2, 4])):
        config = {} if legacy is None else {"legacy": legacy}
        assert Tokenizer(rebuilt(model(), tokenizer_config=config)).encode("a</s>a", add_bos=False) == ids


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no pieces"),
        (model(rest=b"\x0a"), "cut off or corrupt"),
        (model(rest=b"\x0a\xff\xff\xff\xff\x0f"), "a field of 4294967295 bytes"),
        (model(rest=b"\xff" * 12), "cut off or corrupt"),
        (model(rest=b"\x0b"), "a field of type 3"),
        (model(rest=field(1, 7)), "a number where bytes are expected"),
        (model(rest=field(1, field(1, b"\xff"))), "piece 6 is not UTF-8"),
        (model([*PIECES, ("a", NORMAL)]), "there twice"),
        (model([*PIECES, ("", NORMAL)]), "empty"),
        (model(rest=field(1, field(1, b"b") + field(2, float("nan")))), "not finite"),
        (model(rest=field(1, field(1, b"b") + field(2, 5))), "no float"),
        (model(trainer=field(40, b"x")), "bytes where a number"),
    ],
)
def test_corrupt_models_are_input_errors(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rebuilt(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"IQ== 0\nIg== 1\n", "for tiktoken"),
        (model(trainer=field(3, 4)), "type 4, neither unigram nor BPE"),
        (model(trainer=field(24, 1)), "writes spaces in another way"),
        (model(normalizer=field(5, 0)), "writes spaces in another way"),
        (model([*PIECES, ("b", UNUSED)]), "only serve on the way"),
        (model(rest=field(5, field(2, b"x"))), "changes characters"),
        (model([*PIECES, ("b" * 2000, NORMAL)]), "longer than"),
    ],
)
def test_what_no_tokenizer_json_expresses_is_left_out_with_a_note(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UnknownTokenizerError, match=message):
        rebuilt(data)
    directory = make_llama_dir(tmp_path / "in", tokenizer=False)
    (directory / "tokenizer.model").write_bytes(data)
    with open_source(directory) as source:
        assert "tokenizer.json" not in source.blobs
        assert any(note.startswith("There is no tokenizer.json, and ") for note in source.notes)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"<x>": 4}, "token 4 is 'a', but '<x>'"),
        ({"a": 9}, "'a' is added as 9, but is token 4"),
        ({"": 9}, "no text"),
        ({"<x>": 1 << 40}, "no sensible id"),
    ],
)
def test_added_tokens_that_contradict_the_pieces(added: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rebuilt(model(), added_tokens=added)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_give_a_tokenizer_or_an_error(data: st.DataObject) -> None:
    content = bytearray(model())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(1, len(content))) :]
    try:
        blobs = rebuilt(bytes(content))
    except (InputError, UnknownTokenizerError):
        return
    Reference.from_str(blobs["tokenizer.json"].decode())
