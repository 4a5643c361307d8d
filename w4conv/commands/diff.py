"""diff: in what do two models differ, each a container or a checkpoint, and which is closer to a source?"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from w4conv import codes
from w4conv.arrays import Bytes, F32Array
from w4conv.container import Container, TensorInfo, is_container, open_container, open_stream
from w4conv.errors import InputError
from w4conv.files.streams import is_stdin
from w4conv.measure.distortion import Distortion, DistortionMeter
from w4conv.progress import Progress, Silent
from w4conv.quantization.folding import folded_as_recorded
from w4conv.sources import open_source
from w4conv.sources.base import Source

_BLOCK_VALUES: Final = 1 << 20  # of each model, compared at a time
_BLOCK_NBYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that both have. a, b: how it is coded; same: coded alike, with the same bytes.

    equal: the values are the same, in whatever coding. codes_differing: share of codes, where both have codes of one
    kind, else None. b_from_a: distortion of b's values as if a's were the source; from_source: of each against the
    source, None without one or where it lacks the tensor. Where shapes differ all of these say nothing.
    """

    name: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    a: str
    b: str
    same: bool
    equal: bool
    codes_differing: float | None
    b_from_a: Distortion | None
    a_from_source: Distortion | None
    b_from_source: Distortion | None


@dataclass(frozen=True, slots=True)
class MetadataDifference:
    """what: a file inside, or a key of the record of the conversion. a, b: what stands there, None where nothing."""

    what: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """same: nothing differs. only_in_a, only_in_b: names of tensors. b_from_a, a_from_source and b_from_source: all
    tensors pooled that have the same shape in both. closer: "a", "b" or "neither", to the source; None without one."""

    a: str
    b: str
    source: str | None
    same: bool
    n_same: int
    n_equal: int
    n_different: int
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    metadata: tuple[MetadataDifference, ...]
    b_from_a: Distortion
    a_from_source: Distortion | None
    b_from_source: Distortion | None
    closer: str | None
    tensors: tuple[TensorDifference, ...]


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare two models tensor by tensor: containers (`-`: standard input) or checkpoints, a block of rows at a time.

    source: a third one, from which the distance of both is measured. Raises InputError.
    """
    if is_stdin(a) and is_stdin(b):
        raise InputError("standard input can be read once only; name one of the two")
    progress = progress or Silent()
    with ExitStack() as stack:
        left, right = _open(a, stack), _open(b, stack)
        left, right = left.as_read_for(right), right.as_read_for(left)
        origin = None if source is None else _open(source, stack)
        names = [name for name in left.shapes if name in right.shapes]
        progress.start(sum(left.n_values(name) * 4 for name in names))
        pooled, from_a, from_b = DistortionMeter(), DistortionMeter(), DistortionMeter()
        tensors = []
        for name in names:
            found = _Comparison(name, left, right, origin)
            found.run()
            pooled.merge(found.b_from_a)
            from_a.merge(found.a_from_source)
            from_b.merge(found.b_from_source)
            tensors.append(found.result())
            progress.advance(left.n_values(name) * 4, name)
        only = tuple(tuple(n for n in x.shapes if n not in y.shapes) for x, y in ((left, right), (right, left)))
        metadata = tuple(_metadata(left, right))
        to_a, to_b = (None if origin is None else meter.result() for meter in (from_a, from_b))
        n_same, n_equal = sum(t.same for t in tensors), sum(t.equal for t in tensors)
        return DiffReport(
            a=str(a),
            b=str(b),
            source=None if source is None else str(source),
            same=n_same == len(tensors) and not (metadata or only[0] or only[1]),
            n_same=n_same,
            n_equal=n_equal,
            n_different=len(tensors) - n_equal,
            only_in_a=only[0],
            only_in_b=only[1],
            metadata=metadata,
            b_from_a=pooled.result(),
            a_from_source=to_a,
            b_from_source=to_b,
            closer=None if to_a is None or to_b is None else _closer(to_a, to_b),
            tensors=tuple(tensors),
        )


class _Side(ABC):
    """A container or a checkpoint. shapes, codings: of its tensors by name."""

    shapes: dict[str, tuple[int, ...]]
    codings: dict[str, str]
    blobs: Mapping[str, bytes]
    record: Mapping[str, Any] | None = None

    def n_values(self, name: str) -> int:
        return int(np.prod(self.shapes[name], dtype=np.int64))

    def as_read_for(self, _other: _Side) -> _Side:
        """A checkpoint with its channels scaled as a container made of it says."""
        return self

    @abstractmethod
    def values(self, name: str, rows: slice | None) -> F32Array:
        """Of a slice of the first axis; all of a scalar."""


class _ContainerSide(_Side):
    def __init__(self, container: Container) -> None:
        self.container = container
        self.shapes = {name: info.shape for name, info in container.tensors.items()}
        self.codings = {name: str(info.scheme) for name, info in container.tensors.items()}
        self.blobs, self.record = container.blobs, container.provenance

    def values(self, name: str, rows: slice | None) -> F32Array:
        return self.container.dequantize(name, rows)


class _SourceSide(_Side):
    def __init__(self, source: Source) -> None:
        self._source = source
        self.shapes = {name: t.shape for name, t in source.tensors.items()}
        self.codings = {name: t.stored_as for name, t in source.tensors.items()}
        self.blobs = source.blobs

    def as_read_for(self, _other: _Side) -> _Side:
        if _other.record is None:
            return self
        return _SourceSide(folded_as_recorded(self._source, _other.record, _other.blobs, "the container"))

    def values(self, name: str, rows: slice | None) -> F32Array:
        return codes.as_f32(self._source.read(name, rows), self._source.tensors[name].dtype)


def _open(path: str | os.PathLike[str], stack: ExitStack) -> _Side:
    path = Path(path)
    if is_stdin(path):
        return _ContainerSide(stack.enter_context(open_stream(sys.stdin.buffer)))
    if is_container(path):
        return _ContainerSide(stack.enter_context(open_container(path)))
    return _SourceSide(stack.enter_context(open_source(path)))


class _Comparison:
    """One tensor under comparison."""

    def __init__(self, name: str, a: _Side, b: _Side, source: _Side | None) -> None:
        self._name, self._a, self._b = name, a, b
        fits = source is not None and source.shapes.get(name) == a.shapes[name]
        self._sources = (source.as_read_for(a), source.as_read_for(b)) if source is not None and fits else None
        self._comparable = a.shapes[name] == b.shapes[name]
        self._equal = self._comparable
        self.b_from_a, self.a_from_source, self.b_from_source = DistortionMeter(), DistortionMeter(), DistortionMeter()

    def run(self) -> None:
        if not self._comparable:
            return
        for rows in _row_blocks(self._a.shapes[self._name]):
            x, y = (_as_rows(side.values(self._name, rows)) for side in (self._a, self._b))
            self._equal = self._equal and np.array_equal(x.view(np.uint32), y.view(np.uint32))
            self.b_from_a.add(x, y)
            if self._sources is not None:
                of_a, of_b = (_as_rows(source.values(self._name, rows)) for source in self._sources)
                self.a_from_source.add(of_a, x)
                self.b_from_source.add(of_b, y)

    def result(self) -> TensorDifference:
        name, codings = self._name, (self._a.codings[self._name], self._b.codings[self._name])
        same, share = self._equal and codings[0].lower() == codings[1].lower(), None  # a checkpoint says F16 for f16
        if isinstance(self._a, _ContainerSide) and isinstance(self._b, _ContainerSide) and self._comparable:
            infos = self._a.container.tensors[name], self._b.container.tensors[name]
            same = infos[0].scheme == infos[1].scheme and _same_bytes(self._a.container, self._b.container, *infos)
            if infos[0].scheme.kind == infos[1].scheme.kind and not infos[0].scheme.is_float:
                pair = self._a.container.part(name, "codes"), self._b.container.part(name, "codes")
                share = _n_differing(*pair, bits=infos[0].scheme.bits) / max(self._a.n_values(name), 1)
        with_source = self._sources is not None and self._comparable
        return TensorDifference(
            name=name,
            shape_a=self._a.shapes[name],
            shape_b=self._b.shapes[name],
            a=codings[0],
            b=codings[1],
            same=same,
            equal=self._equal,
            codes_differing=share,
            b_from_a=self.b_from_a.result() if self._comparable else None,
            a_from_source=self.a_from_source.result() if with_source else None,
            b_from_source=self.b_from_source.result() if with_source else None,
        )


def _row_blocks(shape: tuple[int, ...]) -> Iterator[slice | None]:
    if not shape:
        yield None
        return
    step = max(_BLOCK_VALUES // max(int(np.prod(shape[1:], dtype=np.int64)), 1), 1)
    yield from (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _as_rows(values: F32Array) -> F32Array:
    return np.ascontiguousarray(values).reshape(-1, values.shape[-1] if values.ndim >= 2 else max(values.size, 1))


def _same_bytes(a: Container, b: Container, x: TensorInfo, y: TensorInfo) -> bool:
    return all(
        np.array_equal(left, right)
        for p, q in zip(x.parts, y.parts, strict=True)
        for left, right in _pieces(a.bytes_of(p), b.bytes_of(q))
    )


def _n_differing(a: Bytes, b: Bytes, *, bits: int) -> int:
    """Codes that differ between two parts of one shape; padding is the same in both."""
    total = 0
    for left, right in _pieces(a, b):
        bits_differing = left ^ right
        if bits == 4:
            total += int(np.count_nonzero(bits_differing & 0x0F) + np.count_nonzero(bits_differing & 0xF0))
        else:
            total += int(np.count_nonzero(bits_differing))
    return total


def _pieces(a: Bytes, b: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    for start in range(0, a.size, _BLOCK_NBYTES):
        yield a[start : start + _BLOCK_NBYTES], b[start : start + _BLOCK_NBYTES]


def _metadata(a: _Side, b: _Side) -> Iterator[MetadataDifference]:
    for name in dict.fromkeys((*a.blobs, *b.blobs)):
        x, y = a.blobs.get(name), b.blobs.get(name)
        if x != y:
            yield MetadataDifference(name, *(None if blob is None else f"{len(blob):,} bytes" for blob in (x, y)))
    if a.record is not None and b.record is not None:
        for key in dict.fromkeys((*a.record, *b.record)):
            x, y = a.record.get(key), b.record.get(key)
            if x != y:
                words = (None if value is None else json.dumps(value, ensure_ascii=False) for value in (x, y))
                yield MetadataDifference(key, *words)


def _closer(a: Distortion, b: Distortion) -> str:
    return "neither" if a.rmse == b.rmse else "a" if a.rmse < b.rmse else "b"
