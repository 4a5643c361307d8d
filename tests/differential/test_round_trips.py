"""`.w4` to another format and back: which keep every code and scale, and the table in docs/formats.md that says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from exports import converted, export_f32, recoded, same, schemes, values
from exports import parts as coded_parts
from gguf_blocks import random_blocks
from helpers import make_llama_gguf

import w4conv
from w4conv.errors import InputError
from w4conv.exports import FORMATS
from w4conv.scheme import QuantScheme

DOCS = Path(__file__).parents[2] / "docs" / "formats.md"
BEGIN, END = "<!-- round trips: written by tests/differential/test_round_trips.py -->", "<!-- end -->"
SCHEMES = {
    "int4/g32": QuantScheme("int4", 32, "f16"),
    "int4/g128": QuantScheme("int4", 128, "f16"),
    "int4/row": QuantScheme("int4", 0, "f16"),
    "int4z/g64": QuantScheme("int4z", 64, "f16"),
    "int4o/g32": QuantScheme("int4o", 32, "f16"),
    "e2m1/g32": QuantScheme("e2m1", 32, "f16"),
    "int8/g32": QuantScheme("int8", 32, "f16"),
    "nl4/g16": QuantScheme("nl4", 16, "s6"),
    "nl4/g32": QuantScheme("nl4", 32, "s6"),
    "nl3/g32": QuantScheme("nl3", 32, "s6"),
    "f16": QuantScheme("f16"),
}
BLOCKS = {  # kept of GGUF
    "Q2_K": "int4o/g16/i8", "Q3_K": "int4/g16/i8", "Q4_K": "int4o/g32/i8", "Q5_K": "int8o/g32/i8",
    "Q6_K": "int8/g16/i8", "Q5_1": "int8o/g32", "IQ4_NL": "iq4nl/g32", "IQ4_XS": "iq4nl/g32/i8",
}  # fmt: skip
NAMES = dict(zip(SCHEMES, SCHEMES, strict=True)) | BLOCKS


def source(tmp_path: Path, name: str) -> Path:
    """A container whose linear layers are in a scheme."""
    if name in SCHEMES:
        return recoded(
            converted(tmp_path, hidden=128, inner=256),
            lambda tensor, shape: SCHEMES[name] if "layers" in tensor else QuantScheme("f16"),
        )

    def blocks(tensor: str, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.uint8], str]:
        own = name if "layers" in tensor else "Q8_0"
        return random_blocks(own, *shape, size=1e-3), own

    path = make_llama_gguf(tmp_path / "m.gguf", hidden=256, inner=512, blocks=blocks)
    w4conv.quantize(path, tmp_path / "m.w4", effort=0)
    return tmp_path / "m.w4"


def outcome(tmp_path: Path, name: str, to: str) -> str:
    """What became of the linear layers of a model in a scheme on the way to `to` and back."""
    path = source(tmp_path, name)
    out = tmp_path / "out"
    try:
        report = export_f32(path, out, to)
    except InputError:  # nothing that the format holds
        return "refused"
    w4conv.quantize(out, tmp_path / "again.w4", scheme="keep", effort=0)
    before, after = values(path), values(tmp_path / "again.w4")
    assert before.keys() == after.keys()
    exact = all(same(before[name], after[name]) for name in before)
    assert exact == report.exact, "the report of the export tells the truth"
    if not exact:
        return "rounded"
    linear = "model.layers.1.mlp.down_proj.weight"
    old, new = schemes(path)[linear], schemes(tmp_path / "again.w4")[linear]
    assert w4conv.verify(tmp_path / "again.w4", against=out).ok
    if new.kind != old.kind:
        return f"same values, as {new}"
    if new.group_size != old.group_size:
        names = [name for name in before if "layers" in name and before[name].ndim == 2]
        assert all(coded_parts(path)[n]["codes"] == coded_parts(tmp_path / "again.w4")[n]["codes"] for n in names), (
            "the codes are the same, scales are repeated"
        )
        return f"same codes, scales repeated for {new}"
    if not old.is_float:
        assert coded_parts(path) == coded_parts(tmp_path / "again.w4")
    return "identical"


IDENTICAL = {
    ("int4/g32", "gguf"), ("int8/g32", "gguf"),
    *((s, to) for s in ("int4/g32", "int4/g128") for to in ("compressed-tensors", "gptq", "awq", "mlx")),
    *(("int4/row", to) for to in ("compressed-tensors", "gptq", "awq")),
    *(("int4z/g64", to) for to in ("compressed-tensors", "gptq", "awq")),
    *(("int8/g32", to) for to in ("compressed-tensors", "mlx")),
    ("f16", "gguf"), ("int4o/g32", "gguf"), ("int4o/g32", "mlx"), ("e2m1/g32", "gguf"),
    ("e2m1/g32", "mlx"), *((qtype, "gguf") for qtype in BLOCKS),
}  # fmt: skip


def table(found: dict[tuple[str, str], str]) -> str:
    lines = ["| scheme | " + " | ".join(FORMATS) + " |", "|---" * (len(FORMATS) + 1) + "|"]
    lines += [f"| `{shown}` | " + " | ".join(found[name, to] for to in FORMATS) + " |" for name, shown in NAMES.items()]
    return "\n".join(lines)


def test_round_trips(tmp_path: Path) -> None:
    found = {}
    for name in NAMES:
        for to in FORMATS:
            folder = tmp_path / f"{name.replace('/', '-')}-{to}"
            folder.mkdir()
            found[name, to] = outcome(folder, name, to)
    assert {pair for pair, what in found.items() if what == "identical"} >= IDENTICAL
    written = DOCS.read_text()
    assert BEGIN in written
    assert written.split(BEGIN)[1].split(END)[0].strip() == table(found), f"docs/formats.md should say:\n{table(found)}"
