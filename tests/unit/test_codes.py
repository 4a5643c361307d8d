"""The coded form against a slow reading of w4-codes, byte by byte in Python integers."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from w4files import ALL_SCHEMES, SCHEMES_OF_1_1, as_bytes, random_parts

from w4conv import codes, scheme
from w4conv.arrays import VALUE_DTYPES
from w4conv.errors import UsageError
from w4conv.scheme import QuantScheme

SHAPES: list[tuple[int, ...]] = [
    (1, 1), (16, 32), (17, 33), (3, 300), (2, 5, 9), (2, 2, 1, 40), (0, 7), (7, 0), (0, 3, 4), (2, 0, 4),
]  # fmt: skip
VECTOR_SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (37,)]
FOUR_BITS = ("int4", "int4z", "int4o", "nf4", "fp4", "e2m1", "iq4nl", "nl4")
COLUMNS_PER_DWORD = dict.fromkeys((*FOUR_BITS, "nl3"), 8) | {"int8": 4, "int8o": 4, "f16": 2, "bf16": 2, "f32": 1}


def schemes_with_groups() -> list[QuantScheme]:
    shifted = ("nl4", "nl3")
    kinds = [k for k in (*FOUR_BITS, "int8", "int8o") if k not in shifted]
    plain = [QuantScheme(k, g, d) for k in kinds for g in scheme.GROUP_SIZES for d in ("f16", "f32")]
    two_levels = [*((k, "i8") for k in kinds), *((k, "s6") for k in shifted)]
    return plain + [QuantScheme(k, g, d) for k, d in two_levels for g in (16, 32, 64, 128)]


def slow_value(coding: QuantScheme, shape: Sequence[int], parts: dict[str, bytes], at: tuple[int, ...]) -> float:
    """One value of a tensor by w4-codes 3 and 5; the product is exact, then rounded once to float32."""
    *lead, n_rows, n_columns = shape
    *lead_at, row, column = at
    matrix = 0
    for dim, i in zip(lead, lead_at, strict=True):
        matrix = matrix * dim + i
    tiles, per_dword = math.ceil(n_rows / 16), COLUMNS_PER_DWORD[coding.kind]
    is_of_three = coding.kind == "nl3"
    lines = 3 * math.ceil(n_columns / 32) if is_of_three else math.ceil(n_columns / per_dword)

    def dword(line: int) -> bytes:
        at = (((matrix * tiles + row // 16) * lines + line) * 16 + row % 16) * 4
        return parts["values" if coding.is_float else "codes"][at : at + 4]

    raw = dword(column // 32 * 3 + min(column % 32 // 8, 2) if is_of_three else column // per_dword)
    k = column % per_dword
    if coding.kind == "f32":
        return float(struct.unpack("<f", raw)[0])
    if coding.kind == "f16":
        return float(struct.unpack("<e", raw[2 * k : 2 * k + 2])[0])
    if coding.kind == "bf16":
        return float(struct.unpack("<f", b"\0\0" + raw[2 * k : 2 * k + 2])[0])
    size = coding.group_size or n_columns
    letter, nbytes = {"f16": ("e", 2), "f32": ("f", 4), "i8": ("b", 1), "s6": ("B", 1)}[coding.scale_dtype]

    def place(size: int) -> int:
        return ((matrix * tiles + row // 16) * math.ceil(n_columns / size) + column // size) * 16 + row % 16

    group_at = place(size)

    def number(part: str) -> float:
        found = float(struct.unpack("<" + letter, parts[part][group_at * nbytes : (group_at + 1) * nbytes])[0])
        if not coding.is_two_level:
            return found
        at = 2 * place(256 if coding.scale_dtype == "i8" else n_columns)
        if coding.scale_dtype == "s6":
            found = found % 64 - (64 if found % 64 > 31 else 0)
        return found * float(struct.unpack("<e", parts[f"super_{part}"][at : at + 2])[0])  # exact

    level: float
    if coding.bits == 8:
        level = raw[k] - 256 if raw[k] > 127 else raw[k]
    else:
        code = raw[k] & 15 if k < 4 else raw[k - 4] >> 4
        if is_of_three:
            bits = [dword(column // 32 * 3 + j)[k % 4] >> (3 if k < 4 else 7) & 1 for j in range(3)]
            code = code & 7 if column % 32 < 24 else bits[0] + 2 * bits[1] + 4 * bits[2]
        if coding.kind == "int4":
            level = code - 8
        elif coding.kind == "int4z":
            level = code - parts["zero_points"][group_at]
        elif coding.kind == "int4o":
            level = code
        else:
            level = float(np.float32(TABLES[coding.kind][code]))
            if coding.kind == "nl4":
                level += 8 * (parts["scales"][group_at] >> 6) - 12
            if coding.kind == "nl3":
                level += 12 * (parts["scales"][group_at] >> 6) - 18
    exact = Fraction(level) * Fraction(number("scales"))
    product = np.float32(exact.numerator / exact.denominator)  # the products here fit float64 exactly
    return float(np.float32(float(product) + number("offsets")) if coding.has_offsets else product)


# Those of bitsandbytes' 4-bit types, and of the OCP microscaling formats.
TABLES = {
    "nf4": [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    "fp4": [s * m / 12 for s in (1, -1) for m in (0, 0.0625, 8, 12, 4, 6, 2, 3)],
    "e2m1": [s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
    "iq4nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],  # kvalues_iq4nl of ggml
    "nl4": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    "nl3": [-127, -72, -40, -13, 11, 34, 64, 103],
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("coding", [*ALL_SCHEMES, *SCHEMES_OF_1_1], ids=repr)
def test_dequantize_is_the_slow_reading(coding: QuantScheme, shape: tuple[int, ...]) -> None:
    parts = random_parts(coding, shape, seed=1)
    assert {kind: len(part) for kind, part in parts.items()} == codes.part_sizes(coding, shape)
    got = codes.dequantize(coding, shape, parts)
    assert got.shape == shape
    assert got.dtype == np.float32
    raw = {kind: part.tobytes() for kind, part in parts.items()}
    for at in itertools.product(*map(range, shape)):
        assert got[at] == slow_value(coding, shape, raw, at), at


@pytest.mark.parametrize("coding", schemes_with_groups(), ids=repr)
def test_every_group_size(coding: QuantScheme) -> None:
    shape = (2, 261)
    parts = random_parts(coding, shape, seed=2)
    got = codes.dequantize(coding, shape, parts)
    raw = {kind: part.tobytes() for kind, part in parts.items()}
    for row, column in itertools.product((0, 1), (0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 260)):
        assert got[row, column] == slow_value(coding, shape, raw, (row, column)), (row, column)


@pytest.mark.parametrize("shape", VECTOR_SHAPES, ids=str)
@pytest.mark.parametrize("coding", [scheme.F16, scheme.BF16, scheme.F32], ids=str)
def test_vectors_are_stored_plain(coding: QuantScheme, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    stored: Any = values.astype(np.float16) if coding.kind == "f16" else values
    if coding.kind == "bf16":
        stored = codes.f32_to_bf16(values)
    assert codes.part_sizes(coding, shape) == {"values": stored.nbytes}
    got = codes.dequantize(coding, shape, {"values": as_bytes(np.asarray(stored))})
    expected = {"f16": values.astype(np.float16).astype(np.float32), "f32": values}.get(coding.kind)
    if expected is None:
        expected = (stored.astype(np.uint32) << 16).astype(np.uint32).view(np.float32).reshape(shape)
    assert got.shape == shape
    assert np.array_equal(got, expected)


def test_a_vector_cannot_be_quantized() -> None:
    with pytest.raises(ValueError, match="no rows and columns"):
        codes.part_sizes(scheme.int4(), (5,))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*ALL_SCHEMES, QuantScheme("nl3", 32, "s6")]),
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 70)),
    st.integers(0, 2**32 - 1),
)
def test_unpack_inverts_pack(coding: QuantScheme, shape: tuple[int, int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = np.dtype("u1") if coding.bits < 8 else np.dtype("i1")
    if coding.is_float:
        dtype = VALUE_DTYPES[coding.kind.upper()]
    original = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    if coding.bits < 8:
        original = original & ((1 << coding.bits) - 1)
    tiles = codes.pack(coding, original)
    assert tiles.shape == (
        shape[0],
        -(-shape[1] // 16),
        -(-shape[2] // 32) * 3 if coding.kind == "nl3" else -(-shape[2] * coding.bits // 32),
        16,
    )
    again = codes.unpack(coding, tiles, *shape[1:])
    assert again.dtype == dtype
    assert again.tobytes() == original.tobytes()
    rows = rng.integers(0, 256, shape, np.uint8)
    assert np.array_equal(codes.unpack_rows(codes.pack_rows(rows), shape[1]), rows)


@pytest.mark.parametrize(
    ("coding", "pad"),
    [
        ("int4", 0x88888888),
        ("int4z", 0x88888888),
        ("nf4", 0x77777777),
        *((k, 0) for k in ("int4o", "fp4", "e2m1", "iq4nl", "int8", "int8o")),
    ],
)
def test_padding_holds_the_prescribed_code(coding: str, pad: int) -> None:
    tiles = codes.pack(QuantScheme(coding, 32, "f16"), np.full((1, 1, 1), 3))
    assert tiles.shape == (1, 1, 1, 16)
    assert tiles[0, 0, 0, 1:].tolist() == [pad] * 15
    keep = 0xFFFFFF00 if coding.startswith("int8") else 0xFFFFFFF0
    assert int(tiles[0, 0, 0, 0]) == 3 | (pad & keep)


def test_where_codes_of_three_bits_lie() -> None:
    """One code of 7 at a time, in 32 columns: 3 bits of w4-codes 3.2 and no others; padding holds 0."""
    coding = QuantScheme("nl3", 32, "s6")
    for column in range(32):
        one = np.zeros((1, 1, 32), np.uint8)
        one[0, 0, column] = 7
        tiles = codes.pack(coding, one)
        assert tiles.shape == (1, 1, 3, 16)
        assert not tiles[..., 1:].any()
        byte, upper = column % 4, column % 8 >= 4
        if column < 24:
            want = [7 << (8 * byte + 4 * upper) if line == column // 8 else 0 for line in range(3)]
        else:
            want = [8 << (8 * byte + 4 * upper)] * 3
        assert tiles[0, 0, :, 0].tolist() == want
        short = codes.pack(coding, one[..., : column + 1])
        assert np.array_equal(short, tiles)


def test_bf16_rounds_half_to_even() -> None:
    def bf16(bits: int) -> int:
        return int(codes.f32_to_bf16(np.array([bits], np.uint32).view(np.float32))[0])

    assert [bf16(b) for b in (0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000)] == [
        0x3F80, 0x3F80, 0x3F80, 0x3F81, 0x3F82,
    ]  # fmt: skip
    assert bf16(0x7F7FFFFF) == 0x7F80
    assert bf16(0x7F800001) == 0x7FC0  # NaN stays NaN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3",), "unknown scheme"),
        (("f16", 32), "no groups"),
        (("int4", 48, "f16"), "group size 48"),
        (("int4", 32, "f64"), "scale dtype"),
        (("int4", 8, "f16"), "group size 8"),
        (("int4", 256, "i8"), "groups of 16 to 128"),
        (("int4", 0, "i8"), "groups of 16 to 128"),
    ],
)
def test_impossible_schemes_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QuantScheme(*arguments)
