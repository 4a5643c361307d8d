"""`w4conv quantize`: report, pipes, refusals, interruption."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from command import COMMAND, TIMEOUT, Runner, default_signals, environment
from helpers import make_llama_dir

DRIVER = """
import os, signal
import w4conv.kernels as kernels
from w4conv.cli.main import main
calls, original = [], kernels.quantize_rtn
def quantize_rtn(*args, **options):
    calls.append(1)
    if len(calls) == 3:
        %s
    return original(*args, **options)
kernels.quantize_rtn = quantize_rtn
main()
"""


def test_report_as_text(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    out = w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "out.w4").done()
    assert out.err == "", "no progress bar where stderr is no terminal"
    size = (tmp_path / "out.w4").stat().st_size
    for part in ("out.w4", "LlamaForCausalLM", "int4/g128", "int8/g128", "bits a weight", f"{size / 1e3:.1f} kB"):
        assert part in out.out


def test_report_as_json(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    report = json.loads(
        w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "out.w4", "--json", "--group-size", "row")
        .done()
        .out
    )
    assert report["schema"] == "w4conv.quantize/1"
    assert report["output_nbytes"] == (tmp_path / "out.w4").stat().st_size
    assert report["group_size"] == 0
    assert not report["dry_run"]
    assert {s["scheme"] for s in report["schemes"]} == {"int4/row", "int8/row", "f16"}


def test_dry_run_writes_nothing_and_says_the_same_size(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    planned = json.loads(
        w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "out.w4", "--dry-run", "--json").done().out
    )
    assert list(tmp_path.iterdir()) == []
    assert planned["dry_run"]
    written = json.loads(
        w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "out.w4", "--json").done().out
    )
    assert planned["output_nbytes"] == written["output_nbytes"]
    assert (
        "would write"
        in w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "o.w4", "--dry-run").done().out
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_same_bytes_by_pipe_and_file(w4: Runner, checkpoint: Path, container: Path, threads: int) -> None:
    piped = w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "-", "--threads", threads)
    assert piped.code == 0
    assert piped.raw == container.read_bytes()
    assert "standard output" in piped.err, "the report goes to stderr when the container goes to stdout"
    report = json.loads(w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "-", "--json").err)
    assert report["out"] == "-"


@pytest.mark.parametrize("embeddings", ["int4", "f16", "keep"])
def test_embeddings_option(w4: Runner, checkpoint: Path, embeddings: str) -> None:
    report = json.loads(
        w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "out.w4", "--embeddings", embeddings, "--json")
        .done()
        .out
    )
    kinds = {s["scheme"].split("/")[0]: s["n_tensors"] for s in report["schemes"]}
    assert kinds == ({"int4": 15, "f16": 5} if embeddings == "int4" else {"int4": 14, "f16": 6})


def test_usage_errors(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    w4("quantize", "--effort", "0", checkpoint, "o.w4", "--scheme", "w3").failed(2, "unknown scheme 'w3'", "w4a16")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "o.w4", "--group-size", "48").failed(
        2, "group size 48", "128"
    )
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "o.w4", "--embeddings", "int2").failed(
        2, "int2", "int8"
    )
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "o.w4", "-t", "0").failed(2, "'-t'")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "o.w4", "-t", "9999").failed(2, "'-t'")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "o.w4", "-t", "two").failed(2, "'-t'", "'two'")
    w4("quantize", checkpoint).failed(2, "Missing argument 'OUT'", "quantize --help")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, checkpoint).failed(2, "the source itself")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, checkpoint / "o.w4").failed(2, "inside the source")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "o.w4", "--sheme", "keep").failed(
        2, "--sheme", "--scheme"
    )
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "o.w4", env={"W4CONV_ISA": "sse9"}).failed(
        2, "sse9"
    )
    assert list(tmp_path.iterdir()) == []


def test_input_errors(w4: Runner, checkpoint: Path, container: Path, tmp_path: Path) -> None:
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "absent", "o.w4").failed(3, "absent", "no such file")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", container, "o.w4").failed(3, "already converted")
    (tmp_path / "empty").mkdir()
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "empty", "o.w4").failed(3, "empty")
    make_llama_dir(tmp_path / "gpt", config={"architectures": ["GPT2LMHeadModel"]})
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "gpt", "o.w4").failed(3, "GPT2LMHeadModel", "not supported")
    broken = make_llama_dir(tmp_path / "cut")
    weights = broken / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "cut", "o.w4").failed(3, "model.safetensors")
    make_llama_dir(tmp_path / "shards", shards=2)
    (tmp_path / "shards" / "model-00002-of-00002.safetensors").unlink()
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "shards", "o.w4").failed(3, "model-00002-of-00002.safetensors")
    assert not (tmp_path / "o.w4").exists()


def test_output_errors(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "old.w4").write_bytes(b"precious")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "old.w4").failed(
        4, "old.w4 exists already", "--overwrite"
    )
    assert (tmp_path / "old.w4").read_bytes() == b"precious"
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "old.w4", "--overwrite").done()
    assert (tmp_path / "old.w4").read_bytes()[:4] == b"\x89W4C"
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, ".").failed(4, "is a directory")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "no/such/o.w4").failed(4, "does not exist")
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "/dev/full").failed(
        4, "/dev/full", "No space left"
    )
    with Path("/dev/full").open("wb") as full:
        w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "-", stdout=full).failed(
            4, "standard output", "No space left"
        )
        w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "new.w4", stdout=full).failed(
            4, "No space left"
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.w4", "old.w4"], "no partial files"


@pytest.mark.parametrize(
    ("name", "code", "message"), [("SIGINT", 130, "interrupted; out.w4 was not written"), ("SIGTERM", 143, "")]
)
def test_interrupted(w4: Runner, checkpoint: Path, tmp_path: Path, name: str, code: int, message: str) -> None:
    driver = DRIVER % f"os.kill(os.getpid(), signal.{name})"
    out = w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "out.w4", code=driver)
    assert (out.code, out.out) == (code, "")
    assert message in out.err
    assert "Traceback" not in out.err
    assert list(tmp_path.iterdir()) == []


def test_interrupted_while_the_reader_of_a_pipe_waits(checkpoint: Path, tmp_path: Path) -> None:
    big = make_llama_dir(tmp_path / "big", hidden=256, inner=512, layers=4)  # more than a pipe holds
    with subprocess.Popen(
        [*COMMAND, "quantize", "--effort", "0", "--scheme", "w4a16", big, "-"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=default_signals,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"\x89W4C"  # it is at work
        process.send_signal(signal.SIGINT)
        process.stdout.close()  # a blocked write ends
        assert process.wait(TIMEOUT) in (0, 130)  # 0 when the closed pipe was seen first
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_internal_errors_have_a_code_of_their_own(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    driver = DRIVER % "raise ZeroDivisionError('oops')"
    w4("quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "out.w4", code=driver).failed(
        5, "internal error", "oops", "W4CONV_DEBUG=1"
    )
    out = w4(
        "quantize", "--effort", "0", "--scheme", "w4a16", checkpoint, "out.w4", code=driver, env={"W4CONV_DEBUG": "1"}
    )
    assert out.code == 5
    assert "Traceback" in out.err
    assert out.err.splitlines()[-1].startswith("w4conv: error: internal error")
    assert list(tmp_path.iterdir()) == []


def test_values_that_cannot_be_coded_name_their_tensor(w4: Runner, tmp_path: Path) -> None:
    import numpy as np
    from helpers import llama_tensors, write_safetensors

    make_llama_dir(tmp_path / "nan", dtype="F32")
    weights = llama_tensors(
        hidden=64, inner=96, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=300, tied=False, biases=(), seed=0
    )
    weights["model.layers.1.mlp.up_proj.weight"][5, 7] = np.nan
    write_safetensors(tmp_path / "nan/model.safetensors", {name: ("F32", v) for name, v in weights.items()})
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "nan", "o.w4").failed(
        3, "model.layers.1.mlp.up_proj.weight", "NaN", "row 5, column 7"
    )
    assert not (tmp_path / "o.w4").exists()


def test_what_is_quantized_already(w4: Runner, tmp_path: Path) -> None:
    import numpy as np
    from helpers import llama_tensors, write_safetensors

    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    make_llama_dir(tmp_path / "fp8", layers=1, config={"quantization_config": settings})
    weights = llama_tensors(
        hidden=64, inner=96, layers=1, heads=4, kv_heads=2, head_dim=16, vocab=300, tied=False, biases=(), seed=0
    )
    raw: dict[str, tuple[str, np.ndarray]] = {}
    for name, array in weights.items():
        if "_proj" in name:
            raw[name] = "F8_E4M3", np.full(array.shape, 0x38, np.uint8)
            raw[f"{name}_scale_inv"] = "F32", np.full((1, 1), 0.5, np.float32)
        else:
            raw[name] = "F16", array.astype(np.float16)
    write_safetensors(tmp_path / "fp8/model.safetensors", raw)
    w4("quantize", "--effort", "0", "fp8", "o.w4").failed(
        2, "quantized already", "F8_E4M3", "--requantize", "--scheme keep"
    )
    assert not (tmp_path / "o.w4").exists()
    assert (
        "rounded a second time"
        in w4("quantize", "--effort", "0", "--scheme", "w4a16", "fp8", "o.w4", "--requantize").done().out
    )
    assert "stored as float32, exactly" in w4("quantize", "--effort", "0", "fp8", "k.w4", "--scheme", "keep").done().out
    assert "fp8" in w4("inspect", "fp8").done().out
    w4("verify", "k.w4", "--against", "fp8").done()


def test_a_budget_of_bits(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    out = w4("quantize", checkpoint, tmp_path / "out.w4", "--target-bpw", "6", "--effort", "1").done().out
    assert re.search(r"down_proj +\d+ (nl[34]|int8)/g\d+", out)
    w4("quantize", checkpoint, tmp_path / "x.w4", "--target-bpw", "2").failed(2, "out of reach")
