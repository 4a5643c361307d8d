"""Typed, checked access to a config.json, and the parts that families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from w4conv.errors import InputError
from w4conv.models.spec import RopeSpec

MAX_SIZE: Final = 1 << 24  # of any one dimension
MAX_LAYERS: Final = 1024
MAX_POSITIONS: Final = 1 << 26
DEFAULT_ROPE_THETA: Final = 10000.0


class Config:
    """The values of a config.json. Each accessor raises InputError naming the key when a value is missing or wrong.

    A key that is absent and one that is null are the same, as in transformers.
    """

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self._values, self._where = values, where

    def _wrong(self, key: str, expected: str) -> InputError:
        return InputError(f"{self._where}: {key} is {self._values.get(key)!r}, expected {expected}")

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def integer(self, key: str, *, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not (0 < value < math.inf):
            raise self._wrong(key, "a finite number above zero")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def string(self, key: str, *, default: str) -> str:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._values.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._wrong(key, "a list of strings")
        return value

    def section(self, key: str) -> Config | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Config(value, f"{self._where}: {key}")

    def require(self, key: str, expected: str, *, default: str) -> None:
        """Refuse a model that needs another `key` than the engine has."""
        if self.string(key, default=default) != expected:
            raise self._wrong(key, f"{expected!r}, the only one supported")

    def sizes(self) -> dict[str, Any]:
        """The fields of ModelSpec that every family spells the same."""
        hidden = self.integer("hidden_size")
        n_heads = self.integer("num_attention_heads")
        n_kv_heads = self.integer("num_key_value_heads", default=n_heads)
        if n_heads % n_kv_heads:
            raise self._wrong("num_key_value_heads", f"a divisor of num_attention_heads = {n_heads}")
        if "head_dim" not in self and hidden % n_heads:
            raise self._wrong("hidden_size", f"a multiple of num_attention_heads = {n_heads}, as head_dim is absent")
        head_dim = self.integer("head_dim", default=hidden // n_heads, low=1)
        if head_dim % 2:
            raise InputError(f"{self._where}: head_dim is {head_dim}; rotary pairs need an even one")
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "n_layers": self.integer("num_hidden_layers", high=MAX_LAYERS),
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "norm_eps": self.number("rms_norm_eps", default=1e-6),
            "max_positions": self.integer("max_position_embeddings", default=2048, high=MAX_POSITIONS),
            "rope": self.rope(),
        }

    def rope(self) -> RopeSpec:
        """Rotary embedding from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
        if (partial := self._values.get("partial_rotary_factor")) not in (None, 1, 1.0):
            raise InputError(f"{self._where}: partial_rotary_factor {partial!r} is not supported")
        key = "rope_parameters" if "rope_parameters" in self else "rope_scaling"
        section = self.section(key)
        outer_theta = self.number("rope_theta", default=DEFAULT_ROPE_THETA)
        if section is None:
            return RopeSpec(outer_theta)
        theta = section.number("rope_theta", default=outer_theta)
        kind = section.string("rope_type", default=section.string("type", default="default"))
        match kind:
            case "default":
                return RopeSpec(theta)
            case "linear":
                return RopeSpec(theta, "linear", section.number("factor"))
            case "llama3":
                original = section.integer("original_max_position_embeddings", high=MAX_POSITIONS)
                low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
                if low >= high:
                    raise section._wrong("low_freq_factor", f"less than high_freq_factor = {high}")
                return RopeSpec(theta, "llama3", section.number("factor"), low, high, original)
        raise InputError(
            f"{self._where}: {key}: rope type {kind!r} is not supported; supported: default, linear, llama3"
        )
