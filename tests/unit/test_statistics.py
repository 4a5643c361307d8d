"""Statistics of activations: what is summed, what the file holds, and what conversions make of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from helpers import WORDS, make_llama_dir
from safetensors.numpy import load_file, save_file
from shifted import LEVELS, SHIFTS, by_the_text

from w4conv import kernels
from w4conv.calibration.imatrix import ImportanceMatrix
from w4conv.calibration.sensitivity import PART_WEIGHTS, Sensitivity
from w4conv.calibration.statistics import SavedStatistics
from w4conv.calibration.text import read_calibration
from w4conv.commands.calibrate import calibrate
from w4conv.commands.quantize import quantize
from w4conv.commands.verify import verify
from w4conv.container import open_container
from w4conv.errors import InputError, OutputError, UsageError
from w4conv.quantization.allocation import MENU
from w4conv.quantization.reference import quantize_rtn
from w4conv.runtime.layers import LayeredSource
from w4conv.sources import open_source

SMALL: dict[str, Any] = {"tokens": 512, "ctx": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_dir(tmp_path_factory.mktemp("in") / "model", hidden=48, inner=80)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS * 60)
    return path


@pytest.fixture(scope="module")
def files(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("statistics")
    out = {full: folder / f"{full}.safetensors" for full in (False, True)}
    for full, path in out.items():
        calibrate(model, text, path, full=full, **SMALL)
    return out


@pytest.mark.parametrize("full", [False, True])
def test_what_the_file_holds(files: dict[bool, Path], model: Path, text: Path, full: bool) -> None:
    found = load_file(files[full])
    rows: dict[str, tuple[list[Any], list[Any]]] = {}
    with open_source(model) as source:
        layered = LayeredSource(source)
        cut = read_calibration(text, source.blobs, layered.spec, **SMALL)
        hidden = layered.embed(cut.sequences)
        for i in range(2):
            layer = layered.layer(i).model
            for j, sequence in enumerate(hidden):
                captured = layer.run(sequence, capture=True)
                assert captured is not None
                for place, x in captured._asdict().items():
                    rows.setdefault(f"layers.{i}.{place}", ([], []))[j % 8 == 4].append(x.astype(np.float64))
        weight = source.read("model.norm.weight").astype(np.float64)
    for j, sequence in enumerate(hidden[..., :48].astype(np.float64)):
        normed = sequence / np.sqrt(np.square(sequence).mean(axis=1, keepdims=True) + 1e-5) * weight
        rows.setdefault("head", ([], []))[j % 8 == 4].append(normed)
    assert len(rows) == 9
    for name, parts in rows.items():
        for part, x in enumerate(map(np.concatenate, parts)):
            assert len(x) == (64 if part else 448)
            np.testing.assert_allclose(found[f"{name}.mean"][part], x.mean(axis=0), atol=2e-6)
            np.testing.assert_allclose(found[f"{name}.mean_square"][part], (x * x).mean(axis=0), rtol=1e-4, atol=1e-7)
            if full:
                np.testing.assert_allclose(found[f"{name}.moments"][part], x.T @ x / len(x), rtol=1e-3, atol=1e-5)
    assert len(found) == 9 * (3 if full else 2)


def test_bytes_depend_on_neither_threads_nor_tier(
    model: Path, text: Path, files: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {files[True].read_bytes()}
    for tier in kernels.isa_tiers():
        monkeypatch.setenv("W4CONV_ISA", tier)
        report = calibrate(model, text, tmp_path / tier, full=True, threads=1, **SMALL)
        made.add((tmp_path / tier).read_bytes())
        assert report.nbytes == (tmp_path / tier).stat().st_size
    assert len(made) == 1
    assert report.digest == blake3(made.pop()).hexdigest() == SavedStatistics(files[True]).digest


def test_moments_without_those_of_pairs(files: dict[bool, Path]) -> None:
    """The same diagonal; of different channels the products of their means."""
    whole, plain = (SavedStatistics(files[full]).at_hook(1, "down") for full in (True, False))
    for a, b, mean in zip(whole.second_moments(), plain.second_moments(), plain.mean, strict=True):
        np.testing.assert_allclose(np.diag(a), np.diag(b), rtol=1e-4)
        off = ~np.eye(len(b), dtype=bool)
        np.testing.assert_allclose(b[off], np.multiply.outer(mean, mean)[off], rtol=1e-5)


@pytest.mark.parametrize(
    ("full", "method"), [(False, "search"), (False, "awq"), (False, None), (True, "gptq"), (True, None)]
)
def test_conversions(files: dict[bool, Path], model: Path, tmp_path: Path, full: bool, method: str | None) -> None:
    options: dict[str, Any] = {"calibration": files[full], "method": method, "embeddings": "int4", "group_size": 32}
    report = quantize(model, tmp_path / "o.w4", threads=1, **options)
    assert report.method == (method or ("best" if full else "awq"))
    with open_container(tmp_path / "o.w4") as container:
        record = container.provenance["calibration"]
    assert record["statistics_blake3"] == blake3(files[full].read_bytes()).hexdigest()
    assert (record["tokens"], record["ctx"], record["held_out_sequences"]) == (512, 32, 2)
    assert verify(tmp_path / "o.w4", against=model).ok
    quantize(model, tmp_path / "rtn.w4", method="rtn", embeddings="int4", group_size=32)
    assert (tmp_path / "o.w4").read_bytes() != (tmp_path / "rtn.w4").read_bytes()
    again = tmp_path / "again.w4"
    with pytest.raises(KeyboardInterrupt):
        quantize(model, again, resume=True, progress=Stop(6 + 14 * (report.method == "awq")), **options)
    resumed = quantize(model, again, resume=True, **options)
    assert any(note.startswith("resumed: ") for note in resumed.notes)
    assert again.read_bytes() == (tmp_path / "o.w4").read_bytes()


class Stop:
    """Interrupts when `n` tensors are done."""

    def __init__(self, n: int) -> None:
        self.n = n

    def start(self, total_nbytes: int) -> None:
        pass

    def advance(self, nbytes: int, name: str) -> None:
        self.n -= 1
        if not self.n:
            raise KeyboardInterrupt


def test_gptq_with_moments_beats_search(files: dict[bool, Path], model: Path, text: Path, tmp_path: Path) -> None:
    """By the outputs that the whole models give."""
    from w4conv.runtime.engine import Model
    from w4conv.runtime.tokenizer import Tokenizer

    quantize(model, tmp_path / "keep.w4", scheme="keep")
    for method in ("rtn", "search", "gptq"):
        quantize(model, tmp_path / f"{method}.w4", method=method, calibration=None if method == "rtn" else files[True])
    logits = {}
    for name in ("keep", "rtn", "search", "gptq"):
        with Model(tmp_path / f"{name}.w4") as m:
            logits[name] = m.logits(Tokenizer(m.container.blobs).encode(WORDS))
    error = {name: np.square(found - logits["keep"]).mean() for name, found in logits.items()}
    assert error["gptq"] < 0.8 * error["search"] < 0.8 * error["rtn"]


def test_a_budget_of_bits(files: dict[bool, Path], model: Path, tmp_path: Path) -> None:
    report = quantize(model, tmp_path / "o.w4", calibration=files[False], target_bpw=6, method="search")
    assert report.n_allocated == 16
    assert any("by the statistics" in note for note in report.notes)
    assert report.bits_per_weight <= 6
    name = "model.layers.1.mlp.down_proj.weight"
    with open_source(model) as source:
        spec = LayeredSource(source).spec
        tensors = [t for t in spec.tensors() if t.role == "linear"]
        sensitivity = Sensitivity(source, [(t,) for t in tensors], MENU, threads=1, advance=lambda *_: None)
        losses = sensitivity.from_statistics(SavedStatistics(files[False]))
        w = source.read(name).astype(np.float64)
    squares = load_file(files[False])["layers.1.down.mean_square"][0].astype(np.float64)
    for scheme, loss in zip(MENU, losses[name], strict=True):
        size, x = scheme.group_size, w.astype(np.float32)
        if scheme.has_shifts:
            q, packed, steps = by_the_text(x, size)
            sub_scales, shifts = (packed.astype(np.int64) + 32) % 64 - 32, np.array(SHIFTS)[packed // 64]
            scales, levels = (
                sub_scales * steps[:, None].astype(np.float64),
                LEVELS[q] + np.repeat(shifts, size, axis=1)[:, : w.shape[1]],
            )
        else:
            found = quantize_rtn(x, scheme)
            scales, levels = found.scales.astype(np.float64), found.q
        e = levels * np.repeat(scales, size, axis=1)[:, : w.shape[1]] - w
        relative = (np.square(e) * squares).sum() / (np.square(w) * squares).sum()
        np.testing.assert_allclose(loss, PART_WEIGHTS["down_proj"] * relative, rtol=1e-4)


def changed(path: Path, out: Path, name: str, change: Any = None, **about: str) -> Path:
    """A copy with one tensor changed or left out, and other metadata."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as f:
        metadata = f.metadata() | about
    tensors = load_file(path)
    if change is None:
        tensors.pop(name, None)
    else:
        tensors[name] = change(tensors[name])
    save_file(tensors, out, metadata)
    return out


