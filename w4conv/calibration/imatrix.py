"""The importance matrix of llama.cpp (`llama-imatrix`, a GGUF file) as statistics: mean squares of channels.

It has two F32 tensors for each matrix NAME: NAME.in_sum2, the sum over tokens of the squares of its inputs, and
NAME.counts, the number of tokens. It has no means of channels and no held-out tokens: the same squares
serve for both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from w4conv.arrays import F32Array
from w4conv.calibration.statistics import HEAD, HookStatistics, Statistics, file_digest, n_channels
from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile
from w4conv.models.spec import READS, ModelSpec
from w4conv.sources.base import Source
from w4conv.sources.gguf_architectures import BY_FAMILY, TOP_NAMES
from w4conv.sources.gguf_header import GgufHeader

_F32: Final = 0


class ImportanceMatrix(Statistics):
    """An open file; only the mapping is held."""

    full = False

    def __init__(self, path: Path) -> None:
        """Raises InputError."""
        self.path = path
        self._file = MappedFile(path)
        self._header = GgufHeader(self._file)
        if self._header.text("general.type", "") != "imatrix":
            raise InputError(f"{path}: is a GGUF file, but no importance matrix: its general.type is not imatrix")
        self.digest = file_digest(self._file)
        self._names: dict[tuple[int | None, str], str] = {}

    def check(self, source: Source, spec: ModelSpec) -> None:
        wrong = f"{self.path}: is of another model than {source.path}"
        if spec.family not in BY_FAMILY or spec.experts is not None:
            raise InputError(f"{self.path}: importance matrices of {spec.architecture} are not supported")
        modules = {module: block for block, module in BY_FAMILY[spec.family].blocks.items()}
        top = {name: gguf for gguf, name in TOP_NAMES.items()}
        for t in spec.tensors():
            if t.role == "linear":
                module = t.name.removeprefix(f"model.layers.{t.layer}.").removesuffix(".weight")
                self._names.setdefault((t.layer, READS[t.part]), f"blk.{t.layer}.{modules[module]}.weight")
        tensors = spec.tensors()
        self._names[None, HEAD] = top[tensors[0 if spec.tied_head else -1].name]
        for (layer, hook), name in self._names.items():
            if layer is not None:
                n = len(self._mean_square(name))
                if n != n_channels(spec, hook):
                    raise InputError(f"{wrong}: {name} reads {n} channels in it, and {n_channels(spec, hook)} here")

    def at_hook(self, layer: int | None, hook: str) -> HookStatistics:
        squares = self._mean_square(self._names[layer, hook])
        both = np.stack([squares, squares])
        return HookStatistics(np.zeros_like(both), both)

    def record(self) -> dict[str, Any]:
        return {"imatrix_blake3": self.digest} | {
            key: self._header.integer(f"imatrix.{key}") for key in ("chunk_count", "chunk_size")
            if f"imatrix.{key}" in self._header
        }  # fmt: skip

    def _mean_square(self, name: str) -> F32Array:
        sums, counts = (self._values(f"{name}.{kind}") for kind in ("in_sum2", "counts"))
        if len(counts) != 1 or not np.isfinite(sums).all() or not (sums >= 0).all() or not counts[0] >= 1:
            raise InputError(f"{self.path}: {name}: its sums or their count are not valid; the file is damaged")
        return np.asarray(sums / counts[0], np.float32)

    def _values(self, name: str) -> F32Array:
        tensor = self._header.tensors.get(name)
        if tensor is None or tensor.type_id != _F32:
            raise InputError(
                f"{self.path}: has no {name} in F32. It is of another model, or llama-imatrix was not told to "
                "process the output (--process-output)"
            )
        return np.frombuffer(self._file.view(tensor.offset, tensor.nbytes).tobytes(), np.float32)
