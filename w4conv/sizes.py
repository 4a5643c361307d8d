"""Sizes as people write them."""

from __future__ import annotations

from typing import Final

from w4conv.errors import UsageError

_DECIMAL: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_BINARY: Final = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "K": 2**10, "M": 2**20, "G": 2**30}
_UNITS: Final = _DECIMAL | _BINARY


def nbytes_of(words: str | int, option: str) -> int:
    """Bytes that "5GB" (decimal), "512M" or "512MiB" (binary) or a number stand for.

    Raises UsageError naming the option.
    """
    text = str(words).strip().upper()
    unit = next((u for u in _UNITS if text.endswith(u)), "")
    number = text.removesuffix(unit).strip()
    if not (number.isascii() and number.isdigit()) or len(number) > 15 or int(number) < 1:
        raise UsageError(f'{option} is {words!r}, expected a size such as "5GB", "512M" or a number of bytes')
    return int(number) * _UNITS.get(unit, 1)
