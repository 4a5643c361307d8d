"""tokenizer.json as a file; json and the tokenizers package are the oracles."""

from __future__ import annotations

import json

import pytest
from helpers import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, models

from w4conv.errors import InputError
from w4conv.runtime.tokenizer_file import TokenizerFile

UNIGRAM = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)).to_str().encode()
HOLES = {"added_tokens": [{"id": 7}], "model": {"type": "BPE", "vocab": {"a": 0, "b": 3, "c": 7}, "merges": []}}


def file_of(document: object) -> TokenizerFile:
    return TokenizerFile(json.dumps(document).encode())


def test_the_tokens_of_a_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken('"vocab": {"x": 999}'), AddedToken('"added_tokens": [')])
    n = tokenizer.get_vocab_size()
    for pretty in (False, True):
        file = TokenizerFile(tokenizer.to_str(pretty=pretty).encode())
        assert file.vocabulary is not None
        assert (file.highest_id, max(file.added), file.n_tokens) == (n - 3, n - 1, n)
        assert [file.token(i) for i in range(n + 1)] == [tokenizer.id_to_token(i) for i in range(n + 1)]
        assert file.model["type"] == "BPE"


def test_other_models_are_read_whole() -> None:
    small = {"added_tokens": [{"id": 3, "content": "<s>"}], "model": {"vocab": {"a": 0, "b": 3}}}
    file = file_of(small)
    assert (file.highest_id, file.added, file.n_tokens) == (0, {3: "<s>"}, 2)
    assert [file.token(i) for i in range(5)] == ["a", None, None, "<s>", None]
    unigram = TokenizerFile(UNIGRAM)
    assert (unigram.highest_id, unigram.added, unigram.n_tokens, unigram.token(1)) == (1, {}, 2, "a")


def test_ids_that_no_token_has() -> None:
    file = file_of(HOLES)
    assert file.vocabulary is not None
    assert (file.highest_id, file.n_tokens, file.token(1), file.token(3)) == (3, 3, None, "b")
    everything = {"added_tokens": [{"id": 0}], "model": {"vocab": {"a": 0}, "merges": []}}
    assert file_of(everything).highest_id == -1


@pytest.mark.parametrize(
    "document", [{}, {"model": 3}, {"model": {}}, {"model": {"vocab": 3}, "added_tokens": {"id": 3}},
                 {"model": {"vocab": {"a": "b", "c": -1, "d": True}}, "added_tokens": [3, {"id": "x"}, {"id": True}]}]
)  # fmt: skip
def test_odd_values_are_no_tokens(document: object) -> None:
    file = file_of(document)
    assert (file.highest_id, file.added, file.n_tokens, file.token(0)) == (-1, {}, 0, None)


@pytest.mark.parametrize(
    "document", [b"", b"{", b'{"vocab": [', b'"vocab": {"a": "b"}', b"[]", b"\xff", b"[" * 100_000]
)
def test_what_is_no_json_object(document: bytes) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        TokenizerFile(document)


def fnv1a(text: str) -> int:
    h = 0x811C9DC5
    for byte in text.encode():
        h = (h ^ byte) * 0x01000193 % (1 << 32)
    return h


def test_tokens_that_are_made_to_collide_are_not_looked_up() -> None:
    """In a table of 8,192 slots for 2,048 tokens they would fill one end, so that each probe passes all before it."""
    tokens = [f"t{i}" for i in range(200_000)]
    colliding = [t for t in tokens if fnv1a(t) % 8192 < 64][:1200]
    for first, expected in ((colliding, True), (tokens[:1200], False)):
        vocab = dict.fromkeys([*first, *(f"u{i}" for i in range(2048 - len(first)))])
        file = file_of({"model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(vocab)}, "merges": []}})
        assert (file.vocabulary is None) == expected
        assert [file.token(i) for i in (0, 1199, 2047)] == [first[0], first[1199], "u847"]
