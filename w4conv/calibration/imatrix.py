"""The importance matrix of llama.cpp (`llama-imatrix`, a GGUF file) as statistics: mean squares of channels.

Of each matrix NAME it has two F32 tensors: NAME.in_sum2, sums over tokens of the squares of what it reads, and
NAME.counts, over how many. Means of channels are not in it; nor is a text to judge by, so the same squares do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from w4conv.calibration.statistics import HEAD, F32Array, PlaceStatistics, Statistics, file_digest, n_channels
from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile
from w4conv.models.spec import READS, ModelSpec
from w4conv.sources.base import Source
from w4conv.sources.gguf_architectures import BY_FAMILY, TOP_NAMES
from w4conv.sources.gguf_header import GgufHeader

_F32: Final = 0


class ImportanceMatrix(Statistics):
    """Opened; nothing but the mapping is held."""

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
        for (layer, place), name in self._names.items():
            if layer is not None:
                n = len(self._mean_square(name))
                if n != n_channels(spec, place):
                    raise InputError(f"{wrong}: {name} reads {n} channels in it, and {n_channels(spec, place)} here")

    def of_place(self, layer: int | None, place: str) -> PlaceStatistics:
        squares = self._mean_square(self._names[layer, place])
        both = np.stack([squares, squares])
        return PlaceStatistics(np.zeros_like(both), both)

    def record(self) -> dict[str, Any]:
        return {"imatrix_blake3": self.digest} | {
            key: self._header.integer(f"imatrix.{key}") for key in ("chunk_count", "chunk_size")
            if f"imatrix.{key}" in self._header
        }  # fmt: skip

    def _mean_square(self, name: str) -> F32Array:
        sums, counts = (self._values(f"{name}.{kind}") for kind in ("in_sum2", "counts"))
        if len(counts) != 1 or not np.isfinite(sums).all() or not (sums >= 0).all() or not counts[0] >= 1:
            raise InputError(f"{self.path}: {name}: its sums or their count are no such; the file is damaged")
        return np.asarray(sums / counts[0], np.float32)

    def _values(self, name: str) -> F32Array:
        tensor = self._header.tensors.get(name)
        if tensor is None or tensor.type_id != _F32:
            raise InputError(
                f"{self.path}: has no {name} in F32. It is of another model, or llama-imatrix was not told to "
                "process the output (--process-output)"
            )
        return np.frombuffer(self._file.view(tensor.offset, tensor.nbytes).tobytes(), np.float32)
