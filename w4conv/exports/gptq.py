"""GPTQ, the layout of AutoGPTQ and GPTQModel.

    X.qweight  I32 (in / 8, out)       8 codes along in, the first lowest
    X.qzeros   I32 (groups, out / 8)   zero points along out; less 1 in "gptq", as they are in "gptq_v2"
    X.scales   F16 (groups, out)
    X.g_idx    I32 (in,)               group of each column

"gptq" cannot hold a zero point of 0, so a container that has one becomes "gptq_v2".
"""

from __future__ import annotations

import numpy as np

from w4conv.exports.huggingface import HuggingFacePlan
from w4conv.exports.model import ExportModel
from w4conv.exports.packed import (
    Coded,
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
from w4conv.files.strict_json import to_json


def plan(model: ExportModel, options: Options) -> Plan:
    coded = coded_linears(model, ("int4", "int4z"), row_multiple=8)
    group_size = common_group(coded)
    v2 = any((model.scales(c.info).zero_points == 0).any() for c in coded if c.info.scheme.kind == "int4z")
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size or -1,
        "desc_act": False,
        "sym": all(c.info.scheme.kind == "int4" for c in coded),
        "lm_head": False,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
        "pack_dtype": "int32",
    }
    notes = []
    if dense := dense_linears(model, coded):
        config["dynamic"] = {f"-:^{module.replace('.', '[.]')}$": {} for module in dense}
        notes.append(f"{len(dense)} linear layers are stored as floats: their scheme or shape has no place in GPTQ.")
    tensors = export_all(model, options, coded, lambda c: _export(model, c, group_size, less=0 if v2 else 1))
    return HuggingFacePlan(
        model,
        options,
        tensors,
        dtype=float_dtype(options),
        quantization={"quantization_config": config},
        sidecars={"quantize_config.json": to_json(config, where="quantize_config.json", indent=2) + b"\n"},
        notes=notes,
    )


def _export(model: ExportModel, c: Coded, group_size: int, *, less: int) -> Exported:
    info = c.info
    n_rows, n_columns = info.shape
    n_groups = n_columns // group_size if group_size else 1
    outputs = (
        output(
            f"{c.module}.qweight",
            "I32",
            (n_columns // 8, n_rows),
            lambda: words(model.whole(info).codes.astype(np.uint8), 4).T,
        ),
        output(
            f"{c.module}.qzeros",
            "I32",
            (n_groups, n_rows // 8),
            lambda: words(spread(model.scales(info).zero_points - less, info, group_size).T.astype(np.uint8), 4),
        ),
        output(
            f"{c.module}.scales",
            "F16",
            (n_groups, n_rows),
            lambda: spread(model.scales(info).scales, info, group_size).T,
        ),
        output(
            f"{c.module}.g_idx",
            "I32",
            (n_columns,),
            lambda: (np.arange(n_columns) // (group_size or n_columns)).astype("<i4"),
        ),
    )
    return Exported(info, f"4-bit/{f'g{group_size}' if group_size else 'channel'}", outputs)
