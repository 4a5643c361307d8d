"""A Hugging Face directory: config.json, safetensors weights (one file, or shards with an index), tokenizer files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import VALUE_DTYPES
from w4conv.errors import InputError, listed
from w4conv.files.blobs import parse_json_object, parse_text
from w4conv.files.mapped import MappedFile
from w4conv.sources.base import TOOL_TEMPLATE, CodedRows, Source, SourceTensor
from w4conv.sources.reading import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    read_small,
    row_range,
    values,
)
from w4conv.sources.safetensors import Entry, read_header
from w4conv.sources.vocabulary import UnknownTokenizerError

if TYPE_CHECKING:
    from w4conv.sources.packed import PackedTensor

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
QUANTIZATION_KEYS: Final = ("quantization_config", "quantization", "compression_config")
QUANTIZE_CONFIG: Final = "quantize_config.json"  # of AutoGPTQ, 2023
# Before every name: what compiles, distributes or adapts a model.
WRAPPERS: Final = ("module.", "_orig_mod.", "base_model.model.", "_fsdp_wrapped_module.", "_forward_module.")
ADAPTER_PARTS: Final = (".lora_", ".base_layer.", ".modules_to_save.", ".original_module.", ".lora_magnitude_vector")
BUFFER: Final = re.compile(
    r"\.rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$|\.rotary_pos_emb\.inv_freq$"
    r"|(^|\.)(self_attn|attn|attention)\.(masked_bias|bias|causal_mask|attention_mask|position_ids)$"
    r"|(^|\.)(position_ids|causal_mask|cached_mask)$"
)
MAX_SHARDS: Final = 10_000
SHARD: Final = re.compile(r"-\d+-of-\d+\b")
# Endings of what other 4-bit and 8-bit formats store in place of a plain weight.
PACKED_ENDINGS: Final = (
    ".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax", ".quant_map",
    ".SCB", "_blocks", "_scales", ".scales", ".biases", ".qdata", ".input_scale",
)  # fmt: skip
# Of a multimodal checkpoint: how the language part's names begin, what they are called alone, and what else there is.
LANGUAGE_PREFIXES: Final = {
    "language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head.",
}  # fmt: skip
OTHER_PARTS: Final = (
    "vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower.",
    "model.vision_tower.", "model.multi_modal_projector.", "model.audio_tower.",
)  # fmt: skip
# model_type -> endings of stacks of matrices that are stored with rows and columns exchanged, inputs first.
TRANSPOSED: Final = {"gpt_oss": (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")}
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLE_ADVICE: Final = (
    "PyTorch pickles can run any code when they are read, so w4conv does not read them; "
    "save the model as safetensors (in transformers: model.save_pretrained(directory, safe_serialization=True))"
)


class HuggingFaceSource(Source):
    """See `open_huggingface`."""

    def __init__(
        self,
        path: Path,
        *,
        files: Iterable[Path],
        mapped: Iterable[MappedFile],
        entries: dict[str, tuple[MappedFile, Entry]],
        blobs: dict[str, bytes],
        notes: Iterable[str],
        packed: Mapping[str, PackedTensor] | None = None,
        kind: str = "safetensors",
        transposed: frozenset[str] = frozenset(),
    ) -> None:
        self.path = path
        self.files = tuple(files)
        self._entries = entries
        self._mapped = tuple(mapped)
        self._packed = packed or {}
        self.kind = kind
        self._transposed = transposed
        shapes = {n: e.shape for n, (_, e) in entries.items()}
        shapes |= {n: (*shapes[n][:-2], shapes[n][-1], shapes[n][-2]) for n in transposed}
        self.tensors = {n: SourceTensor(n, shapes[n], e.dtype, e.dtype) for n, (_, e) in entries.items()}
        self.tensors |= {
            n: SourceTensor(n, p.shape, "F32", p.stored_as, p.coding, p.nbytes) for n, p in self._packed.items()
        }
        self.blobs = blobs
        self.notes = tuple(notes)

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.generic]:
        if name in self._packed:
            tensor = self._packed[name]
            return tensor.values(slice(*row_range(rows, tensor.shape)))
        file, entry = self._entries[name]
        start, stop = row_range(rows, entry.shape)
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        n_rows = entry.shape[0] if entry.shape else 1
        row_nbytes = entry.nbytes // n_rows if n_rows else 0
        raw = file.view(entry.offset + start * row_nbytes, (stop - start) * row_nbytes)
        out = values(raw, entry.dtype, shape)
        return np.ascontiguousarray(np.swapaxes(out, -2, -1)) if name in self._transposed else out

    def read_coded(self, name: str, rows: slice) -> CodedRows:
        tensor = self._packed[name]
        if tensor.coded is None:
            raise ValueError(f"{name} has no coding")
        return tensor.coded(slice(*row_range(rows, tensor.shape)))

    def rename(self, old: str, new: str) -> None:
        if old in self._packed:
            self._packed = {new if name == old else name: tensor for name, tensor in self._packed.items()}
        else:
            self._entries[new] = self._entries.pop(old)
        self.tensors = {
            (new if name == old else name): replace(t, name=new) if name == old else t
            for name, t in self.tensors.items()
        }

    def close(self) -> None:
        for file in self._mapped:
            file.close()


def open_as_stored(directory: Path) -> HuggingFaceSource:
    """Every tensor of a directory as it is stored, to be described and not read: `tensors` has all dtypes. Raises
    InputError."""
    _check_is_model(directory)
    blobs, files = read_sidecars(directory)
    _, weight_map = (None, None) if (directory / SINGLE).exists() else _find_index(directory)
    weights = _single_file(directory) if weight_map is None else sorted(set(weight_map.values()))
    found = _read_shards(directory, weights, weight_map)
    config = parse_json_object(blobs[CONFIG], str(directory / CONFIG), allow_nan=True)
    key = next((key for key in QUANTIZATION_KEYS if isinstance(config.get(key), dict)), "")
    method: dict[str, Any] = config[key] if key else {}
    kind = method.get("quant_method", method.get("quant_algo", "mlx" if key == "quantization" else "safetensors"))
    source = HuggingFaceSource(
        directory,
        files=[*files, *(directory / name for name in weights)],
        mapped={id(file): file for file, _ in found.values()}.values(),
        entries=found,
        blobs=blobs,
        notes=[],
        kind=str(kind)[:40],
    )
    source.tensors = {name: replace(t, nbytes=found[name][1].nbytes) for name, t in source.tensors.items()}
    settings = {key: value for key, value in method.items() if isinstance(value, str | int | float | bool)}
    if settings:
        said = ", ".join(f"{key} {str(value)[:40]}" for key, value in list(settings.items())[:12])
        source.notes = (f"config.json says of the weights: {said}.",)
    return source


def open_huggingface(directory: Path, *, gptq_zero15: int | None = None) -> HuggingFaceSource:
    """Open a directory. gptq_zero15: what a stored zero point of 15 in a GPTQ file means, 16 or 0; None refuses it.

    Raises InputError naming the file or tensor that is missing, ambiguous or unsupported.
    """
    _check_is_model(directory)
    blobs, files = read_sidecars(directory)
    config = parse_json_object(blobs[CONFIG], str(directory / CONFIG), allow_nan=True)
    notes = []
    if "tokenizer.json" not in blobs:
        used, note = _rebuild_tokenizer(directory, blobs)
        files += used
        notes.append(note)

    more = sorted(directory.glob("additional_chat_templates/*.jinja"))
    for path in more:
        if path.name == "tool_use.jinja":
            blobs[TOOL_TEMPLATE] = read_small(path)
            parse_text(blobs[TOOL_TEMPLATE], str(path))
            files.append(path)
    if others := [path.name for path in more if path.name != "tool_use.jinja"]:
        notes.append(f"Left aside, of additional_chat_templates: {listed(sorted(others), most=4)}.")

    warnings = []
    index, weight_map = (None, None) if (directory / SINGLE).exists() else _find_index(directory)
    weights = _single_file(directory) if weight_map is None else sorted(set(weight_map.values()))
    if index is not None:
        files.append(directory / index)
    files += [directory / name for name in weights]
    if (named := index or weights[0]) not in (INDEX, SINGLE):
        notes.append(f"There is no {SINGLE}: the weights are those of {named}.")
    named_by = f"{index} names" if index else f"{weights[0]} holds"
    aside = _weight_files(directory) - set(weights)
    other_indexes = set(_indexes(directory)) - {index}
    if other_indexes and aside:
        warnings.append(
            f"There is more than one set of weights. As in transformers, {named_by} the weights; left aside: "
            f"{listed(sorted(other_indexes), most=4)}; {listed(sorted(aside), most=4)}."
        )
    elif aside or other_indexes:
        notes.append(f"Left aside, as {named_by} the weights: {listed(sorted(aside | other_indexes), most=4)}.")

    found = _read_shards(directory, weights, weight_map)
    mapped = {id(file): file for file, _ in found.values()}.values()
    found = _without_wrappers(found, directory, notes)
    found = _language_part(found, notes)
    found = _without_buffers(found, notes)
    kind = "safetensors"
    packed: dict[str, PackedTensor] = {}
    beside = directory / QUANTIZE_CONFIG
    if not any(config.get(key) for key in QUANTIZATION_KEYS) and beside.exists():
        own = parse_json_object(read_small(beside), str(beside))
        config = {**config, "quantization_config": {"quant_method": "gptq"} | own}
        files.append(beside)
        notes.append(f"How the weights are quantized is read from {QUANTIZE_CONFIG}.")
    method = next((config[key] for key in QUANTIZATION_KEYS if config.get(key)), None)
    if (
        method
        and all(entry.dtype in VALUE_DTYPES for _, entry in found.values())
        and not any(map(_looks_packed, found))
    ):
        name = method.get("quant_method", "") if isinstance(method, dict) else ""
        warnings.append(
            f"config.json says that weights are quantized ({str(name)[:40] or 'no method named'}), but every "
            "tensor is plain: they are read as they are."
        )
        method = None
    if method:
        from w4conv.sources.packed import RawTensors, find_packed  # loaded only where it is needed

        raw = RawTensors(directory, found)
        kind, packed = find_packed(config, raw, gptq_zero15=gptq_zero15)
        found = {name: place for name, place in found.items() if name not in raw.used}
        warnings += raw.warnings
        if raw.activations:
            notes.append(
                f"Left out, as activations are not rounded to 8 bits here: {listed(sorted(raw.activations), most=4)}."
            )
        if both := sorted(packed.keys() & found.keys()):
            raise InputError(f"{directory}: {both[0]} is stored twice, plain and as {kind}")
    _refuse_packed(found, directory)
    entries = {name: place for name, place in found.items() if place[1].dtype in VALUE_DTYPES}
    if ignored := {f"{name} ({place[1].dtype})" for name, place in found.items() if name not in entries}:
        notes.append(f"Left out, as no weight is stored in such a dtype: {listed(sorted(ignored), most=4)}.")
    endings = TRANSPOSED.get(str(config.get("model_type")), ())
    transposed = frozenset(n for n, (_, e) in entries.items() if endings and n.endswith(endings) and len(e.shape) == 3)
    source = HuggingFaceSource(
        directory,
        files=files,
        mapped=mapped,
        entries=entries,
        blobs=blobs,
        notes=[*notes, *warnings],
        packed=packed,
        kind=kind,
        transposed=transposed,
    )
    source.warnings = tuple(warnings)
    source.gptq_zero15 = gptq_zero15 if kind in ("gptq", "auto-round") else None
    return source


def _rebuild_tokenizer(directory: Path, blobs: dict[str, bytes]) -> tuple[list[Path], str]:
    """(files used, note): tokenizer.json made from tokenizer.model, if there is one, and added to `blobs`."""
    missing = "There is no tokenizer.json{}: the result cannot turn text into tokens."
    if not os.path.lexists(directory / "tokenizer.model"):
        return [], missing.format("")
    from w4conv.sources import sentencepiece  # loaded only where it is needed

    files = [
        directory / name for name in (sentencepiece.FILE, sentencepiece.ADDED) if os.path.lexists(directory / name)
    ]
    read = blobs | {file.name: read_small(file, cap=MAX_TOKENIZER_BYTES) for file in files}
    try:
        blobs |= sentencepiece.rebuild_from_pieces(read, where=str(directory))
    except UnknownTokenizerError as error:
        return [], missing.format(f", and {error}")
    return files, "Rebuilt from tokenizer.model: tokenizer.json."


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


def _language_part(found: dict[str, tuple[MappedFile, Entry]], notes: list[str]) -> dict[str, tuple[MappedFile, Entry]]:
    """The language model of a multimodal checkpoint under the names that it has alone; others as they are."""
    if not any(name.startswith(tuple(LANGUAGE_PREFIXES)) for name in found):
        return found
    out = {}
    for name, place in found.items():
        prefix = next((p for p in LANGUAGE_PREFIXES if name.startswith(p)), "")
        if prefix:
            out[LANGUAGE_PREFIXES[prefix] + name.removeprefix(prefix)] = place
        elif not name.startswith(OTHER_PARTS):
            out[name] = place
    if len(out) < len(found):
        notes.append(
            f"Only the language part is read; {len(found) - len(out)} tensors of the other parts are left out."
        )
    return out


def _check_is_model(directory: Path) -> None:
    """Tell what a directory without a full model is, and what to do."""
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
    indexes = _indexes(directory)
    if not indexes:
        return None, None
    if INDEX not in indexes and len(indexes) > 1:
        raise InputError(f"{directory}: which index is meant? There are {listed(sorted(indexes), most=4)}; keep one")
    index = INDEX if INDEX in indexes else indexes[0]
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


def _read_shards(
    directory: Path, shards: list[str], weight_map: dict[str, str] | None
) -> dict[str, tuple[MappedFile, Entry]]:
    """Every tensor of the shards; checked against the index where there is one."""
    if missing := [s for s in shards if not (directory / s).exists()]:
        raise InputError(
            f"{directory}: {len(missing)} of {len(shards)} shards that the index names are missing: "
            f"{listed(sorted(missing), most=4)}; download them"
        )
    out: dict[str, tuple[MappedFile, Entry]] = {}
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


def _refuse_packed(found: dict[str, tuple[MappedFile, Entry]], directory: Path) -> None:
    for name, (file, entry) in found.items():
        if _looks_packed(name):
            raise InputError(
                f"{directory}: {name} belongs to a quantized checkpoint, but config.json says nothing of it, or not of "
                "this tensor. Without it, what the bytes mean would be a guess"
            )
        if name.endswith(".weight") and len(entry.shape) == 2 and entry.dtype.startswith("F8_"):
            raise InputError(
                f"{file.path}: {name}: stored as {entry.dtype}, and there is no scale for it ({name}_scale_inv, or "
                f"{name}_scale); without one, only F16, BF16 and F32 are supported. Convert the original model"
            )
        if name.endswith((".weight", ".bias")) and entry.dtype not in VALUE_DTYPES:
            raise InputError(f"{file.path}: {name}: stored as {entry.dtype}; only F16, BF16 and F32 are supported")


def _looks_packed(name: str) -> bool:
    return name.endswith(PACKED_ENDINGS) or "quant_state" in name


def _without_wrappers(
    found: dict[str, tuple[MappedFile, Entry]], directory: Path, notes: list[str]
) -> dict[str, tuple[MappedFile, Entry]]:
    """Names as the model alone has them, where wrappers of training stand before all of them, or a bare backbone has
    no `model.`. Raises InputError for adapters that are not merged."""
    if adapters := [name for name in found if any(part in f".{name}" for part in ADAPTER_PARTS)]:
        raise InputError(
            f"{directory}: {adapters[0]} and {len(adapters) - 1} more tensors belong to an adapter (LoRA) that is not "
            "merged. Merge it into its base model (in peft: model.merge_and_unload()) and convert the result"
        )
    taken = ""
    while prefix := next((p for p in WRAPPERS if found and all(name.startswith(p) for name in found)), ""):
        found = {name.removeprefix(prefix): place for name, place in found.items()}
        taken += prefix
    if taken:
        notes.append(f"Names are read without {taken}, which stands before all of them.")
    if "embed_tokens.weight" in found and not any(name.startswith("model.") for name in found):
        found = {(n if n.startswith("lm_head.") else f"model.{n}"): place for n, place in found.items()}
        notes.append("Names are read with model., which a bare backbone does not have.")
    return found


def _without_buffers(
    found: dict[str, tuple[MappedFile, Entry]], notes: list[str]
) -> dict[str, tuple[MappedFile, Entry]]:
    """Without what follows from the config and old checkpoints carry nevertheless."""
    left = {name for name in found if BUFFER.search(name)}
    if left:
        notes.append(f"Left out, as they follow from the config: {listed(sorted(left), most=4)}.")
    return {name: place for name, place in found.items() if name not in left}
