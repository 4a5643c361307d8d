"""Model families: config.json -> ModelSpec. One file a family; a new family is a file and a line in FAMILIES."""

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
    """What the engine must know of the model that a config.json describes.

    Raises InputError naming the key: an unsupported architecture or feature, a missing or nonsensical value.
    """
    settings = Config(config)
    return _family(settings).parse(settings)


def _family(config: Config) -> Family:
    """The family by `architectures`, or by `model_type` where that is absent."""
    known = ", ".join(family.ARCHITECTURE for family in FAMILIES)
    by_type = {family.MODEL_TYPE: family for family in FAMILIES}
    by_architecture = {family.ARCHITECTURE: family for family in FAMILIES}
    model_type = config.text("model_type", "")
    architectures = config.get("architectures")
    if not architectures:
        if model_type not in by_type:
            raise InputError(f"config.json: model_type: {model_type[:60]!r} is not supported; known are {known}")
        return by_type[model_type]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise config.error("architectures", "expected a list of names")
    if len(architectures) > 1 or architectures[0] not in by_architecture:
        named = ", ".join(str(name)[:60] for name in architectures[:4])
        raise config.error("architectures", f"{named} is not supported; known are {known}")
    family = by_architecture[architectures[0]]
    if by_type.get(model_type, family) is not family:
        raise config.error("model_type", f"{model_type!r} contradicts architectures {architectures[0]}")
    return family
