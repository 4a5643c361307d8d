"""GGUF types whose blocks a scheme of the container holds exactly, as codes and scales of groups of columns.

type          columns  a block holds                        becomes         value
Q4_0          32       f16 scale d, 4-bit codes q           int4/g32        (q - 8) d
Q4_1          32       d, f16 offset m, 4-bit q             int4o/g32       q d + m, see coding_of
Q5_0          32       d, 5-bit q                           int8/g32        (q - 16) d
Q5_1          32       d, m, 5-bit q                        int8o/g32       q d + m
Q8_0          32       d, signed bytes q                    int8/g32        q d
MXFP4         32       exponent e, 4-bit q                  e2m1/g32        E2M1[q] 2^e
NVFP4         64       4 scales d in E4M3, 4-bit q          e2m1/g16        E2M1[q] d
TQ1_0, TQ2_0  256      d, q out of 0 to 2                   int4/g256       (q - 1) d
IQ4_NL        32       d, 4-bit q                           iq4nl/g32       IQ4NL[q] d
IQ4_XS        256      d, 6-bit s - 32, 4-bit q             iq4nl/g32/i8    IQ4NL[q] (d s)
Q2_K          256      d, m, 4-bit s and t, 2-bit q         int4o/g16/i8    q (d s) - (m t)
Q3_K          256      d, 6-bit s - 32, 3-bit q - 4         int4/g16/i8     q (d s)
Q4_K          256      d, m, 6-bit s and t, 4-bit q         int4o/g32/i8    q (d s) - (m t)
Q5_K          256      d, m, 6-bit s and t, 5-bit q         int8o/g32/i8    q (d s) - (m t)
Q6_K          256      d, signed bytes s, 6-bit q - 32      int8/g16/i8     q (d s)
IQ2_XXS       256      d, 4-bit s, q out of a grid          int8/g32, f32   q (d (s + 1/2) / 4)
IQ2_XS, _S    256      the same, for 16 columns             int8/g16, f32   q (d (s + 1/2) / 4)
IQ3_XXS       256      d, 4-bit s, q out of a grid          int8/g32, f32   q (d (s + 1/2) / 2)
IQ3_S         256      d, 4-bit s, q out of a grid          int8/g32, f32   q (d (2 s + 1))
IQ1_S         256      d, 3-bit s, q / 8 out of a grid      int8/g32, f32   q (d (2 s + 1) / 8)
IQ1_M         256      the same, for 16 columns             int8/g16, f32   q (d (2 s + 1) / 8)

With two levels, s and t are the bytes of the groups, d and -m the super-scales and super-offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import Bytes
from w4conv.errors import InputError
from w4conv.scheme import QuantScheme, int4, int8
from w4conv.sources.base import CodedRows
from w4conv.sources.packed.base import whole_zero_points
from w4conv.sources.packed.mxfp4 import scale_of

I8 = npt.NDArray[np.int8]

COLUMNS: Final = 32
NBYTES: Final = {  # of a block
    "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "MXFP4": 17, "NVFP4": 36, "TQ1_0": 54, "TQ2_0": 66,
    "IQ1_S": 50, "IQ1_M": 56, "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110, "IQ4_NL": 18,
    "IQ4_XS": 136, "Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210,
}  # fmt: skip
FIXED: Final = {
    "Q4_0": int4(COLUMNS),
    "Q5_0": int8(COLUMNS),
    "Q5_1": QuantScheme("int8o", COLUMNS, "f16"),
    "Q8_0": int8(COLUMNS),
    "MXFP4": QuantScheme("e2m1", COLUMNS, "f16"),
    "NVFP4": QuantScheme("e2m1", 16, "f16"),
    "TQ1_0": int4(256),
    "TQ2_0": int4(256),
    "IQ1_S": QuantScheme("int8", COLUMNS, "f32"),
    "IQ1_M": QuantScheme("int8", 16, "f32"),
    "IQ2_XXS": QuantScheme("int8", COLUMNS, "f32"),
    "IQ2_XS": QuantScheme("int8", 16, "f32"),
    "IQ2_S": QuantScheme("int8", 16, "f32"),
    "IQ3_XXS": QuantScheme("int8", COLUMNS, "f32"),
    "IQ3_S": QuantScheme("int8", COLUMNS, "f32"),
    "IQ4_NL": QuantScheme("iq4nl", COLUMNS, "f16"),
    "IQ4_XS": QuantScheme("iq4nl", COLUMNS, "i8"),
    "Q2_K": QuantScheme("int4o", 16, "i8"),
    "Q3_K": QuantScheme("int4", 16, "i8"),
    "Q4_K": QuantScheme("int4o", COLUMNS, "i8"),
    "Q5_K": QuantScheme("int8o", COLUMNS, "i8"),
    "Q6_K": QuantScheme("int8", 16, "i8"),
}
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
    if type_name == "MXFP4":
        return _mxfp4(blocks, coding, where)
    if type_name == "Q4_1":
        zeros = _zero_points(blocks) if coding.kind == "int4z" else None
        offsets = _f16(blocks, 2) if coding.kind == "int4o" else None
        return CodedRows(_halves(blocks[..., -16:], 16), _f16(blocks, 0), zeros, offsets)
    return _grids(blocks, type_name) if type_name in _UNITS else _CODED[type_name](blocks)


# Each takes blocks: (n_rows, n_blocks, bytes of a block).


def _q4_0(blocks: Bytes) -> CodedRows:
    return CodedRows(_halves(blocks[..., 2:], 16), _f16(blocks, 0))


def _q5_0(blocks: Bytes) -> CodedRows:
    return CodedRows(_five_bits(blocks, 2) - np.int8(16), _f16(blocks, 0))


def _q5_1(blocks: Bytes) -> CodedRows:
    return CodedRows(_five_bits(blocks, 4), _f16(blocks, 0), offsets=_f16(blocks, 2))


def _five_bits(blocks: Bytes, at: int) -> I8:
    fifth = np.unpackbits(blocks[..., at : at + 4], axis=2, bitorder="little").reshape(len(blocks), -1)
    return (_halves(blocks[..., at + 4 :], 16) | fifth << 4).astype(np.int8)


def _q8_0(blocks: Bytes) -> CodedRows:
    return CodedRows(np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(blocks), -1), _f16(blocks, 0))


def _mxfp4(blocks: Bytes, coding: QuantScheme, where: str) -> CodedRows:
    codes = _halves(blocks[..., 1:], 16)
    scales = scale_of(blocks[..., 0], codes)
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if not np.array_equal(halves.astype(np.float32), scales):
        raise InputError(
            f"{where}: a scale lies beyond FP16, so {coding} does not hold it exactly. Choose --scheme f32"
        )
    return CodedRows(codes, halves)


def _nvfp4(blocks: Bytes) -> CodedRows:
    """A scale of 0x7f counts as 0; the top bit of a scale is not looked at."""
    stored = blocks[..., :4].reshape(len(blocks), -1)
    exponent, fraction = (stored >> 3 & 15).astype(np.int32), (stored & 7).astype(np.float32)
    scales = np.where(exponent == 0, fraction * 2.0**-9, np.ldexp(1 + fraction / 8, exponent - 7))
    scales = np.where(stored == 0x7F, 0, scales).astype(np.float16)
    return CodedRows(_halves(blocks[..., 4:], 8), scales)


def _tq1_0(blocks: Bytes) -> CodedRows:
    """Five levels a byte, as the digits of a number of base 3 scaled to 256; of the last four bytes four levels."""

    def digits(packed: Bytes, width: int, n: int) -> Bytes:
        powers = np.array([1, 3, 9, 27, 81][:n], np.uint8)[:, None]
        bytes_of = packed.reshape(*packed.shape[:2], -1, 1, width) * powers  # modulo 256
        return (bytes_of.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*packed.shape[:2], -1)

    runs = digits(blocks[..., :32], 32, 5), digits(blocks[..., 32:48], 16, 5), digits(blocks[..., 48:52], 4, 4)
    levels = np.concatenate(runs, axis=2).reshape(len(blocks), -1)
    return CodedRows(levels + np.uint8(7), _f16(blocks, 52))


def _tq2_0(blocks: Bytes) -> CodedRows:
    return CodedRows(_quarters(blocks[..., :64]).reshape(len(blocks), -1) + np.uint8(7), _f16(blocks, 64))


def _iq4_xs(blocks: Bytes) -> CodedRows:
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = _split(blocks[..., 4:8], 1, (0, 4), 15)
    scales = (low | (high & 3).astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    return CodedRows(_halves(blocks[..., 8:], 16), _rows(scales), super_scales=_f16(blocks, 0))


def _q2_k(blocks: Bytes) -> CodedRows:
    packed = blocks[..., :16]
    return _with_offsets(_rows(_quarters(blocks[..., 16:80])), packed & np.uint8(15), packed >> np.uint8(4), blocks, 80)


def _q3_k(blocks: Bytes) -> CodedRows:
    third = _split(blocks[..., :32], 32, range(8), 1)
    codes = _quarters(blocks[..., 32:96]) + (third << 2) + np.uint8(4)  # the level less 4, plus the 8 of int4
    low, high = _split(blocks[..., 96:104], 8, (0, 4), 15), _split(blocks[..., 104:108], 4, (0, 2, 4, 6), 3)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    return CodedRows(_rows(codes), _rows(scales), super_scales=_f16(blocks, 108))


def _q4_k(blocks: Bytes) -> CodedRows:
    return _with_offsets(_halves(blocks[..., 16:], 32), *_scales_and_offsets(blocks), blocks, 0)


def _q5_k(blocks: Bytes) -> CodedRows:
    fifth = _split(blocks[..., 16:48], 32, range(8), 1)
    codes = (_halves(blocks[..., 48:], 32) | _rows(fifth) << 4).astype(np.int8)
    return _with_offsets(codes, *_scales_and_offsets(blocks), blocks, 0)


def _q6_k(blocks: Bytes) -> CodedRows:
    low, high = _split(blocks[..., :128], 64, (0, 4), 15), _quarters(blocks[..., 128:192])
    codes = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return CodedRows(_rows(codes), _rows(scales), super_scales=_f16(blocks, 208))


def _grids(blocks: Bytes, type_name: str) -> CodedRows:
    """Blocks whose codes are numbers of a table: what the gguf package makes of them with d = 1, over the scale that
    the group has then."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    plain = blocks.copy()
    if type_name == "IQ1_M":
        parts = np.ascontiguousarray(blocks[..., 48:]).view("<u2")
        joined = np.bitwise_or.reduce((parts & np.uint16(0xF000)) >> np.array([12, 8, 4, 0], np.uint16), axis=2)
        d = joined.astype("<u2").view("<f2")
        nibbles = np.array([0, 0, 0xC000, 0x3000], np.uint16)
        plain[..., 48:] = (parts & np.uint16(0x0FFF) | nibbles).astype("<u2").view(np.uint8)
    else:
        d = _f16(blocks, 0)
        plain[..., :2] = np.array([1], "<f2").view(np.uint8)
    units = _UNITS[type_name](blocks)
    found = dequantize(plain.reshape(-1, blocks.shape[2]), GGMLQuantizationType[type_name])
    levels = found.astype(np.float32).reshape(*units.shape, -1) / units[..., None]
    scales = _rows(d.astype(np.float32)[..., None] * units)
    return CodedRows(levels.astype(np.int8).reshape(len(blocks), -1), scales)


