"""A GGUF file as a source: tensors under Hugging Face names, in Hugging Face row order, dequantized on reading."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import VALUE_DTYPES
from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile
from w4conv.sources.base import CodedRows, Source
from w4conv.sources.gguf_architectures import ARCHITECTURES
from w4conv.sources.gguf_config import LONG_FACTORS, ROPE_FACTORS, rebuild_config, rebuild_generation_config
from w4conv.sources.gguf_header import GgufHeader, GgufTensor
from w4conv.sources.gguf_tensors import StoredTensor, named_tensors
from w4conv.sources.gguf_tokenizer import rebuild_tokenizer

SPLIT: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_SPLITS: Final = 1000


class GgufSource(Source):
    """See `open_gguf`."""

    kind = "gguf"

    def __init__(
        self,
        path: Path,
        *,
        headers: list[GgufHeader],
        stored: dict[str, StoredTensor],
        blobs: dict[str, bytes],
        notes: list[str],
    ) -> None:
        self.path = path
        self.files = tuple(header.path for header in headers)
        self._stored = stored
        self.tensors = {name: t.source_tensor(name) for name, t in stored.items()}
        self.blobs = blobs
        self.notes = tuple(notes)

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.generic]:
        return self._stored[name].read(rows)

    def read_coded(self, name: str, rows: slice) -> CodedRows:
        coding = self.tensors[name].coding
        if coding is None:
            raise ValueError(f"{name} has no coding")
        return self._stored[name].read_coded(rows, coding)

    def close(self) -> None:
        for t in self._stored.values():
            t.file.close()


def open_gguf(path: Path, *, raw: bool = False) -> GgufSource:
    """Open a GGUF file of a supported architecture; of a split model, its first part. raw: of any; see `open_source`.

    Opening reads the header alone. Raises InputError naming the file, and the key or tensor, that is corrupt, missing
    or not supported.
    """
    headers = _open_parts(path)
    header = headers[0]
    kind = header.text("general.type", "model")
    if kind != "model":
        advice = "; merge it into its base model first" if kind == "adapter" else ""
        raise header.error("general.type", f"{kind!r} is not a model{advice}")
    name = header.text("general.architecture")
    if raw:
        return _open_raw(path, headers, name)
    if name not in ARCHITECTURES:
        raise header.error("general.architecture", f"{name!r} is not supported; known are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    found = _all_tensors(headers)
    if not found:
        raise InputError(f"{path}: holds no tensors, only metadata")
    factors = {name: _row(name, *found.pop(name)) for name in (ROPE_FACTORS, *LONG_FACTORS) if name in found}
    stored = named_tensors(architecture, header, found)
    config = rebuild_config(
        header,
        architecture,
        vocab_size=stored["model.embed_tokens.weight"].tensor.shape[0],
        biases=frozenset(name for name in stored if name.endswith(".bias")),
        tied="lm_head.weight" not in stored,
        factors=factors,
        dtype=_main_dtype(stored),
    )
    blobs = {"config.json": config, "generation_config.json": rebuild_generation_config(header)}
    tokenizer, notes = rebuild_tokenizer(header)
    blobs |= tokenizer
    return GgufSource(path, headers=headers, stored=stored, blobs=blobs, notes=[*_notes(stored, blobs), *notes])


def _open_raw(path: Path, headers: list[GgufHeader], architecture: str) -> GgufSource:
    everything = {name: StoredTensor(*place) for name, place in _all_tensors(headers).items()}
    stored = {name: t for name, t in everything.items() if t.has_values()}
    blobs = {"config.json": json.dumps({"architectures": [architecture], "model_type": architecture}).encode()}
    tokenizer, notes = rebuild_tokenizer(headers[0])
    blobs |= {"generation_config.json": rebuild_generation_config(headers[0])} | tokenizer
    notes = [*_notes(stored, blobs), *notes]
    if others := [f"{name} ({t.tensor.type_name})" for name, t in everything.items() if name not in stored]:
        notes.append(f"Left out, as such a type has no values to convert: {', '.join(others[:4])}.")
    return GgufSource(path, headers=headers, stored=stored, blobs=blobs, notes=notes)


def _open_parts(path: Path) -> list[GgufHeader]:
    """Headers of the file, or of all parts of a split model in their order."""
    first = GgufHeader(MappedFile(path))
    n_parts = first.integer("split.count", 1)
    if n_parts <= 1:
        return [first]
    match = SPLIT.fullmatch(path.name)
    if n_parts > MAX_SPLITS or match is None or int(match[3]) != n_parts:
        raise first.error("split.count", f"{n_parts} parts, but the file is not named like -00001-of-{n_parts:05}.gguf")
    names = [f"{match[1]}-{i + 1:05}-of-{n_parts:05}.gguf" for i in range(n_parts)]
    if path.name != names[0]:
        raise InputError(f"{path}: one part of a split model; name the first one, {names[0]}")
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        raise InputError(
            f"{path}: {len(missing)} of {n_parts} parts are missing, the first is {missing[0]}; fetch them"
        )
    headers = [first, *(GgufHeader(MappedFile(path.with_name(name))) for name in names[1:])]
    for i, header in enumerate(headers):
        if (header.integer("split.no"), header.integer("split.count")) != (i, n_parts):
            raise header.error("split.no", f"expected part {i} of {n_parts}: the parts do not belong together")
    n_tensors = sum(len(header.tensors) for header in headers)
    if first.integer("split.tensors.count", n_tensors) != n_tensors:
        raise first.error("split.tensors.count", f"the parts hold {n_tensors} tensors: they do not belong together")
    return headers


def _all_tensors(headers: list[GgufHeader]) -> dict[str, tuple[MappedFile, GgufTensor]]:
    out: dict[str, tuple[MappedFile, GgufTensor]] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in out:
                raise InputError(f"{header.path}: {name} is in two parts")
            out[name] = header.file, tensor
    return out


def _row(name: str, file: MappedFile, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    if tensor.type_name != "F32" or len(tensor.shape) != 1:
        raise InputError(f"{file.path}: {name}: expected one row of F32")
    return np.frombuffer(file.view(tensor.offset, tensor.nbytes).tobytes(), np.dtype("<f4"))


def _main_dtype(stored: Mapping[str, StoredTensor]) -> str:
    """The dtype for config.json. The type before quantization is not recorded; F16 is usual."""
    types = {t.tensor.type_name for t in stored.values() if len(t.tensor.shape) > 1}
    if "BF16" in types:
        return "bfloat16"
    return "float32" if types == {"F32"} else "float16"


def _notes(stored: Mapping[str, StoredTensor], blobs: Mapping[str, bytes]) -> list[str]:
    rebuilt = " and ".join(name for name in ("config.json", "tokenizer.json") if name in blobs)
    notes = [f"Rebuilt from GGUF metadata: {rebuilt}."]
    counts = Counter(t.tensor.type_name for t in stored.values())
    quantized = [
        f"{name} ({n} tensor{'s' if n > 1 else ''})" for name, n in counts.most_common() if name not in VALUE_DTYPES
    ]
    if quantized:
        notes.append(f"Quantized already, as {', '.join(quantized)}: what that quantization lost is not restored.")
    return notes
