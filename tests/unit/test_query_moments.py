"""What keys are multiplied with, against every pair of a query and a key by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import make_llama_dir

from w4conv.models import parse_config
from w4conv.models.rope import RopeSpec
from w4conv.quantization.query_moments import RopeAverage
from w4conv.sources import open_source

N = 11


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_source(make_llama_dir(tmp_path_factory.mktemp("in") / "model", head_dim=12)) as source:
        return parse_config(json.loads(source.blobs["config.json"]))


@pytest.mark.parametrize(
    ("rope", "no_rope", "windows"),
    [
        (RopeSpec(20.0), (), ()),
        (RopeSpec(20.0, partial=0.5), (), ()),
        (RopeSpec(20.0), (0,), ()),
        (RopeSpec(20.0), (), (4, 0)),
    ],
    ids=["all", "partial", "none", "window"],
)
def test_rope_averaged_query_moments(spec: Any, rope: RopeSpec, no_rope: Any, windows: Any) -> None:
    spec = replace(spec, rope=rope, no_rope=no_rope, sliding_windows=windows)
    rng = np.random.default_rng(0)
    query = rng.standard_normal(12)
    n = 0 if no_rope else rope.rotary_dim(12)
    total, pairs = np.zeros((12, 12)), 0
    for m in range(N):
        for k in range(max(0, m - windows[0] + 1) if windows else 0, m + 1):
            rotated = (
                query.copy()
            )  # the score of a key x is rotated . x: the product of both rotated to their positions
            for pair in range(n // 2):
                x = complex(rotated[pair], rotated[pair + n // 2]) * np.exp(1j * (m - k) * 20.0 ** (-2 * pair / n))
                rotated[pair], rotated[pair + n // 2] = x.real, x.imag
            total, pairs = total + np.outer(rotated, rotated), pairs + 1
    found = RopeAverage(spec, 0, N).mean(np.outer(query, query).astype(np.float32))
    np.testing.assert_allclose(found, total / pairs, atol=1e-6)
