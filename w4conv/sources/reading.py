"""Files of a checkpoint: values, small sidecars. Everything here may be hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.arrays import VALUE_DTYPES
from w4conv.errors import InputError
from w4conv.files.mapped import MappedFile

MAX_JSON_BYTES: Final = 32 << 20
MAX_TOKENIZER_BYTES: Final = 256 << 20


def values(raw: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    """Little-endian bytes as an array of `dtype` ("F16", "BF16" as uint16, "F32"): a view; a copy where unaligned."""
    word = VALUE_DTYPES[dtype]
    if raw.ctypes.data % word.itemsize:
        raw = raw.copy()
    return raw.view(word).reshape(shape)


def row_range(rows: slice | None, shape: tuple[int, ...]) -> tuple[int, int]:
    """First and last + 1 row that `rows` takes of the first axis."""
    if rows is None or not shape:
        if rows is not None:
            raise ValueError("a tensor of rank 0 has no rows")
        return 0, 1 if not shape else shape[0]
    start, stop, step = rows.indices(shape[0])
    if step != 1:
        raise ValueError(f"rows {rows} has a step")
    return start, max(start, stop)


def read_small(path: Path, *, cap: int = MAX_JSON_BYTES) -> bytes:
    """Whole content of a sidecar file of at most `cap` bytes."""
    file = MappedFile(path)
    if file.nbytes > cap:
        raise InputError(f"{path}: {file.nbytes} bytes; at most {cap} are expected of such a file")
    return file.view(0, file.nbytes).tobytes()
