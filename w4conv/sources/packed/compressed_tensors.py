"""compressed-tensors: packed integers, plain int8, FP8.

X.weight_packed      I32 (out, ceil(in * bits / 32))   codes + 2^(bits-1), the first lowest
X.weight_scale       (out, groups), (out, 1) or (1,)
X.weight_zero_point  I32 (ceil(out * bits / 32), groups)   asymmetric 4-bit; packed along out, + 8
X.weight_shape       I64 (2,)                          [out, in]
X.weight_g_idx       I32 (in,)                         group of each column, where activations were ordered

X.weight             I8 or F8_E4M3 (out, in), with X.weight_scale

value = (code - zero point) * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F32Array
from w4conv.errors import InputError
from w4conv.sources.packed import fp8
from w4conv.sources.packed.base import FLOATS, PackedTensor, RawTensors, fields, packed_tensor, signed

CORRECT: Final = "transformers refuses it, or computes other weights. Correct config.json"
FORMATS: Final = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense", "mixed-precision")


def find(settings: Mapping[str, Any], raw: RawTensors) -> dict[str, PackedTensor]:
    groups = _groups_of(settings)
    for layout in (settings.get("format"), *(g.get("format") for g in groups)):
        if layout is not None and layout not in FORMATS:
            raise raw.error(f"compressed-tensors format {str(layout)[:40]!r} is not supported")
    weights = [g["weights"] for g in groups if isinstance(g.get("weights"), dict)]
    named = (own.get("group_size") for own in weights)
    sizes = {size for size in named if isinstance(size, int)}
    raw.leave_activations()
    out = {}
    for module in raw.modules(".weight_packed"):
        out[f"{module}.weight"] = tensor = _packed(module, raw, sizes)
        _compare(tensor, module, settings, raw)
    for module in raw.modules(".weight_scale"):
        name = f"{module}.weight"
        if name in out or name not in raw:
            continue
        raw.used |= {n for n in (f"{module}.weight_zero_point",) if n in raw}
        if raw.entry(name).dtype == "I8":
            out[name] = _int8(module, raw, sizes)
            _compare(out[name], module, settings, raw)
        else:
            own = _weights_of(module, settings, raw)
            out[name] = fp8.tensor(name, f"{module}.weight_scale", raw, block=_block([own] if own else weights))
    return out


def _groups_of(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _weights_of(module: str, settings: Mapping[str, Any], raw: RawTensors) -> Mapping[str, Any]:
    """What config_groups say of the weights of a module: by its name, by a pattern, by its class, in this order, as the
    library matches them; nothing where no target matches."""
    names = raw.spellings(module)
    found = []
    for group in _groups_of(settings):
        targets = group.get("targets")
        for target in targets if isinstance(targets, list) else ():
            if isinstance(target, str) and (how := _matches(target, names, raw)):
                found.append((how, target, group.get("weights")))
    own = min(found, key=lambda match: match[:2])[2] if found else None
    return own if isinstance(own, dict) else {}


def _matches(target: str, names: tuple[str, ...], raw: RawTensors) -> int:
    """0 where a target does not mean the module; 1 by name, 2 by pattern, 3 by class."""
    if target in names:
        return 1
    if target.startswith("re:"):
        return 2 if any(raw.matches(target.removeprefix("re:"), name) for name in names) else 0
    return 3 if target == "Linear" else 0


def _compare(tensor: PackedTensor, module: str, settings: Mapping[str, Any], raw: RawTensors) -> None:
    """Raise InputError where config_groups say of a module what it does not hold: the library refuses such a
    checkpoint, or computes other weights."""

    def fail(stored: str, declared: str, advice: str) -> InputError:
        return raw.error(f"{module}.{stored}, but quantization_config says {declared}: {advice}")

    ignored = settings.get("ignore")
    for target in ignored if isinstance(ignored, list) else ():
        if isinstance(target, str) and _matches(target, raw.spellings(module), raw) in (1, 2):
            advice = "transformers would leave its weights random. Take it out of ignore"
            raise fail("weight is stored quantized", f"ignore {target[:40]!r}", advice)
    own = _weights_of(module, settings, raw)
    zero_name, scale = f"{module}.weight_zero_point", raw.entry(f"{module}.weight_scale").shape
    has_zeros = tensor.coding is not None and tensor.coding.kind == "int4z"
    if own.get("symmetric", True) is True and own and has_zeros:
        advice = "transformers would ignore them. Correct config.json: symmetric false, if the zero points are meant"
        raise fail("weight_zero_point has zero points", "symmetric", advice)
    if own.get("symmetric") is False and zero_name not in raw:
        advice = "transformers refuses it. Correct config.json: symmetric true, if the codes are symmetric"
        raise fail("weight_zero_point is missing", "symmetric false", advice)
    order = own.get("actorder")
    if (order is True or order in ("group", "dynamic")) and f"{module}.weight_g_idx" not in raw:
        advice = "columns would be taken in a wrong order. Correct config.json: actorder weight, if they are in order"
        raise fail("weight_g_idx is missing", f"actorder {str(order).lower()}", advice)
    packed, n_columns = f"{module}.weight_packed", tensor.shape[1]
    if packed in raw and type(bits := own.get("num_bits")) is int:
        n_words = raw.entry(packed).shape[1]
        if n_words != -(-n_columns * bits // 32):
            raise fail(f"weight_packed has {n_words} words for {n_columns} columns", f"num_bits {bits}", CORRECT)
    size, strategy = own.get("group_size"), own.get("strategy")
    n_groups = scale[1] if len(scale) == 2 else 1
    if strategy in ("channel", "tensor") and n_groups != 1:
        raise fail(f"weight_scale has {n_groups} groups a row", f"strategy {strategy}", CORRECT)
    if strategy in (None, "group") and type(size) is int and size > 0 and n_groups != -(-n_columns // size):
        stored = f"weight_scale has {n_groups} groups for {n_columns} columns"
        raise fail(stored, f"group_size {size}", CORRECT)


def _block(weights: list[Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, where the strategy is block."""
    for own in weights:
        block = own.get("block_structure") if isinstance(own, dict) and own.get("strategy") == "block" else None
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n <= 1 << 20 for n in block):
            return block[0], block[1]
    return None


