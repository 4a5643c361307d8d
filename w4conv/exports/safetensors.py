"""A plain Hugging Face directory: every tensor dequantized. F32 is exact; F16 and BF16 round most products."""

from __future__ import annotations

from w4conv.exports.huggingface import HuggingFacePlan
from w4conv.exports.model import ExportModel
from w4conv.exports.plan import FloatWriter, Options, Plan
from w4conv.sources.huggingface import TRANSPOSED


def plan(model: ExportModel, options: Options) -> Plan:
    dtype = options.dtype or "f32"
    writer = FloatWriter(model, dtype)
    transposed = TRANSPOSED.get(str(model.config.get("model_type")), ())
    tensors = [writer.export(info, transposed=info.name.endswith(transposed)) for _, info in model.tensors]
    return HuggingFacePlan(model, options, tensors, dtype=dtype)
