"""Real tokenizers: token ids that llama.cpp publishes for hard texts, and the tokenizers package beside ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import data_dir
from vocabularies import gguf_vocabulary, tokenizer_files

from w4conv.runtime.tokenizer import Tokenizer
from w4conv.sources._files import MappedFile
from w4conv.sources.gguf_header import GgufHeader
from w4conv.sources.gguf_tokenizer import rebuild_tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
# name of the vectors: the tokenizer.json that has to give the same tokens (Qwen3's vocabulary is that of Qwen2)
AS_JSON = {"llama-bpe": "llama3", "qwen2": "qwen3"}


def vectors(texts: Path) -> Iterator[tuple[str, list[int]]]:
    """(text, token ids without BOS)."""
    ids = [[int(i) for i in line.split()] for line in texts.with_suffix(".out").read_text().splitlines()]
    cases = texts.read_text().split(SEPARATOR)[: len(ids)]
    assert len(cases) == len(ids) > 40
    return zip(cases, ids, strict=True)


def rebuilt(path: Path) -> Tokenizer:
    blobs, notes = rebuild_tokenizer(GgufHeader(MappedFile(path)))
    assert notes == []
    return Tokenizer(blobs)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"])
def test_published_vectors(name: str) -> None:
    texts = data_dir("tokenizer-vectors", f"ggml-vocab-{name}.gguf.inp")
    tokenizers = [rebuilt(gguf_vocabulary(name))]
    if name in AS_JSON:
        tokenizers.append(Tokenizer(tokenizer_files(AS_JSON[name])))
    for text, expected in vectors(texts):
        for tokenizer in tokenizers:
            assert tokenizer.encode(text, add_bos=False) == expected, text


@pytest.mark.parametrize("name", ["command-r", "mpt", "refact", "starcoder"])
def test_vectors_that_come_with_the_vocabulary(name: str) -> None:
    path = gguf_vocabulary(name)
    tokenizer = rebuilt(path)
    for text, expected in vectors(path.with_name(f"{path.name}.inp")):
        assert tokenizer.encode(text, add_bos=False) == expected, text


@pytest.mark.parametrize(
    "name", ["aquila", "baichuan", "gpt-2", "gpt-neox", "llama-bpe", "llama-spm", "phi-3", "qwen2"]
)
def test_same_tokens_as_llama_cpp(name: str) -> None:
    """With special tokens spelled out, and for files that do not name how a text is cut."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the oracle; it is built from source")
    path = gguf_vocabulary(name)
    oracle = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    blobs, _ = rebuild_tokenizer(GgufHeader(MappedFile(path)))
    ours = Tokenizer(blobs)
    texts = [text for text, _ in vectors(data_dir("tokenizer-vectors", "ggml-vocab-qwen2.gguf.inp"))]
    wiki = data_dir("wikitext-2-raw", "wiki.test.raw").read_text()
    texts += [wiki[start : start + 2000] for start in range(0, len(wiki), 100_000)]
    marks = [token["content"] for token in json.loads(blobs["tokenizer.json"])["added_tokens"][:40]]
    texts += [f"{mark} a{mark}  b\n{mark}" for mark in marks]
    for text in texts:
        expected = oracle.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.encode(text, add_bos=False) == expected, text
    assert ours.adds_bos == (oracle.tokenize(b"a", add_bos=True)[0] == ours.bos_id)
