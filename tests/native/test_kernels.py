"""Native kernels against the numpy reference and their arithmetic written out, on every ISA tier of this machine."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from w4conv import codes, cpus, kernels
from w4conv.errors import UsageError
from w4conv.quantization.reference import Quantized, QuantizedCodes, quantize_codes, quantize_rtn
from w4conv.scheme import GROUP_SIZES, KINDS, QuantScheme, scheme_of

INTEGER_KINDS = [kind.name for kind in KINDS.values() if not kind.is_float]
# docs/numerics.md 2, the table: codebooks as integers, and the factor of activation scales.
WHOLE_LEVELS = {
    "e2m1": (2, np.float32(0.5)),
    "iq4nl": (1, np.float32(1)),
    "nf4": (2048, np.float32(2.0**-11)),
    "fp4": (192, np.float32(1) / np.float32(192)),
}

TIERS = kernels.isa_tiers()
DOTS = {
    "scalar": "multiply",
    "avx2": "vpmaddwd ymm",
    "avxvnni": "vpdpwssd ymm",
    "avx512": "vpmaddwd zmm",
    "avx512vnni": "vpdpwssd zmm",
}
F32 = npt.NDArray[np.float32]


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("W4CONV_ISA", request.param)
    return str(request.param)


# ---- tiers ----


def test_a_forced_tier_is_the_one_that_runs(tier: str) -> None:
    assert kernels.isa_tier() == tier
    assert kernels.dot_instruction() == DOTS[tier]


def test_the_highest_tier_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("W4CONV_ISA", raising=False)
    assert kernels.isa_tier() == TIERS[-1]


def test_an_unknown_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4CONV_ISA", "sse9")
    with pytest.raises(UsageError, match=r"W4CONV_ISA=sse9.*scalar"):
        kernels.isa_tier()


# ---- quantizing ----

VALUE_CLASSES = (
    "gaussian", "flat", "ramp", "zeros", "subnormal", "f16_max", "outliers", "halves", "near_halves", "sparse"
)  # fmt: skip


def make_values(kind: str, n_rows: int, n_columns: int, seed: int) -> F32:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_rows, n_columns))
    match kind:
        case "flat":
            x = np.full_like(x, rng.choice([-0.3, 1.0, 7.7]))
        case "ramp":
            x = np.linspace(-1, 1, x.size).reshape(x.shape)
        case "zeros":
            x = np.where(rng.random(x.shape) < 0.5, 0.0, -0.0)
        case "subnormal":
            x = x * 1e-7
        case "f16_max":
            x = np.sign(x) * 65504.0
        case "outliers":
            x[rng.random(x.shape) < 0.02] *= 1000
        case "halves":  # many quotients that end in exactly one half
            x = np.round(x * 4) / 2
        case "near_halves":  # quotients next to one half, by the scale that the first column of 32 gives
            scale = rng.uniform(0.5, 1, x.shape).astype(np.float16)[:, :1].astype(np.float64)
            x = ((np.round(x * 2) + 0.5) * scale).astype(np.float32).astype(np.float64)
            x += np.spacing(x.astype(np.float32)) * rng.integers(-2, 3, x.shape)
            x[:, ::32] = -8 * scale
        case "sparse":
            x[rng.random(x.shape) < 0.9] = 0
    return np.clip(x, -65504, 65504).astype(np.float32)


def as_dtype(x: F32, dtype: str) -> tuple[npt.NDArray[np.generic], F32]:
    """The values in a dtype, and the float32 values that they then stand for."""
    if dtype == "F16":
        half = x.astype(np.float16)
        return half, half.astype(np.float32)
    if dtype == "BF16":
        bits = codes.f32_to_bf16(x)
        return bits, codes.bf16_to_f32(bits)
    return x, x


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(("int4", "int4z", "nf4", "fp4", "int8")),
    group_size=st.sampled_from(GROUP_SIZES),
    n_rows=st.integers(1, 40),
    n_columns=st.integers(1, 300),
    values=st.sampled_from(VALUE_CLASSES),
    dtype=st.sampled_from(("F16", "BF16", "F32")),
    threads=st.sampled_from((1, 2)),
    seed=st.integers(0, 9),
)
def test_quantizing_equals_the_reference_bit_for_bit(
    tier: str,
    kind: str,
    group_size: int,
    n_rows: int,
    n_columns: int,
    values: str,
    dtype: str,
    threads: int,
    seed: int,
) -> None:
    scheme = QuantScheme(kind, group_size, "f16")
    some = make_values(values, n_rows, n_columns, seed) / 2  # the largest BF16 of a class is a scale of nf4
    raw, x = as_dtype(some, dtype)
    got = kernels.quantize_rtn(raw, dtype, scheme, threads=threads)
    want: Quantized | QuantizedCodes
    if kind in ("int4", "int8"):
        want = quantize_rtn(x, scheme)
        stored = want.q if kind == "int8" else (want.q.astype(np.int16) + 8).astype(np.uint8)
        parts = codes.pack_matrix(scheme, stored, want.scales)
    else:
        want = quantize_codes(x, scheme)
        parts = codes.pack_matrix(scheme, *want)
    assert list(got.parts()) == list(parts)
    for part, array in got.parts().items():
        np.testing.assert_array_equal(kernels.as_bytes(array), kernels.as_bytes(parts[part]), part)
    step = group_size or n_columns
    groups = [(x[:, i : i + step] != 0).any(axis=1) for i in range(0, n_columns, step)]
    assert got.n_underflowed == (np.stack(groups, axis=1) & (want.scales == 0)).sum()


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (19, 77)])
def test_float_packing_rounds_half_to_even(tier: str, kind: str, dtype: str, shape: tuple[int, int]) -> None:
    for values in VALUE_CLASSES:
        raw, x = as_dtype(make_values(values, *shape, seed=1), dtype)
        x = np.clip(x, -65504, 65504) if kind == "f16" else x  # BF16 rounds 65504 up
        raw = x if kind == "f16" else raw
        narrow = {"f16": lambda v: v.astype(np.float16), "bf16": codes.f32_to_bf16, "f32": lambda v: v}
        want = narrow[kind](x)
        got = kernels.pack_float(raw, "F32" if raw.dtype == np.float32 else dtype, QuantScheme(kind))
        np.testing.assert_array_equal(got, codes.pack(QuantScheme(kind), want[None])[0])


def test_every_f16_is_read_and_written_exactly(tier: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[np.isfinite(bits.view(np.float16))].view(np.float16).reshape(-1, 64)
    wide = kernels.pack_float(finite, "F16", QuantScheme("f32"))
    back = codes.unpack(QuantScheme("f32"), wide[None], *finite.shape)[0]
    np.testing.assert_array_equal(back.view(np.uint32), finite.astype(np.float32).view(np.uint32))
    same = kernels.pack_float(back.astype(np.float32), "F32", QuantScheme("f16"))
    np.testing.assert_array_equal(same, codes.pack(QuantScheme("f16"), finite[None])[0])


@pytest.mark.parametrize(
    ("value", "dtype", "scheme", "reason"),
    [
        (np.nan, "F32", QuantScheme("int4", 32, "f16"), "NaN"),
        (-np.inf, "F16", QuantScheme("int8", 0, "f16"), "infinity"),
        (6e5, "F32", QuantScheme("int4", 32, "f16"), "a scale beyond FP16"),
        (1e20, "BF16", QuantScheme("int8", 64, "f16"), "a scale beyond FP16"),
        (np.nan, "BF16", QuantScheme("bf16"), "NaN"),
        (65520.0, "F32", QuantScheme("f16"), "a value beyond the range of its new type"),
        (3.4e38, "F32", QuantScheme("bf16"), "a value beyond the range of its new type"),
    ],
)
def test_a_value_that_cannot_be_coded_is_named(
    tier: str, value: float, dtype: str, scheme: QuantScheme, reason: str
) -> None:
    x = np.zeros((40, 70), np.float32)
    x[35, 64] = value
    raw = x.view(np.uint32).astype(np.uint64) >> 16 if dtype == "BF16" else x.astype({"F16": "f2", "F32": "f4"}[dtype])
    raw = raw.astype(np.uint16) if dtype == "BF16" else raw
    with pytest.raises(kernels.BadValueError) as caught:
        (kernels.pack_float if scheme.is_float else kernels.quantize_rtn)(raw, dtype, scheme)
    assert (caught.value.reason, caught.value.row) == (reason, 35)
    if reason != "a scale beyond FP16":
        assert caught.value.column == 64


@pytest.mark.parametrize("kind", ["int4", "int4z", "int8", "nf4"])
@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ({(18, 69): np.nan, (18, 0): 1e9, (20, 0): np.inf}, ("NaN", 18, 69)),  # of a row, a value before a scale
        ({(18, 69): -np.inf, (18, 68): -np.nan}, ("NaN", 18, 68)),
        ({(17, 65): -1e9, (17, 40): 1e9, (18, 1): np.nan}, ("a scale beyond FP16", 17, 32)),
        ({(39, 69): 1e9}, ("a scale beyond FP16", 39, 64)),
        ({(0, 69): np.inf, (39, 0): np.nan}, ("infinity", 0, 69)),
    ],
)
def test_the_first_bad_row_is_named(
    tier: str, kind: str, bad: dict[tuple[int, int], float], found: tuple[str, int, int]
) -> None:
    x = np.ones((40, 70), np.float32)
    for at, value in bad.items():
        x[at] = value
    with pytest.raises(kernels.BadValueError) as caught:
        kernels.quantize_rtn(x, "F32", QuantScheme(kind, 32, "f16"))
    assert (caught.value.reason, caught.value.row, caught.value.column) == found


@pytest.mark.parametrize(("kind", "steps"), [("int4", -8), ("int8", -128), ("nf4", 1), ("int4z", 15)])
def test_the_ends_of_fp16_scales(tier: str, kind: str, steps: int) -> None:
    scheme = QuantScheme(kind, 32, "f16")
    for wanted, bits in ((2.0**-25, 0), (np.nextafter(np.float32(2.0**-25), np.float32(1)), 1), (65519, 0x7BFF)):
        got = kernels.quantize_rtn(np.full((1, 32), wanted * steps, np.float32), "F32", scheme)
        assert int(got.scales.view(np.uint16)[0, 0, 0]) == bits
        assert got.n_underflowed == (bits == 0)
    with pytest.raises(kernels.BadValueError, match="scale"):
        kernels.quantize_rtn(np.full((1, 32), 65520.0 * steps, np.float32), "F32", scheme)


# ---- dequantizing ----


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.has_shifts])
@pytest.mark.parametrize(("group_size", "scale_dtype"), [(32, "f16"), (128, "f32"), (0, "f16")])
def test_dequantizing_equals_the_reference_bit_for_bit(tier: str, kind: str, group_size: int, scale_dtype: str) -> None:
    for shape in ((1, 1), (35, 77), (16, 300)):
        w = make_values("outliers", *shape, seed=2)
        w[0] *= 1e-6  # subnormal in FP16
        scheme, parts, want = coded(kind, group_size, np.clip(w, -6e4, 6e4), scale_dtype)
        got = kernels.dequantize(scheme, shape, parts, threads=2)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kind", ["int4", "int4z", "nf4", "fp4", "int8", "f16", "bf16", "f32"])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_a_matrix_and_its_source_are_compared_in_one_pass(tier: str, kind: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    for shape, group_size in (((1, 1), 0), ((35, 77), 32), ((48, 300), 128)):
        raw, x = as_dtype(make_values("gaussian", *shape, seed=4), dtype)
        scheme = QuantScheme(kind) if kind in ("f16", "bf16", "f32") else QuantScheme(kind, group_size, "f16")
        parts = (
            {"values": kernels.pack_float(raw, dtype, scheme)}
            if scheme.is_float
            else kernels.quantize_rtn(raw, dtype, scheme).parts()
        )
        y = codes.dequantize(scheme, shape, {k: kernels.as_bytes(v) for k, v in parts.items()})
        step = group_size or shape[1]
        got = kernels.compare_with_source(raw, dtype, scheme, parts, step, reproduce=True, threads=2)
        want = kernels.compare(x, y, step, threads=1)
        np.testing.assert_array_equal(got.sums, want.sums)
        assert (got.largest, got.equal) == (want.largest, np.array_equal(x, y))
        assert got.largest == np.abs(y.astype(np.float64) - x).max()
        assert got.reproduced
        for part in parts:  # a bit changed anywhere, in padding too
            changed = {k: v.copy() for k, v in parts.items()}
            flat = kernels.as_bytes(changed[part])
            flat[rng.integers(flat.size)] ^= 1
            assert not kernels.compare_with_source(raw, dtype, scheme, changed, step, reproduce=True).reproduced
            assert not kernels.compare_with_source(raw, dtype, scheme, changed, step, reproduce=False).reproduced


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_matrices_without_values_are_equal(shape: tuple[int, int]) -> None:
    scheme, x = QuantScheme("int4", 0, "f16"), np.empty(shape, np.float32)
    parts = kernels.quantize_rtn(x, "F32", scheme).parts()
    found = kernels.compare_with_source(x, "F32", scheme, parts, shape[1], reproduce=True)
    assert (found.sums.size, found.largest, found.equal, found.reproduced) == (0, 0, True, True)


def test_a_source_that_cannot_be_coded_makes_nothing(tier: str) -> None:
    x = np.ones((17, 40), np.float32)
    scheme = QuantScheme("int4", 32, "f16")
    parts = kernels.quantize_rtn(x, "F32", scheme).parts()
    x[16, 3] = np.nan
    found = kernels.compare_with_source(x, "F32", scheme, parts, 32, reproduce=True)
    assert (found.reproduced, found.equal, np.isnan(found.largest)) == (False, False, True)


# ---- GEMV and GEMM ----


def coded(
    kind: str, group_size: int, w: F32, scale_dtype: str = "f16"
) -> tuple[QuantScheme, dict[str, npt.NDArray[np.generic]], F32]:
    """Scheme, parts, and the float32 weights that the parts stand for."""
    parts: dict[str, npt.NDArray[np.generic]]
    if kind in ("f16", "bf16", "f32"):
        scheme = QuantScheme(kind)
        parts = {"values": kernels.pack_float(w, "F32", scheme)}
    else:
        scheme = QuantScheme(kind, group_size, scale_dtype)
        parts = some_parts(scheme, w.shape) if scheme.minor else parts_of_1_0(scheme, w)
    return scheme, parts, codes.dequantize(scheme, w.shape, {k: kernels.as_bytes(v) for k, v in parts.items()})


def parts_of_1_0(scheme: QuantScheme, w: F32) -> dict[str, npt.NDArray[np.generic]]:
    rounded_as = {"int4o": "int4z", "e2m1": "fp4"}.get(scheme.kind, scheme.kind)  # any codes will do
    parts = kernels.quantize_rtn(w, "F32", QuantScheme(rounded_as, scheme.group_size, "f16")).parts()
    if scheme.kind == "int4o":
        steps = parts.pop("zero_points").astype(np.float32) + np.float32(0.3)
        parts["offsets"] = (-steps * parts["scales"]).astype(np.float16)
    if scheme.scale_dtype == "f32":
        for part in parts.keys() & {"scales", "offsets"}:
            parts[part] = parts[part].astype(np.float32) * np.float32(1.0001)
    return parts


def some_parts(scheme: QuantScheme, shape: tuple[int, int]) -> dict[str, npt.NDArray[np.generic]]:
    """Random codes, and scales of ordinary size."""
    rng = np.random.default_rng(shape[1])
    n_rows, n_columns = shape
    q = (
        rng.integers(-128, 128, shape, np.int8)
        if scheme.bits == 8
        else rng.integers(0, 1 << scheme.bits, shape, np.uint8)
    )
    given = {}
    for kind, part in codes.row_parts(scheme).items():
        size = n_rows, part.n_runs(n_columns)
        low, high = (0, 16) if kind == "zero_points" else (0, 256) if scheme.has_shifts else (-128, 128)
        given[kind] = rng.integers(low, high, size) if part.dtype.itemsize == 1 else rng.standard_normal(size) / 50
    return {kind: part[0] for kind, part in codes.pack_matrix(scheme, q, **given).items()}


def numbers_of(scheme: QuantScheme, parts: dict[str, npt.NDArray[np.generic]], kind: str, n_rows: int) -> F32:
    """Scales or offsets (n_rows, n_groups)."""
    found = per_row(parts, kind, n_rows).astype(np.float32)
    if scheme.has_shifts:
        return ((found + 32) % 64 - 32) * per_row(parts, "super_scales", n_rows).astype(np.float32)
    if scheme.scale_dtype != "i8":
        return found
    above = per_row(parts, f"super_{kind}", n_rows).astype(np.float32)
    return found * np.repeat(above, 256 // scheme.group_size, axis=1)[:, : found.shape[1]]


def per_row(parts: dict[str, npt.NDArray[np.generic]], kind: str, n_rows: int) -> npt.NDArray[np.generic]:
    return np.asarray(codes.unpack_rows(np.asarray(parts[kind])[None], n_rows)[0])


def integer_gemm(scheme: QuantScheme, w: F32, parts: dict[str, npt.NDArray[np.generic]], x: F32, bits: int = 16) -> F32:
    """docs/numerics.md 2 in numpy: the same float32 operations in the same order."""
    n_rows, n_columns = w.shape
    group = scheme.group_size or n_columns
    is_wide = scheme.kind in ("nf4", "fp4")
    block, bits, factor = min(group, 32 if is_wide else 128), 16 if is_wide else bits, np.float32(1)
    scales = numbers_of(scheme, parts, "scales", n_rows)
    q = codes.unpack(scheme, np.asarray(parts["codes"])[None], n_rows, n_columns)[0].astype(np.int64)
    if scheme.kind == "int4":
        q -= 8
    if scheme.kind in WHOLE_LEVELS:
        top, factor = WHOLE_LEVELS[scheme.kind]
        q = np.rint(codes.CODEBOOKS[scheme.kind].astype(np.float64) * top).astype(np.int64)[q]
    if scheme.has_shifts:
        step, lowest = {"nl4": (8, -12), "nl3": (12, -18)}[scheme.kind]
        shifts = step * (per_row(parts, "scales", n_rows).astype(np.int64) // 64) + lowest
        q = codes.CODEBOOKS[scheme.kind][q].astype(np.int64) + np.repeat(shifts, group, axis=1)[:, :n_columns]
    if scheme.kind == "int4z":
        q -= np.repeat(per_row(parts, "zero_points", n_rows).astype(np.int64), group, axis=1)[:, :n_columns]
    if scheme.has_offsets:
        offsets = numbers_of(scheme, parts, "offsets", n_rows)
    y = np.zeros((len(x), n_rows), np.float32)
    for start in range(0, n_columns, block):
        part = x[:, start : start + block]
        a_scale = np.abs(part).max(axis=1) / np.float32(2 ** (bits - 1) - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            a = np.where(a_scale[:, None] > 0, np.rint(part / a_scale[:, None]), 0).astype(np.int64)
        isum = a @ q[:, start : start + block].T
        assert np.abs(isum).max() < 2**31
        y += isum.astype(np.float32) * (scales[:, start // group][None] * (a_scale[:, None] * factor))
        if scheme.has_offsets:
            asum = a.sum(axis=1).astype(np.float32)[:, None]
            y += asum * (offsets[:, start // group][None] * a_scale[:, None])
    return y


@pytest.mark.parametrize("kind", ["int4", "int4z", "int4o", "e2m1", "nf4", "fp4", "int8"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_integer_gemm_equals_its_definition(tier: str, kind: str, group_size: int) -> None:
    """For every number of tokens that has a kernel of its own, and for more."""
    rng = np.random.default_rng(7)
    for n_rows, n_columns in ((3, 5), (40, 200), (16, 576), (115, 1000)):
        w = (rng.standard_normal((n_rows, n_columns)) + 0.3).astype(np.float32)
        x = rng.standard_normal((133, n_columns)).astype(np.float32)
        x[rng.random(x.shape) < 0.01] *= 200
        x[0, : n_columns // 2] = 0
        x[[1, -1]] *= np.float32(2.0 ** rng.integers(-110, -60))
        scheme, parts, _ = coded(kind, group_size, w, "f16" if n_rows < 100 else "f32")
        for bits in (16, 8):
            want = integer_gemm(scheme, w, parts, x, bits)
            for n_tokens in (*range(1, 14), len(x)):
                got = kernels.matmul(scheme, w.shape, parts, x[:n_tokens], threads=2, activation_bits=bits)
                np.testing.assert_array_equal(got.view(np.uint32), want[:n_tokens].view(np.uint32))


@pytest.mark.parametrize(
    "scheme",
    [
        *(QuantScheme(kind, 32, dtype) for kind in ("iq4nl", "int8o") for dtype in ("f16", "f32")),
        *(QuantScheme(kind, 16, "f16") for kind in ("int4", "int8", "e2m1", "int8o", "nf4", "fp4")),
        *(QuantScheme(k, g, "i8") for k in INTEGER_KINDS if not KINDS[k].has_shifts for g in (16, 32, 128)),
        *(QuantScheme(k, g, "s6") for k in ("nl4", "nl3") for g in (16, 32, 64, 128)),
    ],
    ids=repr,
)
def test_integer_gemm_of_version_1_1(tier: str, scheme: QuantScheme) -> None:
    rng = np.random.default_rng(13)
    for n_rows, n_columns in ((3, 5), (40, 280), (115, 600)):
        x = rng.standard_normal((133, n_columns)).astype(np.float32)
        x[0, : n_columns // 2] = 0
        parts = some_parts(scheme, (n_rows, n_columns))
        values = codes.dequantize(scheme, (n_rows, n_columns), {k: kernels.as_bytes(v) for k, v in parts.items()})
        assert np.array_equal(kernels.dequantize(scheme, (n_rows, n_columns), parts), values)
        for bits in (16, 8):
            want = integer_gemm(scheme, values, parts, x, bits)
            for n_tokens in (1, 2, 3, 4, 5, 12, 13, len(x)):
                got = kernels.matmul(scheme, (n_rows, n_columns), parts, x[:n_tokens], threads=2, activation_bits=bits)
                np.testing.assert_array_equal(got.view(np.uint32), want[:n_tokens].view(np.uint32))
            if bits == 16:
                np.testing.assert_allclose(want, x @ values.T, rtol=0, atol=2e-3 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["int4", "int8", "f32"])
def test_an_output_that_goes_around_the_caches_is_the_same(tier: str, kind: str) -> None:
    """More than 1 MiB for 120 tokens, and the last tile not whole."""
    rng = np.random.default_rng(12)
    w = rng.standard_normal((2393, 24)).astype(np.float32)
    x = rng.standard_normal((133, 24)).astype(np.float32)
    scheme, parts, wq = coded(kind, 0 if kind == "f32" else 32, w)
    got = kernels.matmul(scheme, w.shape, parts, x, threads=2)
    if kind == "f32":
        np.testing.assert_allclose(got, x @ wq.T, rtol=1e-4, atol=1e-4)
    else:
        want = integer_gemm(scheme, w, parts, x)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("bits", [16, 8])
def test_activations_near_a_half_are_rounded_as_divided(tier: str, bits: int) -> None:
    """Halves and what lies up to two steps of float32 beside them, for scales of every size."""
    rng = np.random.default_rng(11)
    n, top = 128, 2 ** (bits - 1) - 1
    scales = ((1 + rng.random(600)) * 2.0 ** np.linspace(-125, 127 - bits, 600)).astype(np.float32)
    largest = scales * np.float32(top)
    scales = largest / np.float32(top)
    halves = rng.integers(-top, top, (len(scales), n)) + 0.5
    halves[:, ::2] = rng.integers(-4, 4, halves[:, ::2].shape) + 0.5
    x = (halves * scales[:, None]).astype(np.float32)
    x = (x.view(np.int32) + rng.integers(-2, 3, x.shape, dtype=np.int32)).view(np.float32)
    x[:, 0] = largest
    scheme = QuantScheme("int8", n, "f32")
    eye = np.eye(n, dtype=np.int8)
    parts = {k: v[0] for k, v in codes.pack_matrix(scheme, eye, np.ones((n, 1), np.float32), None, None).items()}
    want = integer_gemm(scheme, np.zeros((n, n), np.float32), parts, x, bits)
    for rows in (1, len(x)):
        for at in range(0, len(x), rows):
            got = kernels.matmul(scheme, (n, n), parts, x[at : at + rows], activation_bits=bits)
            np.testing.assert_array_equal(got.view(np.uint32), want[at : at + rows].view(np.uint32))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_the_largest_integers_do_not_overflow(tier: str, kind: str, bits: int) -> None:
    """Levels and activations at their ends in whole blocks: sums as large as they can be, of either sign."""
    n = 256
    scheme = scheme_of(kind, 128)
    signed = [[-128], [127]]
    ends = {"int8": signed, "int8o": signed, "e2m1": [[7], [15]], "fp4": [[3], [11]], "nl3": [[0], [7]]}
    ends = ends.get(kind, [[0], [15]])
    rows = np.resize(np.array(ends), (16, 1))
    stored = np.repeat(rows, n, axis=1).astype(np.int8 if scheme.bits == 8 else np.uint8)
    points = np.resize(np.array([[0], [15], [15], [0]]), (16, 1)).repeat(2, axis=1) if kind == "int4z" else None
    offsets = np.full((16, 2), 7.25) if scheme.has_offsets else None
    scales = np.ones((16, 2), np.float16)
    supers = None
    if scheme.has_shifts:  # those that take the levels furthest
        shifts = np.resize(np.array([scheme.shifts[:1], scheme.shifts[-1:]]), (16, 1)).repeat(2, axis=1)
        scales, supers = codes.pack_shifted(scales, shifts, scheme.shifts), np.ones((16, 1))
    parts = codes.pack_matrix(scheme, stored, scales, points, offsets, supers)
    x = np.ones((14, n), np.float32)
    x[1::2] = -1
    want = integer_gemm(scheme, np.ones((16, n), np.float32), {k: v[0] for k, v in parts.items()}, x, bits)
    for rows_of_x in (x[1:2], *(x[:n] for n in range(1, 15))):
        got = kernels.matmul(scheme, (16, n), parts, rows_of_x, activation_bits=bits)
        first = 1 if rows_of_x[0, 0] < 0 else 0
        np.testing.assert_array_equal(got, want[first : first + len(got)])


def test_sums_of_levels_fit_32_bits() -> None:
    """What docs/numerics.md says of codebooks, of their greatest level: that times 32767 times a block."""
    bounds = {
        kind: int(np.rint(np.abs(codes.CODEBOOKS[kind].astype(np.float64)).max() * top)) * 32767 * block
        for kind, block in (("iq4nl", 128), ("e2m1", 128), ("nf4", 32), ("fp4", 32))
        for top in WHOLE_LEVELS[kind][:1]
    }
    assert bounds["nf4"] == 2**31 - 2**16
    assert bounds["iq4nl"] == 127 * 32767 * 128 < 2**29
    for kind in ("nl4", "nl3"):
        levels, shifts = codes.CODEBOOKS[kind], KINDS[kind].shifts
        furthest = max(abs(int(level) + shift) for level in (levels[0], levels[-1]) for shift in shifts)
        assert furthest == {"nl4": 139, "nl3": 145}[kind]
        assert furthest * 32767 * 128 < 2**30
    assert max(bounds.values()) < 2**31


def fused_multiply_add() -> Callable[[float, float, float], float]:
    """The C library's, in float32."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    libm.fmaf.restype, libm.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return libm.fmaf  # type: ignore[no-any-return]  # ctypes knows no types


