"""`w4conv inspect`: containers, streams, checkpoints, hostile names."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import tokenizers
from command import COMMAND, Runner, environment
from helpers import make_llama_dir
from stories import trained


def test_container_as_text(w4: Runner, container: Path) -> None:
    out = w4("inspect", container).done()
    assert out.err == ""
    for part in (
        "w4 container", "LlamaForCausalLM: 2 layers of 64, 4 heads (2 KV) of 16", "head tied", "rtn, w4a16, group 128",
        "model.safetensors", "BPE, 277 tokens, BOS <s>, EOS </s>, chat template", "int4/g128", "embedding", "attention",
        "end tokens",
    ):  # fmt: skip
        assert part in out.out
    assert "self_attn.q_proj" not in out.out, "tensors are listed only when asked for"
    listed = w4("inspect", container, "--tensors").done().out
    assert "model.layers.1.self_attn.q_proj.weight" in listed


def test_container_as_json(w4: Runner, container: Path, checkpoint: Path) -> None:
    found = json.loads(w4("inspect", container, "--json").done().out)
    assert found["schema"] == "w4conv.inspect/1"
    assert (found["kind"], found["architecture"]) == ("w4", "LlamaForCausalLM")
    assert found["nbytes"] == container.stat().st_size
    assert found["model"]["n_layers"] == 2
    assert found["provenance"]["source"]["kind"] == "safetensors"
    assert found["tokenizer"] == {
        "model": "BPE", "n_tokens": 277, "bos_token": "<s>", "eos_token": "</s>", "has_chat_template": True,
    }  # fmt: skip
    # Sizes by hand: 64-column rows are one group; embedding 300 rows pad to 304 in int8.
    kinds = {t["what"]: t["nbytes"] for t in found["by_kind"]}
    assert kinds["embedding"] == 304 * 64 + 304 * 2
    attention_rows = 2 * (64 + 32 + 32 + 64)
    assert kinds["attention"] == attention_rows * 64 // 2 + attention_rows * 2
    assert kinds["norm"] == 5 * 64 * 2
    assert sum(t["nbytes"] for t in found["tensors"]) == sum(kinds.values())
    n = sum(t["n_parameters"] for t in found["by_kind"])
    assert found["bits_per_weight"] == pytest.approx(8 * sum(kinds.values()) / n)
    source = json.loads(w4("inspect", checkpoint, "--json").done().out)
    assert source["n_parameters"] == found["n_parameters"] == n


def test_header_from_a_stream(w4: Runner, container: Path) -> None:
    by_path = json.loads(w4("inspect", container, "--json").done().out)
    data = container.read_bytes()
    by_stream = json.loads(w4("inspect", "-", "--json", stdin=data).done().out)
    assert by_stream["digest"] is None, "it stands at the end"
    assert {**by_stream, "path": by_path["path"], "digest": by_path["digest"]} == by_path
    last_blob_end = len(data) // 2  # the weights are not needed
    assert json.loads(w4("inspect", "-", "--json", stdin=data[:last_blob_end]).done().out) == by_stream


def test_checkpoints(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    out = w4("inspect", checkpoint).done().out
    assert "Hugging Face directory" in out
    assert "F16" in out
    assert w4("inspect", trained("bf16")).done().out.count("BF16") == 1


def test_unsupported_models_are_described_with_a_note(w4: Runner, tmp_path: Path) -> None:
    make_llama_dir(tmp_path / "gpt", config={"architectures": ["GPT2LMHeadModel"]})
    out = w4("inspect", "gpt").done().out
    assert "w4conv cannot convert this model" in out
    assert "GPT2LMHeadModel" in out


def test_errors(w4: Runner, container: Path, tmp_path: Path) -> None:
    w4("inspect", "absent.w4").failed(3, "absent.w4", "No such file")
    w4("inspect", "absent").failed(3, "absent", "no such file")
    w4("inspect", "-", stdin=b"").failed(3, "standard input")
    w4("inspect", "-", stdin=b"GGUF" + bytes(200)).failed(3, "standard input")
    data = container.read_bytes()
    (tmp_path / "cut.w4").write_bytes(data[:-1])
    w4("inspect", "cut.w4").failed(3, "cut.w4", "cut short")
    (tmp_path / "renamed").write_bytes(data[:-1])
    w4("inspect", "renamed").failed(3, "cut short")
    (tmp_path / "text.w4").write_bytes(data.replace(b"\r\n", b"\n"))
    w4("inspect", "text.w4").failed(3, "text.w4")


def test_names_from_a_file_cannot_write_to_the_terminal(w4: Runner, tmp_path: Path) -> None:
    make_llama_dir(tmp_path / "evil", config={"architectures": ["\x1b[2J\x07Evil"]})
    out = w4("inspect", "evil").done().out
    assert "\\x1b[2J\\x07Evil" in out  # and the fixture checks that no escape sequence is left


def test_reader_that_stops_early_is_no_error(container: Path) -> None:
    for args in (["inspect", container, "--tensors"], ["inspect", container, "--json"], ["--version"], ["--help"]):
        with subprocess.Popen(
            [*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        ) as process:
            assert process.stdout is not None
            process.stdout.close()
            _, err = process.communicate()
            assert (process.returncode, err) == (0, b""), args


def test_every_end_token_is_shown(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in", tied=True)
    assert re.search(r"end tokens +</s>\n", w4("inspect", "in").done().out)
    (source / "generation_config.json").write_text('{"eos_token_id": [257, 5, 9]}')
    blobs = {file.name: file.read_bytes() for file in source.iterdir() if file.suffix == ".json"}
    ids = tokenizers.Tokenizer.from_str(blobs["tokenizer.json"].decode())
    expected = [ids.id_to_token(i) for i in sorted((257, 5, 9))]
    found = json.loads(w4("inspect", "in", "--json").done().out)
    assert found["end_tokens"] == expected
    assert all(token in w4("inspect", "in").done().out for token in expected)
