"""An ONNX model for onnxruntime, in the layout of onnxruntime-genai: codes in MatMulNBits, the rest as floats.

    model.onnx          the graph: com.microsoft MatMulNBits, GroupQueryAttention, GatherBlockQuantized
    model.onnx.data     the weights, each tensor aligned to 64 bytes
    genai_config.json   what onnxruntime-genai must know of the model

    X.weight       U8 (out, blocks, block * bits / 8)   codes along in, the first in the low half
    X.scales       F32 (out, blocks)                    the type of the activations, which holds FP16 exactly
    X.zero_points  U8 (out, ceil(blocks / 2))           int4z alone, the first in the low half; else 8, of int8 128

A tied head is the embedding's bytes under a second name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import codes
from w4conv.arrays import Array
from w4conv.container import TensorInfo
from w4conv.errors import InputError, UsageError
from w4conv.exports.directory import LEFTOVER, check_directory, open_directory
from w4conv.exports.huggingface import checked_blocks, plain_config
from w4conv.exports.model import ExportModel, UnpackedRows
from w4conv.exports.packed import unsigned
from w4conv.exports.plan import Exported, FileSize, FloatWriter, Options, Output, Plan
from w4conv.files.blobs import json_object
from w4conv.files.strict_json import to_json
from w4conv.files.target import open_target
from w4conv.models.rope import RopeSpec
from w4conv.models.spec import TensorSpec
from w4conv.progress import Progress

KINDS: Final = ("int4", "int4z", "int8")
ROW_BLOCKS: Final = (128, 64, 32)  # for one scale a row
NO_NODES: Final = ("clamped_silu",)  # activations that the graph does not write
HEAD_MULTIPLE: Final = 16
ALIGNMENT: Final = 64
GENAI_TYPES: Final = {"gemma3": "gemma3_text", "olmo2": "olmo"}  # where it has another word
GRAPH: Final = "model.onnx"
DATA: Final = "model.onnx.data"


def plan(model: ExportModel, options: Options) -> Plan:
    spec = model.spec
    for reason, there in (
        ("experts", spec.experts is not None),
        ("sinks", spec.sinks),
        (f"the activation {spec.activation}", spec.activation in NO_NODES),
        ("a rotary embedding that depends on the length of the text", spec.rope.scaling in ("dynamic", "longrope")),
    ):
        if there:
            raise InputError(
                f"{model.container.path}: {spec.architecture} has {reason}, for which no ONNX graph is written. Export "
                "to another format"
            )
    rotated = spec.rope.rotary_dim(spec.head_dim)
    for what, n in (("its heads have", spec.head_dim), ("the rotary embedding has", rotated)):
        if n % HEAD_MULTIPLE:
            raise InputError(
                f"{model.container.path}: {what} {n} columns; onnxruntime takes multiples of {HEAD_MULTIPLE} alone. "
                "Export to another format"
            )
    try:
        import onnx  # noqa: F401  # fails before any work
    except ImportError as error:
        raise UsageError(
            f"export to ONNX needs the onnx package, which cannot be imported: {error}. Install w4conv[onnx]"
        ) from error
    return OnnxPlan(model, options)


class OnnxPlan(Plan):
    """A directory: graph, weights, sidecars."""

    def __init__(self, model: ExportModel, options: Options) -> None:
        from w4conv.exports.onnx_graph import decoder_graph

        self.format = options.to
        self.architecture = model.spec.architecture
        self.tensors = [_export(model, options, tensor, info) for tensor, info in model.tensors]
        self.notes = ["activations are float32; engines may round them to 8 bits where they are told to"]
        self._outputs = [output for tensor in self.tensors for output in tensor.outputs]
        self._outputs += _rotary_caches(model)
        offsets, end = {}, 0
        for output in self._outputs:
            offsets[output.name] = end
            end += _padded(output.nbytes)
        self._data_nbytes = end
        coded = {t.info.name: block_size(t.info) for t in self.tensors if t.becomes.endswith("bit")}
        self._sidecars = {name: data for name, data in model.blobs.items() if name != "config.json"}
        self._sidecars |= {
            "config.json": _json(plain_config(model.config, "f32")),
            "genai_config.json": _json(_genai_config(model)),
            GRAPH: decoder_graph(model.spec, self._outputs, offsets, coded, DATA),
        }
        sizes = {name: len(data) for name, data in self._sidecars.items()} | {DATA: end}
        self.files = [FileSize(name, nbytes) for name, nbytes in sorted(sizes.items())]

    def check(self, out: Path, *, overwrite: bool) -> None:
        check_directory(out, self.nbytes, overwrite=overwrite)

    def write(self, out: Path, *, overwrite: bool, progress: Progress) -> None:
        progress.start(self._data_nbytes)
        with open_directory(out, self.nbytes, overwrite=overwrite) as opened:
            directory = opened.path
            if opened.removed:
                self.notes = [*self.notes, LEFTOVER]
            for name, data in sorted(self._sidecars.items()):
                with open_target(directory / name, len(data)) as target:
                    target.write(data)
            with open_target(directory / DATA, self._data_nbytes) as target:
                for output in self._outputs:
                    for block in checked_blocks(output):
                        target.write(block)
                        progress.advance(len(block), output.name)
                    target.write(bytes(_padded(output.nbytes) - output.nbytes))


def block_size(info: TensorInfo) -> int:
    """Columns that share a scale in ONNX: a power of two; the last block of a row may be cut short."""
    n_columns = info.shape[1]
    return info.scheme.group_size or next((size for size in ROW_BLOCKS if n_columns % size == 0), ROW_BLOCKS[-1])


def _export(model: ExportModel, options: Options, tensor: TensorSpec, info: TensorInfo) -> Exported:
    scheme = info.scheme
    if len(info.shape) < 2:
        return FloatWriter(model, "f32").export(info)
    block = block_size(info)
    # Rows of an embedding are gathered from whole blocks.
    if scheme.kind not in KINDS or scheme.minor or (tensor.role == "embedding" and info.shape[1] % block):
        return FloatWriter(model, scheme.kind if scheme.is_float else options.dtype or "f32").export(info)
    n_rows, n_columns = info.shape
    n_blocks = -(-n_columns // block)
    module = info.name.removesuffix(".weight")

    def per_block(per_group: Array) -> Array:
        return np.repeat(per_group, (scheme.group_size or n_blocks * block) // block, axis=1)[:, :n_blocks]

    def packed_codes() -> Iterator[Array]:
        return (_packed(rows, info, n_blocks * block) for rows in model.coded_blocks(info))

    def scales() -> Iterator[Array]:
        return iter((per_block(model.scales(info).scales).astype("<f4"),))

    def zero_points() -> Iterator[Array]:
        return iter((_pairs(per_block(model.scales(info).zero_points).astype(np.uint8), fill=0),))

    shape = (n_rows, n_blocks, block * scheme.bits // 8)
    outputs = [
        Output(f"{module}.weight", "U8", shape, int(np.prod(shape)), packed_codes),
        Output(f"{module}.scales", "F32", (n_rows, n_blocks), 4 * n_rows * n_blocks, scales),
    ]
    if scheme.kind == "int4z":
        zero_shape = (n_rows, -(-n_blocks // 2))
        outputs.append(Output(f"{module}.zero_points", "U8", zero_shape, int(np.prod(zero_shape)), zero_points))
    return Exported(info, f"{scheme.bits}-bit", tuple(outputs))


def _packed(rows: UnpackedRows, info: TensorInfo, width: int) -> npt.NDArray[np.uint8]:
    """(n_rows, width * bits / 8), columns beyond the last one zero."""
    bits = info.scheme.bits
    zero = codes.INT4_PAD if bits == 4 else 128
    unpadded = unsigned(rows.codes, bits)
    padded: npt.NDArray[np.uint8] = np.pad(unpadded, ((0, 0), (0, width - unpadded.shape[1])), constant_values=zero)
    return _pairs(padded, fill=zero) if bits == 4 else padded


def _pairs(nibbles: npt.NDArray[np.uint8], *, fill: int) -> npt.NDArray[np.uint8]:
    """(n, m) numbers of 4 bits -> (n, ceil(m / 2)) bytes, the first in the low half."""
    even = np.pad(nibbles, ((0, 0), (0, nibbles.shape[1] % 2)), constant_values=fill)
    out: npt.NDArray[np.uint8] = np.bitwise_or(even[:, ::2], even[:, 1::2] << 4, dtype=np.uint8)
    return out


def _rotary_caches(model: ExportModel) -> list[Output]:
    """cos and sin of every position and frequency, computed in float64; "_local": of layers with a window, where they
    have a rotary embedding of their own."""
    spec = model.spec

    def output(name: str, rope: RopeSpec, function: np.ufunc) -> Output:
        frequencies = np.array(rope.inverse_frequencies(spec.head_dim))
        shape = (spec.max_positions, len(frequencies))

        def blocks() -> Iterator[Array]:
            for start in range(0, shape[0], 1 << 14):
                positions = np.arange(start, min(start + (1 << 14), shape[0]))
                yield (function(positions[:, None] * frequencies) * rope.magnitude).astype("<f4")

        return Output(name, "F32", shape, 4 * shape[0] * shape[1], blocks)

    ropes = {"": spec.rope} | ({"_local": spec.local_rope} if spec.local_rope is not None else {})
    functions = {"cos": np.cos, "sin": np.sin}
    return [output(f"{name}_cache{end}", rope, f) for end, rope in ropes.items() for name, f in functions.items()]


def _genai_config(model: ExportModel) -> dict[str, Any]:
    spec, config = model.spec, model.config
    generation = json_object(model.blobs, "generation_config.json")

    def token(name: str) -> Any:
        return generation.get(name, config.get(name))

    ends = token("eos_token_id")
    first_end = ends[0] if isinstance(ends, list) and ends else ends
    return {
        "model": {
            "type": GENAI_TYPES.get(spec.family, spec.family),
            "vocab_size": spec.vocab_size,
            "context_length": spec.max_positions,
            **({"bos_token_id": token("bos_token_id")} if token("bos_token_id") is not None else {}),
            **({"eos_token_id": ends} if ends is not None else {}),
            "pad_token_id": first_end if token("pad_token_id") is None else token("pad_token_id"),
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": GRAPH,
                "head_size": spec.head_dim,
                "hidden_size": spec.hidden_size,
                "num_attention_heads": spec.n_heads,
                "num_key_value_heads": spec.n_kv_heads,
                "num_hidden_layers": spec.n_layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"do_sample": False, "max_length": spec.max_positions, "past_present_share_buffer": False},
    }


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _json(value: object) -> bytes:
    return to_json(value, where="genai_config.json", indent=2) + b"\n"
