"""SmolLM2-135M-Instruct, the model of the demo: its perplexity beside other engines', the memory of a conversion."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import data_dir

import w4conv

pytestmark = pytest.mark.services
DEMO = Path(__file__).parents[2] / "docs/demo/demo.py"

# The same weights (dequantized, in F16) and text, ctx 512, first 32 chunks: transformers in float32 gives 22.5877,
# llama.cpp on an F16 GGUF 22.5879.
PERPLEXITY_F16 = 22.5877
N_SCORED = 8160


@pytest.fixture(scope="module")
def model() -> Path:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    try:
        path: Path = demo.fetch_model(demo.default_folder())
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"the demo's model cannot be fetched: {error}")
    return path


def test_f16_perplexity_equals_transformers_and_llama_cpp(model: Path, tmp_path: Path) -> None:
    text = data_dir("wikitext-2-raw", "wiki.test.raw")
    w4conv.quantize(model, tmp_path / "f16.w4", scheme="f16", effort=0)
    report = w4conv.verify(tmp_path / "f16.w4", ppl=True, text=text, chunks=32)
    assert report.ok
    assert report.perplexity is not None
    assert report.perplexity.n_scored == N_SCORED
    assert report.perplexity.container.value == pytest.approx(PERPLEXITY_F16, rel=1e-3)


CONVERT = """
import sys, threading, time, w4conv

def anonymous_kb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous_kb())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
w4conv.quantize(sys.argv[1], sys.argv[2], effort=0, scheme="w4a16")
done.set()
watcher.join()
print(peak)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to see anonymous memory")
def test_a_conversion_never_holds_the_model(model: Path, tmp_path: Path) -> None:
    """538 MB of float32 pass through; memory stays far below."""
    argv = [sys.executable, "-c", CONVERT, str(model), str(tmp_path / "out.w4")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 400e6
