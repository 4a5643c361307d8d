"""Round-to-nearest of nl4 and nl3: native code against w4-codes 6.7 written down plainly, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from shifted import LEVELS, SHIFTS, by_the_text

from w4conv import codes, kernels
from w4conv.scheme import QuantScheme, scheme_of

F32 = np.float32
TIERS = kernels.isa_tiers()
KINDS = list(LEVELS)


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("W4CONV_ISA", request.param)
    return str(request.param)


def some_weights(n_rows: int, n_columns: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(n_columns)
    w = (rng.standard_t(5, (n_rows, n_columns)) * 0.02).astype(F32)
    w[0, : n_columns // 2] = 0
    w[-1] *= F32(2.0**-14)  # scales near the lowest FP16 numbers
    if n_rows > 2:
        w[1] = 0
        w[2] = np.abs(w[2])
    return w


@pytest.mark.parametrize(
    ("n_rows", "n_columns", "size"), [(1, 1, 16), (3, 45, 16), (18, 96, 32), (4, 200, 64), (5, 150, 128)]
)
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_that_of_the_text(tier: str, kind: str, n_rows: int, n_columns: int, size: int, dtype: str) -> None:
    w = some_weights(n_rows, n_columns)
    stored = {"F16": w.astype(np.float16), "BF16": codes.f32_to_bf16(w), "F32": w}[dtype]
    w = codes.as_f32(stored, dtype)
    scheme = scheme_of(kind, size)
    q, sub_scales, supers = by_the_text(w, kind, size)
    for threads in (1, 2):
        got = kernels.quantize_rtn(stored, dtype, scheme, threads=threads).parts()
        assert list(got) == ["codes", "scales", "super_scales"]
        assert np.array_equal(codes.unpack(scheme, got["codes"][None], n_rows, n_columns)[0], q)
        assert np.array_equal(codes.unpack_rows(got["scales"][None], n_rows)[0], sub_scales)
        assert np.array_equal(codes.unpack_rows(got["super_scales"][None], n_rows)[0, :, 0], supers.astype(np.float16))
    blocks = [kernels.quantize_rtn(stored[i : i + 16], dtype, scheme) for i in range(0, n_rows, 16)]
    assert np.array_equal(np.concatenate([b.codes for b in blocks]), got["codes"])


@pytest.mark.parametrize(("kind", "allowed"), [("nl4", 1.1), ("nl3", 1.1)])
def test_no_other_candidate_is_closer(kind: str, allowed: float) -> None:
    """In float64, of all scales and shifts that a byte can say."""
    w = some_weights(6, 64)[3:5]
    parts = kernels.quantize_rtn(w, "F32", scheme_of(kind, 32)).parts()
    got = codes.dequantize(scheme_of(kind, 32), w.shape, {kind: kernels.as_bytes(p) for kind, p in parts.items()})
    steps = codes.unpack_rows(parts["super_scales"][None], 2)[0, :, 0].astype(np.float64)
    for row, step in enumerate(steps):
        for part in (slice(0, 32), slice(32, 64)):
            group = w[row, part].astype(np.float64)
            error = np.square(group - got[row, part]).sum()
            best = min(
                np.square(group[:, None] - k * step * (LEVELS[kind].astype(np.float64) + shift)).min(axis=1).sum()
                for k in range(-31, 32) for shift in SHIFTS[kind]
            )  # fmt: skip
            assert best <= error * (1 + 1e-6)
            assert error <= allowed * best  # 72 candidates stand for 252


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_no_number_is_named(bad: float) -> None:
    w = some_weights(20, 64)
    w[17, 40] = bad
    with pytest.raises(kernels.BadValueError, match=r"(NaN|infinity) at row 17, column 40"):
        kernels.quantize_rtn(w, "F32", scheme_of("nl4", 32))


def test_a_scale_beyond_fp16_is_named() -> None:
    w = np.ones((3, 64), F32)
    w[2, 40] = 1e9
    with pytest.raises(kernels.BadValueError, match="a scale beyond FP16 at row 2, column 32"):
        kernels.quantize_rtn(w, "F32", scheme_of("nl4", 32))


@pytest.mark.parametrize("shape", [(0, 32), (5, 0), (0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_without_values(kind: str, shape: tuple[int, int]) -> None:
    scheme = scheme_of(kind, 32)
    parts = kernels.quantize_rtn(np.zeros(shape, F32), "F32", scheme).parts()
    assert {kind: p.nbytes for kind, p in parts.items()} == codes.part_sizes(scheme, shape)


def test_values_too_small_for_a_scale_are_counted() -> None:
    w = np.full((1, 32), 1e-7, F32)
    assert kernels.quantize_rtn(w, "F32", QuantScheme("nl4", 32, "s6")).n_underflowed == 1
