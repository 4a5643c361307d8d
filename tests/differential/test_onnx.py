"""ONNX exports in onnxruntime: the decoder computes what the engine does, and its operators hold the very values."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import config, converted, parts, recoded, same, values
from helpers import tiny_tokenizer
from tiny_models import MODELS, Case, rope

import w4conv
from w4conv.commands.export import export
from w4conv.errors import InputError, UsageError
from w4conv.exports.onnx import _pairs
from w4conv.scheme import QuantScheme
from w4conv.sources import open_source

onnx = pytest.importorskip("onnx", reason="onnx writes and reads the graph; install the oracle dependency group")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is the consumer; install the oracle group")

IDS = np.random.default_rng(0).integers(0, 300, 24)
SHAPE: dict[str, Any] = {"hidden": 128, "inner": 256, "heads": 4, "kv_heads": 2}
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
INT4Z = QuantScheme("int4z", 32, "f16")
NF4 = QuantScheme("nf4", 32, "f32")


class Session:
    """A decoder of ours in onnxruntime, fed with its own keys and values."""

    def __init__(self, directory: Path) -> None:
        self._session = onnxruntime.InferenceSession(str(directory / "model.onnx"), providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._past = {
            i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32)
            for i in self._session.get_inputs()
            if i.name.startswith("past")
        }
        self._n = 0

    def logits(self, ids: np.ndarray) -> np.ndarray:
        self._n += len(ids)
        feed = {"input_ids": ids[None].astype(np.int64), "attention_mask": np.ones((1, self._n), np.int64)}
        found = dict(zip(self._outputs, self._session.run(None, feed | self._past), strict=True))
        self._past = {name.replace("present", "past_key_values"): a for name, a in found.items() if name != "logits"}
        return found["logits"][0]


def reference(path: Path, ids: np.ndarray) -> np.ndarray:
    """The engine in float32 on the values of the container."""
    export(path, path.with_name("plain"), to="safetensors")
    w4conv.quantize(path.with_name("plain"), path.with_name("f32.w4"), scheme="f32", effort=0)
    with w4conv.Model(path.with_name("f32.w4"), kv="f32") as model:
        return model.logits(ids.tolist())


CASES: dict[str, tuple[dict[str, Any], Callable[..., QuantScheme | None] | None]] = {
    "g32": ({"group_size": 32}, None),
    "g128": ({"group_size": 128, "tied": True}, None),
    "row": ({"group_size": "row", "inner": 200}, None),
    "short groups": ({"group_size": 64, "hidden": 288, "head_dim": 32, "inner": 200}, None),
    "w8": ({"scheme": "w8a16"}, None),
    "f16": ({"scheme": "f16", "tied": True}, None),
    "bf16": ({"scheme": "bf16", "dtype": "BF16"}, None),
    "zero points": ({}, lambda n, s: INT4Z if "down" in n or "embed" in n else None),
    "codebook": ({}, lambda n, s: NF4 if "down" in n else None),
    "biases": ({"biases": EVERY}, None),
    "qwen2": ({"architecture": "Qwen2ForCausalLM"}, None),
    "window": ({"architecture": "MistralForCausalLM", "config": {"sliding_window": 8}}, None),
    "llama3": ({"config": {"rope_scaling": LLAMA3}}, None),
    "linear": ({"config": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_decoder(tmp_path: Path, case: str) -> None:
    """A prompt at once, and token by token, gives the logits of the engine; the values are read back exactly."""
    options, choose = CASES[case]
    path = converted(tmp_path, **SHAPE | options)
    path = recoded(path, choose) if choose else path
    report = export(path, tmp_path / "out", to="onnx")
    assert report.exact
    expected = reference(path, IDS)
    at_once = Session(tmp_path / "out").logits(IDS)
    tolerance = 1e-5 * np.abs(expected).max()
    assert np.abs(at_once - expected).max() < tolerance
    session = Session(tmp_path / "out")
    steps = [session.logits(IDS[:10]), *(session.logits(IDS[i : i + 1]) for i in range(10, len(IDS)))]
    assert np.abs(np.concatenate(steps) - expected).max() < tolerance
    assert w4conv.verify(tmp_path / "out", against=path).ok


# Every family without experts, with what the tiny ones of transformers lack.
GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 20}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-yarn": MODELS["qwen2-yarn"],
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"head_dim": 64, **rope("default", partial_rotary_factor=0.75)}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 6}),
    "olmo2": ("olmo2", {}),
    "granite": MODELS["granite-multipliers"],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    kind, settings = FAMILIES[name]
    case = Case(name, tmp_path, (kind, settings | {"intermediate_size": 192}))
    w4conv.quantize(case.folder, tmp_path / "m.w4", group_size=32, effort=0, scheme="w4a16")
    assert export(tmp_path / "m.w4", tmp_path / "out", to="onnx").exact
    expected = reference(tmp_path / "m.w4", case.tokens)
    session = Session(tmp_path / "out")
    found = [session.logits(case.tokens[:40]), *(session.logits(case.tokens[i : i + 1]) for i in range(40, 64))]
    assert np.abs(np.concatenate(found) - expected).max() < 1e-4 * np.abs(expected).max()
    assert w4conv.verify(tmp_path / "out", against=tmp_path / "m.w4").ok


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral", "experts"),
        ("phi3-longrope", "depends on the length"),
        ("llama-rope-dynamic", "depends on the length"),
    ],
)
def test_what_has_no_graph(tmp_path: Path, name: str, reason: str) -> None:
    w4conv.quantize(Case(name, tmp_path).folder, tmp_path / "m.w4", group_size=32, effort=0, scheme="w4a16")
    with pytest.raises(InputError, match=reason):
        export(tmp_path / "m.w4", tmp_path / "out", to="onnx")


def test_bytes() -> None:
    """The example of the operator's description: 0 to 7 are the bytes 10 32 54 76."""
    assert _pairs(np.arange(8, dtype=np.uint8)[None], fill=8).tobytes().hex() == "10325476"
    assert _pairs(np.array([[5, 6, 7]], np.uint8), fill=8).tobytes().hex() == "6587"