@pytest.mark.parametrize(
    ("name", "change", "about", "words"),
    [
        ("layers.1.o.mean", None, {}, "layers.1.o.mean is missing, expected F32"),
        ("layers.1.o.mean", lambda a: a[:, :-1].copy(), {}, r"is F32 \[2, 47\], expected F32 \[2, 48\]"),
        ("layers.1.o.mean", lambda a: a * np.float32(np.nan), {}, "layers.1.o: a value is not finite"),
        ("", None, {"architecture": "Qwen2ForCausalLM"}, "is of another model"),
        ("", None, {"format": "pt"}, "no file of statistics"),
    ],
)
def test_files_that_do_not_fit(
    files: dict[bool, Path], model: Path, tmp_path: Path, name: str, change: Any, about: dict[str, str], words: str
) -> None:
    path = changed(files[False], tmp_path / "s.safetensors", name, change, **about)
    with pytest.raises(InputError, match=words):
        quantize(model, tmp_path / "o.w4", calibration=path, method="search")
    assert not (tmp_path / "o.w4").exists()


def test_another_checkpoint_of_the_same_shape(files: dict[bool, Path], tmp_path: Path) -> None:
    other = make_llama_dir(tmp_path / "other", hidden=48, inner=80, seed=1)
    with pytest.raises(InputError, match="weights differ"):
        quantize(other, tmp_path / "o.w4", calibration=files[False])


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.v_proj.weight", "model.norm.weight"])
def test_a_checkpoint_tuned_in_one_tensor(files: dict[bool, Path], model: Path, tmp_path: Path, name: str) -> None:
    """Shapes and other tensors stay as they were, so they reveal nothing."""
    shutil.copytree(model, tmp_path / "tuned")
    path = tmp_path / "tuned" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name] * np.float16(1.01)}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match="weights differ"):
        quantize(tmp_path / "tuned", tmp_path / "o.w4", calibration=files[False])
    save_file(tensors, path, metadata={"format": "pt"})
    assert quantize(tmp_path / "tuned", tmp_path / "o.w4", calibration=files[False]).method == "awq"


