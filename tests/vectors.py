"""The vectors of `formats/vectors`, as the tests use them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

FORMATS = Path(__file__).parents[1] / "formats"
FOLDER = FORMATS / "vectors"
MANIFEST: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())
SOUND: list[dict[str, Any]] = MANIFEST["valid"] + MANIFEST["compat"]
FAULTY: list[dict[str, Any]] = MANIFEST["invalid"]


def raw(entry: dict[str, Any]) -> bytes:
    """The content of a vector."""
    data = (FOLDER / entry["file"]).read_bytes()
    return gzip.decompress(data) if entry["file"].endswith(".gz") else data


def name(entry: dict[str, Any]) -> str:
    return str(entry["file"]).removesuffix(".gz").removesuffix(".w4")


def index_of(data: bytes) -> dict[str, Any]:
    """The index of a file whose header is right."""
    index: dict[str, Any] = json.loads(data[128 : 128 + int.from_bytes(data[24:32], "little")])
    return index
