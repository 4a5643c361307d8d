"""Round-to-nearest of every scheme that values are rounded to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv import codes
from w4conv.arrays import Array, F32Array
from w4conv.errors import UsageError
from w4conv.kernels.calibrated import gptq_round, search_scales
from w4conv.kernels.convert import BadValueError, PackedRows, convert_rows, pack_float
from w4conv.kernels.pool import as_bytes
from w4conv.scheme import KINDS, TILE_ROWS, TOP_SCALE, QuantScheme

# Candidates of a scale with shifts: multiples of the one by which the extreme of a group meets the largest level, of
# both signs, with each shift. STEPPING: the few by which the step of a row is found.
SHIFTED: Final = tuple((124 - 8 * i) / 100 for i in range(9))
STEPPING: Final = (1.15, 0.95, 0.75)


def shifted(multiples: Sequence[float], shifts: Sequence[int]) -> F32Array:
    """Candidates as `search_scales` takes them: each multiple, with each shift, of both signs."""
    return np.array([(sign * m, shift) for m in multiples for shift in shifts for sign in (1, -1)], np.float32)


def quantize_rtn(values: Array, dtype: str, scheme: QuantScheme, *, threads: int | None = None) -> PackedRows:
    """The nearest codes of (n_rows, n_columns) values, bit for bit `quantization.reference`; of a scheme with shifts,
    bit for bit w4-codes 6.7: with the scale and shift of each group that leave the least square error, of candidates.

    values: float16 for dtype "F16", uint16 for "BF16" (its bits), float32 for "F32". Blocks of a whole
    number of tiles (16 rows) may be coded one after another and concatenated. Raises BadValueError.
    """
    if not scheme.is_float and scheme.has_shifts:
        return _quantize_shifted(codes.as_f32(values, dtype), scheme, threads)
    if scheme.is_float or not KINDS[scheme.kind].is_rounded_to or scheme.scale_dtype != "f16":
        raise UsageError(f"no native quantizer for scheme {scheme}")
    return convert_rows(values, dtype, scheme, threads)


def nearest_parts(
    values: Array, dtype: str, scheme: QuantScheme, *, threads: int | None = None
) -> dict[str, npt.NDArray[np.uint8]]:
    """Raw parts of values (n_rows, n_columns) rounded to nearest, in any scheme: `quantize_rtn`, or `pack_float`.

    Raises BadValueError.
    """
    if scheme.is_float:
        return {"values": as_bytes(pack_float(values, dtype, scheme, threads=threads))}
    return quantize_rtn(values, dtype, scheme, threads=threads).raw_parts()


def steps_of(
    tiles: F32Array, pivots: F32Array, group_size: int, grid: codes.Grid, *, threads: int | None = None
) -> F32Array:
    """The step of the scales of each row, (n_tiles, 16), an FP16 number: TOP_SCALE steps are the largest scale of the
    row, as a search by few candidates finds it.

    tiles: weights (n_tiles, n_columns, 16); pivots: weights of the columns' errors, (n_columns,). Raises BadValueError
    for a scale beyond FP16.
    """
    candidates = shifted(STEPPING, grid.shifts)
    scales, _, errors = search_scales(tiles, group_size, None, pivots, candidates, grid=grid, threads=threads)
    if beyond := np.argwhere(np.isinf(errors)).tolist():
        tile, group, row = beyond[0]
        raise BadValueError("a scale beyond FP16", tile * TILE_ROWS + row, group * group_size)
    step = (np.abs(scales).max(axis=1, initial=0) / np.float32(TOP_SCALE)).astype(np.float16)
    return np.asarray(step, np.float32)


def _quantize_shifted(w: F32Array, scheme: QuantScheme, threads: int | None) -> PackedRows:
    n_rows, n_columns = w.shape
    if bad := np.argwhere(~np.isfinite(w)).tolist():
        row, column = bad[0]
        raise BadValueError("NaN" if np.isnan(w[row, column]) else "infinity", row, column)
    grid, size = codes.grid(scheme), min(scheme.group_size, n_columns)
    tiles = codes.pack_rows(w[None])[0]
    n_groups = scheme.n_groups(n_columns)
    if not tiles.size:
        empty = codes.pack(scheme, w[None].astype(np.uint8))[0]
        scales_, supers = (np.zeros((len(tiles), n, TILE_ROWS), np.uint8) for n in (n_groups, int(n_groups > 0)))
        return PackedRows(empty, scales_, None, 0, supers.astype(np.float16))
    pivots = np.ones(n_columns, np.float32)
    steps = steps_of(tiles, pivots, size, grid, threads=threads)
    scales, shifts, _ = search_scales(
        tiles, size, None, pivots, shifted(SHIFTED, grid.shifts), grid=grid, steps=steps, threads=threads
    )
    group_of = (np.arange(n_columns) // size).astype(np.int32)
    q = gptq_round(tiles, group_of, scales, shifts, None, grid=grid, threads=threads)
    lost = np.logical_or.reduceat(tiles != 0, np.arange(0, n_columns, size), axis=1) & (scales == 0)
    return PackedRows(
        codes.pack(scheme, grid.codes[codes.unpack_rows(q[None], n_rows)])[0],
        pack_steps(scales, shifts, steps, grid),
        None,
        int(lost.sum()),
        steps.astype(np.float16)[:, None],
    )


def pack_steps(scales: F32Array, shifts: F32Array, steps: F32Array, grid: codes.Grid) -> Array:
    """The bytes of scales (n_tiles, n_groups, 16) that are multiples of steps (n_tiles, 16), and of shifts; 0 where the
    scale is 0."""
    whole = np.rint(scales / np.where(steps == 0, np.float32(1), steps)[:, None])
    return np.where(scales == 0, np.uint8(0), codes.pack_shifted(whole, shifts, grid.shifts))
