"""cat: one tensor of a container as a NumPy file."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.arguments import path_of
from w4conv.commands.options import refuse_idle
from w4conv.container import Container, TensorInfo, open_container, open_stream
from w4conv.errors import UsageError
from w4conv.files.overlap import refuse_origin, refuse_overlap
from w4conv.files.streams import is_stdin
from w4conv.files.target import open_target
from w4conv.scheme import TILE_ROWS

NPY: Final = b"\x93NUMPY"
BLOCK_NBYTES: Final = 1 << 25  # of values held at a time


@dataclass(frozen=True, slots=True)
class Extract:
    """A tensor written. dtype: of the values in the file; nbytes: of the file."""

    path: str
    tensor: str
    scheme: str
    shape: tuple[int, ...]
    dtype: str
    out: str
    nbytes: int


def cat(
    path: str | os.PathLike[str], tensor: str, out: str | os.PathLike[str] = "-", *, overwrite: bool = False
) -> Extract:
    """Write one tensor, dequantized to float32, as an .npy file; "-" is standard input or output.

    Its bytes are checked first, all of them. Raises UsageError when there is no tensor of that name, FormatError,
    OutputError.
    """
    out = path_of(out, "out")
    refuse_idle("cat", {"out": out, "overwrite": overwrite})
    refuse_overlap([out], container=path)
    with open_stream(sys.stdin.buffer) if is_stdin(path) else open_container(path) as container:
        if tensor not in container.tensors:
            some = ", ".join(list(container.tensors)[:3])
            raise UsageError(f"{path} has no tensor {tensor!r}. It has {len(container.tensors)}, such as {some}")
        refuse_origin(out, container.provenance, container.source_digests)
        container.check_tensor(tensor)
        info = container.tensors[tensor]
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": info.shape})
        nbytes = len(head.getvalue()) + 4 * info.n_values
        with open_target(out, nbytes, overwrite=overwrite, signature=NPY) as target:
            target.write(head.getvalue())
            for values in _blocks(container, info):
                target.write(np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8).data)
    return Extract(str(path), tensor, str(info.scheme), info.shape, "float32", str(out), nbytes)


def _blocks(container: Container, info: TensorInfo) -> Iterator[npt.NDArray[np.float32]]:
    """The values, a block of bounded size at a time as far as the first axis allows."""
    if not info.n_values:
        return
    if not info.shape:
        yield container.dequantize(info.name)
        return
    row_nbytes = 4 * info.n_values // info.shape[0]
    step = max(BLOCK_NBYTES // row_nbytes // TILE_ROWS * TILE_ROWS, TILE_ROWS if len(info.shape) == 2 else 1)
    for start in range(0, info.shape[0], step):
        yield container.dequantize(info.name, slice(start, start + step))
