"""An ONNX directory as a source: one whose weights lie in an external file under their Hugging Face names.

MatMulNBits and GatherBlockQuantized hold codes:

    X.weight       U8 (out, blocks, block * bits / 8)   codes along in, the first in the low half
    X.scales       F32 or F16 (out, blocks)
    X.zero_points  U8 (out, ceil(blocks * bits / 8)), the first in the low half; else 8, of 8 bits 128

    value = (code - zero point) * scale
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.errors import InputError, UsageError
from w4conv.files.mapped import MappedFile
from w4conv.sources.huggingface import HuggingFaceSource
from w4conv.sources.huggingface_files import read_sidecars
from w4conv.sources.packed.base import FLOATS, PackedTensor, RawTensors, packed_tensor, signed
from w4conv.sources.reading import read_small
from w4conv.sources.safetensors import Entry

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

GRAPH: Final = "model.onnx"
MAX_GRAPH_NBYTES: Final = 1 << 28
WORDS: Final = {1: ("F32", 4), 2: ("U8", 1), 10: ("F16", 2), 16: ("BF16", 2)}  # data_type -> dtype, bytes
CODED: Final = {"MatMulNBits": 1, "GatherBlockQuantized": 0}  # op -> which input has the codes
MAX_RANK: Final = 8


def open_onnx(directory: Path) -> HuggingFaceSource:
    """Raises InputError for a graph whose weights are not those of a model under their Hugging Face names."""
    try:
        import onnx
    except ImportError as error:
        raise UsageError(
            f"{directory}: reading ONNX needs the onnx package, which cannot be imported: {error}. Install w4conv[onnx]"
        ) from error
    blobs, files = read_sidecars(directory)
    try:
        graph = onnx.load_model_from_string(read_small(directory / GRAPH, cap=MAX_GRAPH_NBYTES)).graph
    except Exception as error:  # protobuf has its own tree of exceptions
        raise InputError(f"{directory / GRAPH}: not an ONNX model: {str(error)[:200]}") from error
    mapped: dict[str, MappedFile] = {}
    found: dict[str, tuple[MappedFile, Entry]] = {}
    seen: dict[tuple[str, int], str] = {}  # a tied head is the embedding under a second name
    aliases: dict[str, str] = {}
    for tensor in graph.initializer:
        if not tensor.name.endswith((".weight", ".bias", ".scales", ".zero_points")):
            continue
        file, entry = _entry(directory, tensor, mapped)
        first = seen.setdefault((file.path.name, entry.offset), tensor.name)
        aliases[tensor.name] = first
        if first == tensor.name:
            found[tensor.name] = file, entry
    raw = RawTensors(directory, found)
    packed: dict[str, PackedTensor] = {}
    for node in graph.node:
        if node.op_type in CODED and (tensor_of := _tensor(node, raw, aliases)):
            packed.setdefault(*tensor_of)
    plain = {name: place for name, place in found.items() if name not in raw.used}
    if odd := sorted(name for name, (_, entry) in plain.items() if entry.dtype not in FLOATS):
        raise InputError(
            f"{directory}: {odd[0]} is {plain[odd[0]][1].dtype}, and no node of a known kind says how to read it"
        )
    return HuggingFaceSource(
        directory,
        files=[*files, directory / GRAPH, *sorted(directory / name for name in mapped)],
        mapped=mapped.values(),
        entries=plain,
        blobs=blobs,
        notes=["The graph is not read, only its weights."],
        packed=packed,
        kind="onnx",
    )


def _entry(directory: Path, tensor: TensorProto, mapped: dict[str, MappedFile]) -> tuple[MappedFile, Entry]:
    where = f"{directory / GRAPH}: {tensor.name}"
    places = {item.key: item.value for item in tensor.external_data}
    name, shape = places.get("location", ""), tuple(tensor.dims)
    # A name that could lead out of the directory must never reach the file system.
    if not name or not name.isprintable() or set(name) & set("/\\:") or name.startswith(".") or len(name) > 255:
        raise InputError(f"{where}: its values are not in a file of this directory, which is not supported")
    if tensor.data_type not in WORDS or len(shape) > MAX_RANK or any(not 0 <= n < 1 << 40 for n in shape):
        raise InputError(f"{where}: type {tensor.data_type} with shape {shape} is not supported")
    dtype, itemsize = WORDS[tensor.data_type]
    nbytes = math.prod(shape) * itemsize
    numbers = places.get("offset", "0"), places.get("length", str(nbytes))
    if not all(n.isascii() and n.isdigit() and len(n) < 19 for n in numbers) or int(numbers[1]) != nbytes:
        raise InputError(f"{where}: offset {numbers[0][:20]} and length {numbers[1][:20]} do not fit its shape {shape}")
    if name not in mapped:
        mapped[name] = MappedFile(directory / name)
    if int(numbers[0]) + nbytes > mapped[name].nbytes:
        raise InputError(f"{where}: {name} ends before it. Fetch it again")
    return mapped[name], Entry(dtype, shape, int(numbers[0]), nbytes)


def _tensor(node: NodeProto, raw: RawTensors, aliases: Mapping[str, str]) -> tuple[str, PackedTensor] | None:
    """(name, tensor) of a node; None where its codes were read before."""
    at = CODED[node.op_type]
    names = [aliases.get(name, "") for name in node.input]
    name = names[at] if len(names) > at else ""
    if name in raw.used:
        return None
    settings = {item.name: item.i for item in node.attribute}
    bits, block = settings.get("bits", 4), settings.get("block_size", 0)
    if bits not in (4, 8) or block < 16 or block & (block - 1) or not name or len(names) < at + 2:
        raise raw.error(f"{node.name[:80]}: {node.op_type} with {bits} bits and blocks of {block} is not supported")
    shape = raw.use(name, ("U8",))
    n_rows = shape[0] if shape else 0
    per_row = math.prod(shape[1:])
    n_blocks = per_row * 8 // (bits * block)
    n_columns = settings.get("K", n_blocks * block)
    if not n_rows or not n_blocks or -(-n_columns // block) != n_blocks or n_blocks * block * bits != 8 * per_row:
        raise raw.error(f"{name} of shape {shape} does not hold rows of {n_columns} columns in blocks of {block}")
    scale_name = names[1 + at] if at else names[2]
    scale_shape = raw.use(scale_name, FLOATS)
    if math.prod(scale_shape) != n_rows * n_blocks:
        raise raw.error(f"{scale_name} has shape {scale_shape}, expected {(n_rows, n_blocks)}")
    zeros = _zero_points(node, names, raw, bits, (n_rows, n_blocks))

    def unsigned(rows: slice) -> npt.NDArray[np.uint8]:
        packed = np.ascontiguousarray(raw.read(name).reshape(n_rows, -1)[rows], np.uint8)
        both = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        return both[:, :n_columns]

    def levels(rows: slice) -> npt.NDArray[np.generic]:
        return signed(unsigned(rows), bits)

    tensor = packed_tensor(
        shape=(n_rows, n_columns),
        stored_as=f"onnx_{bits}bit_g{block}",
        kind="int8" if bits == 8 else "int4" if zeros is None else "int4z",
        group_size=block,
        scales=lambda rows: raw.floats(scale_name).reshape(n_rows, n_blocks)[rows],
        levels=levels,
        zero_points=None if zeros is None else (lambda rows: zeros[rows]),
    )
    return name, replace(tensor, nbytes=sum(raw.entry(n).nbytes for n in {name, scale_name}))


def _zero_points(
    node: NodeProto, names: list[str], raw: RawTensors, bits: int, shape: tuple[int, int]
) -> npt.NDArray[Any] | None:
    """(n_rows, n_blocks), or None where all are the middle."""
    if len(names) < 4 or not names[3]:
        return None
    if bits != 4:
        raise raw.error(f"{node.name[:80]}: 8 bits with zero points are not supported")
    n_rows, n_blocks = shape
    raw.use(names[3], ("U8",), (n_rows, -(-n_blocks // 2)))
    packed = raw.read(names[3]).astype(np.uint8)
    both = np.stack([packed & 15, packed >> 4], axis=-1).reshape(n_rows, -1)[:, :n_blocks]
    return None if (both == 8).all() else both
