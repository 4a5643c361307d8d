"""A model of no known family: whatever tensors a checkpoint has, each with a role by its shape and name.

It can be converted, inspected and verified, not run: nothing says how its tensors are connected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from w4conv.errors import InputError
from w4conv.models.spec import Role, TensorSpec

GENERIC: Final = "generic"
# Parts of names, of Hugging Face checkpoints and GGUF files.
EMBEDDINGS: Final = ("embed_tokens", "embedding", "token_embd", "position_embd", "embed_in", ".wte.", ".wpe.")
HEADS: Final = ("lm_head.", "embed_out.", "output.weight", "output_layer.")


class Inventory(Protocol):
    """The tensors of a model, for a conversion; every ModelSpec is one."""

    @property
    def architecture(self) -> str: ...

    @property
    def tied_head(self) -> bool: ...

    def tensors(self) -> tuple[TensorSpec, ...]: ...


@dataclass(frozen=True, slots=True)
class GenericModel:
    """Every tensor there is, in the order of the checkpoint. architecture: the first name that config.json gives."""

    architecture: str
    found: tuple[TensorSpec, ...]
    tied_head: bool = False

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.found


def generic_model(config: Mapping[str, object], shapes: Iterable[tuple[str, tuple[int, ...]]]) -> GenericModel:
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    found = tuple(TensorSpec(name, shape, role_of(name, shape), None, name) for name, shape in shapes)
    return GenericModel(str(named or "unknown"), found)


def role_of(name: str, shape: tuple[int, ...]) -> Role:
    """Matrices are embedding, head or linear weights by their names; all else is kept."""
    if len(shape) != 2:
        return "norm" if len(shape) < 2 else "bias"  # what a recipe keeps, be it a vector or a stack of matrices
    return matrix_role(name)


def matrix_role(name: str) -> Role:
    if any(part in f".{name}" for part in EMBEDDINGS):
        return "embedding"
    return "head" if name.startswith(HEADS) else "linear"


def refuse_to_run(path: object, provenance: Mapping[str, object]) -> None:
    """Raise InputError for a container that was converted as generic."""
    if provenance.get("architecture") == GENERIC:
        raise InputError(
            f"{path}: it was converted with --architecture generic, as a model that w4conv has no engine for, and "
            "cannot be run. inspect, cat, and verify without --ppl work"
        )
