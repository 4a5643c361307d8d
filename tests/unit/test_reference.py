"""Round to nearest against exact rational arithmetic, and the properties that w4-codes 6 promises."""

from __future__ import annotations

import itertools
import struct
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w4conv import scheme
from w4conv.codes import CODEBOOKS
from w4conv.quantization.reference import Quantized, quantize_codes, quantize_rtn
from w4conv.scheme import QuantScheme

GROUP_SIZES = (32, 64, 128, 256, 0)


def round_half_even(x: Fraction) -> int:
    return round(x)  # Python's rule for Fraction is half to even


def nearest_binary(x: Fraction, precision: int, least_exponent: int) -> Fraction:
    """x rounded to `precision` bits, half to even, no finer than 2 ** least_exponent."""
    if x == 0:
        return x
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + precision):
        exponent += 1
    while abs(x) < Fraction(2) ** (exponent + precision - 1) and exponent > least_exponent:
        exponent -= 1
    step = Fraction(2) ** exponent
    return round_half_even(x / step) * step


def fp16(x: Fraction) -> Fraction:
    return nearest_binary(x, 11, -24)


def fp32(x: Fraction) -> Fraction:
    return nearest_binary(x, 24, -149)


def slow_rtn(row: list[float], bits: int, group_size: int) -> tuple[list[int], list[Fraction]]:
    """Levels and scales of one row by w4-codes 6, in rational numbers."""
    size = group_size or len(row)
    top = 1 << (bits - 1)
    levels, scales = [], []
    for start in range(0, len(row), size):
        group = [Fraction(x) for x in row[start : start + size]]
        largest, smallest = max(group), min(group)
        extreme = largest if largest > -smallest else smallest
        scale = fp16(fp32(extreme / -top))
        scales.append(scale)
        for x in group:
            level = round_half_even(fp32(x / scale)) if scale else 0
            levels.append(min(max(level, -top), top - 1))
    return levels, scales


def assert_is_slow(values: npt.NDArray[np.float32], coding: QuantScheme) -> Quantized:
    got = quantize_rtn(values, coding)
    for i, row in enumerate(values.tolist()):
        levels, scales = slow_rtn(row, coding.bits, coding.group_size)
        assert got.q[i].tolist() == levels
        assert [Fraction(s) for s in got.scales[i].tolist()] == scales
    return got


