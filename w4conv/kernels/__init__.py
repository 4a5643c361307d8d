"""The native kernels, with numpy in and out."""

from w4conv.kernels.calibrated import (
    factor,
    gemm_nt,
    gemm_tn,
    gptq_round,
    refine,
    search_scales,
    solve_rows,
)
from w4conv.kernels.convert import (
    BadValueError,
    Difference,
    PackedRows,
    compare,
    compare_with_source,
    pack_float,
)
from w4conv.kernels.feed_forward import gated, softmax
from w4conv.kernels.multiply import PASS_TOKENS, dequantize, matmul, matrix_parts, multiply_registers, read
from w4conv.kernels.nearest import SHIFTED, nearest_parts, pack_steps, quantize_rtn, steps_of
from w4conv.kernels.pool import as_bytes, starting_threads
from w4conv.kernels.tiers import build_info, dot_instruction, explain_sigbus, isa_tier, isa_tiers

__all__ = [
    "PASS_TOKENS",
    "SHIFTED",
    "BadValueError",
    "Difference",
    "PackedRows",
    "as_bytes",
    "build_info",
    "compare",
    "compare_with_source",
    "dequantize",
    "dot_instruction",
    "explain_sigbus",
    "factor",
    "gated",
    "gemm_nt",
    "gemm_tn",
    "gptq_round",
    "isa_tier",
    "isa_tiers",
    "matmul",
    "matrix_parts",
    "multiply_registers",
    "nearest_parts",
    "pack_float",
    "pack_steps",
    "quantize_rtn",
    "read",
    "refine",
    "search_scales",
    "softmax",
    "solve_rows",
    "starting_threads",
    "steps_of",
]
