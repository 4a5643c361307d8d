"""Files of a checkpoint: values, small sidecars, strict JSON. Everything here may be hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv.errors import InputError
from w4conv.mapped_file import MappedFile

MAX_JSON_BYTES: Final = 32 << 20
MAX_TOKENIZER_BYTES: Final = 256 << 20
# Parsed JSON takes up to 30 times its text; brackets and commas are what makes it grow. Strings may hold them freely,
# so this is far above any real header, and still keeps a crafted one under a few hundred MB.
MAX_JSON_NODES: Final = 8_000_000

VALUE_DTYPES: Final[dict[str, np.dtype[np.generic]]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
}


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


def parse_json_object(text: bytes, where: str, *, allow_nan: bool = False) -> dict[str, object]:
    """A JSON object; `where` starts every error. Raises InputError for anything else, and for a repeated key.

    allow_nan: accept the words NaN and Infinity, which Python's writers put into config files though JSON has neither.
    """
    if sum(text.count(mark) for mark in (b"[", b"{", b",")) > MAX_JSON_NODES:
        raise InputError(f"{where}: more than {MAX_JSON_NODES} JSON values")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # set.add as a step
            raise InputError(f"{where}: the key {again!r} stands twice")
        return out

    def refuse(word: str) -> object:
        raise InputError(f"{where}: {word} is not a JSON value")

    try:
        out = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=None if allow_nan else refuse)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise InputError(f"{where}: JSON is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(out, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(out).__name__}")
    return out
