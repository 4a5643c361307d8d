"""MXFP4, as gpt-oss stores its experts.

X_blocks  U8 (experts, out, groups, 16)   two codes a byte along in, the first in the low half; groups of 32
X_scales  U8 (experts, out, groups)       exponent, biased by 127

value = E2M1[code] * 2^(scale - 127)

The scheme e2m1 with a power of two as scale holds just that. X is a stack of matrices, one an expert, rows and columns
as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F32Array
from w4conv.sources.packed.base import PackedTensor, RawTensors, packed_tensor, stacked

GROUP: Final = 32
BIAS: Final = 127  # of the exponent
SIGN: Final = 8  # the code of -0
MIN_HALF_EXPONENT: Final = 103  # below it the scale is no FP16 number
MAX_EXPONENT: Final = 252  # above it the largest code is no float32


def find(settings: Mapping[str, Any], raw: RawTensors) -> dict[str, PackedTensor]:
    del settings  # it names what is left alone, which the tensors show
    return {module: _tensor(module, raw) for module in raw.modules("_blocks")}


def _tensor(module: str, raw: RawTensors) -> PackedTensor:
    shape = raw.use(f"{module}_blocks", ("U8",))
    if len(shape) != 4 or 0 in shape or 2 * shape[3] != GROUP:
        raise raw.error(f"{module}_blocks has shape {shape}, expected (experts, out, groups, {GROUP // 2})")
    raw.use(f"{module}_scales", ("U8",), shape[:3])
    n_experts, n_out, n_groups, _ = shape

    def part(kind: str, rows: slice) -> npt.NDArray[np.uint8]:
        """Rows of all experts, one behind the other."""
        whole = raw.read(f"{module}_{kind}")
        return np.ascontiguousarray(whole.reshape(n_experts * n_out, *whole.shape[2:])[rows], np.uint8)

    tensor = matrix(
        f"{module}_scales",
        raw,
        shape=(n_experts * n_out, n_groups * GROUP),
        exponents=lambda rows: part("scales", rows),
        levels=lambda rows: _nibbles(part("blocks", rows)),
    )
    return replace(stacked(tensor, n_experts), nbytes=n_experts * n_out * n_groups * (GROUP // 2 + 1))


def matrix(
    scales_name: str,
    raw: RawTensors,
    *,
    shape: tuple[int, int],
    exponents: Callable[[slice], npt.NDArray[np.uint8]],
    levels: Callable[[slice], npt.NDArray[np.uint8]],
) -> PackedTensor:
    """exponents: (n_rows, n_groups) of some rows; levels: their codes, (n_rows, n_columns)."""
    if (raw.read(scales_name).astype(np.uint8) > MAX_EXPONENT).any():
        raise raw.error(f"{scales_name} holds an exponent above {MAX_EXPONENT}: NaN, or beyond float32")

    def scales(rows: slice) -> F32Array:
        found = exponents(rows)
        return scale_of(found, levels(rows) if (found < MIN_HALF_EXPONENT).any() else None)

    return packed_tensor(shape=shape, stored_as="mxfp4", kind="e2m1", group_size=GROUP, scales=scales, levels=levels)


def scale_of(exponents: npt.NDArray[np.uint8], codes: npt.NDArray[np.uint8] | None) -> F32Array:
    """The scales of the levels. codes: (rows, columns), or None; a group of zeros needs no scale, and
    writers give it one that is no FP16 number."""
    scales: F32Array = np.ldexp(np.float32(1), exponents.astype(np.int32) - BIAS).astype(np.float32)
    if codes is not None:
        scales[~(codes.reshape(*scales.shape, GROUP) & ~np.uint8(SIGN)).any(axis=-1)] = 0
    return scales


def _nibbles(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(rows, groups, 16) -> (rows, groups * 32)."""
    return np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
