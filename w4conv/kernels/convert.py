"""Values to codes, bit for bit the reference; and coded matrices compared with values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from w4conv import _native, codes
from w4conv.arrays import VALUE_DTYPES, Array, F32Array
from w4conv.kernels.multiply import matrix_parts
from w4conv.kernels.pool import as_bytes, native_pool
from w4conv.scheme import TILE_ROWS, QuantScheme


class BadValueError(ValueError):
    """A value that cannot be coded. `reason` says what, `row` and `column` where in the block."""

    def __init__(self, reason: str, row: int, column: int) -> None:
        super().__init__(f"{reason} at row {row}, column {column}")
        self.reason, self.row, self.column = reason, row, column


class PackedRows(NamedTuple):
    """codes: (n_tiles, n_lines, 16) uint32; scales: (n_tiles, n_groups, 16) float16, or with shifts uint8; zero_points:
    uint8 of that shape for int4z, else None; super_scales: (n_tiles, 1, 16) float16 with shifts, else None.

    n_underflowed: groups of nonzero values whose scale is zero, so that all their levels are zero.
    """

    codes: npt.NDArray[np.uint32]
    scales: npt.NDArray[Any]
    zero_points: npt.NDArray[np.uint8] | None
    n_underflowed: int
    super_scales: npt.NDArray[np.float16] | None = None

    def parts(self) -> dict[str, Array]:
        """By the names of w4-codes 4, in their order."""
        found = {
            "codes": self.codes, "scales": self.scales,
            "super_scales": self.super_scales, "zero_points": self.zero_points,
        }  # fmt: skip
        return {kind: part for kind, part in found.items() if part is not None}

    def raw_parts(self) -> dict[str, npt.NDArray[np.uint8]]:
        """The same as flat bytes, as `codes.dequantize` and the engine take them."""
        return {kind: as_bytes(part) for kind, part in self.parts().items()}


def pack_float(values: Array, dtype: str, scheme: QuantScheme, *, threads: int | None = None) -> npt.NDArray[np.uint32]:
    """Values as tiled f16, bf16 or f32 lines (n_tiles, n_lines, 16), rounded half to even where the type narrows.

    Raises BadValueError for NaN, infinity, and values that the new type cannot hold.
    """
    return convert_rows(values, dtype, scheme, threads).codes


def convert_rows(values: Array, dtype: str, scheme: QuantScheme, threads: int | None) -> PackedRows:
    """Values (n_rows, n_columns) as `quantize_rtn` takes them, in a scheme with FP16 scales or a float kind. Raises
    BadValueError."""
    n_rows, n_columns = values.shape
    if values.dtype != VALUE_DTYPES[dtype]:
        raise TypeError(f"values of dtype {dtype} are {VALUE_DTYPES[dtype]} arrays, not {values.dtype}")
    n_tiles = codes.n_tiles(n_rows)
    lines = np.empty((n_tiles, scheme.n_lines(n_columns), TILE_ROWS), np.uint32)
    scales = np.empty((n_tiles, scheme.n_groups(n_columns), TILE_ROWS), np.float16)
    zero_points = np.empty(scales.shape, np.uint8) if scheme.has_zero_points else None
    if lines.size == 0:
        return PackedRows(lines, scales, zero_points, 0)
    reason, row, column, n_underflowed = _native.convert(
        native_pool(threads),
        as_bytes(values),
        dtype,
        n_rows,
        n_columns,
        scheme.kind,
        scheme.group_size,
        as_bytes(lines),
        as_bytes(scales),
        np.empty(0, np.uint8) if zero_points is None else as_bytes(zero_points),
    )
    if reason:
        raise BadValueError(reason, row, column)
    return PackedRows(lines, scales, zero_points, n_underflowed)


class Difference(NamedTuple):
    """How y differs from x; e = y - x.

    sums: float64 (3, n_rows, n_groups), over each row and group: x * x, e * e, x * e. largest: the largest |e|, NaN if
    any is NaN. equal: every x == y. reproduced: round-to-nearest, or packing, of the values gives the same bytes; False
    where it was not tried.
    """

    sums: npt.NDArray[np.float64]
    largest: float
    equal: bool
    reproduced: bool = False


def compare(x: F32Array, y: F32Array, group_size: int, *, threads: int | None = None) -> Difference:
    """x, y: (n_rows, n_columns), with one column or more. The order of the sums is fixed: w4conv/kernels.h."""
    sums = np.empty((3, len(x), -(-x.shape[1] // group_size)))
    x, y = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(y, np.float32)
    return Difference(sums, *_native.compare(native_pool(threads), x, y, group_size, sums))


def compare_with_source(
    values: Array,
    dtype: str,
    scheme: QuantScheme,
    parts: Mapping[str, Array],
    group_size: int,
    *,
    reproduce: bool,
    threads: int | None = None,
) -> Difference:
    """How a coded matrix y differs from its source values x (n_rows, n_columns), which are as in `quantize_rtn`.

    Equals `compare` with `dequantize`, in one pass over memory. reproduce: also try `quantize_rtn` or `pack_float`;
    only for schemes that these make.
    """
    n_rows, n_columns = values.shape
    if not values.size:
        return Difference(np.empty((3, n_rows, 0)), 0.0, equal=True, reproduced=reproduce)
    sums = np.empty((3, n_rows, -(-n_columns // group_size)))
    found = _native.compare_with_source(
        native_pool(threads), as_bytes(values), dtype,
        matrix_parts(scheme, (n_rows, n_columns), parts), reproduce, group_size, sums,
    )  # fmt: skip
    return Difference(sums, *found)
