"""Small containers of every scheme, and what an export of them must hold, for the tests of exporters and importers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from helpers import make_llama_dir
from w4files import as_bytes, random_parts

import w4conv
from w4conv.commands.export import export
from w4conv.container import TensorPlan, Writer, open_container, plan
from w4conv.errors import UsageError
from w4conv.exports.report import ExportReport
from w4conv.scheme import QuantScheme

Values = dict[str, npt.NDArray[np.float32]]


def converted(directory: Path, *, group_size: int | str = 32, scheme: str = "w4a16", **model: object) -> Path:
    """A tiny model converted: `directory`/in and `directory`/tiny.w4."""
    source = make_llama_dir(directory / "in", **{"hidden": 64, "inner": 96, **model})  # type: ignore[arg-type]
    out = directory / "tiny.w4"
    floats = scheme in ("f16", "bf16", "f32", "keep")
    w4conv.quantize(source, out, group_size=None if floats else group_size, scheme=scheme, effort=0)
    return out


def export_f32(path: Path, out: Path, to: str) -> ExportReport:
    """Exported with floats of 32 bits, where there are floats to choose a type for."""
    try:
        return export(path, out, to=to, dtype="f32")
    except UsageError:  # nothing depends on it
        return export(path, out, to=to)


def recoded(path: Path, choose: Callable[[str, tuple[int, ...]], QuantScheme | None]) -> Path:
    """A container of the same model whose matrices have random codes in schemes of choice (None: kept)."""
    out = path.with_name("recoded.w4")
    with open_container(path) as old:
        plans, parts = [], {}
        for i, (name, info) in enumerate(old.tensors.items()):
            scheme = choose(name, info.shape) if len(info.shape) == 2 else None
            plans.append(TensorPlan(name, info.shape, scheme or info.scheme, info.source_dtype))
            parts[name] = {p.kind: old.bytes_of(p) for p in info.parts}
            if scheme is not None:
                parts[name] = random_parts(scheme, info.shape, i)
        layout = plan(plans, dict(old.blobs), old.provenance)
        with out.open("wb") as stream:
            writer = Writer(stream, layout)
            for name, part in layout.parts():
                writer.write(name, part.kind, as_bytes(parts[name][part.kind]))
            writer.finish(bytes.fromhex(d) for d in old.source_digests)
    return out


def values(path: Path) -> Values:
    """Every tensor of a container as float32."""
    with open_container(path) as container:
        return {name: container.dequantize(name) for name in container.tensors}


def parts(path: Path) -> dict[str, dict[str, bytes]]:
    """The bytes of every matrix that has codes: codes, scales, zero points."""
    with open_container(path) as container:
        return {
            name: {p.kind: container.bytes_of(p).tobytes() for p in info.parts}
            for name, info in container.tensors.items()
            if not info.scheme.is_float
        }


def schemes(path: Path) -> dict[str, QuantScheme]:
    with open_container(path) as container:
        return {name: info.scheme for name, info in container.tensors.items()}


def same(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Equal bit for bit, but for the sign of zero."""
    return a.shape == b.shape and np.array_equal(a, b)


def config(directory: Path) -> dict[str, Any]:
    out: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return out
