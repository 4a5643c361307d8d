"""What is fuzzed: for each kind of input the seeds, a mutation that knows its structure, and what is done with it.

An input may be refused by an InputError. Any other exception, a crash, a hang or a large allocation is a fault.
"""

from __future__ import annotations

import atexit
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pieces
import vectors
from helpers import make_llama_dir, make_llama_gguf
from mutations import INTEGERS, change_bytes, change_tree, mutate
from w4files import open_bytes, small_file

from w4conv.errors import InputError
from w4conv.models import parse_config
from w4conv.runtime.tokenizer import Tokenizer
from w4conv.sources import open_source
from w4conv.sources.sentencepiece import rebuild_from_pieces
from w4conv.sources.vocabulary import UnknownTokenizerError

GGUF_TOKENS = tuple(n.to_bytes(8, "little") for n in INTEGERS) + tuple(
    (n & 0xFFFFFFFF).to_bytes(4, "little") for n in INTEGERS
)
SHAPE = {"hidden": 32, "inner": 32, "layers": 1, "heads": 2, "kv_heads": 1}


@dataclass(frozen=True)
class Target:
    seeds: Callable[[], list[bytes]]
    mutate: Callable[[bytes, random.Random], bytes]
    run: Callable[[bytes], None]


@cache
def _folder() -> Path:
    """Where inputs that have to be files are written; in memory where there is such a place."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="w4conv-fuzz-", dir=shared if shared.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _container(raw: bytes) -> None:
    container = open_bytes(raw)
    with suppress(InputError):
        container.check()
    for name, info in container.tensors.items():
        if info.n_values < 1 << 20:
            container.dequantize(name)


def _mutate_safetensors(raw: bytes, rng: random.Random) -> bytes:
    """The JSON header changed as a tree or as text, its length put right; or any byte."""
    n = int.from_bytes(raw[:8], "little")
    if n > len(raw) - 8 or rng.random() < 0.1:
        return change_bytes(raw, rng, GGUF_TOKENS)
    header, data = raw[8 : 8 + n], raw[8 + n :]
    try:
        header = json.dumps(change_tree(json.loads(header), rng)).encode() if rng.random() < 0.7 else b""
    except (ValueError, RecursionError):
        header = b""
    header = header or change_bytes(raw[8 : 8 + n], rng, (b"{", b"}", b",", b'"', b"\xff", b"1e9", b"-1"))
    return struct.pack("<Q", len(header)) + header + data


@cache
def _checkpoint() -> tuple[Path, bytes]:
    directory = make_llama_dir(_folder() / "model", vocab=260, **SHAPE)
    return directory, (directory / "model.safetensors").read_bytes()


def _read_all(path: Path) -> None:
    with open_source(path) as source:
        for name, tensor in source.tensors.items():
            values = source.read(name)
            assert values.shape == tensor.shape
            if tensor.shape and tensor.shape[0] > 1:
                part = source.read(name, slice(0, 1))
                assert np.array_equal(part.view(np.uint8), values[:1].view(np.uint8))
        parse_config(json.loads(source.blobs["config.json"]))


def _safetensors(raw: bytes) -> None:
    directory, _ = _checkpoint()
    (directory / "model.safetensors").write_bytes(raw)
    _read_all(directory)


def _shard_index(raw: bytes) -> None:
    directory, weights = _checkpoint()
    (directory / "model.safetensors").write_bytes(weights)
    index = directory / "model.safetensors.index.json"
    index.write_bytes(raw)
    try:
        _read_all(directory)
    finally:
        index.unlink()


def _index_seeds() -> list[bytes]:
    _, weights = _checkpoint()
    names = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    names.pop("__metadata__", None)
    return [json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}).encode()]


def _gguf_seeds() -> list[bytes]:
    seeds = []
    for qtype in ("F32", "F16", "Q4_0", "Q8_0"):
        path = make_llama_gguf(_folder() / "seed.gguf", qtype=qtype, **SHAPE)
        seeds.append(path.read_bytes())
    return seeds


def _mutate_gguf(raw: bytes, rng: random.Random) -> bytes:
    """Mostly the header, where the structure is; a number overwritten by a telling one, or any byte."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = int(len(raw) * rng.random() ** 3)
        if rng.random() < 0.6:
            token = rng.choice(GGUF_TOKENS)
            raw = raw[:at] + token + raw[at + len(token) :]
        else:
            raw = raw[:at] + change_bytes(raw[at : at + 64], rng, GGUF_TOKENS) + raw[at + 64 :]
    return raw


