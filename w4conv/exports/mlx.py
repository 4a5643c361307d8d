"""MLX, in the mode affine, and e2m1 with powers of two in the mode mxfp4.

    X.weight  U32 (out, in * bits / 32)   codes, the first lowest
    X.scales  F16 (out, groups)
    X.biases  F16 (out, groups)           value = code * scale + bias: -zero * scale, or the offset of int4o

    mxfp4: codes of 4 bits likewise, X.scales U8 exponents, no biases

Embedding and head stay coded too, with their bits in the config. Groups are 128, 64 or 32.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.container import TensorInfo
from w4conv.errors import InputError
from w4conv.exports.huggingface import HuggingFacePlan
from w4conv.exports.model import ExportModel, Scales, UnpackedRows
from w4conv.exports.packed import (
    Coded,
    can_stay,
    exponents,
    export_all,
    float_dtype,
    module_of,
    offsets,
    output,
    signed_zeros,
    spread,
    unsigned,
    words,
)
from w4conv.exports.plan import Exported, Options, Plan
from w4conv.sources.packed.mxfp4 import GROUP

KINDS: Final = ("int4", "int4z", "int4o", "int8", "e2m1")
GROUPS: Final = (128, 64, 32)


def plan(model: ExportModel, options: Options) -> Plan:
    coded = [
        Coded(module_of(tensor), info)
        for tensor, info in model.tensors
        if can_stay(info, KINDS) and _holds(model.scales(info), info)
    ]
    if not coded:
        raise InputError(
            f"{model.container.path}: no matrix is in a scheme that MLX holds exactly ({', '.join(KINDS)}). "
            "Export to safetensors or gguf"
        )
    settings = [_settings(c.info) for c in coded]
    if all(own["mode"] == "affine" for own in settings):  # the default, which older readers have no word for
        settings = [{key: value for key, value in own.items() if key != "mode"} for own in settings]
    common = max(settings, key=settings.count)
    quantization: dict[str, Any] = {**common}
    for c, own in zip(coded, settings, strict=True):
        if own != common:
            quantization[c.module] = {**own}
    names = {c.info.name for c in coded}
    for tensor, info in model.tensors:
        if len(info.shape) == 2 and info.name not in names:
            quantization[module_of(tensor)] = False
    return HuggingFacePlan(
        model,
        options,
        export_all(model, options, coded, lambda c: _export(model, c)),
        dtype=float_dtype(options),
        quantization={"quantization": quantization, "quantization_config": quantization},
        writer="mlx",
    )


def _settings(info: TensorInfo) -> dict[str, int | str]:
    is_float = info.scheme.kind == "e2m1"
    group_size = GROUP if is_float else _group(info)
    return {"group_size": group_size, "bits": info.scheme.bits, "mode": "mxfp4" if is_float else "affine"}


def _holds(scales: Scales, info: TensorInfo) -> bool:
    return (exponents(scales.scales) if info.scheme.kind == "e2m1" else offsets(scales, info)) is not None


def _group(info: TensorInfo) -> int:
    divisor = math.gcd(info.shape[1], info.scheme.group_size)  # gcd with 0 is the row itself
    return next(size for size in GROUPS if divisor % size == 0)


def _export(model: ExportModel, c: Coded) -> Exported:
    if c.info.scheme.kind == "e2m1":
        return _mxfp4(model, c)
    info, bits, group_size = c.info, c.bits, _group(c.info)
    n_rows, n_columns = info.shape
    shape = n_rows, n_columns // group_size

    def biases() -> npt.NDArray[np.float16]:
        found = offsets(model.scales(info), info)
        assert found is not None
        return found

    outputs = (
        output(
            f"{c.module}.weight",
            "U32",
            (n_rows, n_columns * bits // 32),
            lambda: (words(unsigned(rows.codes, bits), bits) for rows in model.coded_blocks(info)),
        ),
        output(f"{c.module}.scales", "F16", shape, lambda: spread(model.scales(info).scales, info, group_size)),
        output(f"{c.module}.biases", "F16", shape, lambda: spread(biases(), info, group_size)),
    )
    return Exported(info, f"{bits}-bit/g{group_size}", outputs)


def _mxfp4(model: ExportModel, c: Coded) -> Exported:
    info = c.info
    n_rows, n_columns = info.shape

    def packed(rows: UnpackedRows) -> npt.NDArray[np.uint32]:
        groups = np.ascontiguousarray(rows.codes).view(np.uint8).reshape(len(rows.codes), -1, GROUP)
        scaled = signed_zeros(groups, spread(rows.scales.scales, info, GROUP))
        return words(scaled.reshape(len(scaled), -1), 4)

    def powers() -> npt.NDArray[np.generic]:
        found = exponents(model.scales(info).scales)
        assert found is not None
        return spread(found, info, GROUP)

    outputs = (
        output(
            f"{c.module}.weight",
            "U32",
            (n_rows, n_columns // 8),
            lambda: (packed(rows) for rows in model.coded_blocks(info)),
        ),
        output(f"{c.module}.scales", "U8", (n_rows, n_columns // GROUP), powers),
    )
    return Exported(info, "mxfp4", outputs)