@pytest.mark.parametrize("kind", ["int4", "int4z", "int8"])
def test_one_operator(tmp_path: Path, kind: str) -> None:
    """MatMulNBits of a unit matrix gives the weights themselves, bit for bit."""
    path = converted(tmp_path, **SHAPE)
    name = "model.layers.1.mlp.down_proj.weight"
    path = recoded(path, lambda n, s: QuantScheme(kind, 64, "f16") if n == name else None)
    export(path, tmp_path / "out", to="onnx")
    model = onnx.load(str(tmp_path / "out/model.onnx"))
    node = next(n for n in model.graph.node if n.op_type == "MatMulNBits" and n.input[1] == name)
    initializers = [i for i in model.graph.initializer if i.name in node.input]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [value(node.input[0], onnx.TensorProto.FLOAT, [None, 256])],
        [value(node.output[0], onnx.TensorProto.FLOAT, [None, 128])],
        initializers,
    )
    alone = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)
    session = onnxruntime.InferenceSession(alone.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {node.input[0]: np.eye(256, dtype=np.float32)})[0].T
    assert same(found, values(path)[name])


def test_there_and_back(tmp_path: Path) -> None:
    path = recoded(converted(tmp_path, **SHAPE), lambda n, s: INT4Z if "up_proj" in n else None)
    export(path, tmp_path / "out", to="onnx")
    w4conv.quantize(tmp_path / "out", tmp_path / "again.w4", effort=0)
    assert parts(tmp_path / "again.w4") == parts(path)
    assert w4conv.verify(tmp_path / "again.w4", against=tmp_path / "out").ok