def _gguf(raw: bytes) -> None:
    path = _folder() / "input.gguf"
    path.write_bytes(raw)
    _read_all(path)


def _mutate_json(raw: bytes, rng: random.Random) -> bytes:
    try:
        if rng.random() < 0.85:
            tree = json.loads(raw)
            for _ in range(rng.choice((1, 1, 2, 3))):
                tree = change_tree(tree, rng)
            return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        pass
    return change_bytes(raw, rng, (b"{", b"}", b"[", b",", b'"', b"\xff", b"1e999", b"NaN", b"-1"))


def _config_seeds() -> list[bytes]:
    seeds = []
    for architecture in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"):
        directory = make_llama_dir(_folder() / architecture, architecture=architecture, **SHAPE)
        seeds.append((directory / "config.json").read_bytes())
        scaled = json.loads(seeds[-1])
        scaled["rope_scaling"] = {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
        seeds.append(json.dumps(scaled).encode())
    return seeds


def _config(raw: bytes) -> None:
    directory, weights = _checkpoint()
    (directory / "model.safetensors").write_bytes(weights)
    before = (directory / "config.json").read_bytes()
    (directory / "config.json").write_bytes(raw)
    try:
        with open_source(directory) as source:
            spec = parse_config(json.loads(source.blobs["config.json"]))
            spec.tensors()
    except (ValueError, RecursionError):  # of json.loads here, which the command turns into an error of its own
        pass
    finally:
        (directory / "config.json").write_bytes(before)


def _tokenizer_seeds() -> list[bytes]:
    directory, _ = _checkpoint()
    return [(directory / "tokenizer.json").read_bytes()]


def _tokenizer(raw: bytes) -> None:
    directory, _ = _checkpoint()
    blobs = {file.name: file.read_bytes() for file in directory.iterdir() if file.suffix == ".json"}
    tokenizer = Tokenizer(blobs | {"tokenizer.json": raw})
    ids = tokenizer.encode("The king, caf\u00e9 \U0001f600")
    tokenizer.decode(ids)
    stream = tokenizer.stream()
    for token in [*ids, 0, 255, 256, 10**6]:
        stream.push(token)
    stream.finish()
    tokenizer.stop_ids(chat=True)


def _pieces(raw: bytes) -> None:
    with suppress(UnknownTokenizerError):
        _tokenizer(rebuild_from_pieces({"tokenizer.model": raw}, where="fuzzed")["tokenizer.json"])


def _pieces_seeds() -> list[bytes]:
    fallback = [*pieces.PIECES, *((f"<0x{byte:02X}>", pieces.BYTE) for byte in range(256))]
    unigram = pieces.field(3, 1)
    return [pieces.model(), pieces.model(trainer=unigram), pieces.model(fallback, normalizer=pieces.field(4, 1))]


def _container_seeds() -> list[bytes]:
    return [vectors.raw(e) for e in vectors.SOUND] + [small_file()[0]]


TARGETS: Mapping[str, Target] = {
    "container": Target(_container_seeds, mutate, _container),
    "safetensors": Target(lambda: [_checkpoint()[1]], _mutate_safetensors, _safetensors),
    "shard-index": Target(_index_seeds, _mutate_json, _shard_index),
    "gguf": Target(_gguf_seeds, _mutate_gguf, _gguf),
    "config": Target(_config_seeds, _mutate_json, _config),
    "tokenizer": Target(_tokenizer_seeds, _mutate_json, _tokenizer),
    "tokenizer.model": Target(_pieces_seeds, mutate, _pieces),
}


def attempt(target: Target, raw: bytes) -> bool:
    """Whether `raw` was accepted; whatever is not an InputError goes through."""
    try:
        target.run(raw)
    except InputError:
        return False
    return True
