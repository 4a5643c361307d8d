"""A plain Hugging Face directory: every tensor dequantized. F32 is exact; F16 and BF16 round most products."""

from __future__ import annotations

from w4conv.export.huggingface import HuggingFacePlan
from w4conv.export.model import ExportModel
from w4conv.export.plan import FloatWriter, Options, Plan


def plan(model: ExportModel, options: Options) -> Plan:
    dtype = options.dtype or "f32"
    writer = FloatWriter(model, dtype)
    return HuggingFacePlan(model, options, [writer.export(info) for _, info in model.tensors], dtype=dtype)
