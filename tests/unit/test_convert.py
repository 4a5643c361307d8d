"""quantize: what a container of a checkpoint holds, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from helpers import as_dtype, make_llama_dir, write_safetensors

from w4conv import codes
from w4conv.commands import quantize as convert
from w4conv.commands.quantize import quantize
from w4conv.container import open_container
from w4conv.conversion import plan as planning
from w4conv.errors import InputError, OutputError, UsageError
from w4conv.quantization.recipe import make_recipe
from w4conv.quantization.reference import quantize_codes, quantize_rtn
from w4conv.scheme import QuantScheme, int4, int8
from w4conv.sources import base, open_source

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def source_values(directory: Path) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """name -> (dtype, values as stored) of a one-file checkpoint, read by hand."""
    raw = (directory / "model.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    header.pop("__metadata__")
    dtypes = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}
    out = {}
    for name, entry in header.items():
        start, end = (8 + n + offset for offset in entry["data_offsets"])
        out[name] = (entry["dtype"], np.frombuffer(raw[start:end], dtypes[entry["dtype"]]).reshape(entry["shape"]))
    return out


def as_float(dtype: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if dtype == "BF16":
        return np.asarray((values.astype(np.uint32) << 16).view(np.float32))
    return values.astype(np.float32)


def replace_tensors(directory: Path, change: Callable[[dict[str, tuple[str, Any]]], object]) -> None:
    tensors: dict[str, tuple[str, Any]] = dict(source_values(directory))
    change(tensors)
    write_safetensors(directory / "model.safetensors", tensors)


def tensors_of(path: Path) -> dict[str, QuantScheme]:
    with open_container(path) as container:
        return {name: info.scheme for name, info in container.tensors.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_llama_dir(tmp_path / "model", vocab=300, hidden=72, heads=4, inner=100)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("group_size", [32, "row"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a16"])
def test_codes_are_those_of_the_reference(tmp_path: Path, scheme: str, group_size: int | str, dtype: str) -> None:
    model = make_llama_dir(tmp_path / "model", dtype=dtype, vocab=300, hidden=72, inner=100, layers=1)
    out = tmp_path / "out.w4"
    quantize(model, out, scheme=scheme, group_size=group_size, effort=0)
    size = 0 if group_size == "row" else int(group_size)
    with open_container(out) as container:
        container.check()
        values = source_values(model)
        assert set(container.tensors) == set(values)
        for name, info in container.tensors.items():
            stored, expected = values[name]
            assert info.source_dtype == stored
            if len(info.shape) == 1:
                assert str(info.scheme) == dtype.lower()
                assert container.part(name, "values").tobytes() == expected.tobytes()
                continue
            eight = scheme == "w8a16" or name in (EMBED, HEAD)
            assert info.scheme == (int8 if eight else int4)(size)
            q, scales = quantize_rtn(as_float(stored, expected), info.scheme)
            shifted = q[None] if eight else (q[None] + 8).astype(np.uint8)
            assert container.part(name, "codes").tobytes() == codes.pack(info.scheme, shifted).tobytes()
            assert container.part(name, "scales").tobytes() == codes.pack_rows(scales[None]).tobytes()


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("scheme", ["f16", "bf16", "f32", "keep"])
def test_float_schemes(tmp_path: Path, scheme: str, dtype: str) -> None:
    model = make_llama_dir(tmp_path / "model", dtype=dtype, vocab=301, hidden=72, inner=100, layers=1)
    out = tmp_path / "out.w4"
    report = quantize(model, out, scheme=scheme, effort=0)
    with open_container(out) as container:
        container.check()
        assert "group_size" not in container.provenance
        for name, (stored, values) in source_values(model).items():
            kind = dtype.lower() if scheme == "keep" or values.ndim == 1 else scheme
            assert str(container.tensors[name].scheme) == kind
            expected = as_float(stored, values)
            if kind != stored.lower():  # converted, half to even
                expected = as_float(kind.upper(), as_dtype(expected, kind.upper()))
            assert np.array_equal(container.dequantize(name), expected), name
    assert {t.scheme for t in report.schemes} == {scheme if scheme != "keep" else dtype.lower(), dtype.lower()}


@pytest.mark.parametrize("kind", ["int4z", "nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_four_bits_with_levels_or_zero_points(tmp_path: Path, kind: str, dtype: str) -> None:
    model = make_llama_dir(tmp_path / "model", dtype=dtype, layers=1)
    report = quantize(model, tmp_path / "out.w4", scheme=kind, embeddings=kind, group_size=32, effort=0)
    coding = QuantScheme(kind, 32, "f16")
    assert next((t.scheme, t.n_tensors) for t in report.schemes) == (str(coding), 9)
    with open_container(tmp_path / "out.w4") as container:
        container.check()
        assert container.provenance["scheme"] == kind
        for name, (stored, values) in source_values(model).items():
            if values.ndim == 2:
                parts = codes.pack_matrix(coding, *quantize_codes(as_float(stored, values), coding))
                assert {p: container.part(name, p).tobytes() for p in parts} == {
                    part: array.tobytes() for part, array in parts.items()
                }


def test_order_of_tensors_is_that_of_the_forward_pass(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")
    names = list(tensors_of(tmp_path / "out.w4"))
    assert names[0] == EMBED
    assert names[-2:] == [NORM, HEAD]
    assert names.index("model.layers.0.mlp.down_proj.weight") < names.index("model.layers.1.input_layernorm.weight")


@pytest.mark.parametrize(
    ("scheme", "embeddings", "expected"),
    [
        ("w4a16", None, "int8/g64"), ("w8a16", None, "int8/g64"), ("f16", None, "f16"), ("f32", None, "f32"),
        ("keep", None, "bf16"), ("w4a16", "int4", "int4/g64"), ("w4a16", "f16", "f16"), ("w4a16", "keep", "bf16"),
        ("f32", "int8", "int8/g64"), ("int4z", None, "int8/g64"), ("nf4", "fp4", "fp4/g64"), ("fp4", "f32", "f32"),
    ],
)  # fmt: skip
def test_embeddings(tmp_path: Path, scheme: str, embeddings: str | None, expected: str) -> None:
    model = make_llama_dir(tmp_path / "model", dtype="BF16", layers=1)
    out = tmp_path / "out.w4"
    floats = {scheme, embeddings or scheme} <= {"f16", "bf16", "f32", "keep"}
    report = quantize(model, out, scheme=scheme, embeddings=embeddings, group_size=None if floats else 64, effort=0)
    schemes = tensors_of(out)
    assert str(schemes[EMBED]) == str(schemes[HEAD]) == expected
    with open_container(out) as container:
        assert container.provenance["embeddings"] == report.embeddings
        assert container.provenance["scheme"] == scheme


def test_the_record(model: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "out.w4", group_size=64, effort=0, scheme="w4a16")
    with open_container(tmp_path / "out.w4") as container:
        record = container.provenance
        names = ["config.json", "generation_config.json", "model.safetensors"]
        names += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
        files = {file["name"]: file["nbytes"] for file in record["source"]["files"]}
        assert files == {name: (model / name).stat().st_size for name in names}
        for file, digest in zip(record["source"]["files"], container.source_digests, strict=True):
            assert blake3((model / file["name"]).read_bytes()).hexdigest() == digest
        expected = {"tool": "w4conv 0.1.0", "method": "rtn", "scheme": "w4a16", "group_size": 64}
        assert {key: record[key] for key in expected} == expected
        assert record["source"]["kind"] == "safetensors"
        assert set(record) == {*expected, "embeddings", "source", "notes"}
        for name, data in container.blobs.items():
            assert data == (model / name).read_bytes()
        assert "tokenizer.json" in container.blobs
        assert report.digest == container.digest


def test_the_version_in_the_record_is_that_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{planning.TOOL.removeprefix("w4conv ")}"' in text


def test_the_report_counts_right(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    report = quantize(model, out, effort=0, scheme="w4a16")
    values = source_values(model)
    assert report.output_nbytes == out.stat().st_size
    assert report.input_nbytes == sum(f.stat().st_size for f in model.iterdir())
    assert report.n_tensors == len(values) == sum(t.n_tensors for t in report.schemes)
    assert report.n_parameters == sum(v.size for _, v in values.values()) == sum(t.n_parameters for t in report.schemes)
    assert report.bits_per_weight == pytest.approx(8 * sum(t.nbytes for t in report.schemes) / report.n_parameters)
    assert {t.scheme for t in report.schemes} == {"int4/g128", "int8/g128", "f16"}
    assert report.seconds is not None
    assert report.mb_per_second == pytest.approx(report.input_nbytes / report.seconds / 1e6)
    assert report.architecture == "LlamaForCausalLM"
    assert not report.dry_run


# Same input, same bytes


def test_bytes_depend_on_nothing_but_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_llama_dir(tmp_path / "a", vocab=300, hidden=72)
    second = tmp_path / "elsewhere" / "b"
    shutil.copytree(first, second)
    quantize(first, tmp_path / "1.w4", threads=1, effort=0, scheme="w4a16")
    expected = (tmp_path / "1.w4").read_bytes()
    for threads, block in ((2, 1 << 25), (1, 1), (2, 20_000)):
        monkeypatch.setattr(base, "BLOCK_NBYTES", block)
        quantize(second, tmp_path / "2.w4", threads=threads, overwrite=True, effort=0, scheme="w4a16")
        assert (tmp_path / "2.w4").read_bytes() == expected


def test_shards_give_the_same_tensors(tmp_path: Path) -> None:
    quantize(make_llama_dir(tmp_path / "one"), tmp_path / "one.w4", effort=0, scheme="w4a16")
    quantize(make_llama_dir(tmp_path / "three", shards=3), tmp_path / "three.w4", effort=0, scheme="w4a16")
    with open_container(tmp_path / "one.w4") as one, open_container(tmp_path / "three.w4") as three:
        assert list(one.tensors) == list(three.tensors)
        for name, info in one.tensors.items():
            for part in info.parts:
                assert np.array_equal(one.part(name, part.kind), three.part(name, part.kind))


def test_standard_output_gets_the_same_bytes(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")
    code = f"import w4conv; w4conv.quantize({str(model)!r}, '-', effort=0, scheme='w4a16')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stdout == (tmp_path / "out.w4").read_bytes()
    assert done.stderr == b""


# Dry run and progress


def test_a_dry_run_writes_nothing_and_knows_the_size(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    planned = quantize(model, out, dry_run=True, effort=0, scheme="w4a16")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert planned.dry_run
    assert planned.digest is planned.seconds is planned.mb_per_second is None
    done = quantize(model, out, effort=0, scheme="w4a16")
    assert planned.output_nbytes == out.stat().st_size
    assert (planned.schemes, planned.n_parameters, planned.notes) == (done.schemes, done.n_parameters, done.notes)
    with pytest.raises(OutputError, match="exists already"):
        quantize(model, out, dry_run=True, effort=0, scheme="w4a16")


def test_progress_counts_the_bytes_of_the_weights(model: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, str]] = []

    class Recorder:
        def start(self, total_nbytes: int) -> None:
            calls.append((total_nbytes, "start"))

        def advance(self, nbytes: int, name: str) -> None:
            calls.append((nbytes, name))

    quantize(model, tmp_path / "out.w4", progress=Recorder(), effort=0, scheme="w4a16")
    (total, first), *rest = calls
    assert first == "start"
    assert total == sum(n for n, _ in rest) == sum(v.nbytes for _, v in source_values(model).values())
    assert [name for _, name in rest] == list(tensors_of(tmp_path / "out.w4"))


# Tied heads and tensors that the model does not need


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    model = make_llama_dir(tmp_path / "model", tied=True)
    assert HEAD not in source_values(model)
    report = quantize(model, tmp_path / "plain.w4", effort=0, scheme="w4a16")
    assert not any(HEAD in note for note in report.notes)
    replace_tensors(model, lambda t: t.update({HEAD: t[EMBED]}))
    report = quantize(model, tmp_path / "twice.w4", effort=0, scheme="w4a16")
    assert f"{HEAD} equals {EMBED} and is stored once" in report.notes
    assert HEAD not in tensors_of(tmp_path / "twice.w4")
    with open_container(tmp_path / "twice.w4") as container:
        assert container.provenance["notes"] == list(report.notes)


@pytest.mark.parametrize("how", ["value", "dtype"])
def test_a_head_that_differs_is_stored(tmp_path: Path, how: str) -> None:
    model = make_llama_dir(tmp_path / "model", tied=True)

    def add_head(tensors: dict[str, tuple[str, Any]]) -> None:
        dtype, values = tensors[EMBED]
        other = values.copy()
        other[-1, -1] += 1
        tensors[HEAD] = (dtype, other) if how == "value" else ("F32", values.astype(np.float32))

    replace_tensors(model, add_head)
    report = quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")
    assert any("1 of 300 rows" in warning for warning in report.warnings) == (how == "value")
    assert (HEAD in tensors_of(tmp_path / "out.w4")) == (how == "value"), "the same values in another type are equal"


def test_buffers_of_old_checkpoints_are_left_out_with_a_note(model: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    replace_tensors(model, lambda t: t.update({name: ("F32", np.ones(9, np.float32))}))
    report = quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")
    assert any(name in note for note in report.notes)
    assert name not in tensors_of(tmp_path / "out.w4")


def test_unknown_tensors_are_an_error(model: Path, tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.extra.weight": ("F32", np.ones((2, 2), np.float32)) for i in range(2, 9)}
    replace_tensors(model, lambda t: t.update(extra))
    with pytest.raises(InputError, match=r"does not have: model\.layers\.2\.extra\.weight.* and 2 more"):
        quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")
    assert not (tmp_path / "out.w4").exists()


def test_missing_tensors_are_an_error(model: Path, tmp_path: Path) -> None:
    replace_tensors(model, lambda t: t.pop(UP))
    with pytest.raises(InputError, match=f"missing.*{UP}"):
        quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")


def test_a_shape_that_the_config_does_not_ask_for(model: Path, tmp_path: Path) -> None:
    replace_tensors(model, lambda t: t.update({UP: ("F16", np.ones((100, 71), np.float16))}))
    with pytest.raises(InputError, match=rf"{UP}: shape is \(100, 71\), but the config asks for \(100, 72\)"):
        quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")


# Values


def spoil(model: Path, name: str, at: tuple[int, ...], value: float) -> None:
    def change(tensors: dict[str, tuple[str, Any]]) -> None:
        values = tensors[name][1].astype(np.float32)
        values[at] = value
        tensors[name] = ("F32", values)

    replace_tensors(model, change)


@pytest.mark.parametrize("block", [1, 1 << 25])
@pytest.mark.parametrize(
    ("value", "scheme", "reason"),
    [
        (np.nan, "w4a16", "NaN"),
        (-np.inf, "w8a16", "infinity"),
        (np.nan, "keep", "NaN"),
        (1e6, "w4a16", "a scale beyond FP16"),
        (1e5, "f16", "a value beyond the range of its new type"),
    ],
)
def test_values_that_cannot_be_coded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, scheme: str, reason: str, block: int
) -> None:
    monkeypatch.setattr(base, "BLOCK_NBYTES", block)
    spoil(model, UP, (53, 7), value)
    out = tmp_path / "out.w4"
    column = r"\d+" if "scale" in reason else "7"
    with pytest.raises(InputError, match=f"{UP}: {reason} at row 53, column {column}"):
        quantize(model, out, scheme=scheme, effort=0)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("value", "reason"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_values_of_vectors_are_checked_too(model: Path, tmp_path: Path, value: float, reason: str) -> None:
    spoil(model, NORM, (5,), value)
    with pytest.raises(InputError, match=f"{NORM}: {reason} at element 5"):
        quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")


def test_scales_that_underflow_are_told(model: Path, tmp_path: Path) -> None:
    spoil(model, UP, (slice(0, 3), slice(None)), 1e-9)
    report = quantize(model, tmp_path / "out.w4", group_size=32, effort=0, scheme="w4a16")
    assert [note for note in report.notes if "9 groups in 1 tensors" in note]
    with open_container(tmp_path / "out.w4") as container:
        assert not container.dequantize(UP)[:3].any()
        assert container.dequantize(UP)[3:].any()


# Options and paths


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "q4"}, "unknown scheme 'q4'; choose one of w4a16"),
        ({"embeddings": "int2"}, "unknown embeddings 'int2'; choose one of int4"),
        ({"group_size": 48}, "group size 48 is not one of 16, 32, 64, 128, 256, row"),
        ({"group_size": "all"}, "group size all"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_options_that_do_not_exist(model: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        quantize(model, tmp_path / "out.w4", effort=0, **options)


def test_group_size_row_is_zero() -> None:
    assert make_recipe("w4a16", group_size="row") == make_recipe("w4a16", group_size=0)
    assert make_recipe("w4a16", group_size="64").group_size == 64


def test_the_source_is_never_the_output(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    inside_by_link = tmp_path / "weights.w4"
    inside_by_link.symlink_to(model / "new.w4")
    hard = tmp_path / "hard.w4"
    os.link(model / "model.safetensors", hard)
    before = {f.name: f.read_bytes() for f in model.iterdir()}
    for out in (model, tmp_path / "link", model / "out.w4", model / "sub" / "out.w4", model / "../model/x.w4"):
        with pytest.raises(UsageError, match=r"is the source itself|lies inside the source"):
            quantize(model, out, overwrite=True, effort=0, scheme="w4a16")
    for out in (tmp_path / "link" / "out.w4", inside_by_link):
        with pytest.raises(UsageError, match="lies inside the source"):
            quantize(tmp_path / "link", out, overwrite=True, effort=0, scheme="w4a16")
    with pytest.raises(UsageError, match=r"is model\.safetensors of the source"):
        quantize(model, hard, overwrite=True, effort=0, scheme="w4a16")
    assert {f.name: f.read_bytes() for f in model.iterdir()} == before


def test_a_source_whose_files_are_links_elsewhere(model: Path, tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub: what the links lead to is not written either."""
    cache = tmp_path / "cache"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshot").mkdir()
    for i, file in enumerate(sorted(model.iterdir())):
        file.rename(cache / "blobs" / str(i))
        (cache / "snapshot" / file.name).symlink_to(f"../blobs/{i}")
    quantize(cache / "snapshot", tmp_path / "out.w4", effort=0, scheme="w4a16")
    with open_container(tmp_path / "out.w4") as container:
        assert "model.safetensors" in [file["name"] for file in container.provenance["source"]["files"]]
    target = (cache / "snapshot" / "model.safetensors").resolve()
    with pytest.raises(UsageError, match="of the source"):
        quantize(cache / "snapshot", target, overwrite=True, effort=0, scheme="w4a16")


