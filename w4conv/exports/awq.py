"""AWQ, the GEMM layout of AutoAWQ.

X.qweight  I32 (in, out / 8)       8 codes along out: nibble i is output 8c + ORDER[i]
X.qzeros   I32 (groups, out / 8)   zero points in the same order
X.scales   F16 (groups, out)
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.exports.huggingface import HuggingFacePlan
from w4conv.exports.model import ExportModel
from w4conv.exports.packed import (
    Coded,
    Words,
    coded_linears,
    common_group,
    dense_linears,
    export_all,
    float_dtype,
    output,
    spread,
    words,
)
from w4conv.exports.plan import Exported, Options, Plan

ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def plan(model: ExportModel, options: Options) -> Plan:
    coded = coded_linears(model, ("int4", "int4z"), row_multiple=8)
    group_size = common_group(coded)
    dense = dense_linears(model, coded)
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": dense or None,
    }
    return HuggingFacePlan(
        model,
        options,
        export_all(model, options, coded, lambda c: _export(model, c, group_size)),
        dtype=float_dtype(options),
        quantization={"quantization_config": config},
    )


def _export(model: ExportModel, c: Coded, group_size: int) -> Exported:
    info = c.info
    n_rows, n_columns = info.shape
    n_groups = n_columns // group_size if group_size else 1
    outputs = (
        output(f"{c.module}.qweight", "I32", (n_columns, n_rows // 8), lambda: _ordered(model.whole(info).codes.T)),
        output(
            f"{c.module}.qzeros",
            "I32",
            (n_groups, n_rows // 8),
            lambda: _ordered(spread(model.scales(info).zero_points, info, group_size).T),
        ),
        output(
            f"{c.module}.scales",
            "F16",
            (n_groups, n_rows),
            lambda: spread(model.scales(info).scales, info, group_size).T,
        ),
    )
    return Exported(info, f"4-bit/{f'g{group_size}' if group_size else 'channel'}", outputs)


def _ordered(codes: npt.NDArray[np.generic]) -> Words:
    """(n, out) -> (n, out / 8)."""
    eights = codes.astype(np.uint8).reshape(codes.shape[0], -1, 8)
    return words(eights[..., ORDER].reshape(codes.shape), 4)
