"""The rules of `formats/w4-container.md`, walked in the order of its clause 7.6 before any data is touched.

Nothing read is trusted: every count is capped before it is used, every error names the clause, the file and the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np

from w4conv import codes, scheme
from w4conv.container import layout
from w4conv.container.layout import Header, Part, TensorInfo
from w4conv.errors import FormatError, UsageError
from w4conv.scheme import QuantScheme

_BLOCK: Final = 1 << 18  # bytes looked at together


@dataclass(frozen=True, slots=True)
class Index:
    """A tensor index found sound."""

    blobs: Mapping[str, Part]
    tensors: Mapping[str, TensorInfo]
    provenance: Mapping[str, Any]


def header(raw: bytes, *, where: str) -> Header:
    """The fixed header from the first 128 bytes of a file (w4-container 2); `where` names the file in errors."""

    def fail(clause: str, message: str) -> NoReturn:
        raise FormatError(f"{where}: {message}", clause=clause)

    if not raw.startswith(layout.SIGNATURE):
        fail("2.2", _explain_signature(raw))
    if len(raw) < layout.HEADER_NBYTES:
        fail("2.1", f"the file ends inside the header: {len(raw)} bytes of {layout.HEADER_NBYTES}. Fetch it again")
    fields = layout.unpack_header(raw[: layout.HEADER_NBYTES])
    _, major, minor, header_nbytes, file_nbytes, index_nbytes, data_offset, data_nbytes = fields[:8]
    n_parts, n_sources, reserved, index_digest, header_digest = fields[8:]
    if major != layout.MAJOR or minor > layout.MINOR:
        found, known = f"{major}.{minor}", f"{layout.MAJOR}.{layout.MINOR}"
        fail("2.3", f"container version {found}, but this w4conv reads {known}. Use a w4conv that reads {found}")
    if layout.digest(raw[: layout.HEADER_NBYTES - layout.DIGEST_NBYTES]) != header_digest:
        fail("2.12", "the header does not match its digest; the file is damaged. Fetch or convert it again")
    if header_nbytes != layout.HEADER_NBYTES:
        fail("2.4", f"header_nbytes is {header_nbytes}, expected {layout.HEADER_NBYTES}")
    if not 2 <= index_nbytes <= layout.MAX_INDEX_NBYTES:
        fail("2.6", f"index_nbytes is {index_nbytes}, expected 2 to {layout.MAX_INDEX_NBYTES}")
    expected = layout.round_up(layout.HEADER_NBYTES + index_nbytes, layout.DATA_ALIGNMENT)
    if data_offset != expected:
        fail("2.7", f"data_offset is {data_offset}, expected {expected}")
    if data_nbytes % layout.PART_ALIGNMENT or data_nbytes > layout.MAX_INTEGER:
        fail("2.8", f"data_nbytes is {data_nbytes}, expected a multiple of {layout.PART_ALIGNMENT} below 2^53")
    if n_parts > layout.MAX_PARTS or n_sources > layout.MAX_SOURCES:
        fail("2.9", f"{n_parts} parts and {n_sources} sources, at most {layout.MAX_PARTS} and {layout.MAX_SOURCES}")
    if reserved:
        fail("2.10", f"the reserved field is {reserved:#x}, expected 0")
    sound = Header(file_nbytes, index_nbytes, data_offset, data_nbytes, n_parts, n_sources, index_digest, minor)
    expected = sound.data_end + sound.trailer_nbytes
    if file_nbytes != expected:
        fail("2.5", f"file_nbytes is {file_nbytes}, but header, data and trailer take {expected}")
    return sound


def _explain_signature(raw: bytes) -> str:
    if not raw:
        return "the file is empty"
    if layout.SIGNATURE.startswith(raw):
        return f"the file ends inside the signature: {len(raw)} bytes. Fetch it again"
    if raw.startswith(b"\x89W4C"):
        return "line ends of the signature were changed: the file was transferred as text. Fetch it again as binary"
    return f"not a .w4 file: it starts with {raw[:8].hex(' ')}, expected {layout.SIGNATURE.hex(' ')}"


def index(raw: bytes, head: Header, *, where: str) -> Index:
    """The tensor index (w4-container 3) and the places it gives to the parts (4.2 to 4.4)."""
    return _IndexWalk(head, where).walk(raw)


class _IndexWalk:
    """One pass over the index, with the end of the part before and the number of parts so far."""

    def __init__(self, head: Header, where: str) -> None:
        self._head = head
        self._where = where
        self._end = 0  # of the last part, from the start of the data section
        self._n_parts = 0

    def _fail(self, clause: str, message: str) -> NoReturn:
        raise FormatError(f"{self._where}: {message}", clause=clause)

    def walk(self, raw: bytes) -> Index:
        top = self._keys(self._parse(raw), {"blobs", "provenance", "tensors"}, "the index", "3.3")
        blobs = self._blobs(top["blobs"])
        provenance = self._provenance(top["provenance"])
        tensors = self._tensors(top["tensors"])
        if self._n_parts != self._head.n_parts:
            self._fail("3.9", f"the index lists {self._n_parts} parts, the header says {self._head.n_parts}")
        data_nbytes = layout.round_up(self._end, layout.PART_ALIGNMENT)
        if data_nbytes != self._head.data_nbytes:
            self._fail("4.4", f"the parts end at {data_nbytes}, the header says data_nbytes {self._head.data_nbytes}")
        return Index(blobs, tensors, provenance)

    def _parse(self, raw: bytes) -> object:
        if layout.digest(raw) != self._head.index_digest:
            self._fail("2.11", "the index does not match its digest; the file is damaged. Fetch or convert it again")
        if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > layout.MAX_INDEX_MARKS:
            self._fail("3.2", f"the index has more than {layout.MAX_INDEX_MARKS} commas and opening brackets")
        if _depth(raw) > layout.MAX_INDEX_DEPTH:
            self._fail("3.2", f"the index is nested more than {layout.MAX_INDEX_DEPTH} deep")
        try:
            parsed = json.loads(raw.decode())
        except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            self._fail("3.1", f"the index is not JSON in UTF-8: {error}")
        try:
            canonical = layout.encode_index(parsed)
        except ValueError as error:
            self._fail("3.1", f"the index holds a lone surrogate or a number that is not finite: {error}")
        if canonical != raw:
            at = next((i for i, (a, b) in enumerate(zip(raw, canonical, strict=False)) if a != b), len(canonical))
            found, expected = _short(raw[at : at + 20]), _short(canonical[at : at + 20])
            self._fail("3.1", f"the index is not canonical from its byte {at} on: {found}, expected {expected}")
        if (place := _not_plain(parsed)) is not None:
            found = "null, a fraction, or an integer beyond 2^53 - 1"
            self._fail("3.1", f"the index holds {found} at {_short(place or '/')}")
        return parsed

    # What a JSON value has to be; `what` names it in the error.

    def _keys(self, value: object, keys: set[str], what: str, clause: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fail(clause, f"{what} is not an object")
        if value.keys() != keys:
            missing, unknown = sorted(keys - value.keys()), sorted(value.keys() - keys)
            listed = ", ".join(map(_short, unknown[:5])) or "none"
            self._fail(clause, f"{what}: unknown keys: {listed}; missing keys: {', '.join(missing) or 'none'}")
        return value

    def _array(self, value: object, at_most: int, what: str, clause: str) -> list[Any]:
        if not isinstance(value, list):
            self._fail(clause, f"{what} is not an array")
        if len(value) > at_most:
            self._fail(clause, f"{what} has {len(value)} entries, at most {at_most}")
        return value

    def _integer(self, value: object, at_most: int, what: str, clause: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= at_most:
            self._fail(clause, f"{what} is {_short(value)}, expected an integer from 0 to {at_most}")
        return value

    def _name(self, value: object, sound: Callable[[str], bool], rule: str, what: str, clause: str) -> str:
        if not isinstance(value, str) or not 0 < len(value.encode()) <= layout.MAX_NAME_NBYTES or not sound(value):
            self._fail(clause, f"{what} is {_short(value)}, expected 1 to {layout.MAX_NAME_NBYTES} bytes {rule}")
        return value

    def _place(self, kind: str, entry: Mapping[str, Any], nbytes: int, what: str) -> Part:
        """The part that `entry` places; it follows the part before it without a hole (4.2)."""
        offset = self._integer(entry["offset"], layout.MAX_INTEGER, f"{what}: offset", "4.2")
        expected = layout.round_up(self._end, layout.PART_ALIGNMENT)
        if offset != expected:
            self._fail("4.2", f"{what}: offset is {offset}, expected {expected}: no holes, no overlaps")
        if offset + nbytes > self._head.data_nbytes:
            self._fail("4.4", f"{what}: ends at {offset + nbytes}, beyond the {self._head.data_nbytes} bytes of data")
        part = Part(kind, self._head.data_offset + offset, nbytes, self._n_parts)
        self._end = offset + nbytes
        self._n_parts += 1
        return part

    # The three members of the index.

    def _blobs(self, value: object) -> dict[str, Part]:
        blobs: dict[str, Part] = {}
        total = 0
        for i, entry in enumerate(self._array(value, layout.MAX_BLOBS, "blobs", "3.4")):
            keys = self._keys(entry, {"name", "nbytes", "offset"}, f"blob {i}", "3.4")
            rule = "out of A-Z, a-z, 0-9, '.', '_' and '-', the first no '.'"
            name = self._name(keys["name"], _is_file_name, rule, f"the name of blob {i}", "3.4")
            if name in blobs:
                self._fail("3.4", f"two blobs are named {name!r}")
            nbytes = self._integer(keys["nbytes"], layout.MAX_BLOBS_NBYTES, f"blob {name!r}: nbytes", "3.4")
            total += nbytes
            if total > layout.MAX_BLOBS_NBYTES:
                self._fail("3.4", f"the blobs take more than {layout.MAX_BLOBS_NBYTES} bytes")
            blobs[name] = self._place("blob", keys, nbytes, f"blob {name!r}")
        return blobs

    def _provenance(self, value: object) -> dict[str, Any]:
        if not isinstance(value, dict) or not isinstance(value.get("tool"), str):
            self._fail("3.5", "the provenance is not an object with a string `tool`")
        source = self._keys(value.get("source"), {"files", "kind"}, "provenance.source", "3.5")
        if not isinstance(source["kind"], str):
            self._fail("3.5", "provenance.source.kind is not a string")
        files = self._array(source["files"], layout.MAX_SOURCES, "provenance.source.files", "3.5")
        for i, entry in enumerate(files):
            what = f"source file {i}"
            keys = self._keys(entry, {"name", "nbytes"}, what, "3.5")
            rule = "without '/' and control characters"
            self._name(keys["name"], lambda n: "/" not in n and _is_printable(n), rule, f"the name of {what}", "3.5")
            self._integer(keys["nbytes"], layout.MAX_INTEGER, f"{what}: nbytes", "3.5")
        if len(files) != self._head.n_sources:
            self._fail("3.5", f"the provenance lists {len(files)} files, the header says {self._head.n_sources}")
        return value

    def _tensors(self, value: object) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for i, entry in enumerate(self._array(value, layout.MAX_TENSORS, "tensors", "3.6")):
            if not isinstance(entry, dict):
                self._fail("3.6", f"tensor {i} is not an object")
            rule = "without control characters"
            name = self._name(entry.get("name"), _is_printable, rule, f"the name of tensor {i}", "3.6")
            if name in tensors:
                self._fail("3.6", f"two tensors are named {name!r}")
            tensors[name] = self._tensor(name, entry)
        return tensors

    def _tensor(self, name: str, entry: dict[str, Any]) -> TensorInfo:
        coding = self._scheme(name, entry)
        base = {"name", "parts", "shape", "source_dtype"}
        self._keys(entry, base | layout.scheme_keys(coding).keys(), name, "3.6")
        source_dtype = entry["source_dtype"]
        if not (isinstance(source_dtype, str) and source_dtype.isascii() and _is_dtype_word(source_dtype)):
            found = _short(source_dtype)
            self._fail("3.6", f"{name}: source_dtype is {found}, expected 1 to 32 of A-Z, a-z, 0-9 and '_'")
        shape = self._shape(name, entry["shape"])
        try:
            sizes = codes.part_sizes(coding, shape)
        except ValueError as error:
            self._fail("3.9", f"{name}: {error}")
        entries = self._array(entry["parts"], len(sizes), f"{name}: parts", "3.9")
        if len(entries) != len(sizes):
            self._fail("3.9", f"{name}: {len(entries)} parts, expected {len(sizes)}: {', '.join(sizes)}")
        parts = []
        for (kind, nbytes), part in zip(sizes.items(), entries, strict=True):
            what = f"{name}: {kind}"
            keys = self._keys(part, {"kind", "nbytes", "offset"}, what, "3.9")
            if keys["kind"] != kind:
                self._fail("3.9", f"{what}: kind is {_short(keys['kind'])}")
            if self._integer(keys["nbytes"], layout.MAX_INTEGER, f"{what}: nbytes", "3.9") != nbytes:
                self._fail("3.9", f"{what}: nbytes is {keys['nbytes']}, but {coding} of shape {shape} takes {nbytes}")
            parts.append(self._place(kind, keys, nbytes, what))
        return TensorInfo(name, shape, coding, source_dtype, tuple(parts))

    def _scheme(self, name: str, entry: Mapping[str, Any]) -> QuantScheme:
        kind = entry.get("scheme")
        if not isinstance(kind, str) or kind not in scheme.KINDS:
            self._fail("3.7", f"{name}: scheme is {_short(kind)}; known are {', '.join(scheme.KINDS)}")
        if scheme.KINDS[kind].is_float:
            return QuantScheme(kind)
        group_size, scale_dtype = entry.get("group_size"), entry.get("scale_dtype")
        if not isinstance(scale_dtype, str):
            known = ", ".join(scheme.SCALE_DTYPES)
            self._fail("3.7", f"{name}: scale_dtype is {_short(scale_dtype)}, expected one of {known}")
        if not isinstance(group_size, int) or isinstance(group_size, bool):
            self._fail("3.7", f"{name}: group_size is {_short(group_size)}, expected one of {scheme.GROUP_SIZES}")
        try:
            coding = QuantScheme(kind, group_size, scale_dtype)
        except UsageError as error:
            self._fail("3.7", f"{name}: {error}")
        if coding.minor > self._head.minor:
            self._fail(
                "3.7", f"{name}: {coding} is of version 1.{coding.minor}, but the file says 1.{self._head.minor}"
            )
        if kind in codes.CODEBOOKS and entry.get("codebook") != layout.codebook_words(coding):
            self._fail("3.7", f"{name}: the codebook is not that of {kind}")
        return coding

    def _shape(self, name: str, value: object) -> tuple[int, ...]:
        dims = self._array(value, layout.MAX_RANK, f"{name}: shape", "3.8")
        shape = tuple(
            self._integer(dim, layout.MAX_DIM, f"{name}: dimension {i} of its shape", "3.8")
            for i, dim in enumerate(dims)
        )
        if math.prod(max(dim, 1) for dim in shape) > layout.MAX_VALUES:
            self._fail("3.8", f"{name}: shape {shape} has more than {layout.MAX_VALUES} values")
        return shape


def _short(value: object) -> str:
    """A value of the index for an error, which holds no null: None stands for a key that there is not."""
    if value is None or isinstance(value, bool):
        return "missing" if value is None else json.dumps(value)
    text = repr(value) if not isinstance(value, (dict, list)) else f"of type {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "..."


def _is_printable(name: str) -> bool:
    return all(c >= " " and c != "\x7f" for c in name)


def _is_file_name(name: str) -> bool:
    """Safe to create in a directory: no separator, not hidden, plain ASCII."""
    return not name.startswith(".") and name.isascii() and all(c.isalnum() or c in "._-" for c in name)


def _is_dtype_word(word: str) -> bool:
    return 0 < len(word) <= 32 and all(c.isalnum() or c == "_" for c in word)


def _depth(raw: bytes) -> int:
    """How deep the brackets outside of strings are nested, counted as w4-container 3.2 says; `raw` may be anything."""
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # so that each quote left begins or ends a string
    depth = deepest = n_quotes = 0
    for start in range(0, len(bare), _BLOCK):  # so that little memory is taken
        block = np.frombuffer(bare, np.uint8, min(_BLOCK, len(bare) - start), start)
        quotes = np.cumsum(block == ord('"')) + n_quotes
        curly = block | 0x20  # [ and ] as { and }
        steps = (curly == ord("{")).astype(np.int8) - (curly == ord("}"))
        depths = depth + np.cumsum(np.where(quotes % 2 == 0, steps, 0))
        depth, deepest, n_quotes = int(depths[-1]), max(deepest, int(depths.max())), int(quotes[-1])
    return deepest


def _not_plain(value: object) -> str | None:
    """Where JSON holds something besides objects, arrays, strings, booleans and integers that a float64 can hold."""
    if isinstance(value, (dict, list)):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            if (place := _not_plain(member)) is not None:
                return f"/{key}{place}"
        return None
    return None if isinstance(value, str) or (isinstance(value, int) and abs(value) <= layout.MAX_INTEGER) else ""
