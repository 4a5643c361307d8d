"""A container as exporters see it: its model, and its matrices unpacked a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import codes
from w4conv.arrays import Array
from w4conv.container import Container, TensorInfo
from w4conv.errors import InputError
from w4conv.files.blobs import config_of
from w4conv.models import spec_of
from w4conv.models.spec import TensorSpec
from w4conv.scheme import TILE_ROWS

BLOCK_VALUES: Final = 1 << 22  # values unpacked at a time


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of some rows of a quantized matrix.

    scales: (n_rows, n_groups) float16 or float32, or int8 with two levels. zero_points: (n_rows, n_groups) uint8 for
    int4z; else all 8. offsets: like scales for int4o and int8o; else None. super_scales, super_offsets: (n_rows,
    n_supers) float16 with two levels; else None.
    """

    scales: Array
    zero_points: npt.NDArray[np.uint8]
    offsets: Array | None = None
    super_scales: Array | None = None
    super_offsets: Array | None = None


@dataclass(frozen=True, slots=True)
class UnpackedRows:
    """Rows of a quantized matrix. codes: (n_rows, n_columns) uint8 0..15, or int8."""

    codes: Array
    scales: Scales


class ExportModel:
    """spec: the model. tensors: what it needs, in order, each with its place in the container. config: parsed."""

    def __init__(self, container: Container) -> None:
        """Raises InputError when the container does not hold the model that its config describes."""
        self.container = container
        self.config = config_of(container.blobs)
        self.spec = spec_of(container.blobs)
        self.tensors: list[tuple[TensorSpec, TensorInfo]] = []
        for tensor in self.spec.tensors():
            info = container.tensors.get(tensor.name)
            if info is None or info.shape != tensor.shape:
                found = "is missing" if info is None else f"has shape {info.shape}"
                raise InputError(f"{container.path}: {tensor.name} {found}; config.json asks for {tensor.shape}")
            self.tensors.append((tensor, info))
        if unknown := container.tensors.keys() - {tensor.name for tensor, _ in self.tensors}:
            raise InputError(f"{container.path}: {min(unknown)} is no tensor of {self.spec.architecture}")

    @property
    def blobs(self) -> Mapping[str, bytes]:
        return self.container.blobs

    @property
    def stacks(self) -> list[str]:
        """Names of tensors that hold the matrices of all experts of a layer."""
        return [info.name for _, info in self.tensors if len(info.shape) > 2]

    def coded(self, info: TensorInfo, rows: slice, matrix: int = 0) -> UnpackedRows:
        """Some rows of a quantized matrix, or of one of a stack; `rows` starts on a tile."""
        n_tiles = codes.n_tiles(rows.stop) - rows.start // TILE_ROWS
        dwords = self._tiles(info, "codes", rows, matrix).reshape(-1).view("<u4").reshape(1, n_tiles, -1, TILE_ROWS)
        unpacked = codes.unpack(info.scheme, dwords, rows.stop - rows.start, info.shape[-1])[0]
        return UnpackedRows(unpacked, self.scales(info, rows, matrix))

    def scales(self, info: TensorInfo, rows: slice | None = None, matrix: int = 0) -> Scales:
        """The scales of a quantized matrix, or of some rows that start on a tile; its codes are not read."""
        taken = rows or slice(0, info.shape[-2])
        found: dict[str, Any] = {}
        for kind, part in codes.row_parts(info.scheme).items():
            raw = self._tiles(info, kind, taken, matrix)
            tiled = raw.reshape(-1).view(part.dtype).reshape(1, len(raw), part.n_runs(info.shape[-1]), TILE_ROWS)
            found[kind] = codes.unpack_rows(tiled, taken.stop - taken.start)[0]
        found.setdefault("zero_points", np.full(found["scales"].shape, codes.INT4_PAD, np.uint8))
        return Scales(**found)

    def _tiles(self, info: TensorInfo, kind: str, rows: slice, matrix: int) -> npt.NDArray[np.uint8]:
        """(n_tiles, bytes of a tile) of a part: a part is an array over tiles, so a run of tiles is a run of bytes."""
        n_matrices, n_rows, _ = codes.matrix_shape(info.shape)
        raw = self.container.part(info.name, kind).reshape(n_matrices, codes.n_tiles(n_rows), -1)[matrix]
        return np.ascontiguousarray(raw[rows.start // TILE_ROWS : codes.n_tiles(rows.stop)], np.uint8)

    def whole(self, info: TensorInfo, matrix: int = 0) -> UnpackedRows:
        return self.coded(info, slice(0, info.shape[-2]), matrix)

    def coded_blocks(self, info: TensorInfo) -> Iterator[UnpackedRows]:
        return (self.coded(info, rows) for rows in row_blocks(info))


def row_blocks(info: TensorInfo) -> Iterator[slice]:
    """Slices of the rows of a matrix, whole tiles of bounded size; of a stack, its matrices one by one."""
    if len(info.shape) > 2:
        return (slice(i, i + 1) for i in range(info.shape[0]))
    n_rows, n_columns = info.shape
    step = max(BLOCK_VALUES // max(n_columns, 1) // TILE_ROWS, 1) * TILE_ROWS
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))
