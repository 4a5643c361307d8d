"""Exports, read back by the packages of the formats: safetensors and gguf."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from cuts import LLAMA3, O200K, QWEN2, TEKKEN
from exports import config, converted, recoded, same, values
from helpers import tiny_tokenizer
from safetensors import safe_open
from stories import trained
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

import w4conv
from w4conv.commands.export import export
from w4conv.container import open_container
from w4conv.errors import InputError, OutputError, UsageError
from w4conv.exports import FORMATS
from w4conv.scheme import QuantScheme
from w4conv.sources import open_source

F32 = npt.NDArray[np.float32]
WORDS = {"f16": "F16", "bf16": "BF16", "f32": "F32"}


def read_safetensors(directory: Path) -> dict[str, F32]:
    """Every tensor as float32; the safetensors package reads no BF16 into numpy, so that is taken from the file."""
    out: dict[str, F32] = {}
    for file in sorted(directory.glob("*.safetensors")):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert header["__metadata__"]["format"] == "pt"
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                entry = header[name]
                if entry["dtype"] == "BF16":
                    start, end = entry["data_offsets"]
                    bits = np.frombuffer(raw[8 + length + start : 8 + length + end], "<u2").reshape(entry["shape"])
                    out[name] = (bits.astype(np.uint32) << 16).view(np.float32)
                else:
                    out[name] = tensors.get_tensor(name).astype(np.float32)
    return out


def read_gguf(path: Path) -> dict[str, tuple[str, F32]]:
    """name -> (type, float32 values)."""
    reader = gguf.GGUFReader(path)
    out = {}
    for t in reader.tensors:
        data = gguf.dequantize(t.data, t.tensor_type).reshape([int(n) for n in reversed(t.shape)])
        out[t.name] = t.tensor_type.name, np.asarray(data, np.float32)
    return out


def interleaved(a: F32, n_heads: int) -> F32:
    """Rows of each head as llama.cpp wants them: pair after pair."""
    return a.reshape(n_heads, 2, a.shape[0] // n_heads // 2, -1).swapaxes(1, 2).reshape(a.shape)


def test_safetensors_f32_is_exact(tmp_path: Path) -> None:
    path = converted(tmp_path)
    report = export(path, tmp_path / "out", to="safetensors")
    assert report.exact
    found, expected = read_safetensors(tmp_path / "out"), values(path)
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    assert config(tmp_path / "out")["torch_dtype"] == "float32"
    with open_container(path) as container:
        for name, data in container.blobs.items():
            if name != "config.json":
                assert (tmp_path / "out" / name).read_bytes() == data
    assert report.output_nbytes == sum(f.stat().st_size for f in (tmp_path / "out").iterdir())
    assert {f.name: f.nbytes for f in report.files} == {f.name: f.stat().st_size for f in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_safetensors_rounding_is_measured(tmp_path: Path, dtype: str) -> None:
    path = converted(tmp_path)
    report = export(path, tmp_path / "out", to="safetensors", dtype=dtype)
    assert report.exact is False
    found, expected = read_safetensors(tmp_path / "out"), values(path)
    errors = {name: float(np.abs(found[name] - expected[name]).max()) for name in expected}
    for total in report.tensors:
        assert total.becomes == WORDS[dtype]
    assert max(t.max_abs_error or 0 for t in report.tensors) == max(errors.values()) > 0
    assert sum(t.n_exact or 0 for t in report.tensors) == sum(e == 0 for e in errors.values())
    relative = 2.0 ** (-11 if dtype == "f16" else -8)
    assert all(errors[n] <= relative * np.abs(expected[n]).max() + 1e-7 for n in errors)


def test_an_exported_directory_converts_to_the_same_codes(tmp_path: Path) -> None:
    """RTN is idempotent on its own values: the extreme of each group is hit by the lowest level."""
    path = converted(tmp_path, dtype="F32")
    export(path, tmp_path / "out", to="safetensors")
    w4conv.quantize(tmp_path / "out", tmp_path / "again.w4", group_size=32, effort=0, scheme="w4a16")
    first, again = values(path), values(tmp_path / "again.w4")
    assert all(same(first[name], again[name]) for name in first)


def test_shards(tmp_path: Path) -> None:
    path = converted(tmp_path)
    report = export(path, tmp_path / "out", to="safetensors", max_shard_size="100KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(f.name for f in report.files if f.name.endswith(".safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert sorted(set(index["weight_map"].values())) == shards
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "out" / shard, "numpy") as tensors:
            assert name in set(tensors.keys())
    assert index["metadata"]["total_size"] == 4 * sum(v.size for v in values(path).values())
    found = read_safetensors(tmp_path / "out")
    assert all(same(found[name], v) for name, v in values(path).items())


@pytest.mark.parametrize("size", ["0", "5XB", "-1", "", "GB", "1.5GB", True])
def test_shard_size_is_checked(tmp_path: Path, size: str) -> None:
    with pytest.raises(UsageError, match="max-shard-size"):
        export(tmp_path / "no.w4", tmp_path / "out", to="safetensors", max_shard_size=size)


@pytest.mark.parametrize("group_size", [32, 64, 128, "row"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
def test_gguf_is_exact(tmp_path: Path, architecture: str, group_size: int | str) -> None:
    path = converted(tmp_path, architecture=architecture, group_size=group_size, hidden=64, inner=160)
    report = export(path, tmp_path / "out.gguf", to="gguf")
    assert report.exact
    assert report.output_nbytes == (tmp_path / "out.gguf").stat().st_size
    found, expected = read_gguf(tmp_path / "out.gguf"), values(path)
    assert len(found) == len(expected)
    heads = {"attn_q": ("self_attn.q_proj", 4), "attn_k": ("self_attn.k_proj", 2)}
    for part, (module, n_heads) in heads.items():
        for ending in ("weight", "bias"):
            name = f"model.layers.1.{module}.{ending}"
            if name in expected:
                want = expected[name]
                if architecture != "Qwen2ForCausalLM":
                    want = interleaved(want, n_heads)
                assert same(found[f"blk.1.{part}.{ending}"][1], want)
    plain = {
        "token_embd.weight": ("model.embed_tokens.weight", "Q8_0"),
        "output.weight": ("lm_head.weight", "Q8_0"),
        "output_norm.weight": ("model.norm.weight", "F32"),
        "blk.0.attn_norm.weight": ("model.layers.0.input_layernorm.weight", "F32"),
        "blk.0.ffn_norm.weight": ("model.layers.0.post_attention_layernorm.weight", "F32"),
        "blk.0.attn_v.weight": ("model.layers.0.self_attn.v_proj.weight", "Q4_0"),
        "blk.0.attn_output.weight": ("model.layers.0.self_attn.o_proj.weight", "Q4_0"),
        "blk.1.ffn_gate.weight": ("model.layers.1.mlp.gate_proj.weight", "Q4_0"),
        "blk.1.ffn_up.weight": ("model.layers.1.mlp.up_proj.weight", "Q4_0"),
        "blk.1.ffn_down.weight": ("model.layers.1.mlp.down_proj.weight", "Q4_0"),
    }
    for name, (ours, kind) in plain.items():
        assert found[name][0] == kind
        assert same(found[name][1], expected[ours])


def test_gguf_of_other_schemes(tmp_path: Path) -> None:
    """Q4_1 only where every offset is a float16, floats as they are, the rest as F32 or as asked."""

    def choose(name: str, shape: tuple[int, ...]) -> QuantScheme | None:
        for word, scheme in {
            "q_proj": QuantScheme("int4z", 32, "f16"),
            "k_proj": QuantScheme("nf4", 32, "f16"),
            "v_proj": QuantScheme("int4", 32, "f32"),
            "gate_proj": QuantScheme("bf16"),
            "up_proj": QuantScheme("f16"),
        }.items():
            if word in name:
                return scheme
        return None

    path = recoded(converted(tmp_path, architecture="Qwen2ForCausalLM"), choose)
    report = export(path, tmp_path / "out.gguf", to="gguf")
    assert report.exact
    found, expected = read_gguf(tmp_path / "out.gguf"), values(path)
    kinds = {"attn_q": "F32", "attn_k": "F32", "attn_v": "F32", "ffn_gate": "BF16", "ffn_up": "F16", "ffn_down": "Q4_0"}
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    for part, kind in kinds.items():
        assert found[f"blk.0.{part}.weight"][0] == kind, part
    for part, name in names.items():
        assert same(found[f"blk.0.{part}.weight"][1], expected[f"model.layers.0.{name}.weight"])
    rounded = export(path, tmp_path / "f16.gguf", to="gguf", dtype="f16")
    assert rounded.exact is False
    assert read_gguf(tmp_path / "f16.gguf")["blk.0.attn_v.weight"][0] == "F16"


def test_gguf_q4_1_where_offsets_are_exact(tmp_path: Path) -> None:
    """Zero points that are powers of two give offsets that are float16."""
    path = recoded(converted(tmp_path, hidden=64), lambda n, s: QuantScheme("int4z", 32, "f16") if "mlp" in n else None)
    with open_container(path) as container:
        part = next(p for p in container.tensors["model.layers.0.mlp.up_proj.weight"].parts if p.kind == "zero_points")
        scales = container.part("model.layers.0.mlp.up_proj.weight", "scales").copy().view("<f2").astype(np.float32)
    raw = bytearray(path.read_bytes())
    zero_points = np.where(np.arange(part.nbytes) % 3 == 0, 8, 1).astype(np.uint8)
    raw[part.offset : part.end] = (zero_points * (scales != 0)).astype(np.uint8).tobytes()
    path.write_bytes(raw)  # its digests no longer fit, which only verify looks at
    export(path, tmp_path / "out.gguf", to="gguf")
    kind, found = read_gguf(tmp_path / "out.gguf")["blk.0.ffn_up.weight"]
    assert kind == "Q4_1"
    assert same(found, values(path)["model.layers.0.mlp.up_proj.weight"])


def test_gguf_rows_that_are_no_whole_blocks_become_floats(tmp_path: Path) -> None:
    path = converted(tmp_path, hidden=64, inner=104)
    assert export(path, tmp_path / "out.gguf", to="gguf").exact
    kind, found = read_gguf(tmp_path / "out.gguf")["blk.0.ffn_down.weight"]
    assert kind == "F32"
    assert same(found, values(path)["model.layers.0.mlp.down_proj.weight"])


def test_gguf_metadata(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    path = converted(tmp_path, vocab=310, config={"rope_scaling": scaling, "rope_theta": 500000.0})
    export(path, tmp_path / "out.gguf", to="gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "general.file_type": 2,
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 500000.0,
        "llama.vocab_size": 310,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {name: fields[name] for name in expected} == expected
    assert fields["tokenizer.chat_template"] == (tmp_path / "in" / "chat_template.jinja").read_text()
    document = json.loads((tmp_path / "in" / "tokenizer.json").read_text())
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == 310
    assert all(tokens[i] == token for token, i in document["model"]["vocab"].items())
    types = fields["tokenizer.ggml.token_type"]
    assert (types[0], types[256], types[309]) == (1, 3, 5 if tokens[309].startswith("[PAD") else 1)
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]
    assert fields["tokenizer.ggml.merges"] == merges
    factors = read_gguf(tmp_path / "out.gguf")["rope_freqs.weight"][1]
    assert factors.shape == (8,)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0


def test_gguf_sentence_pieces_come_back(tmp_path: Path) -> None:
    """A real SentencePiece-like tokenizer: scores in, the same tokens out."""
    w4conv.quantize(trained(), tmp_path / "s.w4", effort=0, scheme="w4a16")
    export(tmp_path / "s.w4", tmp_path / "s.gguf", to="gguf")
    w4conv.quantize(tmp_path / "s.gguf", tmp_path / "again.w4", scheme="f32", effort=0)
    from w4conv.runtime.tokenizer import Tokenizer as Ours

    text = "Once upon a time, there was a little girl.  Zoë said: 'héllo' — 12 日本\n\tdone"
    with open_container(tmp_path / "s.w4") as old, open_container(tmp_path / "again.w4") as new:
        assert Ours(old.blobs).encode(text) == Ours(new.blobs).encode(text)


def test_gguf_pieces_without_a_space_in_front(tmp_path: Path) -> None:
    """Gemma's: spaces become U+2581, none is put in front, and a step would split at the spaces that are gone."""
    pieces = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁▁",
        "ab",
    ]
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in pieces[:4]])
    path = converted(tmp_path, vocab=300, tokenizer=False)
    tokenizer.save(str(tmp_path / "in/tokenizer.json"))
    (tmp_path / "in/tokenizer_config.json").write_text('{"bos_token": "<bos>", "add_bos_token": true}')
    w4conv.quantize(tmp_path / "in", path, overwrite=True, effort=0, scheme="w4a16")
    export(path, tmp_path / "out.gguf", to="gguf")
    with open_source(tmp_path / "out.gguf") as source:
        again = Tokenizer.from_str(source.blobs["tokenizer.json"].decode())
    for text in ("a b  ab", " a", "  ", "é<eos> b", "ab\n a"):
        assert again.encode(text).ids == tokenizer.encode(text).ids, text


