"""MLX, affine mode.

    X.weight  U32 (out, in * bits / 32)   codes, the first lowest
    X.scales  F16 (out, groups)
    X.biases  F16 (out, groups)           value = code * scale + bias: -zero * scale, or the offset of int4o

Embedding and head stay coded too, with their bits in the config. Groups are 128, 64 or 32.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.container import TensorInfo
from w4conv.errors import InputError
from w4conv.export.huggingface import HuggingFacePlan
from w4conv.export.model import ExportModel
from w4conv.export.packed import (
    Coded,
    can_stay,
    export_all,
    float_dtype,
    module_of,
    offsets,
    output,
    spread,
    unsigned,
    words,
)
from w4conv.export.plan import Exported, Options, Plan

KINDS: Final = ("int4", "int4z", "int4o", "int8")
GROUPS: Final = (128, 64, 32)


def plan(model: ExportModel, options: Options) -> Plan:
    coded = [
        Coded(module_of(tensor), info)
        for tensor, info in model.tensors
        if can_stay(info, KINDS) and offsets(model.scales(info), info) is not None
    ]
    if not coded:
        raise InputError(
            f"{model.container.path}: no matrix is in a scheme that MLX holds exactly ({', '.join(KINDS)}). "
            "Export to safetensors or gguf"
        )
    settings = [(c.bits, _group(c.info)) for c in coded]
    common = max(settings, key=settings.count)
    quantization: dict[str, Any] = {"group_size": common[1], "bits": common[0]}
    for c, (bits, group_size) in zip(coded, settings, strict=True):
        if (bits, group_size) != common:
            quantization[c.module] = {"group_size": group_size, "bits": bits}
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


def _group(info: TensorInfo) -> int:
    divisor = math.gcd(info.shape[1], info.scheme.group_size)  # gcd with 0 is the row itself
    return next(size for size in GROUPS if divisor % size == 0)


def _export(model: ExportModel, c: Coded) -> Exported:
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
