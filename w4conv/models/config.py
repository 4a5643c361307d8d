"""config.json, read with suspicion: every value is checked for its type and range, every error names its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from w4conv.errors import InputError

MAX_WIDTH: Final = 1 << 20  # hidden and feed-forward sizes
MAX_VOCABULARY: Final = 1 << 24
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1024
MAX_HEAD_DIM: Final = 1024
MAX_POSITIONS: Final = 1 << 26
MAX_EXPERTS: Final = 1024
MAX_EXPERTS_OF_ALL: Final = 1 << 16  # in all layers together


class Config:
    """Typed look-ups in one JSON object. A key that is absent, or null, has its default; without one it is required."""

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def error(self, key: str, fault: str) -> InputError:
        return InputError(f"{self._where}: {key}: {fault}")

    def get(self, key: str) -> object:
        return self._values.get(key)

    def is_null(self, key: str) -> bool:
        """Whether the key is there with the value null, which is not the same as absent for a few keys."""
        return key in self._values and self._values[key] is None

    def integer(self, key: str, default: int | None = None, *, high: int, low: int = 1) -> int:
        value = self._default(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"expected an integer from {low} to {high}, got {_short(value)}")
        return value

    def whole(self, key: str, default: int | None = None, *, high: int) -> int:
        """An integer, or a whole number in the form of a fraction: where transformers checks neither, but computes."""
        value = self._values.get(key)
        if isinstance(value, float) and value.is_integer():
            return self.replaced(key, int(value)).integer(key, high=high)
        return self.integer(key, default, high=high)

    def number(self, key: str, default: float | None = None, *, low: float = 0.0) -> float:
        """A finite number above `low`."""
        value = self._default(key, default)
        if type(value) is int and abs(value) < 2**63:
            value = float(value)
        if type(value) is not float or not math.isfinite(value) or value <= low:
            raise self.error(key, f"expected a number above {low:g}, got {_short(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._default(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, got {_short(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._default(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"expected a string, got {_short(value)}")
        return value

    def numbers(self, key: str, *, high: int) -> tuple[float, ...]:
        """Up to `high` positive finite numbers."""
        value = self._default(key, None)
        if not isinstance(value, list) or len(value) > high:
            raise self.error(key, f"expected a list of at most {high} numbers, got {_short(value)}")
        return tuple(Config({key: item}, self._where).number(key) for item in value)

    def with_defaults(self, defaults: Mapping[str, object]) -> Config:
        """This one, with values for keys that are absent; a key with the value null stays so."""
        return Config({**defaults, **self._values}, self._where)

    def replaced(self, key: str, value: object) -> Config:
        """This one with another value for a key; null takes it away."""
        return Config({**self._values, key: value}, self._where)

    def section(self, key: str) -> Config:
        """The object under `key`; empty when absent or null."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, f"expected an object, got {_short(value)}")
        return Config(value, f"{self._where}: {key}")

    def empty(self) -> bool:
        return not self._values

    def has_objects(self) -> bool:
        return any(isinstance(value, dict) for value in self._values.values())

    def _default(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge integer"
    return text if len(text) <= 40 else text[:37] + "..."
