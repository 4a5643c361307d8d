"""GPTQ, as AutoGPTQ and GPTQModel write it.

    X.qweight  I32 (in * bits / 32, out)       codes along in, the first lowest
    X.qzeros   I32 (groups, out * bits / 32)   zero points along out; less 1 in "gptq", as they are in "gptq_v2"
    X.scales   (groups, out)
    X.g_idx    I32 (in,)                       group of each column; may be absent

    value = (code - zero point) * scale

The file decides, not the config: whether zero points are those of symmetric weights, and whether g_idx puts columns
into another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F32Array
from w4conv.sources.packed.base import (
    FLOATS,
    PackedTensor,
    RawTensors,
    fields,
    integer,
    integer_kind,
    packed_tensor,
    signed,
)


def find(settings: Mapping[str, Any], raw: RawTensors, *, zero15: int | None = None) -> dict[str, PackedTensor]:
    """zero15: what a stored zero point of 15 means in "gptq", 16 or 0; None refuses it."""
    layout = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if layout not in ("gptq", "gptq_v2"):
        raise raw.error(f"GPTQ checkpoint_format {str(layout)[:40]!r} is not supported; gptq and gptq_v2 are")
    out, asymmetric, reordered = {}, [], []
    for module in raw.modules(".qweight"):
        own = _override(settings, module, raw)
        found = Choice(
            integer(own, "bits", raw), integer(own, "group_size", raw), own.get("sym", True), own.get("desc_act", False)
        )
        if found.bits not in (4, 8):
            raise raw.error(f"{module}: GPTQ with {found.bits} bits is not supported; 4 and 8 are")
        tensor = _tensor(module, raw, found, v2=layout == "gptq_v2", zero15=zero15)
        if found.sym is True and "sym" in own and tensor.coding is not None and tensor.coding.kind == "int4z":
            asymmetric.append(module)
        if found.desc_act is False and tensor.stored_as.endswith("_reordered"):
            reordered.append(module)
        out[f"{module}.weight"] = tensor
    if asymmetric:
        raw.warnings.append(
            f"quantization_config says sym, but zero points are stored ({len(asymmetric)} matrices, {asymmetric[0]}): "
            "the stored ones count."
        )
    if reordered:
        raw.warnings.append(
            f"quantization_config says desc_act false, but g_idx orders columns ({len(reordered)} matrices, "
            f"{reordered[0]}): the stored order counts."
        )
    return out


class Choice(NamedTuple):
    """How one matrix is quantized."""

    bits: int
    group_size: int
    sym: object
    desc_act: object


def _override(settings: Mapping[str, Any], module: str, raw: RawTensors) -> Mapping[str, Any]:
    """The settings of a module, with those of GPTQModel's `dynamic`: the first pattern that matches its beginning
    counts; "-:" before one means not quantized."""
    dynamic = settings.get("dynamic")
    for pattern, own in dynamic.items() if isinstance(dynamic, dict) else ():
        skips = pattern.startswith("-:")
        if not raw.matches(pattern.removeprefix("-:").removeprefix("+:"), module):
            continue
        if skips:
            raise raw.error(f"{module} is stored as GPTQ, but dynamic ({pattern[:40]!r}) says that it is not")
        return {**settings, **own} if isinstance(own, dict) else settings
    return settings


def _tensor(module: str, raw: RawTensors, choice: Choice, *, v2: bool, zero15: int | None) -> PackedTensor:
    bits, group_size = choice.bits, choice.group_size
    per_word = 32 // bits
    n_words, n_rows = raw.use_matrix(f"{module}.qweight", ("I32",))
    n_columns = n_words * per_word
    size = group_size if group_size > 0 else n_columns
    n_groups = -(-n_columns // size)
    if n_rows % per_word:
        raise raw.error(f"{module}.qweight: {n_rows} outputs are no multiple of {per_word}")
    raw.use(f"{module}.qzeros", ("I32",), (n_groups, n_rows // per_word))
    raw.use(f"{module}.scales", FLOATS, (n_groups, n_rows))
    zeros = _zero_points(module, raw, bits, v2=v2, zero15=zero15)
    middle = 1 << (bits - 1)
    symmetric = bool((zeros == middle).all())
    shifted = middle - 1 if v2 else middle + 1
    if choice.sym is True and (zeros == shifted).all():
        stored, here, there = (shifted, "gptq_v2", "gptq") if v2 else (middle, "gptq", "gptq_v2")
        raise raw.error(
            f"{module}.qzeros holds {stored} throughout, which in checkpoint_format {here} means {shifted}, "
            f"but sym says {middle}: every weight would be off by a scale. Correct config.json: checkpoint_format "
            f"{there}, or sym false if the zero points are meant so"
        )
    if choice.desc_act is True and f"{module}.g_idx" not in raw:
        raise raw.error(
            f"{module}.g_idx is missing, but desc_act says that columns were ordered: without it they would be taken "
            "in a wrong order. Correct config.json: desc_act false, if they are in order; or convert another copy"
        )
    order = _order(module, raw, n_columns, n_groups, size)
    trivial = order is None or np.array_equal(order, np.arange(n_columns) // size)

    def unsigned(rows: slice) -> npt.NDArray[np.uint8]:
        words = raw.read(f"{module}.qweight")[:, rows].T  # (rows, in / 8)
        return fields(words, bits)

    def scales(rows: slice) -> F32Array:
        return np.ascontiguousarray(raw.floats(f"{module}.scales")[:, rows].T)

    def gathered(rows: slice) -> F32Array:
        group = np.arange(n_columns) // size if order is None else order
        levels = unsigned(rows).astype(np.float32) - zeros.T[rows][:, group]
        out: F32Array = levels * scales(rows)[:, group]
        return out

    kind = integer_kind(bits, symmetric=symmetric) if trivial and zeros.max() < 1 << bits else None
    return packed_tensor(
        shape=(n_rows, n_columns),
        stored_as=f"gptq_{bits}bit_{'row' if group_size <= 0 else f'g{group_size}'}{'' if trivial else '_reordered'}",
        kind=kind,
        group_size=size if group_size > 0 else None,
        scales=scales,
        levels=lambda rows: signed(unsigned(rows), bits),
        zero_points=(lambda rows: np.ascontiguousarray(zeros.T[rows]).astype(np.uint8)) if kind == "int4z" else None,
        values=gathered,
    )


def _zero_points(module: str, raw: RawTensors, bits: int, *, v2: bool, zero15: int | None) -> npt.NDArray[np.int16]:
    """(groups, out)."""
    stored = fields(raw.read(f"{module}.qzeros"), bits)
    if v2:
        return stored.astype(np.int16)
    highest = (1 << bits) - 1
    zeros = stored.astype(np.int16) + 1
    if (stored == highest).any():
        if bits != 4 or zero15 is None:
            choice = "Say which with --gptq-zero15 16 or 0, save" if bits == 4 else "Save"
            raise raw.error(
                f"{module}.qzeros holds {highest}, which some programs read as a zero point of {highest + 1} and some "
                f"as 0; the file does not say which. {choice} it with checkpoint_format gptq_v2, or convert the "
                "original model"
            )
        zeros[zeros == highest + 1] = zero15
    return zeros


def _order(module: str, raw: RawTensors, n_columns: int, n_groups: int, size: int) -> npt.NDArray[np.int64] | None:
    name = f"{module}.g_idx"
    if name not in raw:
        return None
    raw.use(name, ("I32", "I64"), (n_columns,))
    order = raw.read(name).astype(np.int64)
    if order.min() < 0 or order.max() >= n_groups:
        raise raw.error(f"{name} names a group outside of 0 to {n_groups - 1}")
    if (np.bincount(order, minlength=n_groups) > size).any():
        raise raw.error(f"{name} gives a group more columns than the {size} that group_size says")
    return order
