"""MLX, in the modes affine and mxfp4.

    X.weight  U32 (out, in * bits / 32)   codes, the first lowest
    X.scales  (out, groups)
    X.biases  (out, groups)

    value = code * scale + bias

Where every bias is minus a whole number of scales, that number is a zero point: int4, int4z or int8. Other biases of 4
bits are the offsets of int4o; of 8 bits the values are computed in float32.

In the mode mxfp4 the codes are of 4 bits, and X.scales are U8, exponents of groups of 32: see mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F32Array
from w4conv.sources.packed import mxfp4
from w4conv.sources.packed.base import (
    FLOATS,
    PackedTensor,
    RawTensors,
    fields,
    integer,
    integer_kind,
    packed_tensor,
    signed,
    whole_zero_points,
)


def find(settings: Mapping[str, Any], raw: RawTensors) -> dict[str, PackedTensor]:
    out = {}
    for module in raw.modules(".scales"):
        own = next((settings[name] for name in raw.spellings(module) if name in settings), None)
        if own is False:
            raise raw.error(f"{module} is stored quantized, but config.json says that it is not")
        choice = own if isinstance(own, dict) else settings
        mode = choice.get("mode", "affine")
        bits, group_size = integer(choice, "bits", raw), integer(choice, "group_size", raw)
        if (mode, bits, group_size) == ("mxfp4", 4, mxfp4.GROUP):
            out[f"{module}.weight"] = _mxfp4(module, raw)
            continue
        if mode != "affine" or bits not in (4, 8) or group_size < 1:
            raise raw.error(
                f"{module}: MLX mode {str(mode)[:20]!r} with {bits} bits is not supported; affine 4 and 8 and mxfp4 are"
            )
        out[f"{module}.weight"] = _tensor(module, raw, bits, group_size)
    return out


def _mxfp4(module: str, raw: RawTensors) -> PackedTensor:
    n_rows, n_words = raw.use_matrix(f"{module}.weight", ("U32",))
    raw.use(f"{module}.scales", ("U8",), (n_rows, 8 * n_words // mxfp4.GROUP))
    return mxfp4.matrix(
        f"{module}.scales",
        raw,
        shape=(n_rows, 8 * n_words),
        exponents=lambda rows: raw.read(f"{module}.scales")[rows].astype(np.uint8),
        levels=lambda rows: fields(raw.read(f"{module}.weight")[rows], 4),
    )


def _tensor(module: str, raw: RawTensors, bits: int, group_size: int) -> PackedTensor:
    n_rows, n_words = raw.use_matrix(f"{module}.weight", ("U32",))
    n_columns = n_words * (32 // bits)
    if n_columns % group_size:
        raise raw.error(f"{module}.weight: {n_columns} columns are no multiple of the group size {group_size}")
    shape = n_rows, n_columns // group_size
    raw.use(f"{module}.scales", FLOATS, shape)
    raw.use(f"{module}.biases", FLOATS, shape)

    def unsigned(rows: slice) -> npt.NDArray[np.uint8]:
        return fields(raw.read(f"{module}.weight")[rows], bits)

    def scales(rows: slice) -> F32Array:
        return raw.floats(f"{module}.scales")[rows]

    def biases(rows: slice) -> F32Array:
        return raw.floats(f"{module}.biases")[rows]

    def affine(rows: slice) -> F32Array:
        per_column = np.repeat(scales(rows), group_size, axis=1)
        out: F32Array = unsigned(rows) * per_column
        out += np.repeat(biases(rows), group_size, axis=1)
        return out

    zeros = whole_zero_points(scales(slice(0, n_rows)), biases(slice(0, n_rows)), bits)
    middle = 1 << (bits - 1)
    kind = "int4o" if bits == 4 else None
    if zeros is not None:
        kind = integer_kind(bits, symmetric=bool((zeros == middle).all()))
    return packed_tensor(
        shape=(n_rows, n_columns),
        stored_as=f"mlx_{bits}bit_g{group_size}",
        kind=kind,
        group_size=group_size,
        scales=scales,
        levels=lambda rows: signed(unsigned(rows), bits),
        zero_points=(lambda rows: zeros[rows]) if zeros is not None and kind == "int4z" else None,
        offsets=biases if kind == "int4o" else None,
        values=affine,
    )