def test_layout_of_genai(tmp_path: Path) -> None:
    path = converted(tmp_path, **SHAPE, tied=True)
    report = export(path, tmp_path / "out", to="onnx")
    found = config_of_genai(tmp_path / "out")
    decoder = found["decoder"]
    assert (found["type"], found["vocab_size"], found["context_length"]) == ("llama", 300, 256)
    assert (found["bos_token_id"], found["eos_token_id"]) == (256, [257])
    assert (decoder["head_size"], decoder["num_key_value_heads"], decoder["num_hidden_layers"]) == (32, 2, 2)
    inputs = {i.name for i in onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx")).get_inputs()}
    assert inputs == {
        decoder["inputs"]["input_ids"], decoder["inputs"]["attention_mask"],
        *(decoder["inputs"][f"past_{kind}_names"] % i for kind in ("key", "value") for i in range(2)),
    }  # fmt: skip
    assert {file.name: file.nbytes for file in report.files} == {
        p.name: p.stat().st_size for p in (tmp_path / "out").iterdir()
    }
    embedding = 300 * 128 + 300 * 4 * 4
    linears = 2 * sum(n * k // 2 + n * k // 32 * 4 for n, k in [(128, 128)] * 2 + [(64, 128)] * 2 + [(256, 128)] * 3)
    rest = 5 * 128 * 4 + 2 * 256 * 16 * 4  # norms; cos and sin
    assert (tmp_path / "out/model.onnx.data").stat().st_size == embedding + linears + rest, "a tied head is stored once"
    export(path, tmp_path / "out", to="onnx", overwrite=True)
    with pytest.raises(InputError, match="name the directory that holds it"):
        open_source(tmp_path / "out/model.onnx")


def config_of_genai(directory: Path) -> dict[str, Any]:
    out: dict[str, Any] = json.loads((directory / "genai_config.json").read_text())["model"]
    return out


@pytest.mark.parametrize("name", ["llama", *FAMILIES])
def test_genai_generates(tmp_path: Path, name: str) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai: `make test-peers` installs it")
    if name == "llama":
        path = converted(tmp_path, **SHAPE)
    else:
        kind, settings = FAMILIES[name]
        path = tmp_path / "m.w4"
        case = Case(name, tmp_path, (kind, settings | {"intermediate_size": 192}))
        tiny_tokenizer(300).save(str(case.folder / "tokenizer.json"))
        w4conv.quantize(case.folder, path, group_size=32, effort=0, scheme="w4a16")
    export(path, tmp_path / "out", to="onnx")
    model = genai.Model(str(tmp_path / "out"))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=40, do_sample=False)
    generator = genai.Generator(model, settings)
    prompt = IDS[IDS > 2]  # a token that pads is none of the text
    generator.append_tokens(prompt[None].astype(np.int32))
    found = []
    for _ in range(12):
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    reference(path, prompt)
    with w4conv.Model(path.with_name("f32.w4"), kv="f32") as engine:
        assert found == list(engine.generate(prompt.tolist(), max_tokens=12))


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = converted(tmp_path, heads=8, kv_heads=4)
    with pytest.raises(InputError, match="heads have 8 columns; onnxruntime takes multiples of 16"):
        export(path, tmp_path / "out", to="onnx")
    path = converted(tmp_path / "b", **SHAPE)
    export(path, tmp_path / "b/out", to="onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"needs the onnx package.*Install w4conv\[onnx\]"):
        export(path, tmp_path / "b/other", to="onnx")
    with pytest.raises(UsageError, match=r"needs the onnx package.*Install w4conv\[onnx\]"):
        open_source(tmp_path / "b/out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"location": "../model.onnx.data"}, "not in a file of this directory"),
        ({"offset": "9999999999"}, "ends before it"),
        ({"length": "1"}, "do not fit its shape"),
        ({"offset": "-1"}, "do not fit its shape"),
    ],
)
def test_hostile_places(tmp_path: Path, change: dict[str, str], message: str) -> None:
    path = converted(tmp_path, **SHAPE)
    export(path, tmp_path / "out", to="onnx")
    model = onnx.load(str(tmp_path / "out/model.onnx"), load_external_data=False)
    for item in model.graph.initializer[4].external_data:
        item.value = change.get(item.key, item.value)
    (tmp_path / "out/model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=message):
        open_source(tmp_path / "out")
    (tmp_path / "out/model.onnx").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(InputError, match="not an ONNX model"):
        open_source(tmp_path / "out")
    assert config(tmp_path / "out")["torch_dtype"] == "float32"
