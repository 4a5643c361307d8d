"""Plan a whole `.w4` file before its first byte: sizes follow from shapes, schemes and blobs alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from w4conv import codes
from w4conv.container import validate
from w4conv.container.layout import (
    DATA_ALIGNMENT,
    DIGEST_NBYTES,
    HEADER_NBYTES,
    PART_ALIGNMENT,
    Header,
    Part,
    TensorInfo,
    TensorPlan,
    digest,
    encode_index,
    round_up,
    scheme_keys,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A planned file: header and index as bytes, and the offset of every part."""

    header: Header
    index: bytes
    blobs: tuple[tuple[Part, bytes], ...]
    tensors: Mapping[str, TensorInfo]

    @property
    def file_nbytes(self) -> int:
        return self.header.file_nbytes

    def parts(self) -> Iterator[tuple[str, Part]]:
        """(tensor name, part) in file order, without the blobs."""
        return ((tensor.name, part) for tensor in self.tensors.values() for part in tensor.parts)


class _Allocator:
    """Hands out ranges of the data section in order (w4-container 4.2)."""

    def __init__(self) -> None:
        self.n_parts = 0
        self.end = 0  # from the start of the data section

    def take(self, kind: str, nbytes: int) -> Part:
        part = Part(kind, round_up(self.end, PART_ALIGNMENT), nbytes, self.n_parts)
        self.end = part.end
        self.n_parts += 1
        return part


def plan(tensors: Sequence[TensorPlan], blobs: Mapping[str, bytes], provenance: Mapping[str, Any]) -> Layout:
    """Plan a file of these tensors and blobs, in the order given.

    provenance: JSON without floats; `provenance["source"]["files"]` lists the source files whose digests end the
    trailer. Raises ValueError for a quantized scheme of a tensor without rows and columns, and FormatError for whatever
    a reader would refuse: the plan is checked by the very rules of the reader.
    """
    allocator = _Allocator()
    blob_parts = [allocator.take("blob", len(data)) for data in blobs.values()]
    tensor_parts = [
        [allocator.take(kind, nbytes) for kind, nbytes in codes.part_sizes(t.scheme, t.shape).items()] for t in tensors
    ]
    index = encode_index(
        {
            "blobs": [
                {"name": name, "nbytes": part.nbytes, "offset": part.offset}
                for name, part in zip(blobs, blob_parts, strict=True)
            ],
            "provenance": provenance,
            "tensors": [
                {
                    "name": t.name,
                    "parts": [{"kind": p.kind, "nbytes": p.nbytes, "offset": p.offset} for p in parts],
                    "shape": list(t.shape),
                    "source_dtype": t.source_dtype,
                    **scheme_keys(t.scheme),
                }
                for t, parts in zip(tensors, tensor_parts, strict=True)
            ],
        }
    )
    data_offset = round_up(HEADER_NBYTES + len(index), DATA_ALIGNMENT)
    data_nbytes = round_up(allocator.end, PART_ALIGNMENT)
    n_sources = len(provenance["source"]["files"])
    trailer_nbytes = DIGEST_NBYTES * (allocator.n_parts + n_sources + 1)

    def absolute(part: Part) -> Part:
        return Part(part.kind, data_offset + part.offset, part.nbytes, part.index)

    layout = Layout(
        header=Header(
            file_nbytes=data_offset + data_nbytes + trailer_nbytes,
            index_nbytes=len(index),
            data_offset=data_offset,
            data_nbytes=data_nbytes,
            n_parts=allocator.n_parts,
            n_sources=n_sources,
            index_digest=digest(index),
            minor=max((t.scheme.minor for t in tensors), default=0),
        ),
        index=index,
        blobs=tuple((absolute(part), data) for part, data in zip(blob_parts, blobs.values(), strict=True)),
        tensors={
            t.name: TensorInfo(t.name, t.shape, t.scheme, t.source_dtype, tuple(map(absolute, parts)))
            for t, parts in zip(tensors, tensor_parts, strict=True)
        },
    )
    validate.index(layout.index, validate.header(layout.header.pack(), where="plan"), where="plan")
    return layout
