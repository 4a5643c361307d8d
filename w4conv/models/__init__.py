"""Model families: config.json -> ModelSpec. One file a family; a new family is a file and a line in FAMILIES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from w4conv.errors import InputError
from w4conv.files.blobs import config_of, place
from w4conv.models import (
    gemma2,
    gemma3,
    gpt_oss,
    granite,
    granitemoe,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from w4conv.models.config import Config
from w4conv.models.rope import RopeSpec
from w4conv.models.spec import ModelSpec, TensorSpec

__all__ = ["ModelSpec", "RopeSpec", "TensorSpec", "parse_config", "spec_of"]


class Family(Protocol):
    """What a module of this package offers.

    ARCHITECTURES: the names in `architectures`, each with its `model_type`.
    """

    @property
    def ARCHITECTURES(self) -> Mapping[str, str]: ...  # noqa: N802 - a module's constant

    def parse(self, config: Config, architecture: str) -> ModelSpec: ...


FAMILIES: Final[tuple[Family, ...]] = (
    llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, smollm3, phi3, gemma2, gemma3, olmo2, granite, granitemoe,
    gpt_oss,
)  # fmt: skip
_BY_ARCHITECTURE: Final = {name: family for family in FAMILIES for name in family.ARCHITECTURES}
_BY_TYPE: Final = {kind: name for family in FAMILIES for name, kind in family.ARCHITECTURES.items()}


def known_architectures() -> tuple[str, ...]:
    """All names that `architectures` may hold."""
    return tuple(_BY_ARCHITECTURE)


def spec_of(blobs: Mapping[str, bytes]) -> ModelSpec:
    """The model of a container or a source, by the config.json among its blobs. Raises InputError naming the file."""
    config = config_of(blobs)
    try:
        return parse_config(config)
    except InputError as error:
        where = place(blobs, "config.json").removesuffix("config.json").removesuffix(": ")
        raise InputError(f"{where}: {error}" if where else str(error)) from None


def parse_config(config: Mapping[str, object]) -> ModelSpec:
    """The model that a config.json describes.

    Raises InputError naming the key: an unsupported architecture or feature, a missing or nonsensical value.
    """
    settings = Config(config)
    architecture = _architecture(settings)
    return _BY_ARCHITECTURE[architecture].parse(settings, architecture)


def check_architecture(config: Mapping[str, object]) -> None:
    """Raise InputError for an architecture that is not supported."""
    _architecture(Config(config))


def _architecture(config: Config) -> str:
    """By `architectures`, or by `model_type` where that is absent."""
    known = ", ".join(_BY_ARCHITECTURE)
    model_type = config.text("model_type", "")
    architectures = config.get("architectures")
    if not architectures:
        if model_type not in _BY_TYPE:
            raise InputError(f"config.json: model_type: {model_type[:60]!r} is not supported; known are {known}")
        return _BY_TYPE[model_type]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise config.error("architectures", "expected a list of names")
    name = architectures[0]
    if len(architectures) > 1 or name not in _BY_ARCHITECTURE:
        named = ", ".join(str(name)[:60] for name in architectures[:4])
        raise config.error("architectures", f"{named} is not supported; known are {known}")
    if _BY_TYPE.get(model_type, name) not in _BY_ARCHITECTURE[name].ARCHITECTURES:
        raise config.error("model_type", f"{model_type!r} contradicts architectures {name}")
    return name
