"""What is reported, drawn and calibrated is the same bits whatever numpy, its BLAS and libm find in the CPU."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from helpers import WORDS, make_llama_dir

import w4conv
from w4conv import elementary
from w4conv.measure.divergence import Comparison, kullback_leibler, log_softmax
from w4conv.measure.perplexity import estimate, increase, negative_log_likelihoods
from w4conv.models.rope import RopeSpec
from w4conv.quantization.query_moments import RopeAverage
from w4conv.runtime.sampling import Sampler, Sampling, logprob

F64 = npt.NDArray[np.float64]


def logits() -> npt.NDArray[np.float32]:
    """(12, 50021), the same everywhere: the golden angle's multiples, some large."""
    whole = np.arange(12 * 50021, dtype=np.int64) * 2654435769 % 2**20
    return ((whole - 2**19).astype(np.float32) * np.float32(2**-14)).reshape(12, -1)


def comparison() -> Comparison:
    rows = logits()
    q, p = [log_softmax(row) for row in rows[::2]], [log_softmax(row) for row in rows[1::2]]
    klds = np.array([[kullback_leibler(b, a) for a, b in zip(q, p, strict=True)]])
    nlls, base = (-np.array([[row[7] for row in side]]) for side in (q, p))
    return Comparison(nlls, base, klds, np.array([[True, False, True, True, False, True]]))


def spread_nlls() -> F64:
    return negative_log_likelihoods(logits(), np.arange(12) * 999)


def query_moments() -> F64:
    spec = type("Spec", (), {
        "rope_index": lambda self, layer: 0, "window": lambda self, layer: 0, "head_dim": 32, "ropes": (RopeSpec(1e4),),
    })()  # fmt: skip
    return RopeAverage(spec, 0, 200).mean(np.arange(32 * 32, dtype=np.float32).reshape(32, 32))


def converted(**options: object) -> str:
    """Digest of a small checkpoint's container, calibrated on a text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = make_llama_dir(folder / "hf", dtype="F32", hidden=64, inner=96)
        (folder / "text.txt").write_text(WORDS * 200)
        return w4conv.quantize(
            source, folder / "m.w4", calibration=folder / "text.txt", calibration_tokens=2048, calibration_ctx=128,
            **options,  # type: ignore[arg-type], scheme="w4a16"
        ).digest  # fmt: skip


MEASURES: dict[str, Callable[[], object]] = {
    "exp": lambda: elementary.exp(logits()),
    "log": lambda: [elementary.log(x) for x in (np.abs(logits()[0, :5000]) + 0.5).tolist()],
    "cos_sin": lambda: elementary.cos_sin(logits()[0]),
    "negative log-likelihoods": spread_nlls,
    "perplexity": lambda: estimate(spread_nlls()),
    "increase of a perplexity": lambda: increase(spread_nlls()[::2], spread_nlls()[1::2]),
    "log-softmax": lambda: [log_softmax(row) for row in logits()],
    "divergence": lambda: comparison().divergence(),
    "draws": lambda: [Sampler(Sampling(temperature=0.9, top_p=0.95, seed=3))(row) for row in logits()],
    "log-probabilities": lambda: [logprob(row, 7, n_top=5) for row in logits()],
    "frequencies": lambda: RopeSpec(1e6, "llama3", 8.0, 1.0, 4.0, 8192).inverse_frequencies(128),
    "dynamic frequencies": lambda: RopeSpec(1e4, "dynamic", 4.0, original_max_positions=512).tables(128, 2048),
    "query second moments": query_moments,
    **{
        f"container: {method}": functools.partial(converted, method=method, group_size=32)
        for method in ("search", "awq", "gptq", "best")
    },
    "container: int4z": lambda: converted(scheme="int4z", group_size=32),
    "container: budget of bits": lambda: converted(target_bpw=5),
}  # fmt: skip


def digest_of(measure: str) -> str:
    parts: list[bytes] = []

    def add(x: object) -> None:
        if isinstance(x, np.ndarray):
            parts.append(x.tobytes())
        elif isinstance(x, (list, tuple)):
            for item in x:
                add(item)
        else:
            parts.append(repr(x).encode())

    add(MEASURES[measure]())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def digests_with(environment: dict[str, str]) -> dict[str, str]:
    """In a process of its own."""
    code = (
        "import json, test_other_processors as t; print(json.dumps({name: t.digest_of(name) for name in t.MEASURES}))"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))  # an empty one would be the current folder
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def dispatched() -> str:
    """Features of this CPU beyond numpy's baseline: without them it takes other code."""
    from numpy._core import _multiarray_umath as umath

    return " ".join(name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name))


@functools.cache
def digests_here() -> dict[str, str]:
    return {name: digest_of(name) for name in MEASURES}


ENVIRONMENTS = {
    "numpy without vector instructions": lambda: {"NPY_DISABLE_CPU_FEATURES": dispatched()},
    "a BLAS for other processors": lambda: {"OPENBLAS_CORETYPE": "Prescott"},
    "a libm without fused multiply-add": lambda: {
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-AVX2,-AVX2_Usable,-FMA_Usable"
    },
}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_neither_figures_nor_containers_depend_on_the_processor(environment: str) -> None:
    assert digests_with(ENVIRONMENTS[environment]()) == digests_here()
