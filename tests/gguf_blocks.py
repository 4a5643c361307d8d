"""Random blocks of GGUF's types, written by nobody's quantizer: every code, scale and bit comes up."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

# Where the FP16 numbers of a block lie.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "IQ1_M": (),
    "MXFP4": (), "NVFP4": (),
}  # fmt: skip


def random_blocks(
    qtype: str, n_rows: int, n_columns: int, *, seed: int = 0, size: float = 1.0
) -> npt.NDArray[np.uint8]:
    """(n_rows, bytes of a row). size: of the FP16 numbers, which have either sign."""
    rng = np.random.default_rng(seed)
    columns, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]]
    raw = rng.integers(0, 256, (n_rows, n_columns // columns, nbytes), dtype=np.uint8)
    for at in HALVES[qtype]:
        halves = (rng.standard_normal(raw.shape[:2]) * size).astype("<f2")
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    if qtype == "IQ1_M":  # its FP16 number lies in the top bits of the last 8 bytes
        halves = (rng.standard_normal(raw.shape[:2]) * size).astype("<f2").view(np.uint16)
        for i in range(4):
            raw[..., 49 + 2 * i] = raw[..., 49 + 2 * i] & 15 | (halves >> 4 * i & 15).astype(np.uint8) << 4
    if qtype == "MXFP4":
        raw[..., 0] = rng.integers(110, 130, raw.shape[:2])
    return raw.reshape(n_rows, -1)
