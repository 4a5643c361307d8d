"""Decoders of other formats' 4-bit layouts, written apart from w4conv out of their descriptions, nibble by nibble."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
DTYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U8": "u1", "I8": "i1",
    "F8_E4M3": "u1",
}  # fmt: skip
AWQ_PLACE = [0, 4, 1, 5, 2, 6, 3, 7]  # nibble that holds output j of a word


def load(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    out = {}
    for file in sorted(directory.glob("*.safetensors")):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                out[name] = np.frombuffer(raw[start:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return out


def field(words: npt.NDArray[Any], i: int, bits: int) -> npt.NDArray[np.int64]:
    return (words.view(np.uint32).astype(np.int64) >> (bits * i)) & ((1 << bits) - 1)


def along_columns(words: npt.NDArray[Any], bits: int = 4) -> npt.NDArray[np.int64]:
    """(n, m) words -> (n, m * 32 / bits), the first code lowest."""
    n = 32 // bits
    return np.stack([field(words, i, bits) for i in range(n)], axis=2).reshape(words.shape[0], -1)


def grouped(scales: npt.NDArray[Any], n_columns: int) -> F32:
    return np.repeat(scales.astype(np.float32), n_columns // scales.shape[1], axis=1)


def gptq(t: dict[str, Any], module: str, *, v2: bool = False) -> F32:
    q = along_columns(np.ascontiguousarray(t[f"{module}.qweight"].T))  # (out, in)
    z = along_columns(t[f"{module}.qzeros"]).T + (0 if v2 else 1)  # (out, groups)
    group = t[f"{module}.g_idx"]
    s = t[f"{module}.scales"].T.astype(np.float32)
    return ((q - z[:, group]).astype(np.float32) * s[:, group]).astype(np.float32)


def awq(t: dict[str, Any], module: str) -> F32:
    def unpacked(words: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        return np.stack([field(words, place, 4) for place in AWQ_PLACE], axis=2).reshape(words.shape[0], -1).T

    q, z = unpacked(t[f"{module}.qweight"]), unpacked(t[f"{module}.qzeros"])
    s = t[f"{module}.scales"].T
    zeros = np.repeat(z, q.shape[1] // z.shape[1], axis=1)
    return (q - zeros).astype(np.float32) * grouped(s, q.shape[1])


def compressed(t: dict[str, Any], module: str, bits: int = 4) -> F32:
    q = along_columns(t[f"{module}.weight_packed"], bits) - (1 << (bits - 1))
    n_rows, n_columns = t[f"{module}.weight_shape"].tolist()
    assert q.shape == (n_rows, n_columns)
    if f"{module}.weight_zero_point" in t:
        z = along_columns(np.ascontiguousarray(t[f"{module}.weight_zero_point"].T), bits).T[:n_rows] - 8
        q = q - np.repeat(z, n_columns // z.shape[1], axis=1)
    return q.astype(np.float32) * grouped(t[f"{module}.weight_scale"], n_columns)


def mlx(t: dict[str, Any], module: str, bits: int = 4) -> F32:
    q = along_columns(t[f"{module}.weight"], bits).astype(np.float32)
    return q * grouped(t[f"{module}.scales"], q.shape[1]) + grouped(t[f"{module}.biases"], q.shape[1])