@pytest.mark.parametrize(
    ("pattern", "whole_words", "behavior", "name"),
    [
        (O200K, False, "isolated", "gpt-4o"),
        (O200K, False, "removed", "gpt-4o"),  # inverted: what matches is kept
        (TEKKEN, True, "isolated", "tekken"),
        (LLAMA3, True, "isolated", "llama-bpe"),
        (LLAMA3, False, "isolated", "dbrx"),
        (QWEN2, False, "isolated", "deepseek-r1-qwen"),
        (QWEN2, True, "isolated", None),  # whose merges would not make all of its words
        (QWEN2, "merged too", "isolated", "deepseek-r1-qwen"),
        (O200K, "merged too", "isolated", "gpt-4o"),
        (r"\p{L}+", False, "isolated", None),
    ],
)
def test_gguf_names_of_cuts(tmp_path: Path, pattern: str, whole_words: object, behavior: str, name: str | None) -> None:
    path = converted(tmp_path)
    tokenizer = tiny_tokenizer(260 if whole_words == "merged too" else 300)
    split = pre_tokenizers.Split(Regex(pattern), behavior, invert=behavior == "removed")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.model.ignore_merges = bool(whole_words)
    tokenizer.save(str(tmp_path / "in/tokenizer.json"))
    w4conv.quantize(tmp_path / "in", path, overwrite=True, effort=0, scheme="w4a16")
    if name is None:
        with pytest.raises(InputError, match="how it cuts a text"):
            export(path, tmp_path / "out.gguf", to="gguf")
        return
    export(path, tmp_path / "out.gguf", to="gguf")
    assert gguf.GGUFReader(tmp_path / "out.gguf").get_field("tokenizer.ggml.pre").contents() == name


