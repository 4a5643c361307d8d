"""compressed-tensors "pack-quantized", which vLLM and transformers load.

    X.weight_packed      I32 (out, in * bits / 32)       codes + 2^(bits-1), the first lowest
    X.weight_scale       F16 (out, groups)
    X.weight_zero_point  I32 (out * bits / 32, groups)   only asymmetric; packed along out
    X.weight_shape       I64 (2,)                        [out, in]

Embedding and head are stored as floats: what loads the format quantizes linear layers only, and mostly not the head.
"""

from __future__ import annotations

from typing import Any

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
    unsigned,
    words,
)
from w4conv.exports.plan import Exported, Options, Plan

KINDS = ("int4", "int4z", "int8")


def plan(model: ExportModel, options: Options) -> Plan:
    coded = coded_linears(model, KINDS)
    by_kind = {kind: [c for c in coded if c.info.scheme.kind == kind] for kind in KINDS}
    groups = {kind: common_group(found) for kind, found in by_kind.items() if found}
    tensors = export_all(model, options, coded, lambda c: _export(model, c, groups[c.info.scheme.kind]))
    ignored = ["lm_head", *dense_linears(model, coded)]
    config_groups = {
        f"group_{i}": _group(kind, size, ["Linear"] if len(groups) == 1 else [c.module for c in by_kind[kind]])
        for i, (kind, size) in enumerate(groups.items())
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": config_groups,
    }
    return HuggingFacePlan(
        model, options, tensors, dtype=float_dtype(options), quantization={"quantization_config": config}
    )


def _group(kind: str, group_size: int, targets: list[str]) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    weights = {
        "num_bits": 8 if kind == "int8" else 4,
        "type": "int",
        "symmetric": kind != "int4z",
        **strategy,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}


def _export(model: ExportModel, c: Coded, group_size: int) -> Exported:
    info, bits = c.info, c.bits
    n_rows, n_columns = info.shape
    n_groups = n_columns // group_size if group_size else 1

    def scale(kind: str) -> np.ndarray[Any, Any]:
        found = model.scales(info)
        return spread(found.scales if kind == "scales" else found.zero_points, info, group_size)

    outputs = [
        output(
            f"{c.module}.weight_packed",
            "I32",
            (n_rows, n_columns * bits // 32),
            lambda: (words(unsigned(rows.codes, bits), bits) for rows in model.coded_blocks(info)),
        ),
        output(f"{c.module}.weight_scale", "F16", (n_rows, n_groups), lambda: scale("scales")),
        output(f"{c.module}.weight_shape", "I64", (2,), lambda: np.array(info.shape, "<i8")),
    ]
    if info.scheme.kind == "int4z":
        outputs.append(
            output(
                f"{c.module}.weight_zero_point",
                "I32",
                (-(-n_rows // 8), n_groups),
                lambda: words(scale("zero_points").T.astype(np.uint8), 4).T,
            )
        )
    return Exported(info, f"{bits}-bit/{f'g{group_size}' if group_size else 'channel'}", tuple(outputs))
