"""tokenizer.model rebuilt as tokenizer.json, against the SentencePiece library itself."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import english, hard_texts, make_llama_dir
from tokenizers import Tokenizer as Reference
from vocabularies import mistral_file, tokenizer_files

from w4conv.runtime.tokenizer import Tokenizer
from w4conv.sources import open_source
from w4conv.sources.gguf_cuts import O200K_WORDS, TEKKEN_WORDS
from w4conv.sources.sentencepiece import rebuild_from_pieces

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is the oracle; install the oracle group")

PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": PLAIN | {"model_type": "bpe", "byte_fallback": True},
    "gemma": PLAIN
    | {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, "split_digits": True,
       "user_defined_symbols": ["<u>", "\u2581\u2581", "\u2581" * 4, "\n\n"]},
    "bpe": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram"},
    "unigram with bytes": PLAIN | {"model_type": "unigram", "byte_fallback": True},
}  # fmt: skip
HARD = (
    "", " ", "   ", "a", "  a  b ", "x    y     z \n\n  q", "e\u0301 ﬁ ① ｶﾞ x\u3000y\u00a0z", "a<u>b <u>", "aaaaaaaa",
    "Zoë: 漢字 你你 🙂👨‍👩‍👧 ½\t\r\n end",
)  # fmt: skip


def texts() -> list[str]:
    pages = english()
    return [*HARD, *hard_texts("llama-spm"), *(pages[i : i + 500] for i in range(0, len(pages), 500))]


def rebuilt(model: bytes, **files: object) -> dict[str, bytes]:
    blobs = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    return blobs | rebuild_from_pieces(blobs | {"tokenizer.model": model}, where="somewhere")


@pytest.mark.parametrize("name", MODELS)
def test_trained_models(name: str) -> None:
    lines = english().splitlines()
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        vocab_size=900,
        hard_vocab_limit=False,
        minloglevel=2,
        **MODELS[name],
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ours = Tokenizer(rebuilt(out.getvalue()))
    assert ours.n_tokens == oracle.vocab_size()
    assert (ours.bos_id, ours.adds_bos, ours.stop_ids()) == (oracle.bos_id(), True, {oracle.eos_id()})
    for text in texts():
        ids = oracle.encode(text)
        assert ours.encode(text, add_bos=False) == ids, text
        if oracle.unk_id() not in ids:
            assert ours.decode(ids) == oracle.decode(ids), text


@pytest.mark.services
@pytest.mark.parametrize("version", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_real_models(version: str) -> None:
    path = mistral_file(version)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = Tokenizer(rebuilt(path.read_bytes()))
    for text in texts():
        assert ours.encode(text, add_bos=False) == oracle.encode(text), text


@pytest.mark.services
def test_a_directory_with_tokenizer_model_alone(tmp_path: Path) -> None:
    """What transformers' own conversion of this model gives, which is published as tokenizer.json."""
    published = Reference.from_str(tokenizer_files("mistral")["tokenizer.json"].decode())
    directory = make_llama_dir(tmp_path / "in", vocab=32000, hidden=32, tokenizer=False)
    model = mistral_file("tokenizer.model.v1").read_bytes()
    (directory / "tokenizer.model").write_bytes(model)
    with open_source(directory) as source:
        assert "Rebuilt from tokenizer.model: tokenizer.json." in source.notes
        assert directory / "tokenizer.model" in source.files
        ours = Tokenizer(source.blobs)
    for text in [*texts(), "<s>a</s> b", "</s>\n"]:
        assert ours.encode(text, add_bos=False) == published.encode(text, add_special_tokens=False).ids, text


@pytest.mark.services
def test_published_rules_of_cutting() -> None:
    tekken = json.loads(mistral_file("tekken_240718.json").read_text())
    assert tekken["config"]["pattern"] == TEKKEN_WORDS
    o200k = json.loads(tokenizer_files("gpt-oss")["tokenizer.json"])
    assert o200k["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == O200K_WORDS
