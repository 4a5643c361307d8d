"""The specification read as text: its example and its tables are what the code does."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from jsonschema import Draft202012Validator
from w4files import ALL_SCHEMES, SMALL_TENSORS, open_bytes, small_file

from w4conv import codes, scheme
from w4conv.container import TensorPlan, Writer, open_container, plan
from w4conv.errors import FormatError
from w4conv.quantization.reference import quantize_rtn

FORMATS = Path(__file__).parents[2] / "formats"
CONTAINER_TEXT = (FORMATS / "w4-container.md").read_text()
CODES_TEXT = (FORMATS / "w4-codes.md").read_text()

W = [[0, 1, 2, 3, 4, 5, 6, 7, 8, -8], [-0.75, 0.25, 0.5, 0, 0, 0, 0, 1, -1, 0.125]]
B = [1, -2, 0.5]


def fenced(text: str, tag: str) -> str:
    match = re.search(rf"^```{tag}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert match, f"no block {tag!r} in the text"
    return match.group(1)


def read_hexdump(dump: str) -> bytes:
    """Bytes of a dump with offset, 16 bytes and characters on a line; `*` repeats the line before up to the next."""
    raw = bytearray()
    repeat = False
    for line in dump.splitlines():
        if line == "*":
            repeat = True
            continue
        offset, _, rest = line.partition("  ")
        if repeat:
            last = bytes(raw[-16:])
            while len(raw) < int(offset, 16):
                raw += last
            repeat = False
        assert len(raw) == int(offset, 16)
        raw += bytes.fromhex(rest.partition("  |")[0])
    return bytes(raw)


@pytest.fixture(scope="module")
def example() -> bytes:
    return read_hexdump(fenced(CONTAINER_TEXT, "hexdump"))


def test_the_example_opens_and_holds_what_the_text_says(example: bytes, tmp_path: Path) -> None:
    path = tmp_path / "example.w4"
    path.write_bytes(example)
    with open_container(path) as container:
        container.check()
        assert dict(container.blobs) == {"config.json": b"{}\n"}
        assert container.dequantize("b").tolist() == B
        expected = [[*W[0][:8], 7, -8], [-0.75, 0.25, 0.5, 0, 0, 0, 0, 0.875, -1, 0.125]]
        assert container.dequantize("w").tolist() == expected
        assert container.source_digests == (blake3(b"weights\n").hexdigest(),)
        assert example[0x11C0:0x11E0].hex() == container.source_digests[0]
        assert example[0x11E0:].hex() == container.digest


def test_the_writer_writes_the_example(example: bytes) -> None:
    coding = scheme.int4(32)
    quantized = quantize_rtn(np.array(W, np.float32), coding)
    provenance = {
        "tool": "w4conv 0.1.0",
        "method": "rtn",
        "source": {"kind": "safetensors", "files": [{"name": "model.safetensors", "nbytes": 8}]},
    }
    tensors = [TensorPlan("w", (2, 10), coding, "F32"), TensorPlan("b", (3,), scheme.F32, "F32")]
    out = io.BytesIO()
    writer = Writer(out, plan(tensors, {"config.json": b"{}\n"}, provenance))
    writer.write("w", "codes", codes.pack(coding, (quantized.q + 8).astype(np.uint8)[None]))
    writer.write("w", "scales", codes.pack_rows(quantized.scales[None]))
    writer.write("b", "values", np.array(B, np.float32))
    writer.finish([blake3(b"weights\n").digest()])
    assert out.getvalue() == example


def test_every_changed_bit_of_the_example_is_found(example: bytes) -> None:
    """Where the bytes are not padding to a page, which test_container_damage covers."""
    for at in [*range(0x290), *range(0x1000, len(example))]:
        with pytest.raises(FormatError):
            open_bytes(example[:at] + bytes([example[at] ^ 1 << at % 8]) + example[at + 1 :]).check()


@pytest.mark.parametrize("kind", list(codes.CODEBOOKS))
def test_the_codebooks_of_the_text_are_those_of_the_code(kind: str) -> None:
    table = "iq4nl" if kind == "nl4" else kind  # one for both
    words = fenced(CODES_TEXT, f"codebook {table}").split()
    assert np.array([int(w, 16) for w in words], np.uint32).tobytes() == codes.CODEBOOKS[kind].tobytes()


def test_the_digests_of_the_text() -> None:
    given = (b"", b"abc", bytes(i % 251 for i in range(1025)))
    assert fenced(CONTAINER_TEXT, "digests").split() == [blake3(data).hexdigest() for data in given]


def test_every_clause_that_an_error_names_exists() -> None:
    cited = set()
    for file in (FORMATS.parent / "w4conv" / "container").glob("*.py"):
        source = file.read_text()
        cited |= set(re.findall(r'"(\d\.\d+)"', source)) | set(re.findall(r"w4-container (\d\.\d+)", source))
    assert len(cited) > 20
    for clause in sorted(cited):
        assert f"**{clause}** " in CONTAINER_TEXT, clause
    for text, other in ((CODES_TEXT, CONTAINER_TEXT), (CONTAINER_TEXT, CODES_TEXT)):
        name = "w4-codes" if text is CONTAINER_TEXT else "w4-container"
        for clause in re.findall(rf"{name} (\d\.\d+)", text):
            assert f"**{clause}** " in other, f"{name} {clause}"


# The schema


SCHEMA = json.loads((FORMATS / "w4-index.schema.json").read_text())


def index_of(raw: bytes) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(raw[128 : 128 + int.from_bytes(raw[24:32], "little")])
    return index


def test_the_schema_accepts_what_is_valid(example: bytes) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    validator = Draft202012Validator(SCHEMA)
    tensors = {str(s): (s, (3, 5)) for s in ALL_SCHEMES} | {"scalar": (scheme.F32, ())}
    for raw in (example, small_file(SMALL_TENSORS)[0], small_file(tensors)[0]):
        validator.validate(index_of(raw))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("extra",), 1),
        (("blobs", 0, "name"), "../x"),
        (("blobs", 0, "nbytes"), -1),
        (("provenance", "source"), {"files": []}),
        (("provenance", "tool"), 1),
        (("provenance", "damping"), 0.01),
        (("provenance", "damping"), None),
        (("provenance", "source", "files", 0, "name"), "a/b"),
        (("tensors", 0, "scheme"), "int3"),
        (("tensors", 0, "scheme"), "f16"),
        (("tensors", 0, "scheme"), "nf4"),
        (("tensors", 0, "group_size"), 48),
        (("tensors", 0, "codebook"), ["00000000"] * 16),
        (("tensors", 0, "shape"), [1 << 32, 1]),
        (("tensors", 0, "shape"), [8]),
        (("tensors", 0, "name"), "a\n"),
        (("tensors", 0, "extra"), 1),
        (("tensors", 1, "group_size"), 32),
        (("tensors", 1, "source_dtype"), "F 32"),
        (("blobs", 0, "offset"), False),
        (("blobs", 0, "nbytes"), True),
        (("provenance", "source", "files", 0, "nbytes"), False),
        (("provenance", "source", "files", 0, "digest"), ""),
        (("tensors", 0, "group_size"), False),
        (("tensors", 0, "shape", 0), True),
        (("tensors", 0, "parts", 0, "offset"), False),
        (("tensors", 0, "parts", 0, "nbytes"), "0"),
        (("tensors", 1, "parts", 0, "kind"), "code"),
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_reader_refuses(example: bytes, path: tuple[Any, ...], value: object) -> None:
    index = index_of(example)
    at: Any = index
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    assert not Draft202012Validator(SCHEMA).is_valid(index)
