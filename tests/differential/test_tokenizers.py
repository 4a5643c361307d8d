"""Real tokenizers: token ids that llama.cpp publishes for hard texts, and the tokenizers package beside ours."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import BOS, english, hard_texts, make_llama_dir, tiny_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference
from vocabularies import NPM, gguf_vocabulary, tokenizer_file, tokenizer_files

import w4conv
from w4conv.commands.export import export
from w4conv.container import open_container
from w4conv.files.mapped import MappedFile
from w4conv.runtime import package_tokenizer
from w4conv.runtime.package_tokenizer import PackageTokenizer
from w4conv.runtime.tokenizer import Tokenizer
from w4conv.runtime.tokenizer_file import TokenizerFile
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


@pytest.mark.services
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"])
def test_published_vectors(name: str) -> None:
    path = gguf_vocabulary(name)
    tokenizers = [rebuilt(path)]
    if name in AS_JSON:
        tokenizers.append(Tokenizer(tokenizer_files(AS_JSON[name])))
    for text, expected in vectors(path.with_name(f"{path.name}.inp")):
        for tokenizer in tokenizers:
            assert tokenizer.encode(text, add_bos=False) == expected, text


@pytest.mark.services
@pytest.mark.parametrize("name", sorted(NPM))
def test_parts_of_a_vocabulary_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_tokenizer, "_FEW", 1 << 30)
    document = tokenizer_file(name, "tokenizer.json")
    ours, whole = PackageTokenizer(document), Reference.from_str(document.decode())
    marks = [token["content"] for token in json.loads(document)["added_tokens"][:3]]
    texts = hard_texts("qwen2")
    texts += [whole.decode([*range(start, start + 40)]) for start in range(500, 30_000, 3_000)]
    for text in [*texts, "".join(texts), *(f"{mark} a{mark}  b\n{mark}" for mark in marks)]:
        assert ours.encode(text) == whole.encode(text, add_special_tokens=False).ids, text
    assert "_whole" not in vars(ours)
    for i in (*range(0, whole.get_vocab_size(), 997), whole.get_vocab_size() - 1):
        assert ours.token(i) == whole.id_to_token(i)
    file = TokenizerFile(document)
    assert ours.n_tokens == file.n_tokens == whole.get_vocab_size()
    assert max(file.highest_id, *file.added) == max(whole.get_vocab().values())


@pytest.mark.services
@pytest.mark.parametrize("name", ["command-r", "mpt", "refact", "starcoder"])
def test_vectors_that_come_with_the_vocabulary(name: str) -> None:
    path = gguf_vocabulary(name)
    tokenizer = rebuilt(path)
    for text, expected in vectors(path.with_name(f"{path.name}.inp")):
        assert tokenizer.encode(text, add_bos=False) == expected, text


@pytest.mark.services
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
    texts = hard_texts("qwen2")
    texts += [english()[start : start + 2000] for start in range(0, len(english()), 2000)]
    marks = [token["content"] for token in json.loads(blobs["tokenizer.json"])["added_tokens"][:40]]
    texts += [f"{mark} a{mark}  b\n{mark}" for mark in marks]
    for text in texts:
        expected = oracle.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.encode(text, add_bos=False) == expected, text
    assert ours.adds_bos == (oracle.tokenize(b"a", add_bos=True)[0] == ours.bos_id)


@pytest.mark.services
def test_gpt_oss_in_llama_cpp(tmp_path: Path) -> None:
    """Its tokenizer takes whole words as they are, which llama.cpp does not by this name: the merges give the same.
    Only words with combining marks are cut otherwise there, and the export says so."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the consumer; it is built from source")
    files = tokenizer_files("gpt-oss")
    path = make_llama_dir(tmp_path / "in", hidden=32, layers=1, vocab=201_088, tokenizer=False)
    for name, data in files.items():
        (path / name).write_bytes(data)
    w4conv.quantize(path, tmp_path / "m.w4", effort=0, scheme="w4a16")
    notes = export(tmp_path / "m.w4", tmp_path / "m.gguf", to="gguf").notes
    assert any("combining marks" in note for note in notes)
    oracle = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    with open_container(tmp_path / "m.w4") as container:
        ours = Tokenizer(container.blobs)
    texts = hard_texts("qwen2")
    texts += [english()[start : start + 2000] for start in range(0, len(english()), 2000)]
    texts += ["<|start|>user<|message|>I'LL  CamelCase naïveÉcole<|end|>\n", "12345678 ½ ²\r\n\r\n//x/"]
    unmarked = [text for text in texts if not any(unicodedata.category(c).startswith("M") for c in text)]
    assert len(unmarked) > 50
    for text in unmarked:
        assert oracle.tokenize(text.encode(), add_bos=False, special=True) == ours.encode(text, add_bos=False), text


ADDED = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
ADDED_CASES: dict[str, dict[str, object]] = {
    "as they are": {},
    "another flag": {"added_tokens_decoder": {"300": {"content": "<|u|>"} | ADDED | {"rstrip": True}}},
    "not special": {"added_tokens_decoder": {"300": {"content": "<|u|>"} | ADDED | {"special": False}}},
    "one more": {"added_tokens_decoder": {"302": {"content": "<|new|>"} | ADDED | {"lstrip": True}}},
    "a word made special": {"added_tokens_decoder": {"301": {"content": "word"} | ADDED | {"single_word": True}}},
    "a token of the vocabulary": {"eos_token": {"content": "the", "__type": "AddedToken"} | ADDED | {"lstrip": True}},
    "named by a string": {"eos_token": "the", "pad_token": "ing"},
    "cleaned up": {"clean_up_tokenization_spaces": True},
    "no cleaning": {"clean_up_tokenization_spaces": False},
}


@pytest.mark.parametrize("case", ADDED_CASES)
def test_added_tokens_as_transformers_has_them(tmp_path: Path, case: str) -> None:
    """tokenizer_config.json may say otherwise than tokenizer.json, and wins."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the oracle group")
    made = tiny_tokenizer(300)
    made.add_tokens([f"unused{i}" for i in range(300 - made.get_vocab_size())])
    made.add_special_tokens([AddedToken("<|u|>", normalized=False)])
    made.add_tokens([AddedToken("word", normalized=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS} | ADDED_CASES[case]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    for text in ("a <|u|>  b", "the thing, a  the .", "a <|new|> b", "swords word words", "ing <s>the !"):
        ids = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_bos=False) == ids, text
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True), text
        assert ours.encode(text) == oracle.encode(text)


@pytest.mark.services
@pytest.mark.parametrize("name", ["mistral", "llama3", "qwen3"])
def test_special_tokens_as_transformers_has_them(tmp_path: Path, name: str) -> None:
    """The BOS token, whether it is added, and the special tokens that a chat template gets."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the oracle group")
    files = tokenizer_files(name)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(files)
    assert ours.special_tokens == oracle.special_tokens_map
    assert ours.stop_ids() == {oracle.eos_token_id}
    assert ours.bos_id == oracle.bos_token_id
    for text in ("", "a b", f"a{oracle.eos_token}", "x \n"):
        assert ours.encode(text) == oracle.encode(text), text