def _nibbles_over(at: int, offset: float, factor: float) -> Callable[[Bytes], npt.NDArray[np.float32]]:
    """(s + offset) * factor of the 4-bit s from byte `at` on."""
    return lambda blocks: (_split(blocks[..., at:], 1, (0, 4), 15) + np.float32(offset)) * np.float32(factor)


def _tops_over(at: int, step: int, factor: float) -> Callable[[Bytes], npt.NDArray[np.float32]]:
    """(s + 1/2) * factor of the s in the top half of each `step`-th byte."""
    return lambda blocks: ((blocks[..., at::step] >> 4) + np.float32(0.5)) * np.float32(factor)


def _thirds_of_iq1_m(blocks: Bytes) -> npt.NDArray[np.float32]:
    parts = np.ascontiguousarray(blocks[..., 48:]).view("<u2")[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)
    units: npt.NDArray[np.float32] = ((parts & 7).reshape(*blocks.shape[:2], -1) * 2 + 1).astype(
        np.float32
    ) / np.float32(8)
    return units


_UNITS: Final[dict[str, Callable[[Bytes], npt.NDArray[np.float32]]]] = {
    "IQ1_S": lambda blocks: ((blocks[..., 35::2] >> 4 & 7) * 2 + 1).astype(np.float32) / np.float32(8),
    "IQ1_M": _thirds_of_iq1_m,
    "IQ2_XXS": _tops_over(9, 8, 0.25),
    "IQ2_XS": _nibbles_over(66, 0.5, 0.25),
    "IQ2_S": _nibbles_over(74, 0.5, 0.25),
    "IQ3_XXS": _tops_over(69, 4, 0.5),
    "IQ3_S": _nibbles_over(106, 0.5, 2.0),
}


