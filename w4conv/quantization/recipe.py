"""Recipe: which scheme each tensor of a model gets, from the words a user chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from w4conv.errors import UsageError
from w4conv.models.spec import Role
from w4conv.scheme import GROUP_SIZES, QuantScheme

# What `scheme` says of linear weights, and of embedding and head unless told otherwise.
SCHEMES: Final = {
    "w4a16": ("int4", "int8"),
    "w8a16": ("int8", "int8"),
    "f16": ("f16", "f16"),
    "bf16": ("bf16", "bf16"),
    "f32": ("f32", "f32"),
    "keep": ("keep", "keep"),
}
EMBEDDINGS: Final = ("int8", "int4", "f16", "keep")
KEPT: Final = {"F16": QuantScheme("f16"), "BF16": QuantScheme("bf16"), "F32": QuantScheme("f32")}


@dataclass(frozen=True, slots=True)
class Recipe:
    """scheme: the word chosen. linear, embeddings: kind of code or "keep". group_size: 0 for the whole row."""

    scheme: str
    linear: str
    embeddings: str
    group_size: int

    def keeps(self, role: Role) -> bool:
        """Whether tensors of this role keep the coding that they have."""
        return (self.embeddings if role in ("embedding", "head") else self.linear) == "keep"

    def scheme_for(self, role: Role, shape: tuple[int, ...], dtype: str) -> QuantScheme:
        """The scheme of a tensor whose source holds `dtype` ("F16", "BF16", "F32"); vectors keep theirs."""
        kind = self.embeddings if role in ("embedding", "head") else self.linear
        if len(shape) < 2 or kind == "keep":
            return KEPT[dtype]
        return QuantScheme(kind, self.group_size, "f16") if kind.startswith("int") else QuantScheme(kind)


def make_recipe(scheme: str, *, group_size: int | str = 128, embeddings: str | None = None) -> Recipe:
    """scheme: a key of SCHEMES. group_size: 32, 64, 128, 256, or "row" or 0. embeddings: one of EMBEDDINGS, or None.

    Raises UsageError for any other word.
    """
    if scheme not in SCHEMES:
        raise UsageError(f"unknown scheme {scheme!r}; choose one of {', '.join(SCHEMES)}")
    if embeddings is not None and embeddings not in EMBEDDINGS:
        raise UsageError(f"unknown embeddings {embeddings!r}; choose one of {', '.join(EMBEDDINGS)}")
    text = "0" if group_size == "row" else str(group_size)
    if text not in map(str, GROUP_SIZES):
        raise UsageError(f"group size {group_size} is not one of 32, 64, 128, 256, row")
    linear, default = SCHEMES[scheme]
    return Recipe(scheme, linear, embeddings or default, int(text))
