"""Which files of a Hugging Face directory hold the model: weights, index of shards, config.json and its companions."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from w4conv.errors import InputError, listed
from w4conv.files.blobs import parse_json_object, parse_text
from w4conv.files.mapped import MappedFile
from w4conv.sources.reading import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, read_small
from w4conv.sources.safetensors import Entry, read_header

CONFIG: Final = "config.json"
SIDECARS: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
MAX_SHARDS: Final = 10_000
SHARD: Final = re.compile(r"-\d+-of-\d+\b")
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLE_ADVICE: Final = (
    "PyTorch pickles can run any code when they are read, so w4conv does not read them; "
    "save the model as safetensors (in transformers: model.save_pretrained(directory, safe_serialization=True))"
)


Stored = dict[str, tuple[MappedFile, Entry]]  # tensor -> its file, and where it lies there


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a directory. files: their names. index: the name of the index of shards, where there is one.

    other_files, other_indexes: further weights of the directory, which are not read.
    """

    stored: Stored
    files: list[str]
    index: str | None
    other_files: set[str]
    other_indexes: set[str]

    def notes(self) -> tuple[list[str], list[str]]:
        """(notes, warnings): what is read, and what is not."""
        notes, warnings = [], []
        if (named := self.index or self.files[0]) not in (INDEX, SINGLE):
            notes.append(f"There is no {SINGLE}: the weights are those of {named}.")
        named_by = f"{self.index} names" if self.index else f"{self.files[0]} holds"
        if self.other_indexes and self.other_files:
            warnings.append(
                f"There is more than one set of weights. As in transformers, {named_by} the weights; left aside: "
                f"{listed(sorted(self.other_indexes), most=4)}; {listed(sorted(self.other_files), most=4)}."
            )
        elif others := self.other_files | self.other_indexes:
            notes.append(f"Left aside, as {named_by} the weights: {listed(sorted(others), most=4)}.")
        return notes, warnings


def read_weights(directory: Path) -> Weights:
    """The weights as transformers would choose them, of a directory that passes `check_is_model`.

    Raises InputError where they are incomplete or ambiguous.
    """
    index, weight_map = (None, None) if (directory / SINGLE).exists() else _find_index(directory)
    files = _single_file(directory) if weight_map is None else sorted(set(weight_map.values()))
    stored = _read_shards(directory, files, weight_map)
    return Weights(stored, files, index, _weight_files(directory) - set(files), set(_indexes(directory)) - {index})


def read_sidecars(directory: Path) -> tuple[dict[str, bytes], list[Path]]:
    """config.json and what travels with it, and the files that they are. Raises InputError."""
    blobs, files = {CONFIG: read_small(directory / CONFIG)}, [directory / CONFIG]
    for name in SIDECARS:
        path = directory / name
        if os.path.lexists(path):  # a link to nowhere is an error
            blobs[name] = read_small(path, cap=MAX_TOKENIZER_BYTES if name == "tokenizer.json" else MAX_JSON_BYTES)
            if name.endswith(".jinja"):
                parse_text(blobs[name], str(path))
            elif name != "tokenizer.json":  # which is read when the conversion is planned, as a tokenizer
                parse_json_object(blobs[name], str(path), allow_nan=True)
            files.append(path)
    return blobs, files


def check_is_model(directory: Path) -> None:
    """Raise InputError for a directory without a whole model: what it is, and what to do."""
    names = _weight_files(directory)
    has_model = any(n.endswith(".safetensors") and not n.startswith("adapter_") for n in names) or bool(
        _indexes(directory)
    )
    if not has_model and ((directory / "adapter_config.json").exists() or "adapter_model.safetensors" in names):
        raise InputError(
            f"{directory}: this is an adapter (adapter_config.json), not a model; merge it into its base model first "
            "(in peft: model.merge_and_unload()), save that, and convert the result"
        )
    if (directory / CONFIG).exists() and has_model:
        return
    if snapshots := sorted((directory / "snapshots").glob("*/config.json")):
        raise InputError(f"{directory}: a Hugging Face cache folder; name the snapshot in it: {snapshots[0].parent}")
    if not has_model and (ggufs := sorted(n for n in names if n.endswith(".gguf"))):
        raise InputError(
            f"{directory}: no safetensors weights, but GGUF files; name one of them: {directory / ggufs[0]}"
        )
    if not has_model and (pickles := {n for n in names if n.endswith(PICKLE_SUFFIXES)}):
        raise InputError(f"{directory}: the only weights are {listed(sorted(pickles), most=4)}. {PICKLE_ADVICE}")
    missing = (
        CONFIG
        if has_model
        else "safetensors weights (model.safetensors, or model.safetensors.index.json and its shards)"
    )
    raise InputError(f"{directory}: no {missing}: not a Hugging Face model directory, or its download is incomplete")


