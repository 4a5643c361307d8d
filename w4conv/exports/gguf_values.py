"""Typed values of GGUF keys, as bytes: u32 type, value; an array: u32 9, u32 element type, u64 count, elements."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Value:
    """A value with its type, encoded."""

    data: bytes


def u32(value: int) -> Value:
    return Value(struct.pack("<II", 4, value))


def f32(value: float) -> Value:
    return Value(struct.pack("<If", 6, value))


def boolean(value: bool) -> Value:
    return Value(struct.pack("<I?", 7, value))


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def text(value: str) -> Value:
    return Value(struct.pack("<I", 8) + string(value))


def texts(values: Sequence[str]) -> Value:
    return Value(struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(string, values)))


def f32s(values: Sequence[float]) -> Value:
    return Value(struct.pack(f"<IIQ{len(values)}f", 9, 6, len(values), *values))


def i32s(values: Sequence[int]) -> Value:
    return Value(struct.pack(f"<IIQ{len(values)}i", 9, 5, len(values), *values))
