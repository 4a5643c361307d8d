"""A model a layer at a time, its weights from a container or a checkpoint: what is not at work is not in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv import codes, kernels
from w4conv.arrays import F32Array
from w4conv.container import Container
from w4conv.errors import InputError
from w4conv.models import spec_of
from w4conv.models.spec import ModelSpec, TensorSpec
from w4conv.quantization.recipe import KEPT
from w4conv.runtime.layer_model import HeadModel, LayerModel, padded_width
from w4conv.runtime.native_model import Matrix
from w4conv.scheme import TILE_ROWS
from w4conv.sources.base import Source

IntArray = npt.NDArray[np.int64]

_BLOCK_NBYTES: Final = 1 << 25  # of source values in memory beside the matrix


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """A layer ready to run, and its matrices by `TensorSpec.local_name`."""

    model: LayerModel
    matrices: dict[str, Matrix]


class LayeredModel(ABC):
    """A model run layer by layer. activations, kv: as of `Model`. Between calls only file mappings are held."""

    spec: ModelSpec
    activations: str = "int16"
    kv: str = "f16"

    def embed(self, tokens: IntArray, rows_of: Callable[[IntArray], F32Array] | None = None) -> F32Array:
        """Token ids (..., n_tokens) -> hidden states before the first layer, (..., n_tokens, padded hidden_size).

        rows_of: rows of another embedding by token ids, ascending, in place of the model's own.
        """
        t = self.spec.tensors()[0]
        ids, index = np.unique(tokens, return_inverse=True)
        out = np.zeros((*tokens.shape, padded_width(t.shape[1])), np.float32)
        out[..., : t.shape[1]] = (self.rows(t, ids) if rows_of is None else rows_of(ids))[index.reshape(tokens.shape)]
        out *= np.float32(self.spec.embedding_scale)
        return out

    def layer(self, i: int, *, threads: int | None = None) -> LoadedLayer:
        tensors = self.spec.layer_tensors(i)
        matrices = {t.local_name: self.matrix(t) for t in tensors if t.role not in ("norm", "bias")}
        vectors = {t.local_name: self.vector(t) for t in tensors if t.role in ("norm", "bias")}
        model = LayerModel(self.spec, i, matrices, vectors, threads=threads, activations=self.activations, kv=self.kv)
        return LoadedLayer(model, matrices)

    def changed(
        self, i: int, loaded: LoadedLayer, matrices: Mapping[str, Matrix], *, threads: int | None = None
    ) -> LayerModel:
        """Layer i with some matrices replaced."""
        vectors = {t.local_name: self.vector(t) for t in self.spec.layer_tensors(i) if t.role in ("norm", "bias")}
        return LayerModel(self.spec, i, loaded.matrices | dict(matrices), vectors, threads=threads)

    def changed_head(self, matrix: Matrix, *, threads: int | None = None) -> HeadModel:
        """The head with another matrix."""
        return HeadModel(self.spec, matrix, self.final_norm_weight(), threads=threads)

    def final_norm_weight(self) -> F32Array:
        return self.vector(next(t for t in self.spec.tensors() if t.part == "norm" and t.layer is None))

    def head(self, *, threads: int | None = None) -> HeadModel:
        tensors = self.spec.tensors()
        head = next(t for t in tensors if t.role == ("embedding" if self.spec.tied_head else "head"))
        matrix, vector = self.matrix(head), self.final_norm_weight()
        return HeadModel(self.spec, matrix, vector, threads=threads, activations=self.activations)

    @abstractmethod
    def matrix(self, t: TensorSpec) -> Matrix:
        """A matrix, or a stack of them, as the engine takes it."""

    @abstractmethod
    def vector(self, t: TensorSpec) -> F32Array:
        """A norm or a bias."""

    @abstractmethod
    def rows(self, t: TensorSpec, ids: IntArray) -> F32Array:
        """The rows `ids`, ascending, of a matrix."""


def final_norm(spec: ModelSpec, hidden: F32Array, weight: F32Array, *, threads: int | None = None) -> F32Array:
    """Hidden states (n, padded hidden_size) after the final norm: (n, hidden_size), the inputs of the head."""
    x = hidden[:, : spec.hidden_size]
    squares = kernels.gemm_nt(x * x, np.ones((1, x.shape[1]), np.float32), threads=threads)
    r = 1 / np.sqrt(squares / np.float32(x.shape[1]) + np.float32(spec.norm_eps))
    return np.asarray(x * r * (weight + np.float32(spec.norm_offset)), np.float32)


class LayeredContainer(LayeredModel):
    """A container. Its weights stay in the mapping."""

    def __init__(self, container: Container, *, activations: str = "int16", kv: str = "f16") -> None:
        self._container, self.activations, self.kv = container, activations, kv
        self.spec = spec_of(container.blobs)

    def matrix(self, t: TensorSpec) -> Matrix:
        info = self._container.tensors[t.name]
        parts = {part.kind: self._container.bytes_of(part) for part in info.parts}
        return info.scheme, info.shape, parts

    def vector(self, t: TensorSpec) -> F32Array:
        return self._container.dequantize(t.name)

    def rows(self, t: TensorSpec, ids: IntArray) -> F32Array:
        return np.concatenate([self._container.dequantize(t.name, slice(i, i + 1)) for i in ids.tolist()])


class LayeredSource(LayeredModel):
    """A checkpoint. Weights keep the type they are stored in; quantized ones are dequantized."""

    def __init__(self, source: Source, *, threads: int | None = None) -> None:
        self._source, self._threads = source, threads
        self.spec = spec_of(source.blobs)

    def matrix(self, t: TensorSpec, index: int | None = None) -> Matrix:
        """index: of a stack, that matrix alone."""
        found = self._source.tensors[t.name]
        scheme = KEPT[found.dtype]
        n_rows, n_columns = found.shape[-2:]
        picked = range(found.shape[0] if len(found.shape) == 3 else 1) if index is None else [index]
        n_lines = -(-n_columns // scheme.columns_per_dword)
        lines = np.empty((len(picked), codes.n_tiles(n_rows), n_lines, TILE_ROWS), np.uint32)
        step = max(_BLOCK_NBYTES // (max(n_columns, 1) * 4) // TILE_ROWS, 1) * TILE_ROWS
        for place, i in enumerate(picked):
            for start in range(0, n_rows, step):
                rows = slice(start, min(start + step, n_rows))
                if len(found.shape) == 3:
                    values = np.ascontiguousarray(self._source.read(t.name, slice(i, i + 1))[0, rows])
                else:
                    values = self._source.read(t.name, rows)
                try:
                    packed = kernels.pack_float(values, found.dtype, scheme, threads=self._threads)
                except kernels.BadValueError as error:
                    raise InputError(
                        f"{self._source.path}: {t.name}: {error.reason} at row {start + error.row}, "
                        f"column {error.column}"
                    ) from None
                lines[place, start // TILE_ROWS : start // TILE_ROWS + len(packed)] = packed
        shape = found.shape if index is None else (n_rows, n_columns)
        return scheme, shape, {"values": kernels.as_bytes(lines)}

    def vector(self, t: TensorSpec) -> F32Array:
        return codes.as_f32(self._source.read(t.name), self._source.tensors[t.name].dtype)

    def rows(self, t: TensorSpec, ids: IntArray) -> F32Array:
        n_rows, n_columns = self._source.tensors[t.name].shape
        step = max(_BLOCK_NBYTES // (max(n_columns, 1) * 4), 1)
        blocks = []
        for start in range(0, n_rows, step):
            wanted = ids[(ids >= start) & (ids < start + step)] - start
            if len(wanted):
                blocks.append(self._source.read(t.name, slice(start, start + int(wanted[-1]) + 1))[wanted])
        return codes.as_f32(np.concatenate(blocks), self._source.tensors[t.name].dtype)
