"""A Hugging Face directory as an output: config, sidecars, safetensors in one file or in shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from w4conv.exports.directory import LEFTOVER, check_directory, open_directory
from w4conv.exports.model import ExportModel
from w4conv.exports.plan import Exported, FileSize, Options, Output, Plan
from w4conv.files.strict_json import has_special_floats, made_strict, to_json
from w4conv.files.target import open_target
from w4conv.progress import Progress

_ITEMSIZES: Final = {"F32": 4, "I32": 4, "U32": 4, "I64": 8, "F16": 2, "BF16": 2, "U8": 1}
_DTYPE_NAMES: Final = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
_QUANTIZATION_KEYS: Final = ("quantization_config", "quantization", "compression_config")
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Shard:
    """A safetensors file: 8 bytes of length, the header, the tensors without gaps."""

    name: str
    header: bytes
    outputs: tuple[Output, ...]

    @property
    def nbytes(self) -> int:
        return 8 + len(self.header) + sum(output.nbytes for output in self.outputs)


class HuggingFacePlan(Plan):
    """Tensors in shards of at most `max_shard_nbytes`, in the order of the model; a tensor's parts stay together."""

    def __init__(
        self,
        model: ExportModel,
        options: Options,
        tensors: Sequence[Exported],
        *,
        dtype: str,
        quantization: Mapping[str, Any] | None = None,
        writer: str = "pt",
        sidecars: Mapping[str, bytes] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """dtype: of the model ("f16", ...). quantization: keys to add to config.json. writer: for __metadata__.

        sidecars: further files.
        """
        self.format = options.to
        self.architecture = model.spec.architecture
        self.tensors = tensors
        self.notes = notes
        self._shards = _shards(tensors, options.max_shard_nbytes, writer)
        config = plain_config(model.config, dtype) | dict(quantization or {})
        if has_special_floats(config):
            self.notes = [
                *notes,
                'config.json: infinity and NaN are written as transformers does, as {"__float__": ..}.',
            ]
        self._sidecars = {
            name: made_strict(data, name) if name.endswith(".json") else data
            for name, data in sorted(model.blobs.items())
            if name != "config.json"
        }
        self._sidecars |= {**(sidecars or {}), "config.json": _json(config)}
        if len(self._shards) > 1:
            self._sidecars[_INDEX] = _index(self._shards)
        sizes = {shard.name: shard.nbytes for shard in self._shards}
        sizes |= {name: len(data) for name, data in self._sidecars.items()}
        self.files = [FileSize(name, nbytes) for name, nbytes in sorted(sizes.items())]

    def check(self, out: Path, *, overwrite: bool) -> None:
        check_directory(out, self.nbytes, overwrite=overwrite)

    def write(self, out: Path, *, overwrite: bool, progress: Progress) -> None:
        progress.start(sum(shard.nbytes for shard in self._shards))
        with open_directory(out, self.nbytes, overwrite=overwrite) as opened:
            directory = opened.path
            if opened.removed:
                self.notes = [*self.notes, LEFTOVER]
            for name, data in self._sidecars.items():
                with open_target(directory / name, len(data)) as target:
                    target.write(data)
            for shard in self._shards:
                with open_target(directory / shard.name, shard.nbytes) as target:
                    target.write(len(shard.header).to_bytes(8, "little") + shard.header)
                    for output in shard.outputs:
                        for block in checked_blocks(output):
                            target.write(block)
                            progress.advance(len(block), output.name)


def checked_blocks(output: Output) -> Iterator[memoryview]:
    """The bytes of an output. Another number of them is an error of its producer, and nothing is renamed."""
    left = output.nbytes
    for block in output.blocks():
        left -= block.nbytes
        if block.nbytes:
            yield np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
    if left:
        raise ValueError(f"{output.name}: {left} of {output.nbytes} bytes are missing")


def _shards(tensors: Sequence[Exported], max_nbytes: int, writer: str) -> list[_Shard]:
    groups: list[list[Output]] = [[]]
    held = 0
    for tensor in tensors:
        nbytes = sum(output.nbytes for output in tensor.outputs)
        if groups[-1] and held + nbytes > max_nbytes:
            groups.append([])
            held = 0
        groups[-1] += tensor.outputs
        held += nbytes
    n = len(groups)
    names = ["model.safetensors"] if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    return [_shard(name, outputs, writer) for name, outputs in zip(names, groups, strict=True)]


def _shard(name: str, outputs: list[Output], writer: str) -> _Shard:
    # Larger items first, so that every tensor is aligned to its own item.
    ordered = sorted(outputs, key=lambda output: -_ITEMSIZES[output.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": writer}}
    offset = 0
    for output in ordered:
        end = offset + output.nbytes
        header[output.name] = {"dtype": output.dtype, "shape": list(output.shape), "data_offsets": [offset, end]}
        offset = end
    text = to_json(header, where=name, separators=(",", ":"))
    return _Shard(name, text + b" " * (-len(text) % 8), tuple(ordered))


def _index(shards: Sequence[_Shard]) -> bytes:
    weight_map = {output.name: shard.name for shard in shards for output in shard.outputs}
    total = sum(output.nbytes for shard in shards for output in shard.outputs)
    return _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def plain_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the container, with the type of the new weights and without the old quantization settings."""
    out = {key: value for key, value in config.items() if key not in _QUANTIZATION_KEYS}
    for key in [key for key in ("torch_dtype", "dtype") if key in out] or ["torch_dtype"]:
        out[key] = _DTYPE_NAMES[dtype]
    return out


def _json(value: object) -> bytes:
    return to_json(value, where="config.json", special_floats=True, indent=2) + b"\n"