def test_an_existing_file_survives_a_conversion_that_fails(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    out.write_bytes(b"precious")
    with pytest.raises(OutputError, match="exists already"):
        quantize(model, out, effort=0, scheme="w4a16")
    spoil(model, HEAD, (1, 1), np.nan)  # the last tensor
    with pytest.raises(InputError):
        quantize(model, out, overwrite=True, effort=0, scheme="w4a16")
    assert out.read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out.w4"]


def test_interruption_leaves_nothing(model: Path, tmp_path: Path) -> None:
    class Interrupt:
        def start(self, total_nbytes: int) -> None:
            pass

        def advance(self, nbytes: int, name: str) -> None:
            if name == NORM:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "out.w4", progress=Interrupt(), effort=0, scheme="w4a16")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_source_that_changes_meanwhile_is_an_error(model: Path, tmp_path: Path) -> None:
    class Touch:
        def start(self, total_nbytes: int) -> None:
            pass

        def advance(self, nbytes: int, name: str) -> None:
            os.utime(model / "config.json", ns=(1, 1))

    with pytest.raises(InputError, match=r"config\.json was changed while it was read"):
        quantize(model, tmp_path / "out.w4", progress=Touch(), effort=0, scheme="w4a16")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_full_disk(model: Path) -> None:
    with pytest.raises(OutputError, match=os.strerror(errno.ENOSPC)):
        quantize(model, "/dev/full", effort=0, scheme="w4a16")


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": 1}', "[" * 100_000])
def test_a_config_that_is_none(model: Path, tmp_path: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json|model_type|architecture"):
        quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")


def test_sources_are_closed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the conversion fails."""
    closed: list[bool] = []

    def opened(path: Path, **options: Any) -> Any:
        source = open_source(path, **options)
        close = source.close
        monkeypatch.setattr(source, "close", lambda: (closed.append(True), close()))
        return source

    monkeypatch.setattr(convert, "open_source", opened)
    spoil(model, NORM, (0,), np.nan)
    with pytest.raises(InputError):
        quantize(model, tmp_path / "out.w4", effort=0, scheme="w4a16")
    assert closed == [True]


def test_biases_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Programs that quantize store biases of zeros with every linear layer; other biases are an error."""
    make_llama_dir(tmp_path / "in", biases=("q_proj",), config={"attention_bias": False})
    with pytest.raises(InputError, match=r"q_proj\.bias"):
        convert.quantize(tmp_path / "in", tmp_path / "out.w4")
    path = tmp_path / "in/model.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name.endswith(".bias"):
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            raw[start:end] = bytes(end - start)
    path.write_bytes(raw)
    report = convert.quantize(tmp_path / "in", tmp_path / "out.w4")
    assert any("all are zero: model.layers.0.self_attn.q_proj.bias" in note for note in report.notes)
