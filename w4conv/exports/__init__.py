"""A `.w4` container as other engines read it: one file a format, one interface for all."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

from w4conv.exports.model import ExportModel
from w4conv.exports.plan import Options, Plan

# A format is a module here, loaded when chosen, that offers plan(model, options).
_MODULES: Final[Mapping[str, str]] = {
    "safetensors": "safetensors",
    "gguf": "gguf",
    "compressed-tensors": "compressed_tensors",
    "gptq": "gptq",
    "awq": "awq",
    "mlx": "mlx",
    "onnx": "onnx",
}
FORMATS: Final = tuple(_MODULES)
STACKED: Final = ("gguf", "safetensors")  # hold the experts of a layer in one tensor
DTYPES: Final = ("f16", "bf16", "f32")
DEFAULT_SHARD_SIZE: Final = "5GB"


def plan_of(model: ExportModel, options: Options) -> Plan:
    """How `options.to`, one of FORMATS, holds the model. Raises InputError where it cannot."""
    plan: Plan = importlib.import_module(f"w4conv.exports.{_MODULES[options.to]}").plan(model, options)
    return plan
