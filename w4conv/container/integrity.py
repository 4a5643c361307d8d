"""Check the data section byte by byte: digests, padding, and what codes and scales may be (w4-container 7.2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from w4conv import codes
from w4conv.arrays import Bytes
from w4conv.container.layout import PART_ALIGNMENT, Part, TensorInfo, digest, round_up
from w4conv.errors import FormatError
from w4conv.progress import Progress, Silent
from w4conv.scheme import TILE_ROWS
from w4conv.workers import Workers


class Parts(Protocol):
    """What is checked of a container: its parts, their bytes, and the digests that the trailer has for them."""

    @property
    def path(self) -> Path: ...
    @property
    def part_digests(self) -> Sequence[bytes]: ...
    def bytes_of(self, part: Part, /) -> Bytes: ...
    def named_parts(self) -> list[tuple[str, Part, TensorInfo | None]]: ...


def check_data(container: Parts, progress: Progress | None = None) -> None:
    """Raise FormatError naming the first part in file order that is wrong. Parts are hashed by several threads."""
    progress = progress or Silent()
    parts = container.named_parts()
    progress.start(sum(part.nbytes for _, part, _ in parts))

    def check(entry: tuple[str, Part, TensorInfo | None]) -> None:
        _check(container, *entry)

    pool = Workers(len(os.sched_getaffinity(0)))
    try:
        for (what, part, _), _ in zip(parts, pool.map(check, parts), strict=True):
            progress.advance(part.nbytes, what)
    finally:
        pool.shutdown(cancel_futures=True)


def check_tensor(container: Parts, tensor: TensorInfo) -> None:
    """The same for the parts of one tensor."""
    for part in tensor.parts:
        _check(container, f"{tensor.name}: {part.kind}", part, tensor)


def _check(container: Parts, what: str, part: Part, tensor: TensorInfo | None) -> None:
    try:
        _check_part(container, part, tensor)
    except _WrongError as error:
        raise FormatError(f"{container.path}: {what}: {error}", clause=error.clause) from None


class _WrongError(Exception):
    def __init__(self, clause: str, message: str) -> None:
        super().__init__(message)
        self.clause = clause


def _check_part(container: Parts, part: Part, tensor: TensorInfo | None) -> None:
    raw = container.bytes_of(part)
    if digest(raw.data) != container.part_digests[part.index]:
        raise _WrongError("5.1", "its bytes do not match its digest; the file is damaged. Fetch or convert it again")
    if container.bytes_of(Part("gap", part.end, round_up(part.end, PART_ALIGNMENT) - part.end, 0)).any():
        raise _WrongError("4.3", "the bytes after it are not zero")
    if tensor is None or len(tensor.shape) < 2 or not raw.size:
        return
    if part.kind in ("codes", "values"):
        _check_code_padding(tensor, raw)
    else:
        _check_per_group(tensor, part.kind, raw)


def _check_code_padding(tensor: TensorInfo, raw: Bytes) -> None:
    n_matrices, n_rows, n_columns = codes.matrix_shape(tensor.shape)
    run = tensor.scheme.columns_per_run
    n_lines, n_last = tensor.scheme.n_lines(n_columns), tensor.scheme.n_lines(run)
    tiles = raw.view("<u4").reshape(n_matrices, codes.n_tiles(n_rows), n_lines, TILE_ROWS)
    beyond_rows = codes.unpack(tensor.scheme, tiles[:, -1:], TILE_ROWS, n_lines // n_last * run)
    beyond_columns = codes.unpack(tensor.scheme, tiles[:, :, -n_last:], tiles.shape[1] * TILE_ROWS, run)
    first_row, first_column = (n_rows - 1) % TILE_ROWS + 1, (n_columns - 1) % run + 1
    for padding in (beyond_rows[:, first_row:], beyond_columns[..., first_column:]):
        bits = padding.view(f"u{padding.itemsize}")  # so that -0.0 is not 0
        if (bits != codes.pad_code(tensor.scheme)).any():
            raise _WrongError("4.5", "padding rows or columns do not hold the padding code")


def _check_per_group(tensor: TensorInfo, kind: str, raw: Bytes) -> None:
    n_matrices, n_rows, n_columns = codes.matrix_shape(tensor.shape)
    part = codes.row_parts(tensor.scheme)[kind]
    groups = raw.view(part.dtype).reshape(n_matrices, codes.n_tiles(n_rows), part.n_runs(n_columns), TILE_ROWS)
    if kind == "zero_points" and groups.max() > codes.MAX_ZERO_POINT:
        raise _WrongError("4.6", f"a zero point is {groups.max()}, at most {codes.MAX_ZERO_POINT}")
    if not np.isfinite(groups).all():
        raise _WrongError("4.6", f"one of the {kind} is NaN or infinite")
    padding = groups[:, -1, :, (n_rows - 1) % TILE_ROWS + 1 :]
    if padding.view(f"u{padding.itemsize}").any():
        raise _WrongError("4.5", f"{kind} of padding rows are not zero")
