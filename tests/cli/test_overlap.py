"""No command writes onto, inside or around what it reads or was made from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command import Runner
from helpers import make_llama_dir

import w4conv
from w4conv.commands.export import export

TENSOR = "model.norm.weight"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """hf/ and link/ (the same by symlinks), m.w4 made of hf, g.w4 made of g.gguf, a text, a recipe; links to them."""
    hf = make_llama_dir(tmp_path / "hf", tied=True)
    w4conv.quantize(hf, tmp_path / "m.w4", effort=0, scheme="w4a16")
    export(tmp_path / "m.w4", tmp_path / "g.gguf", to="gguf")
    w4conv.quantize(tmp_path / "g.gguf", tmp_path / "g.w4", effort=0, scheme="w4a16")
    (tmp_path / "text.txt").write_text("the thing and her other hand " * 40)
    (tmp_path / "recipe.toml").write_text('[tensors]\nembedding = {scheme = "int8"}\n')
    (tmp_path / "soft").symlink_to("m.w4")
    os.link(tmp_path / "m.w4", tmp_path / "hard")
    os.link(hf / "model.safetensors", tmp_path / "hard.safetensors")
    (tmp_path / "dir").symlink_to("hf")
    cache = tmp_path / "cache"
    cache.mkdir()
    for file in hf.iterdir():
        (cache / file.name).symlink_to(file)
    (tmp_path / "m2.w4.partial").write_bytes((tmp_path / "m.w4").read_bytes())
    (tmp_path / "copy").mkdir()
    for file in hf.iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "calibrate hf text.txt -o hf/model.safetensors",
        "calibrate hf text.txt -o text.txt",
        "calibrate hf text.txt -o hard.safetensors",
        "calibrate cache text.txt -o hf/model.safetensors",
        "calibrate hf text.txt -o hf/new/statistics.safetensors",
        f"cat m.w4 {TENSOR} -o m.w4",
        f"cat m.w4 {TENSOR} -o soft",
        f"cat soft {TENSOR} -o m.w4",
        f"cat m.w4 {TENSOR} -o hard",
        f"cat m.w4 {TENSOR} -o dir/../m.w4",
        f"cat m.w4 {TENSOR} -o hf/config.json",
        f"cat m.w4 {TENSOR} -o dir/norm.npy",
        f"cat g.w4 {TENSOR} -o g.gguf",
        f"cat m2.w4.partial {TENSOR} -o m2.w4",
        "bench m.w4 --html m.w4",
        "bench m.w4 --text text.txt --html text.txt",
        "bench hf --schemes f16 --html hf/report.html",
        "bench g.w4 --html g.gguf",
        "quantize hf text.txt --calibration text.txt",
        "quantize hf recipe.toml --recipe recipe.toml",
        "quantize dir hf/out.w4",
        "quantize cache hf/model.safetensors",
        "export m.w4 hf --to safetensors",
        "export m.w4 dir/ --to mlx",
        "export m.w4 copy --to safetensors",
        "export m.w4 hf/out.gguf --to gguf",
        "export g.w4 g.gguf --to gguf",
        "export m.w4 . --to safetensors",
        "export m.w4 m.w4 --to gguf",
    ],
)
def test_what_is_read_stays(w4: Runner, place: Path, line: str) -> None:
    before = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    done = w4(*line.split(), "--overwrite")
    assert {file: file.read_bytes() for file in place.rglob("*") if file.is_file()} == before
    done.failed(2, "ame another output" if "lies inside" not in done.err else "Write outside")


def test_a_plot_is_not_drawn_into_the_source(w4: Runner, place: Path) -> None:
    line = "verify m.w4 --against hf --text text.txt --ctx 16 --plot"
    w4(*line.split(), "hf/plot.svg").failed(2, "lies inside the source")


def test_standard_streams(w4: Runner, place: Path) -> None:
    before = (place / "m.w4").read_bytes()
    with (place / "m.w4").open("ab") as end:
        w4("cat", "m.w4", TENSOR, stdout=end).failed(2, "standard output is the container itself")
    assert (place / "m.w4").read_bytes() == before
    with (place / "m.w4").open("rb") as stdin:
        code = "import os, sys; os.dup2(os.open('m.w4', os.O_RDONLY), 0)\nfrom w4conv.cli.main import main\nmain()"
        w4("cat", "-", TENSOR, "-o", "m.w4", "--overwrite", code=code).failed(2, "is the container itself")
        assert stdin.read() == before


def test_ordinary_outputs_are_taken(w4: Runner, place: Path) -> None:
    long = "n" * 300
    w4("cat", "m.w4", TENSOR, "-o", long, "--overwrite").failed(4, "cannot write", "name too long")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "hf", long).failed(4, "cannot write")
    w4("cat", "m.w4", TENSOR, "-o", "/dev/null").done()
    w4("cat", "m.w4", TENSOR, "-o", "hard").failed(2, "is the container itself")
    w4("cat", "m.w4", TENSOR, "-o", "norm.npy").done()
    w4("cat", "m.w4", TENSOR, "-o", "norm.npy", "--overwrite").done()
    w4("export", "m.w4", "out", "--to", "safetensors", "--dtype", "bf16").done()
    w4("export", "m.w4", "out", "--to", "safetensors", "--dtype", "bf16", "--overwrite").done()
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "hf", "m.w4", "--overwrite").done()
    w4("calibrate", "hf", "text.txt", "-o", "hf2", "--tokens", "128", "--ctx", "16").done()
    w4("export", "g.w4", "beside.gguf", "--to", "gguf").done()