def classes() -> dict[str, npt.NDArray[np.float32]]:
    """Rows of 300 columns of each kind of values that matters."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((3, 300))
    outliers = normal * np.where(rng.random((3, 300)) < 0.01, 200, 1)
    rows = {
        "normal": normal,
        "outliers": outliers,
        "flat": np.full((2, 300), 0.3),
        "ramp": np.linspace(-1, 1, 600).reshape(2, 300),
        "zeros": np.zeros((2, 300)),
        "negative zeros": np.full((1, 300), -0.0),
        "one value": np.eye(2, 300),
        "halves": rng.integers(-16, 17, (3, 300)) / 2,  # ties in rounding
        "fp16 largest": rng.choice([65504.0, -65504.0, 1.0], (2, 300)),
        "subnormal scales": normal * 1e-6,
        "underflow": normal * 1e-9,
        "fp32 subnormals": normal * 1e-40,
    }
    return {name: np.asarray(v, np.float32) for name, v in rows.items()}


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("make", [scheme.int4, scheme.int8], ids=["int4", "int8"])
@pytest.mark.parametrize("name", classes())
def test_every_class_of_values(name: str, make: type[QuantScheme], group_size: int) -> None:
    assert_is_slow(classes()[name], make(group_size))


FINITE = st.floats(width=32, allow_nan=False, min_value=-500000, max_value=500000)


@settings(max_examples=150, deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=70), st.sampled_from([4, 8]))
def test_any_row(row: list[float], bits: int) -> None:
    coding = QuantScheme(f"int{bits}", 32, "f16")
    values = np.array([row], np.float32)
    got = assert_is_slow(values, coding)
    top = 1 << (bits - 1)
    for g, start in enumerate(range(0, len(row), 32)):
        group, levels = values[0, start : start + 32], got.q[0, start : start + 32]
        scale = float(got.scales[0, g])
        if abs(scale) >= 2**-14:  # normal, so that the scale is known to 11 bits
            assert levels[np.argmax(np.abs(group))] in (-top, top - 1)
            assert levels.min() == -top  # the extreme has the lowest level
            # half a step, one more where the other end is clipped, and what rounding the scale moves
            error = np.abs(levels.astype(np.float64) * scale - group)
            assert error.max() <= abs(scale) * (1.001 + top * 2**-11)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_extreme_maps_to_the_lowest_level(bits: int, sign: int) -> None:
    """The scale gets the sign that makes it so; on a tie in magnitude the negative value is the extreme."""
    top = 1 << (bits - 1)
    coding = QuantScheme(f"int{bits}", 32, "f16")
    row = np.array([[sign * top / 4, 0.25, -0.25]], np.float32)
    got = quantize_rtn(row, coding)
    assert got.scales[0, 0] == -sign * 0.25
    assert got.q[0].tolist() == [-top, -sign, sign]
    tie = quantize_rtn(np.array([[8.0, -8.0]], np.float32), scheme.int4(32))
    assert tie.scales[0, 0] == 1
    assert tie.q[0].tolist() == [7, -8]


def test_ties_go_to_even() -> None:
    row = np.array([[-8, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], np.float32)
    assert quantize_rtn(row, scheme.int4(32)).q[0].tolist() == [-8, 0, 2, 2, 0, -2, -2]


def test_the_scale_is_rounded_before_the_levels() -> None:
    """7.5 levels of the unrounded scale would round to 8, of the rounded one to 7 (or the reverse)."""
    hits = 0
    for extreme in np.linspace(1, 2, 200, dtype=np.float32):
        unrounded = Fraction(float(extreme)) / 8
        rounded = fp16(unrounded)
        for k in range(8):
            x = np.float32(float(unrounded * Fraction(2 * k + 1, 2)))
            exact = Fraction(float(x))
            if round_half_even(exact / unrounded) != round_half_even(exact / rounded):
                hits += 1
                got = quantize_rtn(np.array([[-extreme, x]], np.float32), scheme.int4(32))
                assert got.q[0, 1] == min(round_half_even(exact / rounded), 7)
    assert hits > 100


def test_zero_scales_are_positive_zero() -> None:
    for row in ([0.0, -0.0], [-1e-9, 1e-10], [1e-9, 0.0]):
        got = quantize_rtn(np.array([row], np.float32), scheme.int4(32))
        assert struct.pack("<e", got.scales[0, 0]) == b"\0\0"
        assert got.q[0].tolist() == [0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_without_a_code_are_refused(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        quantize_rtn(np.array([[1, bad]], np.float32), scheme.int4())


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_beyond_fp16_are_refused(bits: int) -> None:
    coding = QuantScheme(f"int{bits}", 32, "f16")
    limit = np.float32((65504 + 16) * (1 << (bits - 1)))  # half a step above the largest FP16 rounds up
    with pytest.raises(FloatingPointError, match="does not fit"):
        quantize_rtn(np.array([[limit]]), coding)
    below = np.nextafter(limit, np.float32(0))
    assert quantize_rtn(np.array([[below]]), coding).scales[0, 0] == -65504


def slow_int4z(row: list[float], size: int) -> tuple[list[int], list[Fraction], list[int]]:
    """Codes, scales and zero points of one row by w4-codes 6.5, in rational numbers."""
    codes, scales, points = [], [], []
    for start in range(0, len(row), size):
        group = [Fraction(x) for x in row[start : start + size]]
        low, high = min(0, *group), max(0, *group)
        scale = fp16(fp32(fp32(high - low) / 15))
        point = min(max(round_half_even(fp32(-low / scale)), 0), 15) if scale else 8
        scales.append(scale)
        points.append(point)
        levels = [round_half_even(fp32(x / scale)) if scale else 0 for x in group]
        codes += [min(max(level + point, 0), 15) for level in levels]
    return codes, scales, points


@pytest.mark.parametrize("name", classes())
def test_zero_points_of_every_class_of_values(name: str) -> None:
    values = classes()[name]
    for shifted in (values, np.abs(values), -np.abs(values), values + values.max()):
        got = quantize_codes(shifted, QuantScheme("int4z", 64, "f16"))
        assert got.zero_points is not None
        for i, row in enumerate(shifted.tolist()):
            codes, scales, points = slow_int4z(row, 64)
            assert got.codes[i].tolist() == codes
            assert [Fraction(s) for s in got.scales[i].tolist()] == scales
            assert got.zero_points[i].tolist() == points


def test_a_zero_point_keeps_zero_and_both_ends() -> None:
    got = quantize_codes(np.array([[-1.0, 0.0, 6.5]], np.float32), QuantScheme("int4z", 32, "f16"))
    assert (got.scales[0, 0], got.codes[0].tolist()) == (0.5, [0, 2, 15])
    assert got.zero_points is not None
    assert got.zero_points[0, 0] == 2


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_codebook_codes_are_the_nearest_levels(kind: str) -> None:
    """No other level is nearer by more than rounding."""
    levels = CODEBOOKS[kind].astype(np.float64)
    for name, values in classes().items():
        values = values / 2  # the largest magnitude is the scale
        got = quantize_codes(values, QuantScheme(kind, 32, "f16"))
        assert got.zero_points is None
        for i, row in enumerate(values.astype(np.float64)):
            scales = np.repeat(got.scales[i].astype(np.float64), 32)[: len(row)]
            largest = np.array([np.abs(row[g : g + 32]).max() for g in range(0, len(row), 32)])
            assert np.array_equal(got.scales[i], largest.astype(np.float16)), name
            errors = np.abs(levels[None] * scales[:, None] - row[:, None])
            chosen = errors[np.arange(len(row)), got.codes[i]]
            assert (chosen <= errors.min(axis=1) + np.abs(row) * 1e-6).all(), name


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_value_between_two_levels_takes_the_lower_one(kind: str) -> None:
    book = np.sort(CODEBOOKS[kind])
    middles = (book[:-1] + book[1:]) / 2
    got = quantize_codes(np.concatenate([[1], middles])[None].astype(np.float32), QuantScheme(kind, 32, "f16"))
    assert np.array_equal(CODEBOOKS[kind][got.codes[0, 1:]], book[:-1])


def test_other_schemes_are_refused() -> None:
    for coding in (scheme.F16, scheme.int4(32), QuantScheme("nf4", 32, "f32")):
        with pytest.raises(ValueError, match="neither a codebook"):
            quantize_codes(np.zeros((1, 1), np.float32), coding)
    for coding in (scheme.F16, QuantScheme("nf4", 32, "f16"), QuantScheme("int4", 32, "f32")):
        with pytest.raises(ValueError, match="not a symmetric"):
            quantize_rtn(np.zeros((1, 1), np.float32), coding)


def test_groups_are_independent() -> None:
    """A row coded alone, or each group coded alone, gives the same levels and scales."""
    values = np.random.default_rng(5).standard_normal((4, 100)).astype(np.float32)
    whole = quantize_rtn(values, scheme.int4(32))
    for row, (g, start) in itertools.product(range(4), enumerate(range(0, 100, 32))):
        alone = quantize_rtn(values[row : row + 1, start : start + 32], scheme.int4(0))
        assert np.array_equal(alone.q[0], whole.q[row, start : start + 32])
        assert alone.scales[0, 0] == whole.scales[row, g]
