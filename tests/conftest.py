"""Puts `tests/` on the import path, so that every test can say `from helpers import make_llama_dir`."""

from __future__ import annotations

import os

import hypothesis
import pytest

# No time is tested; what is found stays with the process, of which there may be several.
hypothesis.settings.register_profile(
    "tests", deadline=None, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch: each process has a core


def pytest_configure(config: pytest.Config) -> None:
    """Where `stories.py` keeps what it makes; processes of pytest-xdist share it."""
    assert config.cache is not None
    os.environ["W4CONV_TEST_CACHE"] = str(config.cache.mkdir("w4conv"))
