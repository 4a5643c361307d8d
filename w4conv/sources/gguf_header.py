"""The header of a GGUF file, read with every count, length and offset checked before it is used.

    "GGUF" | u32 version | u64 n_tensors | u64 n_keys | keys and values | tensor infos | padding | data

    key and value   string key | u32 type | value
    tensor info     string name | u32 n_dims | n_dims x u64, fastest axis first | u32 type | u64 offset in the data
    string          u64 nbytes | UTF-8
    array           u32 element type | u64 n | n elements; no arrays of arrays

Tensors lie one behind the other, each padded to `general.alignment`; a row is a whole number of blocks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile

MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_STRINGS: Final = 1 << 22  # of one array; walking them is the only work that grows with a count
MAX_KEY_BYTES: Final = 65535
MAX_NAME_BYTES: Final = 63
MAX_ALIGNMENT: Final = 1 << 20
MAX_DIMS: Final = 4

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
INTEGERS: Final = "BbHhIiQq"

# id: (name, values of a block, bytes of a block); ids that are missing here were removed from the
# format, or are used in computing only (Q8_1, Q8_K).
TYPES: Final = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
}  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Place of one tensor: `shape` with the slowest axis first, `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int

    @property
    def type_name(self) -> str:
        return TYPES[self.type_id][0]

    @property
    def row_nbytes(self) -> int:
        _, block, block_nbytes = TYPES[self.type_id]
        return self.shape[-1] // block * block_nbytes


@dataclass(frozen=True, slots=True)
class _Array:
    """Place of an array's elements in the file."""

    type_id: int
    n: int
    offset: int
    nbytes: int


class _Cursor:
    """Reads forward through the mapping, never past its end."""

    def __init__(self, file: MappedFile) -> None:
        self.where = str(file.path)
        self.data = file.view(0, file.nbytes).data
        self.nbytes = file.nbytes
        self.at = 0

    def error(self, fault: str) -> InputError:
        return InputError(f"{self.where}: {fault}")

    def skip(self, nbytes: int, what: str) -> int:
        """Move on by `nbytes`; returns where they start."""
        start = self.at
        if nbytes > self.nbytes - start:
            raise self.error(
                f"{what} needs {nbytes} bytes at {start}, {self.nbytes - start} are left: truncated or corrupt"
            )
        self.at = start + nbytes
        return start

    def scalar(self, code: str, what: str) -> int | float | bool:
        form = struct.Struct("<" + code)
        start = self.skip(form.size, what)
        if code == "?" and self.data[start] > 1:
            raise self.error(f"{what}: {self.data[start]} is neither true nor false")
        value: int | float | bool = form.unpack_from(self.data, start)[0]
        return value

    def count(self, code: str, what: str, most: int, smallest: int) -> int:
        """A number of records of at least `smallest` bytes each."""
        n = int(self.scalar(code, what))
        if n > most or n * smallest > self.nbytes - self.at:
            raise self.error(f"{what} is {n}; at most {min(most, (self.nbytes - self.at) // smallest)} can be here")
        return n

    def text(self, what: str, most: int) -> str:
        n = self.count("Q", f"length of {what}", most, 1)
        start = self.skip(n, what)
        try:
            return bytes(self.data[start : self.at]).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error


class GgufHeader:
    """Metadata and tensor infos of one file. Arrays stay in the mapping until they are asked for."""

    def __init__(self, file: MappedFile) -> None:
        """Raises InputError that says what breaks which rule."""
        self.file = file
        cursor = _Cursor(file)
        n_tensors, n_keys = _read_counts(cursor)
        self._values: dict[str, object] = {}
        for i in range(n_keys):
            key = cursor.text(f"metadata key {i}", MAX_KEY_BYTES)
            if not key or not key.isprintable():
                raise cursor.error(f"metadata key {i}: {key[:80]!r} is not a usable key")
            if key in self._values:
                raise cursor.error(f"the metadata key {key} stands twice")
            self._values[key] = _read_value(cursor, key)
        self.tensors = _read_tensors(cursor, n_tensors, self._alignment())

    @property
    def path(self) -> Path:
        return self.file.path

    def error(self, key: str, fault: str) -> InputError:
        return InputError(f"{self.path}: {key}: {fault}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> Iterator[str]:
        return iter(self._values)

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, default, str, "a string")

    def integer(self, key: str, default: int | None = None) -> int:
        return self._typed(key, default, int, "an integer")

    def number(self, key: str, default: float | None = None) -> float:
        return self._typed(key, default, float, "a floating-point number")

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, default, bool, "a truth value")

    def n_elements(self, key: str) -> int:
        """Elements of the array under `key`; 0 when it is absent."""
        return self._array(key).n if key in self else 0

    def numbers(self, key: str) -> npt.NDArray[np.generic]:
        """A numeric array, as stored. Raises InputError when it is absent or of strings."""
        array = self._array(key)
        if array.type_id == STRING:
            raise self.error(key, "expected numbers, got strings")
        raw = self.file.view(array.offset, array.nbytes)
        return np.frombuffer(raw.tobytes(), np.dtype("<" + SCALARS[array.type_id]))

    def strings(self, key: str) -> list[bytes]:
        """An array of strings, undecoded. Raises InputError when it is absent or of numbers."""
        array = self._array(key)
        if array.type_id != STRING:
            raise self.error(key, "expected strings, got numbers")
        raw = self.file.view(array.offset, array.nbytes).tobytes()
        out, at = [], 0
        for _ in range(array.n):  # lengths were checked when the header was read
            end = at + 8 + int.from_bytes(raw[at : at + 8], "little")
            out.append(raw[at + 8 : end])
            at = end
        return out

    def _array(self, key: str) -> _Array:
        value = self._values.get(key)
        if not isinstance(value, _Array):
            raise self.error(key, "is missing" if value is None else "expected an array")
        return value

    def _typed(self, key: str, default: T | None, kind: type[T], words: str) -> T:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if type(value) is not kind:
            got = "an array" if isinstance(value, _Array) else repr(value)[:40]
            raise self.error(key, f"expected {words}, got {got}")
        return value

    def _alignment(self) -> int:
        alignment = self.integer("general.alignment", 32)
        if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.error("general.alignment", f"{alignment} is not a power of two from 8 to {MAX_ALIGNMENT}")
        return alignment


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    if bytes(cursor.data[:4]) != b"GGUF":
        raise cursor.error(f"starts with {bytes(cursor.data[:4])!r}, not with GGUF: not a GGUF file, or corrupt")
    cursor.at = 4
    version = int(cursor.scalar("I", "version"))
    if version and version & 0xFFFF == 0:
        raise cursor.error("a big-endian GGUF file; only little-endian ones are supported")
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is not supported; known are 2 and 3")
    n_tensors = cursor.count("Q", "number of tensors", MAX_TENSORS, 24)
    n_keys = cursor.count("Q", "number of metadata keys", MAX_KEYS, 13)
    return n_tensors, n_keys


