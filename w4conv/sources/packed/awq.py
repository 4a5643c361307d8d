"""AWQ, the GEMM layout of AutoAWQ.

X.qweight  I32 (in, out / 8)       8 codes along out; nibble ORDER[j] of a word is its output j
X.qzeros   I32 (groups, out / 8)   zero points in the same order
X.scales   (groups, out)

value = (code - zero point) * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import Array, F32Array
from w4conv.sources.packed.base import (
    FLOATS,
    PackedTensor,
    RawTensors,
    fields,
    integer,
    packed_tensor,
)

ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
SYMMETRIC: Final = 8


def find(settings: Mapping[str, Any], raw: RawTensors) -> dict[str, PackedTensor]:
    layout = str(settings.get("version", settings.get("format", "gemm"))).lower()
    if settings.get("quant_method") == "awq" and layout != "gemm":
        raise raw.error(f"AWQ version {layout[:40]!r} is not supported; gemm is")
    if (bits := integer(settings, "bits", raw, 4)) != 4:
        raise raw.error(f"AWQ with {bits} bits is not supported; 4 is")
    group_size = integer(settings, "group_size", raw)
    out = {f"{module}.weight": _tensor(module, raw, group_size) for module in raw.modules(".qweight")}
    says = "zero_point false" if settings.get("zero_point") is False else "sym" if settings.get("sym") is True else ""
    asymmetric = [name for name, tensor in out.items() if tensor.coding is None or tensor.coding.kind == "int4z"]
    if says and asymmetric:
        raw.warnings.append(
            f"quantization_config says {says}, but zero points are stored ({len(asymmetric)} matrices, "
            f"{asymmetric[0].removesuffix('.weight')}): the stored ones count."
        )
    return out


def _tensor(module: str, raw: RawTensors, group_size: int) -> PackedTensor:
    n_columns, n_words = raw.use_matrix(f"{module}.qweight", ("I32",))
    n_rows = 8 * n_words
    size = group_size if group_size > 0 else n_columns
    n_groups = -(-n_columns // size)
    raw.use(f"{module}.qzeros", ("I32",), (n_groups, n_words))
    raw.use(f"{module}.scales", FLOATS, (n_groups, n_rows))
    zeros = _outputs(raw.read(f"{module}.qzeros"))
    symmetric = bool((zeros == SYMMETRIC).all())

    def levels(rows: slice) -> npt.NDArray[np.uint8]:
        first, last = rows.start // 8, -(-rows.stop // 8)
        return _outputs(raw.read(f"{module}.qweight")[:, first:last])[rows.start - 8 * first :][
            : rows.stop - rows.start
        ]

    def scales(rows: slice) -> F32Array:
        return np.ascontiguousarray(raw.floats(f"{module}.scales")[:, rows].T)

    return packed_tensor(
        shape=(n_rows, n_columns),
        stored_as=f"awq_4bit_{'row' if group_size <= 0 else f'g{group_size}'}",
        kind="int4" if symmetric else "int4z",
        group_size=size if group_size > 0 else None,
        scales=scales,
        levels=levels,
        zero_points=None if symmetric else (lambda rows: zeros[rows]),
    )


def _outputs(words: Array) -> npt.NDArray[np.uint8]:
    """(n, out / 8) words -> (out, n) codes."""
    eights = fields(words, 4).reshape(*words.shape, 8)[..., ORDER]
    return np.ascontiguousarray(eights.reshape(words.shape[0], -1).T)
