"""Numbers and rotary settings of config.json in unusual forms: read as the classes of transformers read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_llama_dir

from w4conv.conversion.declarations import settle_declarations
from w4conv.errors import InputError
from w4conv.models import FAMILIES, parse_config
from w4conv.sources import open_source

torch = pytest.importorskip("torch", reason="torch is the oracle; install the oracle dependency group")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the oracle group")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")

KINDS = [kind for family in FAMILIES for kind in family.ARCHITECTURES.values() if kind != "gemma3"]
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FORMS: dict[str, Any] = {
    "whole float": lambda n: float(n) if type(n) is int else None,
    "integer": lambda n: int(n) if type(n) is float and n == int(n) else None,
    "text": str,
    "text of a float": lambda n: f"{n:e}",
    "fraction": lambda n: n + 0.5 if type(n) is int else None,
    "boolean": lambda n: True,
    "list": lambda n: [n],
    "NaN": lambda n: float("nan"),
    "beyond float64": lambda n: 10**400,
}


def parsed(config: Any) -> Any:
    try:
        return parse_config(config)
    except InputError as error:
        return str(error)


def takes(kind: str, key: str, value: Any) -> bool:
    """Whether the class takes the value as a number, and a model can be made of it."""
    try:
        config = transformers.AutoConfig.for_model(kind, **{**SIZES, key: value})
        with torch.device("meta"):
            transformers.AutoModelForCausalLM.from_config(config)
        return bool(float(getattr(config, key)) == float(value))
    except Exception:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind: str) -> None:
    """Each number that this package reads, in each form: what the class takes is taken; what it refuses is refused, by
    the name of the key. A whole number may always be written as integer or fraction where its meaning is kept."""
    made = transformers.AutoConfig.for_model(kind, **SIZES)
    base = {"architectures": None, **made.to_dict()}
    want = parse_config(base)
    numbers = {k: v for k, v in base.items() if type(v) in (int, float)}
    numbers |= {"head_dim": 16} if "head_dim" in base else {}
    tried = 0
    for key, number in numbers.items():
        if not isinstance(parsed({**base, key: {}}), str):
            continue  # not read
        plain = parse_config({**base, key: number})
        for form, change in FORMS.items():
            if (value := change(number)) is None or type(value) is type(number):
                continue
            tried += 1
            found = parsed({**base, key: value})
            if key != "_sliding_window_pattern" and takes(kind, key, value):  # which no class checks or uses
                assert found == plain, (key, form, found)
            elif form not in ("integer", "whole float") or found != plain:
                assert isinstance(found, str), (key, form)
                assert key in found
    assert tried > 50
    assert parse_config(base) == want


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LINEAR = {"rope_type": "linear", "factor": 2.0}
# What is beside the sizes; every one in a few families.
ROPES: dict[str, Any] = {
    "yarn, whole float": {"rope_scaling": YARN | {"original_max_position_embeddings": 64.0}},
    "llama3, whole float": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32.0}},
    "integers": {"rope_scaling": LLAMA3 | {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
    "yarn, integers": {"rope_parameters": YARN | {"factor": 4, "beta_fast": 32, "beta_slow": 1, "rope_theta": 10000}},
    "theta twice": {"rope_parameters": LINEAR | {"rope_theta": 5e5}, "rope_theta": 1e4},
    "theta beside": {"rope_scaling": LINEAR, "rope_theta": 12345},
    "theta inside": {"rope_scaling": LINEAR | {"rope_theta": 777.0}},
    "type against rope_type": {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
    "type alone": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "two objects": {"rope_scaling": LINEAR, "rope_parameters": YARN},
    "two objects, the first empty": {"rope_scaling": {}, "rope_parameters": YARN},
    "two objects, the first null": {"rope_scaling": None, "rope_parameters": YARN},
    "original beside": {"rope_scaling": YARN, "original_max_position_embeddings": 128},
    "original beside alone": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64,
    },
    "original of llama3 beside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
    "factor against lengths": {"rope_scaling": YARN | {"factor": 2.0}},
    "length not extended": {"rope_scaling": YARN | {"original_max_position_embeddings": 256}},
    "magnitude": {"rope_scaling": YARN | {"attention_factor": 1.25}},
}  # fmt: skip


def oracle(kind: str, settings: Any) -> tuple[Any, Any, bool]:
    """(frequencies, magnitude, whether transformers warns that the factor does not fit)."""
    said: list[str] = []
    rope_utils.logger.warning_once = said.append
    config = transformers.CONFIG_MAPPING[kind].from_dict({**SIZES, **json.loads(json.dumps(settings))})
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        raise AssertionError("a case without scaling")
    frequencies, magnitude = rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, "cpu")
    return frequencies.numpy(), magnitude, any("does not match" in line for line in said)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("case", ROPES)
def test_ropes(tmp_path: Path, kind: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_utils.logger, "warning_once", rope_utils.logger.warning_once)
    settings = ROPES[case]
    frequencies, magnitude, warns = oracle(kind, settings)
    directory = make_llama_dir(tmp_path / "m", vocab=300, hidden=64, inner=96, config={**SIZES, **settings})
    config = json.loads((directory / "config.json").read_text()) | {"model_type": kind, "architectures": None}
    if "rope_theta" not in settings:
        config.pop("rope_theta", None)
    config["num_hidden_layers"] = 2
    (directory / "config.json").write_text(json.dumps(config))
    spec = parse_config(config)
    (table, *_) = spec.rope.tables(spec.head_dim, 8)
    np.testing.assert_allclose(table.frequencies[0], frequencies, rtol=2e-6)
    assert table.magnitude == pytest.approx(magnitude, rel=1e-6)
    with open_source(directory) as source:
        settle_declarations(source)
        assert any("the factor is used" in warning for warning in source.warnings) == warns


FULL, LOCAL = "full_attention", "sliding_attention"
LOCAL_LINEAR = {FULL: YARN | {"rope_theta": 1e6}, LOCAL: LINEAR | {"rope_theta": 1e4}}
NESTED: dict[str, Any] = {
    "each its own": {"rope_parameters": LOCAL_LINEAR},
    "original beside": {"rope_parameters": LOCAL_LINEAR, "original_max_position_embeddings": 128},
    "theta beside": {"rope_parameters": {FULL: LINEAR, LOCAL: LINEAR}, "rope_theta": 5e5, "rope_local_base_freq": 7e3},
    "theta twice": {"rope_parameters": LOCAL_LINEAR, "rope_theta": 5e5, "rope_local_base_freq": 7e3},
    "whole float": {"rope_parameters": {FULL: YARN | {"original_max_position_embeddings": 32.0}, LOCAL: LINEAR}},
    "scaling of the full ones": {"rope_scaling": LINEAR, "rope_theta": 5e5, "rope_local_base_freq": 7e3},
    "factor against lengths": {"rope_parameters": {FULL: YARN | {"factor": 3.0}, LOCAL: LINEAR}},
    "yarn in the windows": {"rope_parameters": {FULL: LINEAR, LOCAL: YARN}},
}  # fmt: skip


@pytest.mark.parametrize("case", NESTED)
def test_ropes_of_kinds_of_layers(case: str) -> None:
    settings = {**SIZES, "head_dim": 16, **NESTED[case]}
    made = transformers.CONFIG_MAPPING["gemma3_text"].from_dict(json.loads(json.dumps(settings)))
    spec = parse_config({"model_type": "gemma3_text", **settings})
    for kind, rope in ((FULL, spec.rope), (LOCAL, spec.local_rope)):
        assert rope is not None
        own = made.rope_parameters[kind]
        if own["rope_type"] == "default":
            assert rope.scaling == "default"
            assert rope.theta == own["rope_theta"]
            continue
        want, magnitude = rope_utils.ROPE_INIT_FUNCTIONS[own["rope_type"]](made, "cpu", layer_type=kind)
        (table, *_) = rope.tables(16, 8)
        np.testing.assert_allclose(table.frequencies[0], want.numpy(), rtol=2e-6)
        assert table.magnitude == pytest.approx(magnitude, rel=1e-6)
