"""bitsandbytes in 4 bits: NF4 and FP4, plain or with the scales quantized once more.

X.weight              U8 (n / 2, 1)      two codes a byte along the flattened matrix, the first in the high half
X.weight.absmax       F32 (n / block,)   or U8: codes of scales
X.weight.quant_map    F32 (16,)          the codebook
X.weight.quant_state.bitsandbytes__nf4   U8: JSON with quant_type, blocksize, shape, and of nested scales:
X.weight.nested_absmax F32, X.weight.nested_quant_map F32 (256,), nested_blocksize, nested_offset

value = codebook[code] * absmax[block]      absmax = nested_quant_map[code] * nested_absmax[block] + nested_offset
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import codes
from w4conv.arrays import F32Array
from w4conv.files.blobs import parse_json_object
from w4conv.sources.packed.base import PackedTensor, RawTensors, packed_tensor

STATE: Final = ".quant_state.bitsandbytes__"
KINDS: Final = ("nf4", "fp4")
MAX_STATE_NBYTES: Final = 1 << 16


def find(settings: Mapping[str, Any], raw: RawTensors) -> dict[str, PackedTensor]:
    stored_4bit = any(any(raw.modules(STATE + kind)) for kind in KINDS)
    if settings.get("load_in_8bit") and stored_4bit and not any(raw.modules(".SCB")):
        raise raw.error("quantization_config says load_in_8bit, but 4-bit weights are stored. Correct config.json")
    if settings.get("load_in_8bit") or any(raw.modules(".SCB")):
        raise raw.error("bitsandbytes with 8 bits is not supported; 4 bits are")
    out = {name: _tensor(name, kind, raw) for kind in KINDS for name in raw.modules(STATE + kind)}
    said = settings.get("bnb_4bit_quant_type")
    if other := [name for name, t in out.items() if said in KINDS and not t.stored_as.startswith(f"bnb_{said}")]:
        raw.warnings.append(
            f"quantization_config says {said}, but weights are stored otherwise ({len(other)} matrices, {other[0]}: "
            f"{out[other[0]].stored_as}): the stored kind counts, as in transformers."
        )
    nested = settings.get("bnb_4bit_use_double_quant")
    if other := [name for name, t in out.items() if type(nested) is bool and t.stored_as.endswith("_nested") != nested]:
        raw.warnings.append(
            f"quantization_config says bnb_4bit_use_double_quant {str(nested).lower()}, but scales are stored "
            f"otherwise ({len(other)} matrices, {other[0]}): the stored ones count, as in transformers."
        )
    return out


def _tensor(name: str, kind: str, raw: RawTensors) -> PackedTensor:
    state = _state(f"{name}{STATE}{kind}", raw)
    shape, block = _shape(name, state, raw), state.get("blocksize")
    if state.get("quant_type") in KINDS and state["quant_type"] != kind:
        raise raw.error(
            f"{name}: its quant_state is named {kind}, but says quant_type {state['quant_type']}. It is not what "
            "bitsandbytes writes; convert the original model"
        )
    if state.get("quant_type") != kind or type(block) is not int or not 32 <= block <= 4096 or block & (block - 1):
        raise raw.error(f"{name}: its quant_state has quant_type {state.get('quant_type')!r}, blocksize {block!r}")
    n_rows, n_columns = shape
    n_blocks = -(-n_rows * n_columns // block)
    if n_rows * n_columns % 2:
        raise raw.error(f"{name}: an odd number of values, {shape}, is not supported")
    if math.prod(raw.use(name, ("U8",))) != n_rows * n_columns // 2:
        raise raw.error(f"{name} has shape {raw.entry(name).shape}, expected {n_rows * n_columns // 2} bytes")
    raw.use(f"{name}.quant_map", ("F32",), (16,))
    if not np.array_equal(raw.read(f"{name}.quant_map"), codes.CODEBOOKS[kind]):
        own = raw.read(f"{name}.quant_map")
        other = next((k for k in KINDS if np.array_equal(own, codes.CODEBOOKS[k])), "")
        raise raw.error(
            f"{name}.quant_map is {f'the codebook of {other}' if other else f'not the codebook of {kind}'}, but its "
            f"quant_state says {kind}: bitsandbytes would use that of {kind}, whatever is stored. Convert the original "
            "model"
        )
    absmax = _absmax(name, state, n_blocks, raw)
    size = math.gcd(n_columns, block)  # a block may run over the end of a row

    def levels(rows: slice) -> npt.NDArray[np.uint8]:
        first, last = rows.start * n_columns, rows.stop * n_columns
        pairs = raw.read(name).reshape(-1)[first // 2 : -(-last // 2)].astype(np.uint8)
        both = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)
        return both[first % 2 :][: last - first].reshape(-1, n_columns)

    def scales(rows: slice) -> F32Array:
        starts = np.arange(rows.start * n_columns, rows.stop * n_columns, size)
        return np.asarray(absmax[starts // block].reshape(-1, n_columns // size), np.float32)

    return packed_tensor(
        shape=shape,
        stored_as=f"bnb_{kind}_g{block}{'_nested' if 'nested_offset' in state else ''}",
        kind=kind,
        group_size=size,
        scales=scales,
        levels=levels,
    )


def _state(name: str, raw: RawTensors) -> dict[str, Any]:
    if math.prod(raw.use(name, ("U8",))) > MAX_STATE_NBYTES:
        raise raw.error(f"{name} is longer than {MAX_STATE_NBYTES} bytes")
    return parse_json_object(raw.read(name).tobytes(), f"{raw.directory}: {name}")


def _shape(name: str, state: Mapping[str, Any], raw: RawTensors) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
        raise raw.error(f"{name}: its quant_state has no shape of a matrix")
    return shape[0], shape[1]


def _absmax(name: str, state: Mapping[str, Any], n_blocks: int, raw: RawTensors) -> F32Array:
    if "nested_offset" not in state:
        _use_absmax(name, "F32", state, n_blocks, raw)
        return raw.floats(f"{name}.absmax")
    offset, block = state["nested_offset"], state.get("nested_blocksize")
    if not isinstance(offset, int | float) or type(block) is not int or block < 1:
        raise raw.error(f"{name}: its quant_state has nested_offset {offset!r}, nested_blocksize {block!r}")
    _use_absmax(name, "U8", state, n_blocks, raw)
    raw.use(f"{name}.nested_absmax", ("F32",), (-(-n_blocks // block),))
    raw.use(f"{name}.nested_quant_map", ("F32",), (256,))
    codebook, outer = raw.floats(f"{name}.nested_quant_map"), raw.floats(f"{name}.nested_absmax")
    inner: F32Array = codebook[raw.read(f"{name}.absmax").astype(np.uint8)] * outer[np.arange(n_blocks) // block]
    inner += np.float32(offset)
    return inner


def _use_absmax(name: str, dtype: str, state: Mapping[str, Any], n_blocks: int, raw: RawTensors) -> None:
    shape = raw.use(f"{name}.absmax", (dtype,))
    if shape != (n_blocks,):
        raise raw.error(
            f"{name}.absmax has shape {shape}, but the blocksize {state['blocksize']} of its quant_state needs "
            f"({n_blocks},). It is not what bitsandbytes writes; convert the original model"
        )
