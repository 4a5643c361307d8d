"""Sizes that a config.json claims cost nothing until they are used; what is refused names the key, not the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_llama_dir

from w4conv import quantize
from w4conv.errors import InputError
from w4conv.models import parse_config
from w4conv.models.rope import RopeSpec
from w4conv.models.spec import ModelSpec
from w4conv.runtime.engine import Model

MOST = 1 << 26
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **settings}}


# name -> (keys of config.json, what Model is asked for, positions)
CLAIMS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "positions": ({"max_position_embeddings": MOST}, {}, MOST),
    "positions, f32 keys": ({"max_position_embeddings": MOST}, {"kv": "f32"}, MOST),
    "positions, int8 keys": ({"max_position_embeddings": MOST}, {"kv": "int8"}, MOST),
    "positions, asked for": ({"max_position_embeddings": MOST}, {"ctx": MOST - 1}, MOST - 1),
    "positions within memory": ({"max_position_embeddings": MOST}, {"kv_memory": 1 << 22}, MOST),
    "dynamic": ({"max_position_embeddings": 1024, **rope("dynamic", factor=65536.0)}, {}, MOST),
    "dynamic of one position": ({"max_position_embeddings": 1, **rope("dynamic", factor=float(MOST))}, {}, MOST),
    "dynamic, many positions": ({"max_position_embeddings": MOST // 2, **rope("dynamic", factor=2.0)}, {}, MOST),
    "yarn": ({"max_position_embeddings": 1024, **rope("yarn", factor=65536.0)}, {}, MOST),
    "linear": ({"max_position_embeddings": MOST, **rope("linear", factor=65536.0)}, {}, MOST),
    "llama3": (
        {"max_position_embeddings": MOST,
         **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=MOST // 8)}, {}, MOST,
    ),
    "longrope, long": (
        {"max_position_embeddings": MOST, **rope("longrope", original_max_position_embeddings=2, **FACTORS)}, {}, MOST,
    ),
    "longrope, short": (
        {"max_position_embeddings": MOST, **rope("longrope", original_max_position_embeddings=MOST - 1, **FACTORS)},
        {}, MOST,
    ),
    "window": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": MOST,
         "sliding_window": MOST}, {}, MOST,
    ),
    "small window": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": MOST,
         "sliding_window": 64}, {}, MOST,
    ),
}  # fmt: skip

# Address space is bounded too, so that nothing is reserved in advance either.
SCRIPT = """
import json, resource, sys
from w4conv import kernels
from w4conv.runtime.engine import Model
from w4conv.runtime.layers import LayeredContainer
import w4conv
import numpy as np
path, asked = sys.argv[1], json.loads(sys.argv[2])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
kernels.gemm_nt(np.ones((16, 16), np.float32), np.ones((16, 16), np.float32), threads=2)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), -1))
before = peak()
model = Model(path, threads=2, **asked)
session = model.session()
first = peak() - before
session.append([1, 2, 3])
session.append(list(range(200)) * 4)
layered = LayeredContainer(w4conv.open(path))
layered.layer(0, threads=2).model.run(layered.embed(np.arange(64)))
print(json.dumps([model.ctx, first, peak() - before]))
"""


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_costs_nothing(claim: str, tmp_path: Path) -> None:
    keys, asked, ctx = CLAIMS[claim]
    quantize(make_llama_dir(tmp_path / "hf", config=keys), tmp_path / "m.w4", group_size=32, effort=0, scheme="w4a16")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "m.w4", json.dumps(asked)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "MALLOC_ARENA_MAX": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, before_first_token, after = json.loads(done.stdout)
    assert found == ctx
    assert before_first_token < 20e6
    assert after < 40e6


EXPERTS = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2}
REFUSED = {
    "layers": ({"num_hidden_layers": 1024}, "model.layers.2"),
    "experts": ({**EXPERTS, "num_hidden_layers": 1024, "num_local_experts": 1024}, "num_local_experts"),
    "some experts": ({**EXPERTS, "num_local_experts": 1024}, "experts"),
    "beyond positions": ({"max_position_embeddings": MOST + 1}, "max_position_embeddings"),
    "factor": ({"max_position_embeddings": 1024, **rope("dynamic", factor=65537.0)}, "factor"),
    "vocabulary": ({"vocab_size": 1 << 24}, "embed_tokens"),
}


@pytest.mark.parametrize("claim", REFUSED)
def test_a_claim_beyond_the_file_is_named(claim: str, tmp_path: Path) -> None:
    keys, named = REFUSED[claim]
    with pytest.raises(InputError, match=named):
        quantize(make_llama_dir(tmp_path / "hf", config=keys), tmp_path / "m.w4", effort=0, scheme="w4a16")


@pytest.mark.parametrize("layers", [64, 128, 1024])
def test_experts_of_all_layers_are_bounded(layers: int) -> None:
    keys = {
        **EXPERTS, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64, "num_hidden_layers": layers, "num_local_experts": (1 << 16) // layers,
    }  # fmt: skip
    assert parse_config(keys).n_layers == layers
    with pytest.raises(InputError, match="num_local_experts"):
        parse_config({**keys, "num_local_experts": keys["num_local_experts"] + 1})


@pytest.mark.parametrize(("theta", "factor", "original", "head_dim"), [
    (10000.0, 4.0, 32, 16), (10000.0, 65536.0, 1024, 64), (500000.0, 2.5, 100, 128), (1e308, 8.0, 1, 4),
])  # fmt: skip
def test_rows_of_frequencies_are_those_of_the_whole_table(
    theta: float, factor: float, original: int, head_dim: int
) -> None:
    """However lengths are cut into pieces, in float64 rounded once as for the whole."""
    rope_ = RopeSpec(theta, "dynamic", factor, original_max_positions=original)
    n, end = head_dim, original + 5000
    growth = factor * np.arange(original + 1, end + 1) / original - (factor - 1)
    with np.errstate(over="ignore"):
        whole = ((theta * growth ** (n / (n - 2)))[:, None] ** (-2 * np.arange(n // 2) / n)).astype(np.float32)
        (table,) = rope_.tables(head_dim, end)
        cuts = [0, 1, 2, 5, 8, 1024, 1029, 2048, 4999, 5000]
        rows = [rope_.rows(head_dim, original + 1 + a, original + 1 + b) for a, b in pairwise(cuts)]
    assert np.concatenate(rows).tobytes() == whole.tobytes() == table.frequencies[1:].tobytes()


def test_logits_are_those_of_a_table_made_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"max_position_embeddings": 32, **rope("dynamic", factor=128.0)}
    quantize(make_llama_dir(tmp_path / "hf", config=keys), tmp_path / "m.w4", group_size=32, effort=0, scheme="w4a16")
    ids = np.random.default_rng(0).integers(0, 300, 2500)
    with Model(tmp_path / "m.w4", threads=2) as model:
        session = model.session()
        grown = [session.append(piece)[0] for piece in np.split(ids, [1, 30, 33, 34, 1055, 1056, 1058, 2100])]

    def at_once(spec: ModelSpec, n_positions: int) -> list[tuple[RopeSpec, Any]]:
        (table,) = spec.rope.tables(spec.head_dim, 2600)
        return [(RopeSpec(spec.rope.theta), table)]

    monkeypatch.setattr(ModelSpec, "rope_tables", at_once)
    with Model(tmp_path / "m.w4", threads=2) as model:
        session = model.session()
        wanted = [session.append(piece)[0] for piece in np.split(ids, [1, 30, 33, 34, 1055, 1056, 1058, 2100])]
    assert np.array(grown).tobytes() == np.array(wanted).tobytes()


@pytest.mark.parametrize("kv", ["f16", "f32", "int8"])
def test_keys_stay_where_memory_grows(kv: str, tmp_path: Path) -> None:
    """Room for keys and values is taken anew many times; a session that takes it at once gives the same bits."""
    keys = {"max_position_embeddings": 1 << 20}
    source = make_llama_dir(tmp_path / "hf", config=keys, heads=4, kv_heads=4, head_dim=256, layers=1)
    quantize(source, tmp_path / "m.w4", group_size=32, effort=0, scheme="w4a16")
    n = {"f16": 2300, "f32": 2100, "int8": 4300}[kv]
    ids = np.random.default_rng(0).integers(0, 300, n)
    with Model(tmp_path / "m.w4", threads=2, kv=kv) as model:
        session = model.session()
        for piece in np.split(ids, [100, 257, 1000, n // 2]):
            grown = session.append(piece)
        assert np.isfinite(grown).all()
        again = model.session()
        again.append(ids)
        again.truncate(300)
        assert again.append(ids[300:]).tobytes() == grown.tobytes()