def test_gguf_with_a_template_for_tools(tmp_path: Path) -> None:
    path = converted(tmp_path)
    (tmp_path / "in/additional_chat_templates").mkdir()
    (tmp_path / "in/additional_chat_templates/tool_use.jinja").write_text("tools: {{ tools }}")
    w4conv.quantize(tmp_path / "in", path, overwrite=True, effort=0, scheme="w4a16")
    export(path, tmp_path / "out.gguf", to="gguf")
    with open_container(path) as container, open_source(tmp_path / "out.gguf") as source:
        names = ("chat_template.jinja", "chat_template.tool_use.jinja")
        assert [source.blobs[name] for name in names] == [container.blobs[name] for name in names]


def test_gguf_refuses_a_tokenizer_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    path = converted(tmp_path)
    tokenizer = json.loads((tmp_path / "in/tokenizer.json").read_text())
    steps = [{"type": "Whitespace"}, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (tmp_path / "in/tokenizer.json").write_text(json.dumps(tokenizer))
    w4conv.quantize(tmp_path / "in", path, overwrite=True, effort=0, scheme="w4a16")
    with pytest.raises(InputError, match="how it cuts a text"):
        export(path, tmp_path / "out.gguf", to="gguf")


def test_gguf_without_a_tokenizer(tmp_path: Path) -> None:
    report = export(converted(tmp_path, tokenizer=False), tmp_path / "out.gguf", to="gguf")
    assert any("no tokenizer" in note for note in report.notes)


@pytest.mark.parametrize("to", FORMATS)
def test_same_container_same_bytes(tmp_path: Path, to: str) -> None:
    path = converted(tmp_path)
    for name in ("a", "b"):
        export(path, tmp_path / name, to=to)
    files = [tmp_path / "a"] if to == "gguf" else sorted((tmp_path / "a").iterdir())
    for file in files:
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()


@pytest.mark.parametrize("to", FORMATS)
def test_dry_run_writes_nothing_and_says_the_same_sizes(tmp_path: Path, to: str) -> None:
    path = converted(tmp_path)
    before = sorted(tmp_path.iterdir())
    planned = export(path, tmp_path / "out", to=to, dry_run=True)
    assert sorted(tmp_path.iterdir()) == before
    written = export(path, tmp_path / "out", to=to)
    assert (planned.files, planned.dry_run, planned.seconds) == (written.files, True, None)
    assert planned.exact in (None, written.exact)


@pytest.mark.parametrize("to", [to for to in FORMATS if to != "onnx"])  # which rounds nothing
def test_nothing_is_left_when_a_value_does_not_fit(tmp_path: Path, to: str) -> None:
    source_config = {"tie_word_embeddings": False}
    path = recoded(
        converted(tmp_path, config=source_config),
        lambda n, s: QuantScheme("int8", 32, "f32") if n in ("lm_head.weight", "model.embed_tokens.weight") else None,
    )
    with open_container(path) as container:
        part = next(p for p in container.tensors["lm_head.weight"].parts if p.kind == "scales")
    raw = bytearray(path.read_bytes())
    raw[part.offset : part.offset + 4] = np.float32(1e6).tobytes()
    path.write_bytes(raw)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"lm_head\.weight: a value of magnitude .* does not fit F16"):
        export(path, tmp_path / "out", to=to, dtype="f16")
    assert sorted(tmp_path.iterdir()) == before


