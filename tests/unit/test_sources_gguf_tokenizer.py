"""Tokenizers rebuilt from GGUF metadata, against the tokenizers they came from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import pytest
from cuts import LLAMA3, O200K, QWEN2, TEKKEN
from helpers import BOS, CHAT_TEMPLATE, EOS, make_llama_gguf, tiny_tokenizer
from stories import trained
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from w4conv.errors import InputError
from w4conv.sources import open_source

TEXTS = (
    "the hands of the land, and ing 1234 it's the end",
    "  Zoë's naïve café\n\n\tdef f(x):\n    return x ** 2  \r\n",
    "漢字とかな交じり文 🙂👨‍👩‍👧 ﷺ e\u0301 ½②٣",
    f"{BOS}the{EOS} and {EOS}",
    "",
    " ",
)
PRE = "tokenizer.ggml.pre"


def rebuilt(path: Path) -> Tokenizer:
    with open_source(path) as source:
        return Tokenizer.from_str(source.blobs["tokenizer.json"].decode())


def test_blobs(tmp_path):
    with open_source(make_llama_gguf(tmp_path / "m.gguf")) as source:
        assert set(source.blobs) == {
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        }  # fmt: skip
        assert source.blobs["chat_template.jinja"].decode() == CHAT_TEMPLATE
        assert json.loads(source.blobs["tokenizer_config.json"]) == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
        }


def expected_tokenizer(pre: str) -> Tokenizer:
    """The tiny tokenizer with the steps that each name stands for, put together by the tokenizers package."""
    out = tiny_tokenizer(300)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in ("smollm", "starcoder", "refact"):
        out.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    words = {"llama-bpe": LLAMA3, "dbrx": LLAMA3, "qwen2": QWEN2, "tekken": TEKKEN, "gpt-4o": O200K, "llama4": O200K}
    if pre in words:
        split = pre_tokenizers.Split(Regex(words[pre]), "isolated")
        out.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if pre in ("llama-bpe", "tekken"):
        out.model.ignore_merges = True
    if pre == "qwen2":
        out.normalizer = normalizers.NFC()
    return out


@pytest.mark.parametrize(
    "pre",
    ["gpt-2", "olmo", "smollm", "starcoder", "refact", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "llama4"],
)
def test_byte_level_tokenizers(tmp_path, pre):
    got = rebuilt(make_llama_gguf(tmp_path / "m.gguf", edit=lambda w: set_key(w, "tokenizer.ggml.pre", pre)))
    expected = expected_tokenizer(pre)
    assert got.get_vocab() == expected.get_vocab()
    assert {i: (t.content, t.special) for i, t in got.get_added_tokens_decoder().items()} == {
        i: (t.content, t.special) for i, t in expected.get_added_tokens_decoder().items()
    }
    for text in TEXTS:
        for add in (True, False):
            ids = expected.encode(text, add_special_tokens=add).ids
            assert got.encode(text, add_special_tokens=add).ids == ids
            for skip in (True, False):
                assert got.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)


def set_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Replace a value that the writer already holds."""
    for kv in writer.kv_data:
        if key in kv:
            kv[key].value = value
            return
    raise KeyError(key)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (
            lambda w: set_key(w, "tokenizer.ggml.pre", "kimi-k2"),
            "how it cuts a text .tokenizer.ggml.pre is 'kimi-k2'. is",
        ),
        (lambda w: set_key(w, "tokenizer.ggml.model", "t5"), "the tokenizer model 't5' cannot be rebuilt"),
        (lambda w: set_key(w, "tokenizer.ggml.merges", ["t zzz"]), "the merge 't zzz' is not of two tokens to a third"),
        (lambda w: set_key(w, "tokenizer.ggml.merges", ["nospace"]), "the merge 'nospace' is not of two"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_left_out_with_a_note(tmp_path, edit, reason):
    with open_source(make_llama_gguf(tmp_path / "m.gguf", edit=edit)) as source:
        assert "tokenizer.json" not in source.blobs
        assert "chat_template.jinja" in source.blobs
        assert source.notes[0] == "Rebuilt from GGUF metadata: config.json."
        assert len(source.notes) == 2
        assert source.notes[1].startswith("There is no tokenizer.json: ")
        assert re.search(reason, source.notes[1])


def test_a_cut_that_is_not_recorded_is_llama_cpp_s_and_told(tmp_path):
    with open_source(make_llama_gguf(tmp_path / "m.gguf", edit=lambda w: set_key(w, PRE, "default"))) as source:
        assert any("How the model's own tokenizer cuts a text is not recorded" in note for note in source.notes)
        got = Tokenizer.from_str(source.blobs["tokenizer.json"].decode())
    # Punctuation apart, then GPT-2's rule, then numbers apart, then three digits at a time.
    pieces = [piece for piece, _ in got.pre_tokenizer.pre_tokenize_str("it's 12345½ 12a+b <=>. x")]
    letters = str.maketrans({"½": "Â½", " ": "Ġ"})
    assert pieces == [p.translate(letters) for p in
                      ("it", "'", "s", " ", "123", "45½", " ", "12", "a", "+", "b", " ", "<=>.", " x")]  # fmt: skip


def test_tokens_of_phi3_swallow_the_spaces_after_them(tmp_path):
    def edit(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", "▁", "a", "<|endoftext|>", "<|user|>"])
        writer.add_token_scores([0.0] * 7)
        writer.add_token_types([2, 3, 4, 1, 1, 3, 3])

    def added(name: str) -> dict[str, bool]:
        path = make_llama_gguf(
            tmp_path / "m.gguf", vocab=7, tokenizer=False, edit=lambda w: [edit(w), w.add_name(name)]
        )
        return {t.content: t.rstrip for t in rebuilt(path).get_added_tokens_decoder().values()}

    plain = dict.fromkeys(("<unk>", "<s>", "<|endoftext|>"), False)
    assert added("Phi-3 mini") == plain | {"</s>": True, "<|user|>": True}
    assert added("Llama") == plain | {"</s>": False, "<|user|>": False}


def test_no_tokenizer_at_all(tmp_path):
    with open_source(make_llama_gguf(tmp_path / "m.gguf", tokenizer=False)) as source:
        assert set(source.blobs) == {"config.json", "generation_config.json"}
        assert "the tokenizer model 'none' cannot be rebuilt" in source.notes[1]


def test_added_bos_and_eos(tmp_path):
    def ids(bos: bool | None, eos: bool, pre: str = "gpt-2") -> list[int]:
        def edit(writer):
            set_key(writer, "tokenizer.ggml.pre", pre)
            set_key(writer, "tokenizer.ggml.add_bos_token", bos)
            if bos is None:
                for kv in writer.kv_data:
                    kv.pop("tokenizer.ggml.add_bos_token", None)
            writer.add_add_eos_token(eos)

        return rebuilt(make_llama_gguf(tmp_path / "m.gguf", edit=edit)).encode("a").ids

    a = tiny_tokenizer().token_to_id("a")
    assert ids(True, False) == [256, a]
    assert ids(False, False) == [a]
    assert ids(False, True) == [a, 257]
    assert ids(True, True) == [256, a, 257]
    assert ids(None, False) == [a]
    assert ids(None, False, "llama-bpe") == [256, a]


def test_user_defined_tokens_are_added_but_not_special(tmp_path):
    types = [3 if i in (256, 257) else 1 for i in range(300)]
    vocab = tiny_tokenizer().get_vocab()
    types[vocab["Ġthe"]] = 4
    types[len(vocab) :] = [5] * (300 - len(vocab))
    got = rebuilt(make_llama_gguf(tmp_path / "m.gguf", edit=lambda w: set_key(w, "tokenizer.ggml.token_type", types)))
    added = got.get_added_tokens_decoder()
    assert {i: t.special for i, t in added.items()} == {256: True, 257: True, vocab["Ġthe"]: False}
    assert got.decode([256, vocab["t"]]) == "t"


def test_contradictions(tmp_path):
    def refused(edit, match):
        with pytest.raises(InputError, match=match):
            open_source(make_llama_gguf(tmp_path / "m.gguf", edit=edit))

    refused(lambda w: set_key(w, "tokenizer.ggml.token_type", [1, 2]), "token_type: 2 types for 300 tokens")
    refused(lambda w: set_key(w, "tokenizer.ggml.eos_token_id", 300), "eos_token_id: 300 is none of the 300 tokens")
    refused(lambda w: set_key(w, "tokenizer.ggml.tokens", [1, 2]), "tokens: expected strings, got numbers")
    refused(lambda w: w.add_string("tokenizer.huggingface.json", "{"), "tokenizer.huggingface.json: not valid JSON")


def test_the_original_is_taken_where_it_is_kept(tmp_path):
    original = tiny_tokenizer().to_str()
    path = make_llama_gguf(tmp_path / "m.gguf", edit=lambda w: w.add_string("tokenizer.huggingface.json", original))
    with open_source(path) as source:
        assert source.blobs["tokenizer.json"].decode() == original


def piece_gguf(path: Path, original: dict, *, space_prefix: bool | None = None) -> Path:
    """A GGUF file with the pieces of a tokenizer.json; a piece scores by the place of the merge that makes it."""
    vocab = original["model"]["vocab"]
    pieces = sorted(vocab, key=vocab.__getitem__)
    rank = {}
    for i, merge in enumerate(original["model"]["merges"]):
        rank.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), i)
    special = {t["content"] for t in original["added_tokens"]}

    def edit(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([-float(rank.get(p, 10**6)) for p in pieces])
        kinds = [2 if p == "<unk>" else 3 if p in special else 6 if p.startswith("<0x") else 1 for p in pieces]
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if space_prefix is not None:
            writer.add_add_space_prefix(space_prefix)

    return make_llama_gguf(path, vocab=len(pieces), tokenizer=False, edit=edit)


def test_sentence_pieces_of_a_real_model(tmp_path):
    file = trained() / "tokenizer.json"
    expected = Tokenizer.from_file(str(file))
    got = rebuilt(piece_gguf(tmp_path / "m.gguf", json.loads(file.read_text())))
    story = (trained() / "sample_greedy.txt").read_text()
    for text in (story, *TEXTS[:3], "Once upon a time, there was a little girl named Lily."):
        ids = expected.encode(text, add_special_tokens=False).ids
        assert got.encode(text, add_special_tokens=False).ids == ids
        assert got.encode(text).ids == [1, *ids]
        assert got.decode(ids) == expected.decode(ids)


def test_scores_must_match_the_tokens(tmp_path):
    def edit(writer):
        set_key(writer, "tokenizer.ggml.model", "llama")
        writer.add_token_scores([0.0] * 3)

    with pytest.raises(InputError, match="scores: 3 scores for 300 tokens"):
        open_source(make_llama_gguf(tmp_path / "m.gguf", edit=edit))
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.scores: is missing"):
        open_source(make_llama_gguf(tmp_path / "m.gguf", edit=lambda w: set_key(w, "tokenizer.ggml.model", "llama")))


def test_space_prefix(tmp_path):
    original = json.loads((trained() / "tokenizer.json").read_text())
    with_prefix = rebuilt(piece_gguf(tmp_path / "a.gguf", original))
    without = rebuilt(piece_gguf(tmp_path / "b.gguf", original, space_prefix=False))
    assert with_prefix.encode("the cat").ids == without.encode(" the cat").ids
    assert with_prefix.decode(with_prefix.encode("the cat").ids) == "the cat"
    assert without.decode(without.encode("the cat").ids) == "the cat"
    assert without.decode(without.encode(" the cat").ids) == " the cat"
