"""Shared by the packed formats: raw tensors with checked types and shapes, nibbles, groups, scales."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import codes
from w4conv.arrays import VALUE_DTYPES, Array, F32Array
from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile
from w4conv.scheme import GROUP_SIZES, QuantScheme
from w4conv.sources.base import CodedRows
from w4conv.sources.safetensors import Entry

_NUMPY: Final[Mapping[str, np.dtype[Any]]] = {
    **VALUE_DTYPES,
    "I32": np.dtype("<i4"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"), "I8": np.dtype("i1"), "F8_E8M0": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"),
}  # fmt: skip
FLOATS: Final = tuple(VALUE_DTYPES)
MAX_PATTERN: Final = 500


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A matrix in the coding of its format, or a stack of matrices, of which `coded` and `values` take whole ones.

    stored_as: letters, digits and "_". coding: the scheme of the container that holds it exactly, with `coded` for its
    rows; both None where there is none. values: rows in float32.
    """

    shape: tuple[int, ...]
    stored_as: str
    coding: QuantScheme | None
    coded: Callable[[slice], CodedRows] | None
    values: Callable[[slice], F32Array]
    nbytes: int = 0  # of all its parts


class RawTensors:
    """Tensors of the files as they are stored. `used`: names of tensors that a format has read; `activations`: names of
    settings for rounded activations, which weights do not need."""

    def __init__(self, directory: Path, found: Mapping[str, tuple[MappedFile, Entry]]) -> None:
        self.directory = directory
        self.used: set[str] = set()
        self.activations: set[str] = set()
        self.warnings: list[str] = []
        self._found = found

    def spellings(self, module: str) -> tuple[str, ...]:
        """Names that a module of the language part may have in the config of a multimodal checkpoint, its own first."""
        inner = module.removeprefix("model.")
        return module, f"language_model.{module}", f"model.language_model.{inner}", f"language_model.{inner}", inner

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def nbytes(self, name: str) -> int:
        """Bytes of the tensors that a matrix is made of: those used that begin like its module."""
        module = name.removesuffix(".weight")
        return sum(self.entry(part).nbytes for part in self._parts.get(module, ()))

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        out: dict[str, list[str]] = {}
        for name in self.used:
            module = name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]
            out.setdefault(module, []).append(name)
        return out

    def error(self, message: str) -> InputError:
        return InputError(f"{self.directory}: {message}")

    def modules(self, ending: str) -> Iterator[str]:
        """Names that end so, without the ending."""
        return (name.removesuffix(ending) for name in self._found if name.endswith(ending))

    def entry(self, name: str) -> Entry:
        if name not in self._found:
            module = name.rpartition(".")[0]
            there = sorted(n for n in self._found if module and n.startswith(f"{module}."))
            beside = f", though {there[0]} is there" if there else ""
            raise self.error(
                f"{name} is missing{beside}. Every weight file is complete, so the checkpoint was saved without it: "
                "convert the original model, or another copy of it"
            )
        return self._found[name][1]

    def use(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The shape of a tensor, checked. Raises InputError when it is missing or of another type or shape."""
        entry = self.entry(name)
        if entry.dtype not in dtypes or entry.dtype not in _NUMPY:
            raise self.error(f"{name} is {entry.dtype}, expected {' or '.join(dtypes)}")
        if shape is not None and entry.shape != shape:
            raise self.error(f"{name} has shape {entry.shape}, expected {shape}")
        self.used.add(name)
        return entry.shape

    def matches(self, pattern: str, name: str) -> bool:
        """Whether an expression of the config matches the beginning of a name. Raises InputError."""
        try:
            return len(pattern) <= MAX_PATTERN and re.match(pattern, name) is not None
        except re.error as error:
            raise self.error(f"quantization_config: {pattern[:40]!r} is no regular expression") from error

    def leave_activations(self) -> None:
        self.activations = {f"{module}.input_scale" for module in self.modules(".input_scale")}
        self.used |= self.activations

    def use_matrix(self, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """As `use`, of rank 2 and not empty."""
        shape = self.use(name, dtypes)
        if len(shape) != 2 or 0 in shape:
            raise self.error(f"{name} has shape {shape}, expected a matrix")
        return shape[0], shape[1]

    def read(self, name: str) -> Array:
        """A view of the whole tensor."""
        file, entry = self._found[name]
        raw = file.view(entry.offset, entry.nbytes)
        word = _NUMPY[entry.dtype]
        return (raw.copy() if raw.ctypes.data % word.itemsize else raw).view(word).reshape(entry.shape)

    def floats(self, name: str) -> F32Array:
        """F16, BF16 or F32 as float32, exactly."""
        values = self.read(name)
        if self.entry(name).dtype == "F8_E8M0":
            exponents = values.astype(np.int32)
            if (exponents == 255).any():
                raise self.error(f"{name} holds 255, which is no exponent but NaN")
            return np.ldexp(np.float64(1), exponents - 127).astype(np.float32)
        if self.entry(name).dtype == "BF16":
            return codes.bf16_to_f32(values.astype(np.uint16))
        return values.astype(np.float32)


def fields(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """(..., n) words of 32 bits -> (..., n * 32 / bits) unsigned codes, the lowest bits first."""
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    out = unsigned[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return out.astype(np.uint8).reshape(*unsigned.shape[:-1], -1)


def signed(unsigned: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.generic]:
    """Unsigned codes as the container has them: of 4 bits as they are, of 8 bits less 128, as int8."""
    return unsigned if bits == 4 else np.ascontiguousarray(unsigned ^ np.uint8(0x80)).view(np.int8)


def integer_kind(bits: int, *, symmetric: bool) -> str | None:
    """The scheme of codes with a scale and a whole zero point; symmetric: which is the middle everywhere."""
    return {(4, True): "int4", (4, False): "int4z", (8, True): "int8"}.get((bits, symmetric))


def scale_dtype(scales: F32Array) -> str:
    """ "f16" where every scale is a float16, else "f32"."""
    with np.errstate(over="ignore"):
        return "f16" if np.array_equal(scales.astype(np.float16).astype(np.float32), scales) else "f32"


def container_group(group_size: int, n_columns: int) -> tuple[int, int] | None:
    """(group size of the container, times that each scale is repeated), or None where no group of it divides."""
    if group_size >= n_columns and group_size not in GROUP_SIZES:
        return 0, 1
    for size in sorted((size for size in GROUP_SIZES if size), reverse=True):
        if group_size % size == 0:
            return size, group_size // size
    return None


def packed_tensor(
    *,
    shape: tuple[int, int],
    stored_as: str,
    kind: str | None,
    group_size: int | None,
    scales: Callable[[slice], F32Array],
    levels: Callable[[slice], Array],
    zero_points: Callable[[slice], npt.NDArray[np.uint8]] | None = None,
    offsets: Callable[[slice], F32Array] | None = None,
    values: Callable[[slice], F32Array] | None = None,
) -> PackedTensor:
    """A PackedTensor of `kind` ("int4", ...), or where kind is None, or no group fits, of `values` alone.

    group_size: None for one scale a row.
    scales, offsets: (n_rows, n_groups) of some rows; all are looked at now, to tell their type. levels: codes of some
    rows.
    """
    n_rows, n_columns = shape
    group = (0, 1) if group_size is None else container_group(group_size, n_columns)
    width = n_columns if group_size is None else group_size

    def plain(rows: slice) -> F32Array:
        if values is not None:
            return values(rows)
        assert kind is not None
        per_column = np.repeat(scales(rows), width, axis=1)[:, :n_columns]
        q: F32Array
        if kind in codes.CODEBOOKS:
            q = codes.CODEBOOKS[kind][levels(rows)]
        elif zero_points is not None:
            q = levels(rows).astype(np.float32) - np.repeat(zero_points(rows), width, axis=1)[:, :n_columns]
        else:
            q = levels(rows).astype(np.float32) - np.float32(codes.INT4_PAD if kind == "int4" else 0)
        out: F32Array = q * per_column
        if offsets is not None:
            out += np.repeat(offsets(rows), width, axis=1)[:, :n_columns]
        return out

    if kind is None or group is None:
        return PackedTensor(shape, stored_as, None, None, plain)
    size, repeats = group
    whole = slice(0, n_rows)
    dtypes = {scale_dtype(numbers(whole)) for numbers in (scales, offsets) if numbers is not None}
    coding = QuantScheme(kind, size, max(dtypes))  # f32 where one is
    n_groups = coding.n_groups(n_columns)

    def coded(rows: slice) -> CodedRows:
        def spread(a: Array) -> Array:
            return np.repeat(a, repeats, axis=1)[:, :n_groups]

        dtype = codes.SCALE_DTYPES[coding.scale_dtype]
        return CodedRows(
            levels(rows),
            spread(scales(rows)).astype(dtype),
            None if zero_points is None else spread(zero_points(rows)).astype(np.uint8),
            None if offsets is None else spread(offsets(rows)).astype(dtype),
        )

    return PackedTensor(shape, stored_as, coding, coded, plain)


def stacked(tensor: PackedTensor, n: int) -> PackedTensor:
    """A matrix as a stack of `n`, cut between rows."""
    n_rows, n_columns = tensor.shape[0] // n, tensor.shape[1]

    def rows_of(matrices: slice) -> slice:
        return slice(matrices.start * n_rows, matrices.stop * n_rows)

    def values(matrices: slice) -> F32Array:
        return tensor.values(rows_of(matrices)).reshape(-1, n_rows, n_columns)

    def coded(matrices: slice) -> CodedRows:
        assert tensor.coded is not None
        return tensor.coded(rows_of(matrices)).stacked(n_rows)

    shape = (n, n_rows, n_columns)
    return PackedTensor(shape, tensor.stored_as, tensor.coding, tensor.coded and coded, values, tensor.nbytes)


def whole_zero_points(scales: F32Array, offsets: F32Array, bits: int) -> npt.NDArray[np.uint8] | None:
    """Whole numbers z with offset = -z * scale, so that code * scale + offset = (code - z) * scale; None where one is
    not whole or out of range."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(scales == 0, np.float32(1 << (bits - 1)), np.rint(-offsets / scales))
    inside = np.isfinite(ratio) & (ratio >= 0) & (ratio < 1 << bits)
    if not inside.all() or not np.array_equal(-ratio * scales, offsets):
        return None
    return ratio.astype(np.uint8)


def integer(settings: Mapping[str, Any], key: str, raw: RawTensors, default: int | None = None) -> int:
    """An integer of the quantization settings. Raises InputError."""
    value = settings.get(key, default)
    if type(value) is not int or not -1 <= value <= 1 << 20:
        raise raw.error(f"quantization_config: {key} is {str(value)[:40]!r}, expected an integer")
    return value
