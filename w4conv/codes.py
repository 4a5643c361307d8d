"""The coded form of a tensor, in numpy: `formats/w4-codes.md` put into code.

Layout first. A matrix of N rows and K columns is cut into tiles of 16 rows. A tile is a run of lines of 64 bytes; a
line is 16 little-endian dwords, one a row; the dwords of a row hold its columns, k the first one of each:

    4 bits  8 columns: byte i (0..3) = code[k+i] | code[k+4+i] << 4
    3 bits  24 of 32 columns as if they had 4 bits, in 3 dwords; and in the fourth bits of dword j (0..2), bit j of the
            codes of the 8 others
    int8    4 columns: byte i = code[k+i], two's complement
    f16     2 columns, bf16 likewise; f32 1 column

Rows are padded to 16, columns to `columns_per_run`, which fill whole dwords. Tensors of rank 0 and 1 are stored plain;
tensors of rank 3 and more are a stack of matrices, each padded by itself. Scales and zero points are arrays
[matrix][tile][group][16 rows].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import VALUE_DTYPES, Array, F32Array
from w4conv.scheme import KINDS, TILE_ROWS, QuantScheme

INT4_PAD: Final = 8  # the code of zero
MAX_ZERO_POINT: Final = 15
SCALE_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "f16": np.dtype("<f2"), "f32": np.dtype("<f4"), "i8": np.dtype("i1"), "s6": np.dtype("u1"),
}  # fmt: skip

CODEBOOKS: Final = {kind.name: np.array(kind.levels, np.float32) for kind in KINDS.values() if kind.levels}


@dataclass(frozen=True, slots=True)
class Grid:
    """The levels that weights over their scale are rounded to.

    Integers: q_min .. q_min + span. q_min is -(span + 1) / 2, or where is_asymmetric minus the zero point of the group.
    A codebook: levels, ascending, and the code of each. Both are empty for integers. shifts: what may be added to the
    levels of a group; scales are then whole numbers of steps, up to TOP_SCALE, and each row has its step.
    """

    span: int
    is_asymmetric: bool = False
    levels: F32Array = field(default_factory=lambda: np.empty(0, np.float32))
    codes: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    shifts: tuple[int, ...] = ()

    @property
    def q_min(self) -> int:
        return 0 if self.is_codebook else -(self.span + 1) // 2

    @property
    def is_codebook(self) -> bool:
        return len(self.levels) > 0


def grid(scheme: QuantScheme) -> Grid:
    """Of an integer or codebook scheme."""
    if scheme.kind in CODEBOOKS:
        order = np.argsort(CODEBOOKS[scheme.kind], kind="stable")
        return Grid(
            len(order) - 1, levels=CODEBOOKS[scheme.kind][order], codes=order.astype(np.uint8), shifts=scheme.shifts
        )
    return Grid((1 << scheme.bits) - 1, is_asymmetric=scheme.has_zero_points)


def pad_code(scheme: QuantScheme) -> int:
    """The code, or bits of the value, in padding rows and columns (w4-codes 3.5)."""
    return KINDS[scheme.kind].pad


def matrix_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """(n_matrices, n_rows, n_columns) of a tensor of rank 2 or more."""
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def n_tiles(n_rows: int) -> int:
    return -(-n_rows // TILE_ROWS)


@dataclass(frozen=True, slots=True)
class RowPart:
    """A part that holds a number for each row and each run of so many columns; columns 0: for each row."""

    dtype: np.dtype[Any]
    columns: int

    def n_runs(self, n_columns: int) -> int:
        if n_columns == 0:
            return 0
        return -(-n_columns // self.columns) if self.columns else 1


def row_parts(scheme: QuantScheme) -> dict[str, RowPart]:
    """What lies behind the codes, in file order (w4-codes 4): all but the codes, or values, themselves."""
    if scheme.is_float:
        return {}
    found: dict[str, RowPart] = {}

    def numbers(kind: str) -> None:
        found[kind] = RowPart(SCALE_DTYPES[scheme.scale_dtype], scheme.group_size)
        if scheme.is_two_level:
            found[f"super_{kind}"] = RowPart(SCALE_DTYPES["f16"], scheme.super_columns)

    numbers("scales")
    if scheme.has_zero_points:
        found["zero_points"] = RowPart(np.dtype("u1"), scheme.group_size)
    if scheme.has_offsets:
        numbers("offsets")
    return found


def part_sizes(scheme: QuantScheme, shape: Sequence[int]) -> dict[str, int]:
    """Parts of a tensor and their bytes, in file order (w4-codes 4).

    Raises ValueError when a tensor of rank 0 or 1 has a scheme that is not a float kind.
    """
    if len(shape) < 2:
        if not scheme.is_float:
            raise ValueError(f"a tensor of shape {tuple(shape)} has no rows and columns to quantize as {scheme}")
        return {"values": math.prod(shape) * scheme.bits // 8}
    n_matrices, n_rows, n_columns = matrix_shape(shape)
    n_lines = scheme.n_lines(n_columns)
    rows = n_matrices * n_tiles(n_rows) * TILE_ROWS
    if scheme.is_float:
        return {"values": rows * n_lines * 4}
    sizes = {"codes": rows * n_lines * 4}
    for kind, part in row_parts(scheme).items():
        sizes[kind] = rows * part.n_runs(n_columns) * part.dtype.itemsize
    return sizes


def tile(dwords: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """(n_matrices, n_rows, n_lines) -> (n_matrices, n_tiles, n_lines, 16); n_rows is a multiple of 16."""
    n_matrices, n_rows, n_lines = dwords.shape
    tiles = dwords.reshape(n_matrices, n_rows // TILE_ROWS, TILE_ROWS, n_lines).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(tiles)


def untile(tiles: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Inverse of `tile`."""
    n_matrices, n_tiles_, n_lines, _ = tiles.shape
    return np.ascontiguousarray(tiles.transpose(0, 1, 3, 2)).reshape(n_matrices, n_tiles_ * TILE_ROWS, n_lines)