def test_output_paths(tmp_path: Path) -> None:
    path = converted(tmp_path)
    out = tmp_path / "out"
    export(path, out, to="safetensors")
    (out / "model.safetensors").write_bytes(b"old")
    with pytest.raises(OutputError, match="not empty"):
        export(path, out, to="safetensors")
    assert (out / "model.safetensors").read_bytes() == b"old"
    export(path, out, to="safetensors", overwrite=True)
    assert (out / "model.safetensors").stat().st_size > 3
    (out / "thesis.docx").write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"it holds thesis\.docx"):
        export(path, out, to="safetensors", overwrite=True)
    assert (out / "thesis.docx").read_bytes() == b"precious"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("precious")
    with pytest.raises(OutputError, match=r"no config\.json"):
        export(path, tmp_path / "notes", to="safetensors", overwrite=True)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputError, match="not a directory"):
        export(path, tmp_path / "file", to="safetensors", overwrite=True)
    with pytest.raises(OutputError, match="does not exist"):
        export(path, tmp_path / "no/out", to="safetensors")
    with pytest.raises(UsageError, match="standard output"):
        export(path, "-", to="safetensors")
    (tmp_path / "empty").mkdir()
    export(path, tmp_path / "empty", to="safetensors")
    with pytest.raises(OutputError, match="is a directory"):
        export(path, out, to="gguf")
    with pytest.raises(UsageError, match="container itself"):
        export(path, path, to="gguf", overwrite=True)
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob("*.old"))


