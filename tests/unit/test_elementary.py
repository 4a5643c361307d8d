"""exp, log, cosine, sine and sums: near the true values, and the same bits whatever numpy and libm find in the CPU."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from w4conv import elementary
from w4conv.measure.divergence import Comparison, kullback_leibler, log_softmax
from w4conv.measure.perplexity import estimate, increase, negative_log_likelihoods
from w4conv.models.rope import RopeSpec
from w4conv.quantization.scores import Turns
from w4conv.runtime.sampling import Sampler

F64 = npt.NDArray[np.float64]


def error(got: float, want: Decimal) -> float:
    """In units of the last place."""
    return float(abs(Decimal(got) - want) / Decimal(math.ulp(got)))


def test_exp_is_within_a_unit_of_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-708, 709, 500), rng.uniform(-1, 1, 500), 10.0 ** rng.uniform(-20, 0, 200), [0.0]])
    with localcontext(prec=50):
        errors = [error(y, Decimal(v).exp()) for v, y in zip(x.tolist(), elementary.exp(x).tolist(), strict=True)]
    assert max(errors) < 1


def test_log_is_within_two_units_of_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(0.5, 2, 500), 2.0 ** rng.uniform(-1000, 1000, 500), [1.0, 5e-324]])
    with localcontext(prec=50):
        assert max(error(elementary.log(v), Decimal(v).ln()) for v in x.tolist() if v != 1) < 2
    assert elementary.log(1.0) == 0


def test_exp_beyond_its_range() -> None:
    x = np.array([-np.inf, -1e300, -709.0, 710.0, np.inf, np.nan, -0.0])
    np.testing.assert_array_equal(elementary.exp(x), [0, 0, 0, np.inf, np.inf, np.nan, 1])
    assert elementary.exp(0.0).shape == ()
    assert elementary.exp(np.zeros((0, 3))).shape == (0, 3)


def test_exp_of_many_values_is_that_of_each() -> None:
    x = np.random.default_rng(0).uniform(-800, 5, (3, 5001))
    want = [float(elementary.exp(v)) for v in x[:, ::97].ravel()]
    np.testing.assert_array_equal(elementary.exp(x)[:, ::97].ravel(), want)


def test_cosine_and_sine_are_those_of_libm() -> None:
    x = np.random.default_rng(0).uniform(-(2**20), 2**20, 5000)
    cos, sin = elementary.cos_sin(x)
    np.testing.assert_allclose(cos, np.cos(x), rtol=0, atol=1e-14)
    np.testing.assert_allclose(sin, np.sin(x), rtol=0, atol=1e-14)


def test_sums_and_means() -> None:
    x = np.array([[1e16, 1.0, -1e16], [3.0, 4.0, 5.0]])
    assert elementary.mean(x) == 13 / 6  # rounded once
    assert elementary.variance(x[1]) == 2 / 3
    assert elementary.total(x[1]) == 12
    assert elementary.total(x[:0]) == 0
    assert elementary.mean(np.array([np.inf, 1.0])) == np.inf
    assert math.isnan(elementary.mean(np.array([np.inf, -np.inf])))


# ---- what rests on them ---------------------------------------------------------------------------------------------


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


def turned() -> F64:
    spec = type("Spec", (), {
        "rope_index": lambda self, layer: 0, "window": lambda self, layer: 0, "head_dim": 32, "rope": RopeSpec(1e4),
        "local_rope": None,
    })()  # fmt: skip
    return Turns(spec, 0, 200).mean(np.arange(32 * 32, dtype=np.float32).reshape(32, 32))


MEASURES: dict[str, Callable[[], object]] = {
    "exp": lambda: elementary.exp(logits()),
    "log": lambda: [elementary.log(x) for x in (np.abs(logits()[0, :5000]) + 0.5).tolist()],
    "cos_sin": lambda: elementary.cos_sin(logits()[0]),
    "negative log-likelihoods": spread_nlls,
    "perplexity": lambda: estimate(spread_nlls()),
    "increase of a perplexity": lambda: increase(spread_nlls()[::2], spread_nlls()[1::2]),
    "log-softmax": lambda: [log_softmax(row) for row in logits()],
    "divergence": lambda: comparison().divergence(),
    "probabilities": lambda: Sampler(temperature=0.7, top_k=5000, top_p=0.9).probabilities(logits()[0]),
    "draws": lambda: [Sampler(temperature=0.9, seed=3)(row) for row in logits()],
    "frequencies": lambda: RopeSpec(1e6, "llama3", 8.0, 1.0, 4.0, 8192).inverse_frequencies(128),
    "dynamic frequencies": lambda: RopeSpec(1e4, "dynamic", 4.0, original_max_positions=512).tables(128, 2048),
    "turns of queries": turned,
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
    code = "import json, test_elementary as t; print(json.dumps({name: t.digest_of(name) for name in t.MEASURES}))"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def dispatched() -> str:
    """Features of this CPU beyond numpy's baseline: without them it takes other code."""
    from numpy._core import _multiarray_umath as umath

    return " ".join(name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name))


ENVIRONMENTS = {
    "numpy without vector instructions": lambda: {"NPY_DISABLE_CPU_FEATURES": dispatched()},
    "a BLAS for other processors": lambda: {"OPENBLAS_CORETYPE": "Prescott"},
    "a libm without fused multiply-add": lambda: {
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-AVX2,-AVX2_Usable,-FMA_Usable"
    },
}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_what_is_reported_depends_on_no_cpu(environment: str) -> None:
    assert digests_with(ENVIRONMENTS[environment]()) == {name: digest_of(name) for name in MEASURES}
