"""Recipe: which scheme and which method each tensor of a model gets, from the words a user chooses.

A recipe file is TOML. Under [tensors] it maps patterns to what is to differ from the options of the command:

    description = "8 bits where it hurts"
    [tensors]
    embedding = {scheme = "int8"}
    "*.v_proj.weight" = {scheme = "int8", group = 64, method = "rtn"}
    "model.layers.0.*" = {group = "row"}

A pattern is a role ("embedding", "head", "linear"), or matches whole tensor names with `*`, `?` and `[...]` as a shell
does. Each key counts as the last pattern that matches and has it says, and as the options say where none does.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from w4conv.arguments import shown
from w4conv.errors import InputError, UsageError
from w4conv.files.mapped import HEAD_NBYTES, refuse_stand_in
from w4conv.models.generic import Inventory
from w4conv.models.spec import Role
from w4conv.scheme import (
    DEFAULT_GROUP_SIZE,
    FLOAT_KINDS,
    GROUP_SIZES,
    GROUP_WORDS,
    KINDS,
    SCHEME_WORDS,
    TENSOR_WORDS,
    QuantScheme,
    scheme_of,
)

KEPT: Final = {"F16": QuantScheme("f16"), "BF16": QuantScheme("bf16"), "F32": QuantScheme("f32")}
BUILT_IN: Final = Path(__file__).parent / "recipes"


def is_calibrated(role: Role, kind: str, *, tied_head: bool) -> bool:
    """Whether methods other than rtn know a matrix: linear weights, and those of a head in 4 bits."""
    if kind == "keep" or not KINDS[kind].is_calibrated:
        return False
    if role == "linear":
        return True
    return KINDS[kind].bits == 4 and (role == "head" or (role == "embedding" and tied_head))


@dataclass(frozen=True, slots=True)
class Rule:
    """What is said of the tensors that a pattern matches; None where nothing is. group: 0 for the whole row."""

    scheme: str | None = None
    group: int | None = None
    method: str | None = None

    def record(self) -> dict[str, Any]:
        words = {"scheme": self.scheme, "group": self.group, "method": self.method}
        return {key: word for key, word in words.items() if word is not None}


@dataclass(frozen=True, slots=True)
class Choice:
    """What one tensor gets. kind: of code, or "keep"; vectors are always kept. method: None where nothing names one.

    explicit: a rule says its scheme or its group, or it is always kept unless one does.
    """

    kind: str
    group_size: int
    method: str | None = None
    explicit: bool = False

    @property
    def keeps(self) -> bool:
        return self.kind == "keep"

    def coding(self, dtype: str) -> QuantScheme:
        """The scheme where the source holds `dtype` ("F16", "BF16", "F32")."""
        if self.keeps:
            return KEPT[dtype]
        return scheme_of(self.kind, self.group_size)


@dataclass(frozen=True, slots=True)
class Recipe:
    """scheme: the word chosen. linear, embeddings: kind of code or "keep". group_size: 0 for the whole row.

    rules: (pattern, what it says) in order.
    """

    scheme: str
    linear: str
    embeddings: str
    group_size: int
    rules: tuple[tuple[str, Rule], ...] = ()

    def choices(self, spec: Inventory) -> dict[str, Choice]:
        """What each tensor of a model gets, by name. Raises UsageError for a pattern that matches no matrix."""
        unused = {pattern for pattern, _ in self.rules}
        rules = [(pattern, re.compile(fnmatch.translate(pattern)).match, rule) for pattern, rule in self.rules]
        out = {}
        for t in spec.tensors():
            if len(t.shape) < 2 or t.role == "bias":  # the biases of experts are matrices
                out[t.name] = Choice("keep", 0, explicit=True)
                continue
            roles = ("embedding", "head") if t.role == "embedding" and spec.tied_head else (t.role,)
            words = {"linear": self.linear, "router": "keep"}  # routers are small, and what they choose is a jump
            explicit = t.role == "router"
            found = Rule(words.get(t.role, self.embeddings), self.group_size)
            for pattern, matches, rule in rules:
                if pattern in roles or matches(t.name):
                    found = replace(found, **rule.record())
                    explicit = explicit or rule.scheme is not None or rule.group is not None
                    unused.discard(pattern)
            assert found.scheme is not None
            assert found.group is not None
            out[t.name] = Choice(found.scheme, found.group, found.method, explicit)
        if unused:
            example = next((t.name for t in spec.tensors() if t.role == "linear"), "model.layers.0.mlp.up_proj.weight")
            raise UsageError(
                f"recipe: {min(unused)!r} matches no matrix of this model. A pattern is embedding, head, linear, or a "
                f"whole name such as {example} with * and ?"
            )
        return out

    def record(self) -> list[Any]:
        """The rules for the provenance of a container: [pattern, words] in order."""
        return [[pattern, rule.record()] for pattern, rule in self.rules]


def make_recipe(
    scheme: str,
    *,
    group_size: int | str = DEFAULT_GROUP_SIZE,
    embeddings: str | None = None,
    rules: Sequence[tuple[str, Rule]] = (),
) -> Recipe:
    """scheme: a key of SCHEME_WORDS. group_size: one of GROUP_WORDS or GROUP_SIZES. embeddings: one of TENSOR_WORDS, or
    None.

    Raises UsageError for any other word.
    """
    if scheme not in SCHEME_WORDS:
        raise UsageError(f"unknown scheme {scheme!r}; choose one of {', '.join(SCHEME_WORDS)}")
    if embeddings is not None and embeddings not in TENSOR_WORDS:
        raise UsageError(f"unknown embeddings {embeddings!r}; choose one of {', '.join(TENSOR_WORDS)}")
    size = _group_size(group_size)
    if size is None:
        word = group_size if isinstance(group_size, str) else shown(group_size)
        raise UsageError(f"group size {word} is not one of {', '.join(GROUP_WORDS)}")
    linear, default = SCHEME_WORDS[scheme]
    return Recipe(scheme, linear, embeddings or default, size, tuple(rules))


def read_rules(recipe: str) -> tuple[tuple[str, Rule], ...]:
    """The rules of a built-in recipe, by its name, or of a file. Raises UsageError, InputError."""
    path = Path(recipe)
    if path.suffix != ".toml":
        path = BUILT_IN / f"{recipe}.toml"
        if recipe not in dict(built_in_recipes()):
            names = ", ".join(name for name, _ in built_in_recipes())
            raise UsageError(f"no recipe {recipe!r} is built in; there are {names}. A file ends in .toml")
    try:
        text = path.read_text(encoding="utf-8")
        refuse_stand_in(text[:HEAD_NBYTES].encode(), path)
        document = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    return _parse(document, str(path))


def built_in_recipes() -> Iterator[tuple[str, str]]:
    """(name, description) of each."""
    for path in sorted(BUILT_IN.glob("*.toml")):
        yield path.stem, tomllib.loads(path.read_text(encoding="utf-8"))["description"]


def _parse(document: Mapping[str, Any], where: str) -> tuple[tuple[str, Rule], ...]:
    if unknown := [key for key in document if key not in ("description", "tensors")]:
        raise InputError(f"{where}: unknown key {unknown[0]!r}; a recipe has description and [tensors]")
    tensors = document.get("tensors")
    if not isinstance(tensors, dict) or not tensors:
        raise InputError(f"{where}: has no patterns under [tensors]")
    return tuple((pattern, _parse_rule(words, f"{where}: {pattern!r}")) for pattern, words in tensors.items())


def _parse_rule(words: Any, where: str) -> Rule:
    if not isinstance(words, dict) or not words:
        raise InputError(f'{where}: is {words!r}, expected a table such as {{scheme = "int8", group = 64}}')
    if unknown := [key for key in words if key not in ("scheme", "group", "method")]:
        raise InputError(f"{where}: unknown key {unknown[0]!r}; there are scheme, group and method")
    scheme, group, method = (words.get(key) for key in ("scheme", "group", "method"))
    if scheme is not None and scheme not in TENSOR_WORDS:
        raise InputError(f"{where}: scheme is {scheme!r}, expected one of {', '.join(TENSOR_WORDS)}")
    size = None if group is None else _group_size(group)
    if group is not None and size is None:
        raise InputError(f"{where}: group is {group!r}, expected one of {', '.join(GROUP_WORDS)}")
    if group is not None and (scheme == "keep" or scheme in FLOAT_KINDS):
        raise InputError(f"{where}: scheme {scheme} has no groups; leave out group")
    if method is not None and not isinstance(method, str):
        raise InputError(f"{where}: method is {method!r}, expected a word")
    return Rule(scheme, size, method)


def _group_size(word: object) -> int | None:
    """0 for "row"; None for what is no group size."""
    if isinstance(word, bool):
        return None
    text = "0" if word == "row" else word if isinstance(word, str) else shown(word)
    return int(text) if text in map(str, GROUP_SIZES) else None