def test_unknown_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown format 'openvino'"):
        export(tmp_path / "x.w4", tmp_path / "out", to="openvino")
    with pytest.raises(UsageError, match="unknown dtype 'f8'"):
        export(tmp_path / "x.w4", tmp_path / "out", to="gguf", dtype="f8")


DIRECTORIES = ("safetensors", "gptq")


def kill_an_export(path: Path, out: Path, to: str, **options: object) -> None:
    """Export in a process of its own that dies by SIGKILL after the first tensors."""
    code = f"""
import os, signal
from w4conv.commands.export import export
from w4conv.progress import Silent

class Deadly(Silent):
    def advance(self, n, what):
        if "layers.1" in what or "blk.1" in what:
            os.kill(os.getpid(), signal.SIGKILL)

export({str(path)!r}, {str(out)!r}, to={to!r}, progress=Deadly(), **{options!r})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("to", [*DIRECTORIES, "gguf"])
def test_what_a_killed_export_left_is_removed(tmp_path: Path, to: str) -> None:
    path, out = converted(tmp_path), tmp_path / "out"
    kill_an_export(path, out, to)
    assert (tmp_path / "out.partial").exists()
    assert not out.exists()
    assert "the leftover of an interrupted export was removed" in export(path, out, to=to).notes
    assert not (tmp_path / "out.partial").exists()
    assert w4conv.verify(out, against=path).ok
    assert "the leftover of an interrupted export was removed" not in export(path, out, to=to, overwrite=True).notes


@pytest.mark.parametrize("to", DIRECTORIES)
def test_leftovers_of_others_are_let_be(tmp_path: Path, to: str) -> None:
    path, out = converted(tmp_path), tmp_path / "out"
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.doc").write_text("mine")
    with pytest.raises(OutputError, match=r"in the way: it holds thesis\.doc"):
        export(path, out, to=to)
    (partial / "thesis.doc").rename(partial / "config.json")
    lock = os.open(partial, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(OutputError, match="is being written by another process"):
        export(path, out, to=to)
    assert (partial / "config.json").read_text() == "mine"
    os.close(lock)
    export(path, out, to=to)
    partial.write_text("a file")
    with pytest.raises(OutputError, match="is in the way, and w4conv has not left it"):
        export(path, out, to=to, overwrite=True)


def test_a_replacement_cut_short_is_undone_or_finished(tmp_path: Path) -> None:
    path, out, old = converted(tmp_path), tmp_path / "out", tmp_path / "out.old"
    export(path, out, to="safetensors")
    out.rename(old)  # as if killed between the two renames
    with pytest.raises(OutputError, match="exists already and is not empty"):
        export(path, out, to="safetensors")
    assert w4conv.verify(out, against=path).ok, "the old one is back"
    assert not old.exists()
    shutil.copytree(out, old)  # as if killed while the old one was removed
    report = export(path, out, to="safetensors", dtype="f16", overwrite=True)
    assert "the leftover of an interrupted export was removed" in report.notes
    assert not old.exists()
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out"]
