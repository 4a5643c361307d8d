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
from w4files import open_bytes, small_file, with_blobs

from w4conv.commands.diff import diff
from w4conv.commands.export import export
from w4conv.commands.inspect import inspect
from w4conv.commands.quantize import quantize
from w4conv.container import open_container
from w4conv.errors import InputError, UsageError
from w4conv.measure.text_windows import cut_text
from w4conv.models import parse_config, spec_of
from w4conv.runtime.chat import templates_of
from w4conv.runtime.engine import Model
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


SHARD = "model-00001-of-00001.safetensors"


def _safetensors(raw: bytes) -> None:
    directory, _ = _checkpoint()
    (directory / "model.safetensors").write_bytes(raw)
    _read_all(directory)


def _shard_index(raw: bytes) -> None:
    directory, weights = _checkpoint()
    (directory / "model.safetensors").unlink(missing_ok=True)  # it would be read in place of the shards
    files = {SHARD: weights, "model.safetensors.index.json": raw}
    for name, data in files.items():
        (directory / name).write_bytes(data)
    try:
        _read_all(directory)
    finally:
        for name in files:
            (directory / name).unlink()


def _index_seeds() -> list[bytes]:
    _, weights = _checkpoint()
    names = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    names.pop("__metadata__", None)
    return [json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}).encode()]


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


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_BLOBS = (
    b"", b"[]", b"{", b"{}", b"null", b"\0" * 9, b"[" * 100_000, b"9" * 5000, b"\xff\xfe{", b"\xef\xbb\xbf{}",
    b'{"a":' * 50_000, b'{"a":1,"a":2}', b"1e999", b'"x"', b"version https://git-lfs.github.com/spec/v1\n",
)  # fmt: skip
BLOB_SEEDS = {
    "generation_config.json": {"bos_token_id": 256, "eos_token_id": [257, 3], "temperature": 0.7, "do_sample": True},
    "tokenizer_config.json": {
        "bos_token": {"content": "<s>", "lstrip": False, "special": True}, "eos_token": "</s>", "add_bos_token": True,
        "added_tokens_decoder": {"256": {"content": "<s>", "special": True}},
        "chat_template": "{{ messages[0].content }}",
        "image_token": "<img>", "clean_up_tokenization_spaces": False,
    },
    "special_tokens_map.json": {"bos_token": "<s>", "pad_token": {"content": "</s>"}, "unk_token": None},
}  # fmt: skip


@cache
def _converted() -> bytes:
    directory, weights = _checkpoint()
    (directory / "model.safetensors").write_bytes(weights)
    path = _folder() / "model.w4"
    quantize(directory, path, overwrite=True, effort=0, scheme="w4a16")
    return path.read_bytes()


def _blob_seeds() -> list[bytes]:
    """Blobs as one JSON object of texts, in which a character stands for a byte."""
    blobs = dict(open_bytes(_converted()).blobs)
    blobs |= {name: json.dumps(value).encode() for name, value in BLOB_SEEDS.items()}
    return [json.dumps({name: data.decode("latin-1") for name, data in blobs.items()}).encode()]


def _mutate_blobs(raw: bytes, rng: random.Random) -> bytes:
    """One file changed, cut, removed or replaced by something else."""
    blobs = {name: text.encode("latin-1") for name, text in json.loads(raw).items()}
    name = rng.choice(sorted(blobs))
    kind = rng.random()
    if kind < 0.05:
        del blobs[name]
    elif kind < 0.15:
        blobs[name] = rng.choice(NO_BLOBS)
    elif kind < 0.2:
        blobs[name] = blobs[name][: rng.randrange(len(blobs[name]) + 1)]
    else:
        blobs[name] = _mutate_json(blobs[name], rng)
    return json.dumps({name: data.decode("latin-1") for name, data in blobs.items()}).encode()


def _blobs(raw: bytes) -> None:
    """What each command makes of a container with these blobs; one that refuses them does not end the others."""
    blobs = {name: text.encode("latin-1") for name, text in json.loads(raw).items()}
    path = _folder() / "blobs.w4"
    path.write_bytes(with_blobs(open_bytes(_converted()), blobs))
    faults: list[InputError] = []

    def use(step: Callable[[], object]) -> None:
        try:
            step()
        except InputError as error:
            faults.append(error)
        except UsageError:  # such as a prompt with a BOS that the model does not have
            pass

    use(lambda: inspect(path))
    use(lambda: diff(path, _folder() / "model.w4"))
    use(lambda: _run_model(path))
    for to in ("gguf", "safetensors", "mlx"):
        use(lambda to=to: export(path, _folder() / f"exported-{to}", to=to, overwrite=True))  # type: ignore[misc]  # bound at once
    if faults:
        raise faults[0]


def _run_model(path: Path) -> None:
    with open_container(path) as container:
        spec_of(container.blobs)
        tokenizer = Tokenizer(container.blobs)
        tokenizer.stop_ids(chat=True)
        text = _folder() / "text.txt"
        text.write_text("The king said to the queen that the kingdom was theirs. " * 4)
        cut_text(container, text, convention="llama.cpp", ctx=8)
        if named := templates_of(container.blobs):
            assert all(isinstance(text, str) for text in named.values())
        with Model(container, ctx=16, threads=1) as model:
            model.logits([1])


def _container_seeds() -> list[bytes]:
    return [vectors.raw(e) for e in vectors.SOUND] + [small_file()[0]]


TARGETS: Mapping[str, Target] = {
    "container": Target(_container_seeds, mutate, _container),
    "safetensors": Target(lambda: [_checkpoint()[1]], _mutate_safetensors, _safetensors),
    "shard-index": Target(_index_seeds, _mutate_json, _shard_index),
    "gguf": Target(_gguf_seeds, _mutate_gguf, _gguf),
    "config": Target(_config_seeds, _mutate_json, _config),
    "blobs": Target(_blob_seeds, _mutate_blobs, _blobs),
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
