"""Checkpoints whose weights are quantized already: one file a format, told apart by config.json.

A format gives a PackedTensor for every matrix that it stores in its own way. Where the container has a scheme that
means the very same float32 values, the tensor says which, and its codes and scales are handed out as they are; where
it has none, the values are handed out in float32, as the format's own library computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from w4conv.errors import InputError
from w4conv.sources.packed import awq, bitsandbytes, compressed_tensors, fp8, gptq, mlx, mxfp4
from w4conv.sources.packed.base import PackedTensor, RawTensors

__all__ = ["PackedTensor", "RawTensors", "find_packed"]

Settings = Mapping[str, Any]
Finder = Callable[[Settings, RawTensors], dict[str, PackedTensor]]

# quant_method of config.json -> what reads it
METHODS: Final[Mapping[str, Finder]] = {
    "gptq": gptq.find,
    "awq": awq.find,
    "compressed-tensors": compressed_tensors.find,
    "bitsandbytes": bitsandbytes.find,
    "fp8": fp8.find,
    "mxfp4": mxfp4.find,
}


def find_packed(
    config: Mapping[str, Any], raw: RawTensors, *, gptq_zero15: int | None = None
) -> tuple[str, dict[str, PackedTensor]]:
    """(kind of source, tensors by name) of a quantized checkpoint. gptq_zero15: see gptq.find.

    Raises InputError for a method that is not known, and for tensors that do not fit what config.json says.
    """
    settings = config.get("quantization_config")
    if isinstance(settings, dict) and "quant_method" in settings:
        method = settings["quant_method"]
        if method == "auto-round":
            method = _auto_round(settings, raw)
        if method not in METHODS:
            known = ", ".join((*METHODS, "auto-round", "mlx"))
            raise raw.error(
                f"quantization_config: quant_method {str(method)[:40]!r} is not supported; known are {known}"
            )
        found = gptq.find(settings, raw, zero15=gptq_zero15) if method == "gptq" else METHODS[method](settings, raw)
        kind = str(settings["quant_method"])
    else:
        settings = config.get("quantization")
        if not isinstance(settings, dict) or "group_size" not in settings or "bits" not in settings:
            raise raw.error("config.json says that the weights are quantized, but not how: no quant_method")
        found, kind = mlx.find(settings, raw), "mlx"
    if not found:
        raise InputError(f"{raw.directory}: config.json says {kind}, but no tensor is stored so")
    return kind, {
        name: tensor if tensor.nbytes else replace(tensor, nbytes=raw.nbytes(name)) for name, tensor in found.items()
    }


def _auto_round(settings: Settings, raw: RawTensors) -> str:
    """AutoRound stores weights in the layout of GPTQ or of AWQ."""
    layout = str(settings.get("packing_format", ""))
    for method in ("gptq", "awq"):
        if layout.endswith(method):
            return method
    raise raw.error(f"quantization_config: packing_format {layout[:40]!r} is not supported; known are gptq and awq")
