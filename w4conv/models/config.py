"""config.json, read with suspicion: every value is checked for its type and range, every error names its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from w4conv.errors import InputError
from w4conv.models.spec import ModelSpec, RopeSpec

MAX_WIDTH: Final = 1 << 20  # hidden and feed-forward sizes
MAX_VOCABULARY: Final = 1 << 24
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1024
MAX_HEAD_DIM: Final = 1024
MAX_POSITIONS: Final = 1 << 26

ROPE_SCALINGS: Final = ("default", "linear", "llama3")


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


def decoder(
    config: Config,
    *,
    family: str,
    architecture: str,
    default_kv_heads: int | None,
    default_max_positions: int,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
) -> ModelSpec:
    """The part of a ModelSpec that all families of the Llama shape read alike; without sliding windows."""
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of the same function
        raise config.error("hidden_act", f"{activation!r} is not supported; only silu is")
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    if default_kv_heads is None or config.is_null("num_key_value_heads"):
        default_kv_heads = heads
    kv_heads = config.integer("num_key_value_heads", default_kv_heads, high=MAX_HEADS)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide the {heads} attention heads")
    if "head_dim" not in config and hidden % heads:
        raise config.error(
            "num_attention_heads", f"{heads} does not divide hidden_size {hidden}, and there is no head_dim"
        )
    head_dim = config.integer("head_dim", max(1, hidden // heads), high=MAX_HEAD_DIM)
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd; rotary embeddings need pairs")
    max_positions = config.integer("max_position_embeddings", default_max_positions, high=MAX_POSITIONS)
    return ModelSpec(
        family=family,
        architecture=architecture,
        vocab_size=config.integer("vocab_size", high=MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        n_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope(config, max_positions),
        max_positions=max_positions,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        tied_head=config.flag("tie_word_embeddings"),
    )


def rope(config: Config, max_positions: int) -> RopeSpec:
    """Rotary settings, in the older form (`rope_theta` and `rope_scaling`) or the newer one (`rope_parameters`).

    `rope_scaling` wins where both are given, and a theta inside the object wins over the one beside it, as in
    transformers.
    """
    key = "rope_parameters" if config.section("rope_scaling").empty() else "rope_scaling"
    settings = config.section(key)
    if settings.has_objects():
        raise config.error(key, "settings that differ between kinds of layers are not supported")
    theta = settings.number("rope_theta", config.number("rope_theta", 10000.0))
    for place in (settings, config):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.error("partial_rotary_factor", "rotating a part of each head is not supported")
    scaling = settings.text("rope_type", settings.text("type", "default"))
    if scaling not in ROPE_SCALINGS:
        raise settings.error("rope_type", f"{scaling!r} is not supported; known are {', '.join(ROPE_SCALINGS)}")
    if scaling == "default":
        return RopeSpec(theta)
    factor = settings.number("factor")
    if scaling == "linear":
        return RopeSpec(theta, scaling, factor)
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if low >= high:
        raise settings.error("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
    original = settings.integer("original_max_position_embeddings", max_positions, high=MAX_POSITIONS)
    original = config.integer("original_max_position_embeddings", original, high=MAX_POSITIONS)
    return RopeSpec(theta, scaling, factor, low, high, original)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge integer"
    return text if len(text) <= 40 else text[:37] + "..."
