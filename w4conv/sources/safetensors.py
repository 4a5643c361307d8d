"""The header of a safetensors file, read strictly.

    u64 header length | header: a JSON object, right-padded with spaces | data

The header maps a name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets relative to the data. Sorted by
offset the tensors are contiguous from 0 to the end of the file: no hole, no overlap, nothing behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from w4conv.errors import InputError
from w4conv.files.blobs import parse_json_object
from w4conv.files.mapped import MappedFile

MAX_HEADER_BYTES: Final = 100_000_000  # as the reference implementation
MAX_RANK: Final = 16
MAX_NAME_BYTES: Final = 1024
MAX_NUMBER: Final = 2**63 - 1

DTYPE_BITS: Final = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of one tensor: `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: MappedFile) -> dict[str, Entry]:
    """Every tensor of the file, by name, in header order. Raises InputError that says what breaks which rule."""
    where = str(file.path)
    if file.nbytes < 8:
        raise InputError(f"{where}: {file.nbytes} bytes; a safetensors file starts with an 8-byte header length")
    length = int.from_bytes(file.view(0, 8).tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise InputError(
            f"{where}: header length {length} is over {MAX_HEADER_BYTES}: not a safetensors file, or corrupt"
        )
    if length > file.nbytes - 8:
        raise InputError(
            f"{where}: the header needs {length} bytes, {file.nbytes - 8} are left: truncated; download it again"
        )
    text = file.view(8, length).tobytes()
    if not text.startswith(b"{"):
        raise InputError(f"{where}: the header does not start with '{{': not a safetensors file, or corrupt")
    header = parse_json_object(text, f"{where}: header")
    _check_metadata(header.pop("__metadata__", {}), where)
    base = 8 + length
    entries = {name: _entry(name, fields, base, where) for name, fields in header.items()}
    _check_contiguous(entries, base, file.nbytes, where)
    return entries


def _check_metadata(metadata: object, where: str) -> None:
    if metadata is None:
        return  # MLX writes null where there is none, and the reference implementation reads it
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InputError(f"{where}: __metadata__ is not an object of strings")


def _entry(name: str, fields: object, base: int, where: str) -> Entry:
    if not name or not name.isprintable() or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise InputError(f"{where}: {name[:80]!r} is not a usable tensor name")
    where = f"{where}: {name}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{where}: expected exactly dtype, shape and data_offsets")
    dtype, shape = fields["dtype"], _naturals(fields["shape"], f"{where}: shape")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise InputError(f"{where}: unknown dtype {dtype!r}")
    if len(shape) > MAX_RANK:
        raise InputError(f"{where}: rank {len(shape)} is over {MAX_RANK}")
    offsets = _naturals(fields["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError(f"{where}: data_offsets {list(offsets)} is not [begin, end]")
    begin, end = offsets
    n_bits = DTYPE_BITS[dtype]
    for size in shape:  # a running product, so that it stays small however many factors a header has
        n_bits *= size
        if n_bits > MAX_NUMBER:
            raise InputError(f"{where}: shape {list(shape)} is too large")
    if n_bits != 8 * (end - begin):
        raise InputError(f"{where}: {dtype} {list(shape)} takes {n_bits / 8:g} bytes, data_offsets hold {end - begin}")
    return Entry(dtype, shape, base + begin, end - begin)


def _naturals(numbers: object, where: str) -> tuple[int, ...]:
    if not isinstance(numbers, list):
        raise InputError(f"{where}: expected a list of integers")
    for n in numbers:
        if type(n) is not int or not 0 <= n <= MAX_NUMBER:
            raise InputError(f"{where}: {str(n)[:40]} is not a 63-bit natural number")
    return tuple(numbers)


def _check_contiguous(entries: dict[str, Entry], base: int, file_nbytes: int, where: str) -> None:
    expected = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != expected:
            fault = "a hole before it" if entry.offset > expected else "it overlaps another tensor"
            raise InputError(
                f"{where}: {name}: expected at data offset {expected - base}, is at {entry.offset - base}: {fault}"
            )
        expected += entry.nbytes
    if expected > file_nbytes:
        raise InputError(f"{where}: {file_nbytes} bytes, the header describes {expected}: truncated; download it again")
    if expected < file_nbytes:
        raise InputError(f"{where}: {file_nbytes - expected} bytes behind the last tensor: corrupt; download it again")
