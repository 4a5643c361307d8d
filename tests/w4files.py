"""Small `.w4` files for tests, and the means to damage them."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from w4conv import codes, scheme
from w4conv.arrays import VALUE_DTYPES
from w4conv.container import Container, Layout, TensorPlan, Writer, plan, validate
from w4conv.errors import FormatError
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
        for kind in ("int4", "int4z", "int4o", "nf4", "fp4", "e2m1", "int8")
        for group_size, dtype in ((32, "f16"), (0, "f32"))
    ),
]
SCHEMES_OF_1_1 = [
    *(QuantScheme(kind, 32, dtype) for kind in ("iq4nl", "int8o") for dtype in ("f16", "f32")),
    *(QuantScheme(kind, 16, "f16") for kind in ("int4", "e2m1", "int8", "int8o")),
    *(
        QuantScheme(k, size, "i8")
        for k, kind in scheme.KINDS.items()
        if not kind.is_float and not kind.has_shifts
        for size in (16, 128)
    ),
    *(QuantScheme(k, size, "s6") for k in ("nl4", "nl3") for size in (16, 128)),
]


def random_parts(coding: QuantScheme, shape: Sequence[int], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Codes, scales, zero points and offsets of a tensor, random and packed, as uint8 arrays."""
    rng = np.random.default_rng(seed)
    if len(shape) < 2:
        return {"values": random_values(coding, shape, seed).reshape(-1).view(np.uint8)}
    n_matrices, n_rows, n_columns = codes.matrix_shape(shape)
    matrices = (n_matrices, n_rows, n_columns)
    if coding.is_float:
        return {"values": as_bytes(codes.pack(coding, random_values(coding, matrices, seed)))}
    lowest, end, dtype = (-128, 128, np.int8) if coding.bits == 8 else (0, 1 << coding.bits, np.uint8)
    q = rng.integers(lowest, end, matrices, dtype)
    parts = {"codes": as_bytes(codes.pack(coding, q))}
    for kind, part in codes.row_parts(coding).items():
        shape = n_matrices, n_rows, part.n_runs(n_columns)
        if kind == "zero_points":
            numbers = rng.integers(0, 16, shape, np.uint8)
        elif part.dtype == np.uint8:
            numbers = rng.integers(0, 256, shape, np.uint8)
        elif part.dtype == np.int8:
            numbers = rng.integers(-128, 128, shape, np.int8)
        elif coding.kind == "e2m1" and kind == "scales":  # as MXFP4 has them
            numbers = np.exp2(rng.integers(-9, 3, shape)).astype(part.dtype)
        else:
            numbers = rng.standard_normal(shape).astype(part.dtype)
        parts[kind] = as_bytes(codes.pack_rows(numbers))
    return parts


def random_values(coding: QuantScheme, shape: Sequence[int], seed: int) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).standard_normal(tuple(shape)).astype(np.float32)
    if coding.kind == "bf16":
        return np.asarray(values.view(np.uint32) >> 16, np.uint16)
    return values.astype(VALUE_DTYPES[coding.kind.upper()])


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


def with_blobs(container: Container, blobs: Mapping[str, bytes]) -> bytes:
    """The file with these blobs in place of its own, and right digests."""
    tensors = {name: (info.scheme, info.shape) for name, info in container.tensors.items()}
    parts = {n: {part.kind: container.bytes_of(part) for part in i.parts} for n, i in container.tensors.items()}
    return write(small_plan(tensors, blobs, container.provenance), parts)


SMALL_TENSORS: dict[str, tuple[QuantScheme, tuple[int, ...]]] = {
    "odd int4": (scheme.int4(32), (3, 37)),
    "norm": (scheme.F16, (5,)),
    "zero points": (QuantScheme("int4z", 0, "f32"), (2, 17, 9)),
    "plain": (scheme.BF16, (3, 3)),
}


def rebuild(
    raw: bytes,
    change: Callable[[dict[str, Any]], object] | None = None,
    *,
    index: bytes | None = None,
    header: Mapping[str, int] | None = None,
    data: Callable[[bytearray], object] | None = None,
    seal: bool = True,
) -> bytes:
    """The file with its index, header fields or data section changed and every digest made to fit again.

    Written apart from w4conv: what a careful attacker, or another writer with a fault, would produce.
    change: alters the parsed index. index: bytes to take instead. header: fields to set at last.
    data: alters the data section. seal: recompute the digests of parts and trailer.
    """
    names = ["file_nbytes", "index_nbytes", "data_offset", "data_nbytes", "n_parts", "n_sources", "reserved"]
    fields = dict(zip(names, struct.unpack_from("<QQQQIIQ", raw, 16), strict=True))
    version = {"major": raw[8], "minor": raw[10], "header_nbytes": 128}
    end = fields["data_offset"] + fields["data_nbytes"]
    section, trailer = bytearray(raw[fields["data_offset"] : end]), raw[end:]
    old_index = raw[128 : 128 + fields["index_nbytes"]]
    parsed = json.loads(old_index)
    places = [(p["offset"], p["nbytes"]) for p in parsed["blobs"] + [p for t in parsed["tensors"] for p in t["parts"]]]
    if change:
        change(parsed)
    if index is None:
        index = json.dumps(parsed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    if data:
        data(section)
    fields["index_nbytes"] = len(index)
    fields["data_offset"] = -(-(128 + len(index)) // 4096) * 4096
    fields["file_nbytes"] = fields["data_offset"] + len(section) + len(trailer)
    fields |= version | dict(header or {})
    head = b"\x89W4C\r\n\x1a\n" + struct.pack(
        "<HHIQQQQIIQ", fields["major"], fields["minor"], fields["header_nbytes"], *(fields[n] for n in names)
    )
    head += blake3(index).digest()
    head_digest = blake3(head).digest()
    if seal:
        digests = b"".join(blake3(bytes(section[o : o + n])).digest() for o, n in places)
        digests += trailer[len(digests) : -32]
        trailer = digests + blake3(head_digest + digests).digest()
    gap = bytes(-(128 + len(index)) % 4096)
    return head + head_digest + index + gap + bytes(section) + trailer


def open_bytes(raw: bytes) -> Container:
    """A container in memory, by the rules of `open_container` but for the file itself."""
    head = validate.header(raw[:128], where="memory")
    if head.file_nbytes != len(raw):
        raise FormatError("memory: wrong size", clause="2.5")
    return Container(Path("memory"), np.frombuffer(raw, np.uint8), head)