def _pad(a: Array, scheme: QuantScheme) -> Array:
    """(n_matrices, n_rows, n_columns) -> the same with rows padded to 16 and columns to whole dwords."""
    _, n_rows, n_columns = a.shape
    widths = ((0, 0), (0, -n_rows % TILE_ROWS), (0, -n_columns % scheme.columns_per_run))
    return np.pad(a, widths, constant_values=pad_code(scheme))


def pack(scheme: QuantScheme, codes: Array) -> npt.NDArray[np.uint32]:
    """Codes or values (n_matrices, n_rows, n_columns) -> tiled dwords (n_matrices, n_tiles, n_lines, 16).

    4-bit kinds take uint8 0..15 (int4: code = q + 8), 3-bit ones 0..7, int8 and int8o take int8, float kinds take
    float16, uint16 (bf16) or float32.
    """
    padded = _pad(codes, scheme)
    if scheme.bits < 8:
        n_matrices, n_rows, n_columns = padded.shape
        halves = padded.astype(np.uint8).reshape(n_matrices, n_rows, n_columns // 8, 2, 4)
        packed = halves[..., 0, :] | halves[..., 1, :] << 4  # (n_matrices, n_rows, n_columns / 8, 4) u8
        if scheme.bits == 3:
            runs = packed.reshape(n_matrices, n_rows, n_columns // 32, 4, 4)
            bits = runs[..., 3:, :] >> np.arange(3, dtype=np.uint8)[:, None] & 0x11
            packed = (runs[..., :3, :] | bits << 3).reshape(n_matrices, n_rows, n_columns // 32 * 3, 4)
        return tile(np.ascontiguousarray(packed).view("<u4")[..., 0])
    dtype = np.dtype("i1") if scheme.bits == 8 else VALUE_DTYPES[scheme.kind.upper()]
    return tile(np.ascontiguousarray(padded, dtype).view("<u4"))


def unpack(scheme: QuantScheme, tiles: npt.NDArray[np.uint32], n_rows: int, n_columns: int) -> Array:
    """Inverse of `pack`: (n_matrices, n_rows, n_columns) of uint8, int8, float16, uint16 (bf16) or float32."""
    dwords = untile(tiles)
    if scheme.bits < 8:
        packed = dwords.astype("<u4")[..., None].view(np.uint8)  # (n_matrices, n_rows, n_lines, 4)
        if scheme.bits == 3:
            runs = packed.reshape(*dwords.shape[:2], dwords.shape[2] // 3, 3, 4)
            spread = runs >> 3 & 0x11  # of the last 8 of 32 columns: a bit of each
            last = (spread << np.arange(3, dtype=np.uint8)[:, None]).sum(axis=3, keepdims=True, dtype=np.uint8)
            packed = np.concatenate([runs & 0x77, last], axis=3).reshape(*dwords.shape[:2], dwords.shape[2] // 3 * 4, 4)
        codes = np.stack([packed & 15, packed >> 4], axis=-2)
        return codes.reshape(*packed.shape[:2], 8 * packed.shape[2])[:, :n_rows, :n_columns]
    dtype = np.dtype("i1") if scheme.bits == 8 else VALUE_DTYPES[scheme.kind.upper()]
    return dwords.astype("<u4", copy=False).view(dtype)[:, :n_rows, :n_columns]


def pack_rows(per_row: Array) -> Array:
    """Scales or zero points (n_matrices, n_rows, n_groups) -> (n_matrices, n_tiles, n_groups, 16), padding zero."""
    n_matrices, n_rows, n_groups = per_row.shape
    padded = np.pad(per_row, ((0, 0), (0, -n_rows % TILE_ROWS), (0, 0)))
    tiles = padded.reshape(n_matrices, n_tiles(n_rows), TILE_ROWS, n_groups).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(tiles)


def unpack_rows(tiles: Array, n_rows: int) -> Array:
    """Inverse of `pack_rows`."""
    n_matrices, n_tiles_, n_groups, _ = tiles.shape
    rows = np.ascontiguousarray(tiles.transpose(0, 1, 3, 2)).reshape(n_matrices, n_tiles_ * TILE_ROWS, n_groups)
    return rows[:, :n_rows]


def pack_shifted(scales: Array, shifts: Array, known: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Bytes of "s6": scales -31..31, and the index in `known` of shifts, as floats or integers of one shape."""
    index = np.searchsorted(known, shifts)
    return (scales.astype(np.int32) & 0x3F | index << 6).astype(np.uint8)


def unpack_shifted(packed: Array, known: Sequence[int]) -> tuple[F32Array, F32Array]:
    """Inverse of `pack_shifted`: (scales, shifts)."""
    b = packed.astype(np.int32)
    return ((b & 0x3F ^ 0x20) - 0x20).astype(np.float32), np.array(known, np.float32)[b >> 6]


def pack_matrix(
    scheme: QuantScheme,
    codes: Array,
    scales: Array,
    zero_points: Array | None = None,
    offsets: Array | None = None,
    super_scales: Array | None = None,
    super_offsets: Array | None = None,
) -> dict[str, Array]:
    """The parts of a quantized matrix, or of whole tiles of its rows.

    codes: (n_rows, n_columns) as `pack` takes them. scales, zero_points, offsets: (n_rows, n_groups); super_scales,
    super_offsets: (n_rows, n_supers). Those that the scheme has.
    """
    given = {
        "scales": scales, "zero_points": zero_points, "offsets": offsets,
        "super_scales": super_scales, "super_offsets": super_offsets,
    }  # fmt: skip
    parts: dict[str, Array] = {"codes": pack(scheme, codes[None])}
    for kind, part in row_parts(scheme).items():
        array = given[kind]
        assert array is not None, f"{scheme} needs {kind}"
        parts[kind] = pack_rows(array[None].astype(part.dtype))
    return parts


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> F32Array:
    return np.asarray(bits.astype(np.uint32) << 16, np.uint32).view(np.float32)


def as_f32(values: Array, dtype: str) -> F32Array:
    """Values as a source gives them, of dtype "F16", "BF16" (uint16 holding its bits) or "F32", exactly."""
    return bf16_to_f32(values.astype(np.uint16, copy=False)) if dtype == "BF16" else values.astype(np.float32)


def f32_to_bf16(values: F32Array) -> npt.NDArray[np.uint16]:
    """Round half to even; NaN stays NaN (made quiet)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | 0x40, rounded).astype(np.uint16)


def dequantize(scheme: QuantScheme, shape: Sequence[int], parts: Mapping[str, Array]) -> F32Array:
    """float32 values of `shape` from the raw parts of a tensor (uint8 arrays), by w4-codes 5.

    Every product is a float32 product: code (or codebook entry) times scale, and before, with super-scales, of these
    and the bytes of the groups; of int4o and int8o the offset is added to it.
    """
    shape = tuple(shape)
    if scheme.is_float:
        raw = np.ascontiguousarray(parts["values"])
        if len(shape) < 2:
            values = raw.view(VALUE_DTYPES[scheme.kind.upper()]).reshape(shape)
        else:
            values = unpack(scheme, _tiles(scheme, shape, raw), shape[-2], shape[-1]).reshape(shape)
        return bf16_to_f32(values.astype(np.uint16)) if scheme.kind == "bf16" else values.astype(np.float32)
    n_matrices, n_rows, n_columns = matrix_shape(shape)
    codes = unpack(scheme, _tiles(scheme, shape, np.ascontiguousarray(parts["codes"])), n_rows, n_columns)
    row_parts_ = row_parts(scheme)

    def of_rows(kind: str) -> Array:
        part = row_parts_[kind]
        tiled = (n_matrices, n_tiles(n_rows), part.n_runs(n_columns), TILE_ROWS)
        return unpack_rows(np.ascontiguousarray(parts[kind]).view(part.dtype).reshape(tiled), n_rows)

    def widened(rows: Array, kind: str) -> F32Array:
        wide = np.repeat(rows.astype(np.float32), row_parts_[kind].columns or n_columns, axis=2)
        return wide[..., :n_columns]

    def per_column(kind: str) -> F32Array:
        return widened(of_rows(kind), kind)

    def numbers(kind: str) -> F32Array:
        if scheme.has_shifts:
            return per_column("super_scales") * widened(unpack_shifted(of_rows("scales"), scheme.shifts)[0], "scales")
        return per_column(kind) * per_column(f"super_{kind}") if scheme.is_two_level else per_column(kind)

    levels: F32Array
    if scheme.kind in CODEBOOKS:
        levels = CODEBOOKS[scheme.kind][codes]
        if scheme.has_shifts:
            levels += widened(unpack_shifted(of_rows("scales"), scheme.shifts)[1], "scales")
    elif scheme.has_zero_points:
        levels = codes.astype(np.float32) - per_column("zero_points")
    else:
        levels = codes.astype(np.float32) - np.float32(KINDS[scheme.kind].centre)
    with np.errstate(over="ignore", invalid="ignore"):  # the scales of a file not verified may be anything
        levels *= numbers("scales")
        if scheme.has_offsets:
            levels += numbers("offsets")
    return levels.reshape(shape)


def _tiles(scheme: QuantScheme, shape: Sequence[int], raw: Array) -> npt.NDArray[np.uint32]:
    n_matrices, n_rows, n_columns = matrix_shape(shape)
    n_lines = scheme.n_lines(n_columns)
    return raw.view("<u4").reshape(n_matrices, n_tiles(n_rows), n_lines, TILE_ROWS)
