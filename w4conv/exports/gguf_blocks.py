"""Rows of a coded matrix as blocks of GGUF's types: the reverse of `sources/gguf_blocks.py`, bit for bit.

A type holds a matrix where its codes and the bytes of its groups fit into the bits of the type, as they do
where they come from such blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import Bytes
from w4conv.exports.model import UnpackedRows
from w4conv.scheme import QuantScheme

Numbers = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class BlockType:
    """columns, nbytes: of a block. codes, bytes_of_groups: the lowest and the highest that it has bits for."""

    name: str
    columns: int
    nbytes: int
    codes: tuple[int, int]
    bytes_of_groups: tuple[int, int]
    encode: Callable[[_Rows], Sequence[Bytes]]

    def holds(self, rows: UnpackedRows) -> bool:
        scales = rows.scales
        groups = [g for g in (scales.scales, scales.offsets) if g is not None and g.dtype == np.int8]
        return _within(rows.codes, self.codes) and all(_within(g, self.bytes_of_groups) for g in groups)

    def blocks(self, rows: UnpackedRows) -> Bytes:
        """(n_rows, bytes of a row)."""
        r = _Rows(rows, self.columns)
        return np.concatenate(self.encode(r), axis=2).reshape(len(rows.codes), -1)


class _Rows:
    """Arrays of some rows, by blocks: (n_rows, n_blocks, numbers of a block)."""

    def __init__(self, rows: UnpackedRows, columns: int) -> None:
        n_rows, n_columns = rows.codes.shape
        self._shape = n_rows, n_columns // columns, -1
        self._scales = rows.scales
        self.codes = rows.codes.reshape(self._shape)

    def codes_from(self, lowest: int) -> Bytes:
        """Codes less the lowest."""
        return (self.codes.astype(np.int16) - lowest).astype(np.uint8)

    def scales_from(self, lowest: int) -> Bytes:
        return (self._scales.scales.reshape(self._shape).astype(np.int16) - lowest).astype(np.uint8)

    def offsets(self) -> Bytes:
        assert self._scales.offsets is not None
        return self._scales.offsets.reshape(self._shape).astype(np.uint8)

    @staticmethod
    def _halves(numbers: Numbers | None, shape: tuple[int, ...], sign: int = 1) -> Bytes:
        assert numbers is not None
        halves = np.ascontiguousarray(numbers, "<f2").reshape(shape)
        return (halves if sign > 0 else -halves).view(np.uint8)

    def scale(self) -> Bytes:
        return self._halves(self._scales.scales, self._shape)

    def offset(self) -> Bytes:
        return self._halves(self._scales.offsets, self._shape)

    def super_scale(self) -> Bytes:
        return self._halves(self._scales.super_scales, self._shape)

    def super_minimum(self) -> Bytes:
        return self._halves(self._scales.super_offsets, self._shape, -1)


def _within(numbers: Numbers, limits: tuple[int, int]) -> bool:
    return not numbers.size or (int(numbers.min()) >= limits[0] and int(numbers.max()) <= limits[1])


def _join(codes: Bytes, width: int, shifts: Iterable[int], mask: int) -> Bytes:
    """Bits of codes put together: a run of `width` bytes holds, one after another, the codes at each of its shifts."""
    places = np.array(list(shifts), np.uint8)
    runs = (codes & np.uint8(mask)).reshape(*codes.shape[:2], -1, len(places), width) << places[:, None]
    packed: Bytes = np.bitwise_or.reduce(runs.astype(np.uint8), axis=3).reshape(*codes.shape[:2], -1)
    return packed


def _nibbles(codes: Bytes, width: int) -> Bytes:
    return _join(codes, width, (0, 4), 15)


def _quarters(codes: Bytes) -> Bytes:
    return _join(codes, 32, (0, 2, 4, 6), 3)


def _six_bits(scales: Bytes, offsets: Bytes) -> Bytes:
    """Of 8 groups, 12 bytes."""
    parts = []
    for numbers in (scales, offsets):
        parts.append(numbers[..., :4] | (numbers[..., 4:] >> 4) << 6)
    parts.append(scales[..., 4:] & 15 | (offsets[..., 4:] & 15) << 4)
    return np.concatenate(parts, axis=2).astype(np.uint8)


def _q5_1(r: _Rows) -> Sequence[Bytes]:
    codes = r.codes_from(0)
    fifth = np.packbits(codes >> 4, axis=2, bitorder="little")
    return r.scale(), r.offset(), fifth, _nibbles(codes, 16)


def _iq4_nl(r: _Rows) -> Sequence[Bytes]:
    return r.scale(), _nibbles(r.codes_from(0), 16)


def _iq4_xs(r: _Rows) -> Sequence[Bytes]:
    scales = r.scales_from(-32)
    high = np.bitwise_or.reduce((scales >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=2)
    return (
        r.super_scale(), high[..., None].astype("<u2").view(np.uint8), _join(scales, 1, (0, 4), 15),
        _nibbles(r.codes_from(0), 16),
    )  # fmt: skip


def _q2_k(r: _Rows) -> Sequence[Bytes]:
    return r.scales_from(0) | r.offsets() << np.uint8(4), _quarters(r.codes_from(0)), r.super_scale(), r.super_minimum()


def _q3_k(r: _Rows) -> Sequence[Bytes]:
    codes, scales = r.codes_from(4), r.scales_from(-32)
    return (
        _join(codes >> np.uint8(2), 32, range(8), 1), _quarters(codes), _join(scales, 8, (0, 4), 15),
        _join(scales >> np.uint8(4), 4, (0, 2, 4, 6), 3), r.super_scale(),
    )  # fmt: skip


def _q4_k(r: _Rows) -> Sequence[Bytes]:
    return r.super_scale(), r.super_minimum(), _six_bits(r.scales_from(0), r.offsets()), _nibbles(r.codes_from(0), 32)


def _q5_k(r: _Rows) -> Sequence[Bytes]:
    codes = r.codes_from(0)
    return (
        r.super_scale(), r.super_minimum(), _six_bits(r.scales_from(0), r.offsets()),
        _join(codes >> np.uint8(4), 32, range(8), 1), _nibbles(codes, 32),
    )  # fmt: skip


def _q6_k(r: _Rows) -> Sequence[Bytes]:
    codes = r.codes_from(-32)
    return _nibbles(codes, 64), _quarters(codes >> np.uint8(4)), r.scales_from(0), r.super_scale()


NO_BYTES: Final = (0, 0)
BLOCK_TYPES: Final = {  # of what w4-codes has from version 1.1 on
    QuantScheme("int8o", 32, "f16"): BlockType("Q5_1", 32, 24, (0, 31), NO_BYTES, _q5_1),
    QuantScheme("iq4nl", 32, "f16"): BlockType("IQ4_NL", 32, 18, (0, 15), NO_BYTES, _iq4_nl),
    QuantScheme("iq4nl", 32, "i8"): BlockType("IQ4_XS", 256, 136, (0, 15), (-32, 31), _iq4_xs),
    QuantScheme("int4o", 16, "i8"): BlockType("Q2_K", 256, 84, (0, 3), (0, 15), _q2_k),
    QuantScheme("int4", 16, "i8"): BlockType("Q3_K", 256, 110, (4, 11), (-32, 31), _q3_k),
    QuantScheme("int4o", 32, "i8"): BlockType("Q4_K", 256, 144, (0, 15), (0, 63), _q4_k),
    QuantScheme("int8o", 32, "i8"): BlockType("Q5_K", 256, 176, (0, 31), (0, 63), _q5_k),
    QuantScheme("int8", 16, "i8"): BlockType("Q6_K", 256, 210, (-32, 31), (-128, 127), _q6_k),
}
BY_NAME: Final = {kind.name: kind for kind in BLOCK_TYPES.values()}
