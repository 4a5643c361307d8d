"""Small `.w4` files for tests, and the means to damage them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from w4conv import codes, scheme
from w4conv.container import Layout, TensorPlan, Writer, plan
from w4conv.scheme import QuantScheme

PROVENANCE: dict[str, Any] = {
    "method": "rtn",
    "notes": [],
    "source": {"files": [{"name": "model.safetensors", "nbytes": 7}], "kind": "safetensors"},
    "tool": "w4conv test",
}
BLOBS = {"config.json": b'{"model_type":"llama"}', "tokenizer.json": b"", "chat_template.jinja": b"x" * 64}
ALL_SCHEMES = [
    *(QuantScheme(kind) for kind in scheme.FLOAT_KINDS),
    *(
        QuantScheme(kind, group_size, dtype)
        for kind in ("int4", "int4z", "nf4", "fp4", "int8")
        for group_size, dtype in ((32, "f16"), (0, "f32"))
    ),
]


def random_parts(coding: QuantScheme, shape: Sequence[int], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Codes, scales and zero points of a tensor, random and packed, as uint8 arrays."""
    rng = np.random.default_rng(seed)
    dtype = codes.VALUE_DTYPES.get(coding.kind)
    if len(shape) < 2:
        assert dtype is not None
        return {"values": random_values(coding, shape, seed).reshape(-1).view(np.uint8)}
    n_matrices, n_rows, n_columns = codes.matrix_shape(shape)
    matrices = (n_matrices, n_rows, n_columns)
    if coding.is_float:
        return {"values": as_bytes(codes.pack(coding, random_values(coding, matrices, seed)))}
    if coding.kind == "int8":
        q = rng.integers(-128, 128, matrices, np.int8)
    else:
        q = rng.integers(0, 16, matrices, np.uint8)
    groups = (n_matrices, n_rows, coding.n_groups(n_columns))
    scales = rng.standard_normal(groups).astype(codes.SCALE_DTYPES[coding.scale_dtype])
    parts = {"codes": as_bytes(codes.pack(coding, q)), "scales": as_bytes(codes.pack_rows(scales))}
    if coding.kind == "int4z":
        parts["zero_points"] = as_bytes(codes.pack_rows(rng.integers(0, 16, groups, np.uint8)))
    return parts


def random_values(coding: QuantScheme, shape: Sequence[int], seed: int) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).standard_normal(tuple(shape)).astype(np.float32)
    if coding.kind == "bf16":
        return np.asarray(values.view(np.uint32) >> 16, np.uint16)
    return values.astype(codes.VALUE_DTYPES[coding.kind])


def as_bytes(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def small_plan(
    tensors: Mapping[str, tuple[QuantScheme, tuple[int, ...]]],
    blobs: Mapping[str, bytes] = BLOBS,
    provenance: Mapping[str, Any] = PROVENANCE,
) -> Layout:
    return plan([TensorPlan(n, shape, s, "F32") for n, (s, shape) in tensors.items()], blobs, provenance)


def write(layout: Layout, parts: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], block: int = 1 << 20) -> bytes:
    """The whole file in memory; `parts` are written in blocks of `block` bytes."""
    out = io.BytesIO()
    writer = Writer(out, layout)
    for name, part in layout.parts():
        data = parts[name][part.kind]
        for i in range(0, len(data), block):
            writer.write(name, part.kind, data[i : i + block])
    writer.finish([bytes([i]) * 32 for i in range(layout.header.n_sources)])
    return out.getvalue()


def small_file(
    tensors: Mapping[str, tuple[QuantScheme, tuple[int, ...]]] | None = None, *, block: int = 1 << 20
) -> tuple[bytes, dict[str, dict[str, np.ndarray[Any, Any]]]]:
    """(bytes, parts) of a file with these tensors, by default one of each kind that matters."""
    tensors = tensors if tensors is not None else SMALL_TENSORS
    parts = {name: random_parts(s, shape, i) for i, (name, (s, shape)) in enumerate(tensors.items())}
    return write(small_plan(tensors), parts, block), parts


SMALL_TENSORS: dict[str, tuple[QuantScheme, tuple[int, ...]]] = {
    "odd int4": (scheme.int4(32), (3, 37)),
    "norm": (scheme.F16, (5,)),
    "zero points": (QuantScheme("int4z", 0, "f32"), (2, 17, 9)),
    "plain": (scheme.BF16, (3, 3)),
}