def _read_value(cursor: _Cursor, key: str) -> object:
    type_id = int(cursor.scalar("I", key))
    if type_id == STRING:
        return cursor.text(key, cursor.nbytes)
    if type_id == ARRAY:
        return _read_array(cursor, key)
    if type_id not in SCALARS:
        raise cursor.error(f"{key}: unknown value type {type_id}")
    return cursor.scalar(SCALARS[type_id], key)


def _read_array(cursor: _Cursor, key: str) -> _Array:
    type_id = int(cursor.scalar("I", key))
    if type_id == STRING:
        n = cursor.count("Q", f"{key}: number of strings", MAX_STRINGS, 8)
        start = at = cursor.at
        data, nbytes, length = cursor.data, cursor.nbytes, struct.Struct("<Q").unpack_from
        for _ in range(n):  # the tight loop of opening a file: hundreds of thousands of tokens and merges
            if at + 8 > nbytes:
                raise cursor.error(f"{key}: a string starts beyond the end of the file: truncated or corrupt")
            at += 8 + length(data, at)[0]
        if at > nbytes:
            raise cursor.error(f"{key}: a string ends beyond the end of the file: truncated or corrupt")
        cursor.at = at
        return _Array(type_id, n, start, at - start)
    if type_id not in SCALARS:
        raise cursor.error(f"{key}: arrays of value type {type_id} are not allowed")
    size = struct.calcsize("<" + SCALARS[type_id])
    n = cursor.count("Q", f"{key}: number of elements", cursor.nbytes, size)
    return _Array(type_id, n, cursor.skip(n * size, key), n * size)


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    infos = [_read_info(cursor, i) for i in range(n_tensors)]
    at = base = _padded(cursor.at, alignment)
    out: dict[str, GgufTensor] = {}
    for name, shape, type_id, offset in infos:
        if name in out:
            raise cursor.error(f"the tensor {name} stands twice")
        if offset != at - base:
            raise cursor.error(f"{name}: expected at data offset {at - base}, is at {offset}")
        _, block, block_nbytes = TYPES[type_id]
        nbytes = math.prod(shape) // block * block_nbytes
        if at + nbytes > cursor.nbytes:
            raise cursor.error(
                f"{name}: needs {nbytes} bytes at {at}, the file has {cursor.nbytes}: truncated; fetch it again"
            )
        out[name] = GgufTensor(name, shape, type_id, at, nbytes)
        at = _padded(at + nbytes, alignment)
    return out


def _read_info(cursor: _Cursor, i: int) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (slowest axis first), type and offset."""
    name = cursor.text(f"name of tensor {i}", MAX_NAME_BYTES)
    if not name or not name.isprintable():
        raise cursor.error(f"tensor {i}: {name!r} is not a usable name")
    n_dims = int(cursor.scalar("I", name))
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"{name}: {n_dims} dimensions, expected 1 to {MAX_DIMS}")
    dims = [int(cursor.scalar("Q", name)) for _ in range(n_dims)]
    type_id = int(cursor.scalar("I", name))
    if type_id not in TYPES:
        raise cursor.error(f"{name}: unknown tensor type {type_id}")
    type_name, block, _ = TYPES[type_id]
    if 0 in dims or math.prod(dims) > 2**60:
        raise cursor.error(f"{name}: dimensions {dims} are empty or too large")
    if dims[0] % block:
        raise cursor.error(f"{name}: rows of {dims[0]} values are not whole blocks of {block} ({type_name})")
    return name, tuple(reversed(dims)), type_id, int(cursor.scalar("Q", name))


def _padded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
