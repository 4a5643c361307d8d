"""Counts, numbers and token ids that a caller gives, checked in one way by everything public.

Nothing is rounded or taken for something else: True is no count, 2.0 is none either, and 0 is not "the default".
Integers of numpy count as integers. Every refusal is a UsageError that names the argument.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, SupportsFloat, SupportsIndex

import numpy as np
import numpy.typing as npt

from w4conv.errors import UsageError

MAX_THREADS: Final = 1024
MAX_COUNT: Final = 2**63 - 1


def count(value: SupportsIndex, name: str, *, low: int = 0, high: int = MAX_COUNT, what: str = "") -> int:
    """An integer from `low` to `high`. what: what the limit is, for the message."""
    number = _integer(value)
    if number is None or not low <= number <= high:
        open_ended = high == MAX_COUNT and (number is None or number < low)
        bounds = f"of {low} or more" if open_ended else f"from {low} to {high}"
        raise UsageError(f"{name} is {shown(value)}; it must be an integer {bounds}{what and ', '}{what}")
    return number


def optional_count(value: SupportsIndex | None, name: str, *, low: int = 0) -> int | None:
    """The same, or None where nothing was given."""
    return None if value is None else count(value, name, low=low)


def real(value: SupportsFloat, name: str, expected: str = "a finite number") -> float:
    """A finite number. expected: what the message asks for."""
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise UsageError(f"{name} is {shown(value)}; it must be {expected}")


def path_of(value: object, name: str) -> Path:
    """A path that could name something. An empty one is none: Path("") would be the current directory."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"{name} is {shown(value)}; it must be the path of a file or directory")
    return Path(text)


def flag(value: object, name: str) -> bool:
    """True or False, and no word that only looks like one: "no" is true to Python."""
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def token_ids(values: Iterable[SupportsIndex] | npt.NDArray[np.integer], vocab_size: int) -> npt.NDArray[np.int32]:
    """(n,) int32: a sequence or array of one dimension of integers below vocab_size."""
    if hasattr(values, "__array__"):
        ids = np.asarray(values)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UsageError(f"token ids are an array {ids.shape} of {ids.dtype}; expected integers in one dimension")
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        first = bad[0] if bad.size else None
    else:
        if isinstance(values, str | bytes | bytearray | dict | set | frozenset) or not isinstance(values, Iterable):
            raise UsageError(f"token ids are {shown(values)}; expected a sequence of integers")
        integers = []
        for value in values:
            if (number := _integer(value)) is None:
                raise UsageError(f"token ids hold {shown(value)}; expected integers")
            integers.append(number)
        first = next((number for number in integers if not 0 <= number < vocab_size), None)
        ids = np.array(integers if first is None else [], np.int64)
    if first is not None:
        raise UsageError(f"token id {shown(first)} is outside the vocabulary of {vocab_size}")
    return np.ascontiguousarray(ids, np.int32)


def shown(value: object) -> str:
    """A value for a message, in short."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a huge integer"
    text = str(value) if isinstance(value, int | float | np.number) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _integer(value: object) -> int | None:
    """As an int, or None for what is no integer; a bool is none."""
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
