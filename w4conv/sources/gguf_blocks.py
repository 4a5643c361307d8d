"""GGUF types whose blocks a scheme of the container holds exactly, as codes and scales of groups of 32 columns.

Q4_0   f16 scale, 16 bytes               int4:  code * scale, codes less 8
Q4_1   f16 scale, f16 offset, 16 bytes   int4 or int4z where every offset is minus a whole number of scales; else int4o
Q4_K   256 columns: f16 scale and offset, for each group 6 bits to multiply either with, 128 bytes
                                         int4o with float32 scales
Q5_0   f16 scale, 4 bytes of fifth bits, 16 bytes   int8: code * scale, codes less 16
Q8_0   f16 scale, 32 signed bytes        int8
MXFP4  exponent, 16 bytes                e2m1, a power of two as scale

16 bytes hold 32 codes: byte j = code[j] | code[j + 16] << 4. Of Q4_K, 32 bytes hold 64: code[j] | code[j + 32] << 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.errors import InputError
from w4conv.scheme import QuantScheme, int4, int8
from w4conv.sources.base import CodedRows
from w4conv.sources.packed.base import whole_zero_points
from w4conv.sources.packed.mxfp4 import scale_of

Bytes = npt.NDArray[np.uint8]

COLUMNS: Final = 32
NBYTES: Final = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q8_0": 34, "MXFP4": 17, "Q4_K": 144}  # of a block
FIXED: Final = {
    "Q4_0": int4(COLUMNS),
    "Q5_0": int8(COLUMNS),
    "Q8_0": int8(COLUMNS),
    "MXFP4": QuantScheme("e2m1", COLUMNS, "f16"),
    "Q4_K": QuantScheme("int4o", COLUMNS, "f32"),
}
MIDDLE_OF_Q5_0: Final = 16
SYMMETRIC: Final = 8
CHECKED_AT_ONCE: Final = 1 << 20  # bytes of blocks


def coding_of(type_name: str, n_rows: int, row_nbytes: int, read: Callable[[int, int], Bytes]) -> QuantScheme | None:
    """The scheme for a matrix, or None. read: the bytes of rows from, to; only Q4_1 is looked at, up to the first block
    that has no zero point."""
    if type_name != "Q4_1":
        return FIXED.get(type_name)
    symmetric = True
    step = max(CHECKED_AT_ONCE // row_nbytes, 1)
    for start in range(0, n_rows, step):
        zeros = _zero_points(_blocks(read(start, min(start + step, n_rows)), "Q4_1"))
        if zeros is None:
            return QuantScheme("int4o", COLUMNS, "f16")
        symmetric = symmetric and bool((zeros == SYMMETRIC).all())
    return int4(COLUMNS) if symmetric else QuantScheme("int4z", COLUMNS, "f16")


def coded(raw: Bytes, type_name: str, coding: QuantScheme, where: str) -> CodedRows:
    """raw: (n_rows, bytes of a row). Raises InputError where a scale of MXFP4 is no FP16 number."""
    n_rows = raw.shape[0]
    blocks = _blocks(raw.reshape(-1), type_name).reshape(n_rows, -1, NBYTES[type_name])
    if type_name == "Q8_0":
        return CodedRows(np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(n_rows, -1), _f16(blocks, 0))
    if type_name == "Q4_K":
        return _q4_k(blocks)
    nibbles = blocks[..., -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(n_rows, -1)
    if type_name == "Q5_0":
        fifth = np.unpackbits(blocks[..., 2:6], axis=2, bitorder="little").reshape(n_rows, -1)
        return CodedRows((codes | fifth << 4).astype(np.int8) - np.int8(MIDDLE_OF_Q5_0), _f16(blocks, 0))
    if type_name == "MXFP4":
        scales = scale_of(blocks[..., 0], codes)
        with np.errstate(over="ignore"):
            halves = scales.astype(np.float16)
        if not np.array_equal(halves.astype(np.float32), scales):
            raise InputError(
                f"{where}: a scale lies beyond FP16, so {coding} does not hold it exactly. Choose --scheme f32"
            )
        return CodedRows(codes, halves)
    zeros = _zero_points(blocks) if coding.kind == "int4z" else None
    return CodedRows(codes, _f16(blocks, 0), zeros, _f16(blocks, 2) if coding.kind == "int4o" else None)


def _q4_k(blocks: Bytes) -> CodedRows:
    """blocks: (n_rows, n_blocks, 144). Bytes 4 to 15 are 6 bits for scale and offset of each of 8 groups: of the
    first four the low bits of a byte, of the others 4 bits of the last bytes and the 2 high ones of those before."""
    n_rows = len(blocks)
    first, second, last = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=2).astype(np.float32)
    offsets = np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=2).astype(np.float32)
    scales *= _f16(blocks, 0)[..., None]
    offsets *= -_f16(blocks, 2)[..., None]
    nibbles = blocks[..., 16:].reshape(n_rows, -1, 1, COLUMNS)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    return CodedRows(codes.reshape(n_rows, -1), scales.reshape(n_rows, -1), None, offsets.reshape(n_rows, -1))


def _blocks(raw: Bytes, type_name: str) -> Bytes:
    return raw.reshape(-1, NBYTES[type_name])


def _f16(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _zero_points(blocks: Bytes) -> Bytes | None:
    scales, offsets = (_f16(blocks, at).astype(np.float32) for at in (0, 2))
    return whole_zero_points(scales, offsets, 4)
