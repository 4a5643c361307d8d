"""FP8 with a scale for each block of a matrix.

    X.weight            F8_E4M3 (out, in)
    X.weight_scale_inv  (ceil(out / 128), ceil(in / 128))   multiplied with, whatever its name says

    value = float8 * scale of the block

No scheme of the container holds these values; they are handed out in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F32Array
from w4conv.sources.packed.base import FLOATS, PackedTensor, RawTensors


def _e4m3() -> npt.NDArray[np.float32]:
    """Values of the 256 codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; S.1111.111 is NaN."""
    out = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        out.append(math.nan if code & 127 == 127 else -value if code > 127 else value)
    return np.array(out, np.float32)


E4M3: Final = _e4m3()
DEFAULT_BLOCK: Final = [128, 128]  # as in transformers


def find(settings: Mapping[str, Any], raw: RawTensors) -> dict[str, PackedTensor]:
    if (layout := settings.get("fmt", "e4m3")) != "e4m3":
        raise raw.error(f"FP8 fmt {str(layout)[:20]!r} is not supported; e4m3 is")
    block = settings.get("weight_block_size", DEFAULT_BLOCK)
    if block is None:
        block = [1 << 20, 1 << 20]
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= 1 << 20 for n in block):
        raise raw.error(f"quantization_config: weight_block_size is {str(block)[:40]}, expected two integers")
    raw.leave_activations()
    out, single = {}, []
    for module in raw.modules(".weight_scale_inv"):
        name, scale_name = f"{module}.weight", f"{module}.weight_scale_inv"
        out[name] = tensor(name, scale_name, raw, block=(block[0], block[1]))
        n_rows, n_columns = raw.entry(name).shape
        if math.prod(raw.entry(scale_name).shape) == 1 and (n_rows > block[0] or n_columns > block[1]):
            single.append(module)
    if single:
        raw.warnings.append(
            f"quantization_config says weight_block_size {block[0]}, {block[1]}, but one scale is stored for a whole "
            f"matrix ({len(single)} matrices, {single[0]}): it counts for all of it, as in transformers."
        )
    return out


def tensor(name: str, scale_name: str, raw: RawTensors, *, block: tuple[int, int] | None) -> PackedTensor:
    """block: rows and columns that share a scale; None for one scale a tensor or a row."""
    n_rows, n_columns = raw.use_matrix(name, ("F8_E4M3",))
    shape = raw.use(scale_name, (*FLOATS, "F8_E8M0"))
    if block is not None and math.prod(shape) == 1:
        block = None
    if block is None:
        if shape not in ((), (1,), (1, 1), (n_rows,), (n_rows, 1)):
            raise raw.error(f"{scale_name} has shape {shape}, expected one scale, or one for each of {n_rows} rows")
        block = (n_rows if math.prod(shape) == 1 else 1), n_columns
    elif shape != (expected := (-(-n_rows // block[0]), -(-n_columns // block[1]))):
        raise raw.error(
            f"{scale_name} has shape {shape}, but blocks of {block[0]} by {block[1]}, which quantization_config says, "
            f"need {expected} for {n_rows} by {n_columns} weights: which weights share a scale would be a guess. "
            "Correct config.json, if the scales are right"
        )
    tall, wide = block

    def values(rows: slice) -> F32Array:
        per_block = raw.floats(scale_name).reshape(-1, -(-n_columns // wide))
        scales = np.repeat(per_block[np.arange(rows.start, rows.stop) // tall], wide, axis=1)[:, :n_columns]
        out: F32Array = E4M3[raw.read(name)[rows].astype(np.uint8)] * scales
        return out

    return PackedTensor((n_rows, n_columns), "F8_E4M3", None, None, values)
