"""Sidecars are read when a model is converted: a broken one is refused, one without effect is noted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import make_llama_dir, make_llama_gguf, tiny_tokenizer
from tokenizers import AddedToken

import w4conv
from w4conv.errors import InputError
from w4conv.runtime.tokenizer import Tokenizer

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"
STAND_INS = {
    "Git LFS pointer": LFS,
    "older LFS pointer": b"version https://hawser.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n",
    "web page": b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>",
    "web page after a line": b"\r\n  <html lang='en'>\n</html>",
    "XML": b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code></Error>',
    "server's error": b"Entry not found",
}
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
)
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")


def checkpoint(tmp_path: Path) -> Path:
    directory = make_llama_dir(tmp_path / "in", vocab=320)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (directory / name).write_text("{}")
    (directory / "additional_chat_templates").mkdir()
    for name in TEMPLATES:
        (directory / name).write_text("{{ messages[0].content }}")
    return directory


def convert(directory: Path) -> w4conv.QuantizeReport:
    return w4conv.quantize(directory, directory.with_suffix(".w4"), overwrite=True, effort=0, scheme="w4a16")


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("what", STAND_INS)
@pytest.mark.parametrize("name", [*JSON_FILES, *TEMPLATES, "model.safetensors"])
def test_stand_ins_are_called_by_name(name: str, what: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    (directory / name).write_bytes(STAND_INS[what])
    with pytest.raises(
        InputError, match=r"(is a Git LFS pointer|is a web page|is a server's|is an XML).*fetch"
    ) as error:
        convert(directory)
    assert str(directory / name) in str(error.value)


def test_stand_ins_in_place_of_other_files(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    for name in ("model.gguf", "model.w4", "imatrix.dat", "stats.safetensors", "rules.toml", "text.txt"):
        (tmp_path / name).write_bytes(LFS)
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    index.write_bytes(LFS)
    report = w4conv.quantize(
        directory, tmp_path / "beside.w4", effort=0, scheme="w4a16"
    )  # as transformers, which does not read the index then
    assert any(index.name in note for note in report.notes)
    single.rename(tmp_path / single.name)
    with pytest.raises(InputError, match="LFS"):
        convert(directory)
    (tmp_path / single.name).rename(single)
    index.unlink()
    with pytest.raises(InputError, match="LFS"):
        w4conv.quantize(tmp_path / "model.gguf", tmp_path / "out.w4", effort=0, scheme="w4a16")
    with pytest.raises(InputError, match="LFS"):
        w4conv.open(tmp_path / "model.w4")
    for name in ("imatrix.dat", "stats.safetensors", "text.txt"):
        with pytest.raises(InputError, match="LFS"):
            w4conv.quantize(
                directory, tmp_path / "out.w4", calibration=tmp_path / name, calibration_ctx=32, scheme="w4a16"
            )
    with pytest.raises(InputError, match="LFS"):
        w4conv.quantize(directory, tmp_path / "out.w4", recipe=tmp_path / "rules.toml", effort=0, scheme="w4a16")
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").write_bytes(LFS)
    with pytest.raises(InputError, match="LFS"):
        convert(directory)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"{}x", b"\0" * 20, b'\xef\xbb\xbf{"a": 1}', '{"a": 1}'.encode("utf-16"), b"[" * 99_999,
     b'{"a": 1, "a": 2}', b'{"a": ' + b"9" * 5000 + b"}", b'{"a": "\xff"}', b"null", b"'a'"],
)  # fmt: skip
@pytest.mark.parametrize("name", JSON_FILES)
def test_what_is_no_json_object(name: str, content: bytes, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    (directory / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        convert(directory)


@pytest.mark.parametrize("content", [b"", b"\xff", b"\xef\xbb\xbfx", b"a\0", "{{ a }}".encode("utf-16")])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_no_text(name: str, content: bytes, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    (directory / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        convert(directory)


@pytest.mark.parametrize("name", [*JSON_FILES[1:], TEMPLATES[0]])
def test_links_to_nowhere_and_folders_are_no_absence(name: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    (directory / name).unlink()
    assert convert(directory).notes is not None
    (directory / name).symlink_to("../../blobs/0123")
    with pytest.raises(InputError, match=r"a link to \.\./\.\./blobs/0123, which is not there"):
        convert(directory)
    (directory / name).unlink()
    (directory / name).symlink_to(name)
    with pytest.raises(InputError, match=name):
        convert(directory)
    (directory / name).unlink()
    (directory / name).mkdir()
    with pytest.raises(InputError, match="is a directory"):
        convert(directory)
    (directory / name).rmdir()
    os.mkfifo(directory / name)
    with pytest.raises(InputError, match="not a regular file"):
        convert(directory)


@pytest.mark.parametrize("value", ["2", 2.0, 2.5, True, [2, "3"], [2, None], [2.0], {"a": 1}, [[2]], "</s>"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_end_tokens_that_transformers_refuses(name: str, value: object, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    edit(directory / name, eos_token_id=value)
    with pytest.raises(InputError, match=rf"{name}: eos_token_id is .*; expected a token id or a list of them"):
        convert(directory)
    LlamaConfig = pytest.importorskip("transformers").LlamaConfig  # noqa: N806  # a class
    with pytest.raises(Exception, match="eos_token_id"):
        LlamaConfig(eos_token_id=value)


@pytest.mark.parametrize(("value", "ends"), [(-1, set()), (320, {320}), (2**40, {2**40}), ([2, 999], {2, 999})])
def test_end_tokens_without_effect(value: object, ends: set[int], tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    edit(directory / "generation_config.json", eos_token_id=value)
    edit(directory / "config.json", eos_token_id=None)
    report = convert(directory)
    assert any("eos_token_id names" in note and "no effect" in note for note in report.notes)
    with w4conv.open(directory.with_suffix(".w4")) as container:
        assert Tokenizer(container.blobs).stop_ids() == ends


@pytest.mark.parametrize("value", [None, [], 2, [2, 3], 0])
def test_end_tokens_that_are_fine(value: object, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    edit(directory / "generation_config.json", eos_token_id=value)
    assert not any("eos_token_id" in note for note in convert(directory).notes)


def test_added_tokens_that_are_left_aside(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "added_tokens.json").write_text(json.dumps({"<tool>": tokenizer.token_to_id("<tool>")}))
    assert not any("added_tokens.json" in note for note in convert(directory).notes)
    (directory / "added_tokens.json").write_text(json.dumps({"<new>": 301}))
    assert any("added_tokens.json" in n and "'<new>' is token 301" in n for n in convert(directory).notes)
    (directory / "added_tokens.json").write_bytes(LFS)
    with pytest.raises(InputError, match="LFS"):
        convert(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
        {"model": {"type": "New"}},
        {"decoder": {"type": "New"}},
        {"decoder": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"added_tokens": [{"id": 1, "content": 5}]},
        {"pre_tokenizer": 7},
        {"post_processor": {"type": "TemplateProcessing", "single": "$A", "pair": [], "special_tokens": []}},
    ],
)
def test_tokenizers_that_the_package_refuses(change: dict[str, Any], tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    edit(directory / "tokenizer.json", **change)
    with pytest.raises(InputError, match=r"tokenizer\.json .*take it away"):
        convert(directory)
    (directory / "tokenizer.json").unlink()
    convert(directory)


def test_templates_that_are_no_jinja_are_told(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    (directory / "chat_template.jinja").write_text("{% for %}")
    assert any("chat template 'default' cannot be used" in note for note in convert(directory).notes)


def test_a_gguf_file_is_checked_as_well(tmp_path: Path) -> None:
    path = make_llama_gguf(tmp_path / "model.gguf")
    path.write_bytes(b"<html>" + path.read_bytes())
    with pytest.raises(InputError, match="web page"):
        w4conv.quantize(path, tmp_path / "out.w4", effort=0, scheme="w4a16")
