"""Model families: config.json -> ModelSpec. One declarative file a family; no arithmetic on weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from w4conv.errors import InputError
from w4conv.models import llama, mistral, qwen2
from w4conv.models.config import Config
from w4conv.models.spec import ModelSpec, RopeSpec, TensorSpec

__all__ = ["ModelSpec", "RopeSpec", "TensorSpec", "parse_config"]


class Family(Protocol):
    """What a module of this package offers."""

    ARCHITECTURE: str
    MODEL_TYPE: str

    def parse(self, config: Config) -> ModelSpec: ...


FAMILIES: Final[tuple[Family, ...]] = (llama, mistral, qwen2)


def parse_config(config: Mapping[str, object]) -> ModelSpec:
    """The model that a config.json describes.

    Raises InputError for an unsupported architecture, and for a missing or nonsensical value, naming the key.
    """
    values = Config(config)
    architectures = values.strings("architectures")
    model_type = values.string("model_type", default="")
    for family in FAMILIES:
        if family.ARCHITECTURE in architectures or (not architectures and model_type == family.MODEL_TYPE):
            return family.parse(values)
    known = ", ".join(family.ARCHITECTURE for family in FAMILIES)
    found = ", ".join(architectures) or model_type or "(none named)"
    raise InputError(f"config.json: architecture {found} is not supported; supported are {known}")
