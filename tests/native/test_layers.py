"""The four layers of the native code: each includes only itself and those below it (docs/architecture.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "native/src"
LAYERS = ("kernels", "ops", "engine", "bindings")


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_includes_only_what_lies_below_it(layer: str) -> None:
    files = sorted((SOURCES / layer).glob("*"))
    assert files
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for file in files:
        for room in re.findall(r'#include "([a-z]+)/', file.read_text()):
            assert room in (*allowed, "w4conv"), f"{file.name} includes {room}"
