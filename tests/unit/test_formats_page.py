"""The table of formats in README.md: every format that the code reads or writes, and what it was checked with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest

from w4conv.exports import FORMATS
from w4conv.sources.packed import METHODS

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- formats: written by tests/unit/test_formats_page.py -->", "<!-- end -->"


class Row(NamedTuple):
    """kinds: words of `quant_method`, or of the code, that are read as this. to: word of `export`."""

    name: str
    kinds: tuple[str, ...]
    to: str | None
    reads: str
    writes: str
    exact: str
    libraries: tuple[str, ...]


# Those of the last run of everything; `make test` and `make test-peers` take what is current.
CHECKED = {
    "auto-round": "0.16.1",
    "bitsandbytes": "0.50.2",
    "compressed-tensors": "0.20.1",
    "gguf": "0.19",
    "gptqmodel": "7.7.0",
    "llama-cpp-python": "0.3.36",
    "mlx": "0.32.4",
    "onnxruntime": "1.32",
    "onnxruntime-genai": "0.18",
    "transformers": "5.24",
}
ROWS = (
    Row("safetensors", ("safetensors",), "safetensors", "F16, BF16, F32", "F32, or rounded", "kept; out as F32",
        ("transformers",)),
    Row("GGUF", ("gguf",), "gguf", "every type", "Q4_0, Q4_1, Q5_1, Q8_0, Q2_K to Q6_K, IQ4, MXFP4, floats",
        "always", ("llama-cpp-python", "gguf")),
    Row("GPTQ", ("gptq",), "gptq", "4 and 8 bits, both versions", "4 bits", "columns in order", ("gptqmodel",)),
    Row("AWQ, GEMM", ("awq",), "awq", "4 bits", "4 bits", "always", ("gptqmodel",)),
    Row("AutoRound", ("auto-round",), None, "in the two layouts above", "-", "as these", ("auto-round",)),
    Row("compressed-tensors", ("compressed-tensors",), "compressed-tensors", "4 and 8 bits, FP8", "4 and 8 bits",
        "integers", ("compressed-tensors", "transformers")),
    Row("MLX", ("mlx",), "mlx", "affine of 4 and 8 bits, mxfp4", "the same", "4 bits", ("mlx",)),
    Row("bitsandbytes", ("bitsandbytes",), None, "NF4, FP4, nested too", "-", "always", ("bitsandbytes",)),
    Row("MXFP4", ("mxfp4",), None, "gpt-oss", "in GGUF and MLX", "always", ("transformers",)),
    Row("FP8, in blocks", ("fp8",), None, "E4M3", "-", "as float32", ()),
    Row("ONNX", ("onnx",), "onnx", "as written here", "decoder with MatMulNBits", "always",
        ("onnxruntime", "onnxruntime-genai")),
)  # fmt: skip


def table() -> str:
    lines = ["| format | in | out | exact | checked with |", "|---|---|---|---|---|"]
    for row in ROWS:
        checked = ", ".join(f"{name} {CHECKED[name]}" for name in row.libraries) or "decoders of our own"
        lines.append(f"| {row.name} | {row.reads} | {row.writes} | {row.exact} | {checked} |")
    return "\n".join(lines)


def test_the_table_of_the_readme() -> None:
    written = (ROOT / "README.md").read_text()
    assert BEGIN in written
    assert written.split(BEGIN)[1].split(END)[0].strip() == table(), f"README.md should say:\n{table()}"


def test_no_format_is_missing() -> None:
    assert sorted(row.to for row in ROWS if row.to) == sorted(FORMATS)
    kinds = {kind for row in ROWS for kind in row.kinds}
    assert kinds == {*METHODS, "auto-round", "mlx", "safetensors", "gguf", "onnx"}
    page = (ROOT / "docs/formats.md").read_text()
    for to in FORMATS:
        assert re.search(rf"^\| `{to}` \|", page, re.MULTILINE), to


@pytest.mark.parametrize("name", CHECKED)
def test_versions(name: str) -> None:
    """Both pages name the same ones; they can be installed by our commands; what is installed is not older."""
    page = (ROOT / "docs/formats.md").read_text().split("## Checked with")[1]
    assert re.search(rf"^\| {name}[ ,|][^|]*\| {re.escape(CHECKED[name])} \|", page, re.MULTILINE), name
    assert re.search(rf"\b{name}\b", (ROOT / "pyproject.toml").read_text() + (ROOT / "Makefile").read_text())
    try:
        installed = version(name)
    except PackageNotFoundError:
        return
    named = [int(part) for part in CHECKED[name].split(".")]
    assert [int(part) for part in re.findall(r"\d+", installed)[: len(named)]] >= named
