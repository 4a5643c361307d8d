"""A `.w4` with right digests and a bad blob: a command that reads it ends with exit code 3, naming file and blob."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import make_llama_dir, tiny_tokenizer
from w4files import with_blobs

import w4conv
from w4conv.cli import main
from w4conv.commands.inspect import inspect
from w4conv.container import open_container

NOT_JSON = {
    "empty": b"",
    "a list": b"[]",
    "cut": b"{",
    "NULs": b"\0" * 64,
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "5,000 digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "a text": b'"x"',
    "null": b"null",
    "a key twice": b'{"a": 1, "a": 2}',
    "a page": b"<!DOCTYPE html><html></html>",
    "an LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
}
RUN = ("run", "FILE", "-p", "the king", "-n", "2")
CHAT = (*RUN, "--chat")
BENCH = ("bench", "FILE", "-p", "4", "-n", "2")
VERIFY = ("verify", "FILE", "--ppl", "--text", "TEXT", "--ctx", "8")
GGUF = ("export", "FILE", "OUT.gguf", "--to", "gguf")
FLOATS = ("export", "FILE", "OUT", "--to", "safetensors")
ONNX = ("export", "FILE", "OUT", "--to", "onnx")

CASES = [
    *(("config.json", content, command) for content in NOT_JSON.values() for command in (RUN, GGUF)),
    *(("config.json", NOT_JSON["cut"], command) for command in (CHAT, BENCH, VERIFY, FLOATS, ONNX)),
    *(("generation_config.json", content, RUN) for content in NOT_JSON.values()),
    *(("generation_config.json", NOT_JSON["a list"], command) for command in (CHAT, VERIFY, GGUF)),
    *(("tokenizer_config.json", content, RUN) for content in NOT_JSON.values()),
    *(("tokenizer_config.json", NOT_JSON["a text"], command) for command in (VERIFY, GGUF)),
    *(("special_tokens_map.json", content, VERIFY) for content in (b"[]", b"{", b"\0")),
    *(("tokenizer.json", content, RUN) for content in NOT_JSON.values()),
    *(("tokenizer.json", content, GGUF) for content in (b"{}", b"[]", b'{"model": {"type": "BPE"}}')),
    *(("chat_template.jinja", content, CHAT) for content in (b"\xff", b"", b"\xef\xbb\xbfx", b"a\0b", b"{% for %}")),
    *(("chat_template.jinja", content, GGUF) for content in (b"\xff", b"", b"a\0b")),
    *(
        ("generation_config.json", json.dumps({"eos_token_id": value}).encode(), RUN)
        for value in ("2", 2.0, True, [2, "3"], [None], {"id": 2}, [[2]])
    ),
    ("config.json", None, RUN),
    ("config.json", None, VERIFY),
    ("config.json", None, FLOATS),
    *(
        ("tokenizer_config.json", content, RUN)
        for content in (
            b'{"added_tokens_decoder": {"7": {"content": "new"}}}',
            b'{"added_tokens_decoder": {"x": {"content": "a"}}}',
            b'{"added_tokens_decoder": [1]}',
            b'{"added_tokens_decoder": {"7": {"content": 8}}}',
            b'{"added_tokens_decoder": {"99999999999": {"content": "a"}}}',
            b'{"add_bos_token": "false", "bos_token": "<s>"}',
        )
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blobs")
    tiny_tokenizer().save(str(make_llama_dir(folder / "in", vocab=320) / "tokenizer.json"))
    w4conv.quantize(folder / "in", folder / "model.w4", effort=0, scheme="w4a16")
    (folder / "text.txt").write_text("the king and the queen of the kingdom " * 20)
    return folder / "model.w4"


@pytest.mark.parametrize(
    ("name", "content", "command"),
    CASES,
    ids=[f"{i}-{name}-{command[0]}" for i, (name, _, command) in enumerate(CASES)],
)
def test_it_ends_with_an_input_error(
    name: str, content: bytes | None, command: tuple[str, ...], model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "bad.w4"
    with open_container(model) as container:
        blobs = {**container.blobs, name: content}
        path.write_bytes(with_blobs(container, {n: data for n, data in blobs.items() if data is not None}))
    words = {
        "FILE": path,
        "TEXT": model.with_name("text.txt"),
        "OUT": tmp_path / "out",
        "OUT.gguf": tmp_path / "x.gguf",
    }
    code = main._run([str(words.get(word, word)) for word in command])
    error = capsys.readouterr().err
    assert code == 3, error
    if name != "chat_template.jinja" or content != b"{% for %}":
        assert str(path) in error
        assert name in error


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_what_does_not_need_the_blob_goes_on(name: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.w4"
    with open_container(model) as container:
        path.write_bytes(with_blobs(container, {**container.blobs, name: NOT_JSON["NULs"]}))
    found = inspect(path)
    assert (name != "config.json") or any(f"{name}: not valid JSON" in note for note in found.notes)
    assert main._run(["diff", str(path), str(model)]) == 1
    assert main._run(["verify", str(path)]) == 0
    assert main._run(["cat", str(path), "model.norm.weight", "-o", str(tmp_path / "norm.npy")]) == 0


def test_a_whole_model_is_still_fine(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (RUN, BENCH, VERIFY):
        words = {"FILE": model, "TEXT": model.with_name("text.txt")}
        assert main._run([str(words.get(word, word)) for word in command]) == 0, capsys.readouterr().err
