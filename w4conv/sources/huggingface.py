"""A Hugging Face directory: config.json, safetensors weights (one file, or shards with an index), tokenizer files."""

from __future__ import annotations

import os
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
from w4conv.sources.huggingface_files import CONFIG, Stored, check_is_model, read_sidecars, read_weights
from w4conv.sources.huggingface_names import looks_packed, names_of_model, refuse_packed
from w4conv.sources.reading import MAX_TOKENIZER_BYTES, read_small, row_range, values
from w4conv.sources.vocabulary import UnknownTokenizerError

if TYPE_CHECKING:
    from w4conv.sources.packed import PackedTensor

QUANTIZATION_KEYS: Final = ("quantization_config", "quantization", "compression_config")
QUANTIZE_CONFIG: Final = "quantize_config.json"  # of AutoGPTQ, 2023
# model_type -> endings of stacks of matrices that are stored with rows and columns exchanged, inputs first.
TRANSPOSED: Final = {"gpt_oss": (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")}


class HuggingFaceSource(Source):
    """See `open_huggingface`."""

    def __init__(
        self,
        path: Path,
        *,
        files: Iterable[Path],
        mapped: Iterable[MappedFile],
        entries: Stored,
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
    check_is_model(directory)
    blobs, files = read_sidecars(directory)
    weights = read_weights(directory)
    found = weights.stored
    config = parse_json_object(blobs[CONFIG], str(directory / CONFIG), allow_nan=True)
    key = next((key for key in QUANTIZATION_KEYS if isinstance(config.get(key), dict)), "")
    method: dict[str, Any] = config[key] if key else {}
    kind = method.get("quant_method", method.get("quant_algo", "mlx" if key == "quantization" else "safetensors"))
    source = HuggingFaceSource(
        directory,
        files=[*files, *(directory / name for name in weights.files)],
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
    check_is_model(directory)
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

    weights = read_weights(directory)
    if weights.index is not None:
        files.append(directory / weights.index)
    files += [directory / name for name in weights.files]
    more_notes, warnings = weights.notes()
    mapped = {id(file): file for file, _ in weights.stored.values()}.values()
    found, name_notes = names_of_model(weights.stored, directory)
    notes += [*more_notes, *name_notes]
    kind = "safetensors"
    packed: dict[str, PackedTensor] = {}
    beside = directory / QUANTIZE_CONFIG
    if not any(config.get(key) for key in QUANTIZATION_KEYS) and beside.exists():
        own = parse_json_object(read_small(beside), str(beside))
        config = {**config, "quantization_config": {"quant_method": "gptq"} | own}
        files.append(beside)
        notes.append(f"How the weights are quantized is read from {QUANTIZE_CONFIG}.")
    method = next((config[key] for key in QUANTIZATION_KEYS if config.get(key)), None)
    if method and all(entry.dtype in VALUE_DTYPES for _, entry in found.values()) and not any(map(looks_packed, found)):
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
    refuse_packed(found, directory)
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