def test_options_that_make_no_sense(files: dict[bool, Path], model: Path, text: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"calibration_tokens": 512}, "calibration-tokens, calibration-ctx and special-tokens are for a text"),
        ({"method": "gptq"}, "needs second moments"),
        ({"method": "rtn"}, "no use"),
    ):
        with pytest.raises(UsageError, match=words):
            quantize(model, tmp_path / "o.w4", calibration=files[False], **options)
    with pytest.raises(UsageError, match="Use a longer text"):
        calibrate(model, text, tmp_path / "s", tokens=1 << 20, ctx=32)
    with pytest.raises(OutputError, match="exists already"):
        calibrate(model, text, files[False], **SMALL)


def write_imatrix(path: Path, rows: dict[str, Any], *, kind: str = "imatrix", count: float = 7) -> Path:
    """As llama-imatrix does: sums of squares and how many."""
    import gguf

    writer = gguf.GGUFWriter(path, arch=None)
    writer.add_type(kind)
    writer.add_uint32("imatrix.chunk_count", 3)
    for name, squares in rows.items():
        writer.add_tensor(f"{name}.in_sum2", (squares * 7).astype(np.float32)[None])
        writer.add_tensor(f"{name}.counts", np.array([[count]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_NAMES = {"qkv": ("attn_q", "attn_k", "attn_v"), "o": ("attn_output",), "gate_up": ("ffn_gate", "ffn_up"),
              "down": ("ffn_down",)}  # fmt: skip


def squares_of(path: Path) -> dict[str, Any]:
    found = load_file(path)
    return {
        f"blk.{i}.{name}.weight": found[f"layers.{i}.{place}.mean_square"][0]
        for i in range(2) for place, names in GGUF_NAMES.items() for name in names
    }  # fmt: skip


def test_importance_matrices(files: dict[bool, Path], model: Path, tmp_path: Path) -> None:
    """The same squares as of our own make the same scales, where only these count."""
    path = write_imatrix(tmp_path / "imatrix.gguf", squares_of(files[False]))
    with open_source(model) as source:
        opened = ImportanceMatrix(path)
        opened.check(source, LayeredSource(source).spec)
        for place in GGUF_NAMES:
            found = opened.at_hook(1, place).mean_square
            wanted = load_file(files[False])[f"layers.1.{place}.mean_square"][:1]
            np.testing.assert_allclose(found, np.repeat(wanted, 2, axis=0), rtol=1e-6)
    for name, calibration in (("a", path), ("b", files[False])):
        quantize(model, tmp_path / f"{name}.w4", calibration=calibration, method="search")
    with open_container(tmp_path / "a.w4") as a, open_container(tmp_path / "b.w4") as b:
        record = a.provenance["calibration"]
        assert record["imatrix_blake3"] == blake3(path.read_bytes()).hexdigest()
        assert record["chunk_count"] == 3
        linears = [name for name in a.tensors if "proj" in name]
        same = [np.array_equal(a.part(name, "codes"), b.part(name, "codes")) for name in linears]
    assert np.mean(same) > 0.6  # the others were judged on held-out sequences
    for options, words in (
        ({"method": "gptq"}, "needs second moments"),
        ({"method": "search", "embeddings": "int4"}, r"has no output.weight.in_sum2 in F32.*--process-output"),
    ):
        with pytest.raises((InputError, UsageError), match=words):
            quantize(model, tmp_path / "o.w4", calibration=path, **options)


def test_importance_matrices_that_do_not_fit(files: dict[bool, Path], model: Path, tmp_path: Path) -> None:
    squares = squares_of(files[False])
    name = "blk.1.ffn_down.weight"
    for change, options, words in (
        ({}, {"kind": "model"}, "no importance matrix"),
        ({name: squares[name][:-1]}, {}, "reads 79 channels in it, and 80 here"),
        ({name: squares[name] * np.float32(np.nan)}, {}, "damaged"),
        ({}, {"count": 0.0}, "damaged"),
    ):
        path = write_imatrix(tmp_path / "imatrix.gguf", squares | change, **options)
        with pytest.raises(InputError, match=words):
            quantize(model, tmp_path / "o.w4", calibration=path)
    missing = {key: value for key, value in squares.items() if "down" not in key}
    with pytest.raises(InputError, match=r"has no blk\.0\.ffn_down\.weight\.in_sum2"):
        quantize(model, tmp_path / "o.w4", calibration=write_imatrix(tmp_path / "imatrix.gguf", missing))
