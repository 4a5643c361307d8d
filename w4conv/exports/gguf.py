"""A GGUF file for llama.cpp: Q4_0, Q4_1, Q8_0, MXFP4 and those of gguf_blocks.py where they hold the very values,
floats for the rest.

    "GGUF" | u32 version | u64 n_tensors | u64 n_keys | keys | tensor infos | zeros | tensors, each padded to 32

    Q4_0    f16 scale, 16 bytes: byte j = code[j] | code[j + 16] << 4        value = (code - 8) * scale
    Q4_1    f16 scale, f16 offset, the same 16 bytes                         value = code * scale + offset
    Q8_0    f16 scale, 32 signed bytes                                       value = code * scale
    MXFP4   exponent, the same 16 bytes                                      value = E2M1[code] * 2^(exponent - 127)

A group of 32 or more becomes blocks of 32 with its scale repeated, so nothing is lost.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import Array
from w4conv.container import TensorInfo
from w4conv.errors import InputError
from w4conv.exports.directory import LEFTOVER
from w4conv.exports.gguf_blocks import BLOCK_TYPES, BY_NAME
from w4conv.exports.gguf_metadata import metadata
from w4conv.exports.gguf_values import Value, string
from w4conv.exports.huggingface import checked_blocks
from w4conv.exports.model import ExportModel, UnpackedRows
from w4conv.exports.packed import exponents, offsets, signed_zeros, spread
from w4conv.exports.plan import FLOAT_WORDS, Exported, FileSize, FloatWriter, Options, Output, Plan
from w4conv.files.target import check_target, open_target
from w4conv.models.spec import ModelSpec, TensorSpec
from w4conv.progress import Progress
from w4conv.sources.gguf_architectures import BY_FAMILY, TOP_NAMES, Architecture
from w4conv.sources.gguf_config import LONG_FACTORS, ROPE_FACTORS
from w4conv.sources.gguf_tensors import stored_rows

VERSION: Final = 3
ALIGNMENT: Final = 32
BLOCK: Final = 32
MAX_NAME_NBYTES: Final = 63
TYPE_IDS: Final = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13,
    "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "MXFP4": 39,
}  # fmt: skip
BLOCK_NBYTES: Final = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "MXFP4": 17}
FILE_TYPES: Final = {  # general.file_type
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17,
    "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "MXFP4": 38,
}  # fmt: skip


def plan(model: ExportModel, options: Options) -> Plan:
    if model.spec.family not in BY_FAMILY:
        raise InputError(
            f"{model.container.path}: {model.spec.architecture} cannot be exported to GGUF; families that can are "
            f"{', '.join(BY_FAMILY)}"
        )
    return GgufPlan(model, options)


class GgufPlan(Plan):
    """One file, written in one pass."""

    def __init__(self, model: ExportModel, options: Options) -> None:
        architecture = BY_FAMILY[model.spec.family]
        self.format = options.to
        self.architecture = model.spec.architecture
        self.tensors = [_export(model, options, architecture, tensor, info) for tensor, info in model.tensors]
        outputs = _stacked([output for tensor in self.tensors for output in tensor.outputs])
        for name, factors in _rope_factors(model.spec).items():
            outputs.append(Output(name, "F32", factors.shape, factors.nbytes, partial(_whole, factors)))
        keys, self.notes = metadata(model, architecture, _file_type(self.tensors))
        self._outputs = outputs
        self._head = _head(keys, outputs)
        nbytes = len(self._head) + sum(_padded(output.nbytes) for output in outputs)
        self._nbytes = nbytes
        self.files = [FileSize("", nbytes)]

    def check(self, out: Path, *, overwrite: bool) -> None:
        self.files = [FileSize(out.name, self._nbytes)]
        check_target(out, self._nbytes, overwrite=overwrite)

    def write(self, out: Path, *, overwrite: bool, progress: Progress) -> None:
        progress.start(self._nbytes)
        with open_target(out, self._nbytes, overwrite=overwrite, signature=b"GGUF") as target:
            if target.removed:
                self.notes = [*self.notes, LEFTOVER]
            target.write(self._head)
            for output in self._outputs:
                for block in checked_blocks(output):
                    target.write(block)
                    progress.advance(len(block), output.name)
                target.write(bytes(_padded(output.nbytes) - output.nbytes))


def _whole(values: Array) -> Iterator[Array]:
    return iter((values,))


def _joined(outputs: Sequence[Output]) -> Iterator[Array]:
    return chain.from_iterable(output.blocks() for output in outputs)


def _export(
    model: ExportModel, options: Options, architecture: Architecture, tensor: TensorSpec, info: TensorInfo
) -> Exported:
    if parts := architecture.joined.get(tensor.name.removeprefix(f"model.layers.{tensor.layer}.")):
        return _export_parts(model, options, [f"blk.{tensor.layer}.{part}" for part in parts], architecture, info)
    name = _name(architecture, tensor)
    n_heads = {"q_proj": model.spec.n_heads, "k_proj": model.spec.n_kv_heads}.get(tensor.part.removesuffix(".bias"), 0)
    order = None
    if n_heads and architecture.interleaved:
        # stored_rows: row of the file of each row of ours; the inverse permutation lists our rows in the file's order.
        order = np.argsort(stored_rows(info.shape[0] // n_heads, 0, info.shape[0]))
    if len(info.shape) < 2:
        # llama.cpp wants vectors as F32.
        offset = architecture.norm_offset if tensor.role == "norm" else 0.0
        return FloatWriter(model, "f32").export(info, name=name, order=order, offset=offset)
    if tensor.role == "router":  # and routers
        return FloatWriter(model, "f32").export(info, name=name)
    if (kind := _block_type(model, info)) is None:
        return FloatWriter(model, _float_kind(info, options)).export(info, name=name, order=order)
    nbytes = _blocks_nbytes(kind, info.n_values)
    output = Output(name, kind, info.shape, nbytes, lambda: _blocks(model, info, kind, order))
    return Exported(info, kind, (output,))


def _blocks_nbytes(kind: str, n_values: int) -> int:
    columns, nbytes = (BY_NAME[kind].columns, BY_NAME[kind].nbytes) if kind in BY_NAME else (BLOCK, BLOCK_NBYTES[kind])
    return n_values // columns * nbytes


def _float_kind(info: TensorInfo, options: Options) -> str:
    return info.scheme.kind if info.scheme.is_float else options.dtype or "f32"


def _export_parts(
    model: ExportModel, options: Options, names: list[str], architecture: Architecture, info: TensorInfo
) -> Exported:
    """What has a name of its own, such as the matrices or the biases of all experts: as one tensor, or each half of the
    rows as one."""
    # llama.cpp wants vectors as F32.
    kind = "F32" if len(info.shape) < 3 else _block_type(model, info) or FLOAT_WORDS[_float_kind(info, options)]
    writer = FloatWriter(model, kind.lower()) if kind in FLOAT_WORDS.values() else None
    rounding = None if writer is None else writer.rounding(info)
    axis = min(len(info.shape) - 1, 1)
    n_rows = info.shape[axis] // len(names)
    outputs = []
    for i, name in enumerate(names):
        order = np.arange(n_rows) * len(names) + i if architecture.alternating else np.arange(n_rows) + i * n_rows
        shape = (*info.shape[:axis], n_rows, *info.shape[axis + 1 :])
        n = math.prod(shape)
        blocks: Callable[[], Iterator[Array]]
        if writer is None:
            nbytes, blocks = _blocks_nbytes(kind, n), partial(_stack_blocks, model, info, kind, order)
        else:
            nbytes, blocks = n * writer.itemsize, partial(writer.stack_blocks, info, order, rounding)
        outputs.append(Output(name, kind, shape, nbytes, blocks))
    return Exported(info, kind, tuple(outputs), rounding)


def _stack_blocks(
    model: ExportModel, info: TensorInfo, kind: str, order: npt.NDArray[np.int64]
) -> Iterator[npt.NDArray[np.uint8]]:
    return (_encode(model.whole(info, i), kind, info)[order] for i in range(info.shape[0]))


def _name(architecture: Architecture, tensor: TensorSpec) -> str:
    """GGUF name of a tensor, by the table that reads GGUF files. Those of experts come to have the same name."""
    if tensor.layer is None:
        return next(ours for ours, theirs in TOP_NAMES.items() if theirs == tensor.name)
    module, _, ending = tensor.name.removeprefix(f"model.layers.{tensor.layer}.").rpartition(".")
    ours = next(o for o, t in architecture.blocks.items() if t.format(tensor.expert) == module)
    return f"blk.{tensor.layer}.{ours}.{ending}"


def _stacked(outputs: list[Output]) -> list[Output]:
    """One tensor of all that have a name in common: the matrices of the experts of a layer."""
    groups: dict[str, list[Output]] = {}
    for output in outputs:
        groups.setdefault(output.name, []).append(output)
    out = []
    for name, group in groups.items():
        first = group[0]
        if len(group) == 1:
            out.append(first)
            continue
        if len({output.dtype for output in group}) > 1:
            raise InputError(
                f"{name}: the experts of a layer differ in their coding; a GGUF file holds them as one tensor"
            )
        nbytes = sum(output.nbytes for output in group)
        shape = (len(group), *first.shape)
        out.append(Output(name, first.dtype, shape, nbytes, partial(_joined, group)))
    return out


def _block_type(model: ExportModel, info: TensorInfo) -> str | None:
    """The type that holds the values of a matrix exactly, or None."""
    scheme = info.scheme
    if block_type := BLOCK_TYPES.get(scheme):
        if info.shape[-1] % block_type.columns:
            return None
        matrices = range(math.prod(info.shape[:-2]))
        return block_type.name if all(block_type.holds(model.whole(info, i)) for i in matrices) else None
    if scheme.scale_dtype != "f16" or scheme.minor or info.shape[-1] % BLOCK:
        return None
    if scheme.kind in ("int4", "int8"):
        return {"int4": "Q4_0", "int8": "Q8_0"}[scheme.kind]
    scales = (model.scales(info, matrix=i) for i in range(math.prod(info.shape[:-2])))
    if scheme.kind in ("int4z", "int4o") and all(offsets(s, info) is not None for s in scales):
        return "Q4_1"
    if scheme.kind == "e2m1" and all(exponents(s.scales) is not None for s in scales):
        return "MXFP4"
    return None


def _blocks(model: ExportModel, info: TensorInfo, kind: str, order: npt.NDArray[np.int64] | None) -> Iterator[Array]:
    if order is None:
        return (_encode(rows, kind, info) for rows in model.coded_blocks(info))
    return iter((_encode(model.whole(info), kind, info)[order],))


def _encode(rows: UnpackedRows, kind: str, info: TensorInfo) -> npt.NDArray[np.uint8]:
    """(n_rows, bytes of a row)."""
    if kind in BY_NAME:
        return BY_NAME[kind].blocks(rows)
    n_rows, n_columns = rows.codes.shape
    n_blocks = n_columns // BLOCK

    def per_block(per_group: Array) -> npt.NDArray[np.uint8]:
        halves = np.ascontiguousarray(spread(per_group, info, BLOCK), "<f2")
        return halves.view(np.uint8).reshape(n_rows, n_blocks, 2)

    scales = rows.scales.scales
    parts: list[npt.NDArray[np.uint8]] = [] if kind == "MXFP4" else [per_block(scales)]
    codes: npt.NDArray[np.uint8] = np.ascontiguousarray(rows.codes).view(np.uint8).reshape(n_rows, n_blocks, BLOCK)
    if kind == "Q4_1":
        minimum = offsets(rows.scales, info)
        assert minimum is not None  # found before
        parts.append(per_block(minimum))
    if kind == "MXFP4":
        powers = exponents(scales)
        assert powers is not None  # found before
        parts.append(spread(powers, info, BLOCK)[..., None].astype(np.uint8))
        codes = signed_zeros(codes, spread(scales, info, BLOCK))
    nibbles: npt.NDArray[np.uint8] = np.bitwise_or(codes[..., :16], codes[..., 16:] << 4, dtype=np.uint8)
    parts.append(codes if kind == "Q8_0" else nibbles)
    return np.concatenate(parts, axis=2).reshape(n_rows, -1)


def _rope_factors(spec: ModelSpec) -> dict[str, npt.NDArray[np.float32]]:
    """Divisors of the frequencies in llama.cpp, by the names of the tensors: of the scalings llama3 and longrope."""
    rope = spec.rope
    if rope.scaling == "longrope":
        factors = {"short_factor": rope.short_factors, "long_factor": rope.long_factors}
        return {name: np.asarray(factors[key], np.float32) for name, key in LONG_FACTORS.items()}
    if rope.scaling != "llama3":
        return {}
    scaled = np.array(rope.inverse_frequencies(spec.head_dim))
    plain = np.array(replace(rope, scaling="default").inverse_frequencies(spec.head_dim))
    return {ROPE_FACTORS: np.asarray(plain / scaled, np.float32)}


def _file_type(tensors: Sequence[Exported]) -> int:
    """general.file_type: the type of most parameters of the layers."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if tensor.info.name.startswith("model.layers."):
            counts[tensor.becomes] = counts.get(tensor.becomes, 0) + tensor.info.n_values
    return FILE_TYPES[max(counts, key=lambda kind: (counts[kind], kind))]


def _head(keys: Mapping[str, Value], outputs: Sequence[Output]) -> bytes:
    """Everything before the first tensor."""
    parts = [struct.pack("<4sIQQ", b"GGUF", VERSION, len(outputs), len(keys))]
    parts += [string(key) + value.data for key, value in keys.items()]
    offset = 0
    for output in outputs:
        if len(output.name) > MAX_NAME_NBYTES:
            raise InputError(f"{output.name}: names of GGUF tensors have at most {MAX_NAME_NBYTES} bytes")
        dims = output.shape[::-1]  # fastest axis first
        parts.append(string(output.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        parts.append(struct.pack("<IQ", TYPE_IDS[output.dtype], offset))
        offset += _padded(output.nbytes)
    head = b"".join(parts)
    return head + bytes(_padded(len(head)) - len(head))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