def _with_offsets(codes: npt.NDArray[np.generic], scales: Bytes, offsets: Bytes, blocks: Bytes, at: int) -> CodedRows:
    """scales, offsets: (n_rows, n_blocks, groups of a block), to be multiplied with the two numbers at `at`."""
    return CodedRows(
        codes,
        _rows(scales).astype(np.int8),
        offsets=_rows(offsets).astype(np.int8),
        super_scales=_f16(blocks, at),
        super_offsets=-_f16(blocks, at + 2),
    )


def _scales_and_offsets(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Of Q4_K and Q5_K. Bytes 4 to 15 are 6 bits for scale and offset of each of 8 groups: of the first four the low
    bits of a byte, of the others 4 bits of the last bytes and the 2 high ones of those before."""
    first, second, last = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, last & 15 | first >> 6 << 4], axis=2)
    return scales, np.concatenate([second & 63, last >> 4 | second >> 6 << 4], axis=2)


_CODED: Final[dict[str, Callable[[Bytes], CodedRows]]] = {
    "Q4_0": _q4_0, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "NVFP4": _nvfp4, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
    "IQ4_NL": _q4_0, "IQ4_XS": _iq4_xs, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


# How codes lie in bytes: a run of `width` bytes holds, one after another, the codes at each of its shifts.


def _split(packed: Bytes, width: int, shifts: Iterable[int], mask: int) -> Bytes:
    """(n_rows, n_blocks, n) -> (n_rows, n_blocks, n * number of shifts)."""
    runs = packed.reshape(*packed.shape[:2], -1, 1, width) >> np.array(list(shifts), np.uint8)[:, None]
    codes: Bytes = (runs & np.uint8(mask)).reshape(*packed.shape[:2], -1)
    return codes


def _halves(packed: Bytes, width: int) -> Bytes:
    """Codes of 4 bits, (n_rows, n_columns)."""
    codes: Bytes = _rows(_split(packed, width, (0, 4), 15))
    return codes


def _quarters(packed: Bytes) -> Bytes:
    """Codes of 2 bits, (n_rows, n_blocks, columns of a block)."""
    return _split(packed, 32, (0, 2, 4, 6), 3)


def _rows(per_block: Any) -> Any:
    return per_block.reshape(len(per_block), -1)


def _blocks(raw: Bytes, type_name: str) -> Bytes:
    return raw.reshape(-1, NBYTES[type_name])


def _f16(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _zero_points(blocks: Bytes) -> Bytes | None:
    scales, offsets = (_f16(blocks, at).astype(np.float32) for at in (0, 2))
    return whole_zero_points(scales, offsets, 4)