def _packed(module: str, raw: RawTensors, sizes: set[int]) -> PackedTensor:
    n_rows, n_words = raw.use_matrix(f"{module}.weight_packed", ("I32",))
    raw.use(f"{module}.weight_shape", ("I64", "I32"), (2,))
    shape = tuple(int(n) for n in raw.read(f"{module}.weight_shape"))
    bits = next((b for b in (4, 8) if shape[0] == n_rows and -(-shape[1] * b // 32) == n_words and shape[1] > 0), 0)
    if not bits:
        raise raw.error(f"{module}.weight_packed of {n_words} words a row does not hold {shape} in 4 or 8 bits")
    n_columns = shape[1]
    n_groups, size = _groups(module, raw, n_rows, n_columns)
    zero_name, order_name = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
    zeros = None
    if zero_name in raw and bits == 4:
        if raw.entry(zero_name).dtype == "I8":  # one for the tensor, not packed
            raw.use(zero_name, ("I8",), (1,))
            zeros = np.full((n_rows, n_groups), int(raw.read(zero_name)[0]) + 8, np.uint8)
            if not 0 <= int(raw.read(zero_name)[0]) + 8 < 16:
                raise raw.error(f"{zero_name} is {int(raw.read(zero_name)[0])}, expected -8 to 7")
        else:
            raw.use(zero_name, ("I32",), (-(-n_rows // 8), n_groups))
            zeros = np.ascontiguousarray(fields(raw.read(zero_name).T, 4).T[:n_rows])
        zeros = None if (zeros == 8).all() else zeros
    elif zero_name in raw:
        raise raw.error(f"{zero_name}: 8-bit weights with zero points are not supported")
    if order_name in raw:
        raw.use(order_name, ("I32", "I64"), (n_columns,))
        order = raw.read(order_name).astype(np.int64)  # -1 everywhere: not ordered
        if not np.array_equal(order, np.arange(n_columns) // size) and (order != -1).any():
            raise raw.error(f"{order_name} puts columns into another order, which is not supported")

    def levels(rows: slice) -> npt.NDArray[np.generic]:
        unsigned = fields(raw.read(f"{module}.weight_packed")[rows], bits)[:, :n_columns]
        return signed(unsigned, bits)

    return packed_tensor(
        shape=(n_rows, n_columns),
        stored_as=f"ct_{bits}bit_{'row' if n_groups == 1 else f'g{size}'}",
        kind="int8" if bits == 8 else "int4" if zeros is None else "int4z",
        group_size=None if n_groups == 1 and size not in sizes else size,
        scales=lambda rows: _scales(module, raw, n_rows, rows),
        levels=levels,
        zero_points=None if zeros is None else (lambda rows: zeros[rows]),
    )


def _int8(module: str, raw: RawTensors, sizes: set[int]) -> PackedTensor:
    name = f"{module}.weight"
    n_rows, n_columns = raw.use_matrix(name, ("I8",))
    n_groups, size = _groups(module, raw, n_rows, n_columns)
    zero_name = f"{module}.weight_zero_point"
    if zero_name in raw and raw.read(zero_name).any():
        raise raw.error(f"{zero_name}: 8-bit weights with zero points are not supported")
    return packed_tensor(
        shape=(n_rows, n_columns),
        stored_as=f"ct_int8_{'row' if n_groups == 1 else f'g{size}'}",
        kind="int8",
        group_size=None if n_groups == 1 and size not in sizes else size,
        scales=lambda rows: _scales(module, raw, n_rows, rows),
        levels=lambda rows: raw.read(name)[rows],
    )


def _groups(module: str, raw: RawTensors, n_rows: int, n_columns: int) -> tuple[int, int]:
    """(groups of a row, columns of a group)."""
    name = f"{module}.weight_scale"
    shape = raw.use(name, FLOATS)
    if shape in ((), (1,), (1, 1), (n_rows,), (n_rows, 1)):
        return 1, n_columns
    if len(shape) != 2 or shape[0] != n_rows or not shape[1] or n_columns % shape[1]:
        raise raw.error(f"{name} of shape {shape} does not divide the rows of ({n_rows}, {n_columns}) into groups")
    return shape[1], n_columns // shape[1]


def _scales(module: str, raw: RawTensors, n_rows: int, rows: slice) -> F32Array:
    scales = raw.floats(f"{module}.weight_scale")
    if scales.size == 1:
        return np.full((rows.stop - rows.start, 1), scales.reshape(-1)[0], np.float32)
    return scales.reshape(n_rows, -1)[rows]
