"""Coded matrices times activations, and back to values; what the machine can read and multiply at most."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from w4conv import _native, codes
from w4conv.arrays import Array, F32Array
from w4conv.kernels.pool import as_bytes, native_pool
from w4conv.scheme import TILE_ROWS, QuantScheme

PASS_TOKENS: int = _native.MAX_TOKENS  # tokens that pass through the engine together, at most


def matrix_parts(scheme: QuantScheme, shape: tuple[int, int], parts: Mapping[str, Array]) -> _native.MatrixParts:
    """A coded matrix of shape (n_rows, n_columns) as the native code takes it.

    parts: by the names of w4-codes 4. The result keeps their memory alive, and so does a native model that has it.
    """
    empty = np.empty(0, np.uint8)

    def part(kind: str) -> npt.NDArray[np.uint8]:
        return as_bytes(parts[kind]) if kind in parts else empty

    codes_ = part("values" if scheme.is_float else "codes")
    per_group = map(part, ("scales", "zero_points", "offsets", "super_scales", "super_offsets"))
    return _native.MatrixParts(scheme.kind, *shape, scheme.group_size, scheme.scale_dtype, codes_, *per_group)


def matmul(
    scheme: QuantScheme,
    shape: tuple[int, int],
    parts: Mapping[str, Array],
    x: npt.NDArray[np.float32],
    *,
    threads: int | None = 1,
    activation_bits: int = 16,
) -> npt.NDArray[np.float32]:
    """x (n_tokens, n_columns) times a coded matrix of shape (n_rows, n_columns): (n_tokens, n_rows) float32.

    Integer schemes quantize x to integers of 16 or 8 bits as docs/numerics.md says; the others take it as it is. The
    same bits on every tier, for any threads and n_tokens.
    """
    n_rows, n_columns = shape
    padded = np.zeros((len(x), -(-n_columns // TILE_ROWS) * TILE_ROWS), np.float32)
    padded[:, :n_columns] = x
    width = codes.n_tiles(n_rows) * TILE_ROWS
    store = np.empty(len(x) * width + 16, np.float32)  # rows begin at a cache line, as the engine's do
    y = store[-(store.ctypes.data // 4) % 16 :][: len(x) * width].reshape(len(x), width)
    _native.matmul(native_pool(threads), matrix_parts(scheme, shape, parts), padded, y, activation_bits)
    return y[:, :n_rows]


def dequantize(
    scheme: QuantScheme, shape: tuple[int, int], parts: Mapping[str, Array], *, threads: int | None = None
) -> F32Array:
    """The values of a coded matrix, bit for bit `codes.dequantize`."""
    out = np.empty(shape, np.float32)
    if out.size:
        _native.dequantize(native_pool(threads), matrix_parts(scheme, shape, parts), out)
    return out


def read(data: npt.NDArray[np.uint8], *, threads: int) -> int:
    """Read whole 64-byte lines of `data` and nothing else; returns how many bytes that was."""
    lines = data[: data.size // 64 * 64]
    _native.read(native_pool(threads), lines)
    return lines.size


def multiply_registers(*, operands: str, threads: int) -> int:
    """Dot products of the tier in use from registers, nothing else; returns how many multiplications that was.

    operands: of the activations, "int16", "int8" or "float".
    """
    return _native.multiply_registers(native_pool(threads), operands)
