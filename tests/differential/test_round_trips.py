"""`.w4` to another format and back: which keep every code and scale, and the table in docs/formats.md that says so."""

from __future__ import annotations

from pathlib import Path

from exports import converted, recoded, same, schemes, values
from exports import parts as coded_parts

import w4conv
from w4conv.errors import InputError
from w4conv.export import FORMATS, export
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
    "f16": QuantScheme("f16"),
}


def outcome(tmp_path: Path, scheme: QuantScheme, to: str) -> str:
    """What became of the linear layers of a model in `scheme` on the way to `to` and back."""
    path = recoded(
        converted(tmp_path, hidden=128, inner=256),
        lambda name, shape: scheme if "layers" in name else QuantScheme("f16"),
    )
    out = tmp_path / "out"
    try:
        report = export(path, out, to=to, dtype="f32")
    except InputError:  # nothing that the format holds
        return "refused"
    w4conv.quantize(out, tmp_path / "again.w4", scheme="keep")
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
    ("e2m1/g32", "mlx"),
}  # fmt: skip


def table(found: dict[tuple[str, str], str]) -> str:
    lines = ["| scheme | " + " | ".join(FORMATS) + " |", "|---" * (len(FORMATS) + 1) + "|"]
    lines += [f"| `{name}` | " + " | ".join(found[name, to] for to in FORMATS) + " |" for name in SCHEMES]
    return "\n".join(lines)


def test_round_trips(tmp_path: Path) -> None:
    found = {}
    for name, scheme in SCHEMES.items():
        for to in FORMATS:
            folder = tmp_path / f"{name.replace('/', '-')}-{to}"
            folder.mkdir()
            found[name, to] = outcome(folder, scheme, to)
    assert {pair for pair, what in found.items() if what == "identical"} >= IDENTICAL
    written = DOCS.read_text()
    assert BEGIN in written
    assert written.split(BEGIN)[1].split(END)[0].strip() == table(found), f"docs/formats.md should say:\n{table(found)}"