def _weight_files(directory: Path) -> set[str]:
    """Names of the files in the directory that hold weights of some format."""

    def holds_weights(name: str) -> bool:
        if name.endswith((".safetensors", ".gguf", ".pth")):
            return True
        return name.endswith(PICKLE_SUFFIXES) and name.startswith(
            ("pytorch_model", "model", "adapter_model", "consolidated")
        )

    return {p.name for p in directory.iterdir() if holds_weights(p.name)}


def _indexes(directory: Path) -> list[str]:
    """Names of the indexes of shards, those of a variant too (model.safetensors.index.fp16.json)."""
    return sorted(p.name for p in directory.glob("*.safetensors.index*.json"))


def _find_index(directory: Path) -> tuple[str, dict[str, str]] | tuple[None, None]:
    """Name of the index of shards and its map of tensor to shard; None where there is no index."""
    found = _indexes(directory)
    if not found:
        return None, None
    if INDEX not in found and len(found) > 1:
        raise InputError(f"{directory}: which index is meant? There are {listed(found, most=4)}; keep one")
    index = INDEX if INDEX in found else found[0]
    return index, _weight_map(directory / index)


def _single_file(directory: Path) -> list[str]:
    """The one weight file of a directory without an index."""
    names = sorted(n for n in _weight_files(directory) if n.endswith(".safetensors") and not n.startswith("adapter_"))
    if SINGLE in names:
        return [SINGLE]
    if any(SHARD.search(n) for n in names):
        raise InputError(f"{directory}: shards ({listed(sorted(names), most=4)}) without {INDEX}; download it too")
    if len(names) > 1:
        raise InputError(
            f"{directory}: which weights are meant? There are {listed(sorted(names), most=4)}; "
            f"name one of them {SINGLE}"
        )
    return names


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> shard, of an index whose shard names are plain file names."""
    weight_map = parse_json_object(read_small(path), str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: no weight_map: not an index of shards, or corrupt")
    out: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        # A name that could lead out of the directory must never reach the file system.
        plain = isinstance(shard, str) and shard.isprintable() and not set(shard) & set("/\\:") and len(shard) <= 255
        if not plain or not shard.endswith(".safetensors") or shard.startswith("."):
            raise InputError(f"{path}: {tensor}: {str(shard)[:80]!r} is not the name of a .safetensors file")
        out[tensor] = shard
    if len(set(out.values())) > MAX_SHARDS:
        raise InputError(f"{path}: more than {MAX_SHARDS} shards")
    return out


def _read_shards(directory: Path, shards: list[str], weight_map: dict[str, str] | None) -> Stored:
    """Every tensor of the shards; checked against the index where there is one."""
    if missing := [s for s in shards if not (directory / s).exists()]:
        raise InputError(
            f"{directory}: {len(missing)} of {len(shards)} shards that the index names are missing: "
            f"{listed(sorted(missing), most=4)}; download them"
        )
    out: Stored = {}
    for shard in shards:
        file = MappedFile(directory / shard)
        for name, entry in read_header(file).items():
            if name in out:
                raise InputError(f"{directory}: {name} is in two shards, {out[name][0].path.name} and {shard}")
            if weight_map is not None and weight_map.get(name) != shard:
                said = f"puts it into {weight_map[name]}" if name in weight_map else "does not list it"
                raise InputError(
                    f"{directory / shard}: {name}: the index {said}; index and shards do not belong together, "
                    "download them again"
                )
            out[name] = file, entry
    if absent := sorted(set(weight_map or ()) - set(out)):
        raise InputError(
            f"{directory}: tensors that the index names are in no shard: {listed(sorted(absent), most=4)}; "
            "index and shards do not belong together, download them again"
        )
    return out