def test_integer_gemm_is_closer_than_f16_activations(tier: str) -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((64, 4096)).astype(np.float32)
    x = rng.standard_normal((4, 4096)).astype(np.float32)
    scheme, parts, wq = coded("int4", 128, w)
    exact = x.astype(np.float64) @ wq.T.astype(np.float64)

    def error(y: npt.NDArray[np.floating]) -> float:
        return float(np.sqrt(np.mean((y - exact) ** 2) / np.mean(exact**2)))

    assert error(kernels.matmul(scheme, w.shape, parts, x)) < error(x.astype(np.float16).astype(np.float64) @ wq.T) / 4


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("n_tokens", [1, 3, 14])
def test_float_gemm_is_one_chain_of_fused_multiply_adds(tier: str, kind: str, n_tokens: int) -> None:
    fmaf = fused_multiply_add()
    rng = np.random.default_rng(5)
    w = rng.standard_normal((21, 137)).astype(np.float32)
    x = rng.standard_normal((n_tokens, 137)).astype(np.float32)
    scheme, parts, wq = coded(kind, 0, w)
    want = np.zeros((n_tokens, 21), np.float32)
    for m in range(n_tokens):
        for n in range(21):
            acc = 0.0
            for k in range(137):
                acc = fmaf(float(wq[n, k]), float(x[m, k]), acc)
            want[m, n] = acc
    got = kernels.matmul(scheme, w.shape, parts, x, threads=2)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_activation_is_not_hidden(tier: str, value: float) -> None:
    w = np.ones((16, 256), np.float32)
    x = np.ones((2, 256), np.float32)
    x[1, 200] = value
    scheme, parts, _ = coded("int4", 128, w)
    y = kernels.matmul(scheme, w.shape, parts, x)
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()


# ---- threads ----


def write_cgroup(root: object, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name  # type: ignore[operator]  # pathlib.Path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_cgroup_quota_is_honoured(tmp_path: object, files: dict[str, str], quota: float | None) -> None:
    write_cgroup(tmp_path, files)
    assert cpus._cgroup_cpus(tmp_path) == quota  # type: ignore[arg-type]  # pathlib.Path
