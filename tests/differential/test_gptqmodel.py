"""GPTQ and AWQ exports in GPTQModel on the CPU, and weights that it packs read by us.

It computes in FP16, so its values are ours rounded once to FP16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import converted, recoded
from helpers import llama_tensors, make_llama_dir, write_safetensors

import w4conv
from w4conv.commands.export import export
from w4conv.container import open_container
from w4conv.scheme import QuantScheme
from w4conv.sources import open_source

torch = pytest.importorskip("torch", reason="torch is the oracle; install the oracle dependency group")
pytest.importorskip("gptqmodel", reason="gptqmodel is the consumer; `make test-peers` installs it")

pytestmark = pytest.mark.filterwarnings("default")  # of the package's own
IDS = np.random.default_rng(0).integers(0, 300, 24).tolist()
SHAPE: dict[str, Any] = {"hidden": 128, "inner": 256, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 32}


def load(directory: Path, backend: str) -> Any:
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(str(directory), device="cpu", backend=BACKEND[backend], dtype=torch.float16).model


def theirs(module: Any) -> np.ndarray:
    """(out, in) float16."""
    if type(module).__name__.startswith("Awq"):
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        parts = (module.qweight, module.qzeros, module.scales)
        return dequantize_gemm(*parts, bits=4, group_size=module.group_size).detach().numpy().T
    return module.dequantize_weight().detach().numpy().T


@pytest.mark.parametrize("kind", ["int4", "int4z"])
@pytest.mark.parametrize(("to", "backend"), [("gptq", "TORCH"), ("awq", "TORCH_AWQ")])
def test_export(tmp_path: Path, to: str, backend: str, kind: str) -> None:
    path = converted(tmp_path, **SHAPE | {"head_dim": None})
    if kind == "int4z":
        path = recoded(path, lambda n, s: QuantScheme("int4z", 32, "f16") if "layers" in n else None)
    export(path, tmp_path / "out", to=to)
    model = load(tmp_path / "out", backend)
    n_compared = 0
    with open_container(path) as container:
        for name, module in model.named_modules():
            if hasattr(module, "qweight"):
                expected = container.dequantize(f"{name}.weight").astype(np.float16)
                assert np.array_equal(theirs(module), expected), name
                n_compared += 1
    assert n_compared == 7
    if kind == "int4":
        with torch.no_grad():
            found = model(torch.tensor([IDS])).logits[0].float().numpy()
        with w4conv.Model(path, kv="f32") as ours:
            logits = ours.logits(IDS)
        assert np.abs(found - logits).max() < 1e-2 * np.abs(logits).max()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_import(tmp_path: Path, symmetric: bool, act_order: bool) -> None:
    """It packs in the layout of "gptq_v2"."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    rng = np.random.default_rng(5)
    raw: dict[str, tuple[str, np.ndarray]] = {}
    expected = {}
    weights = llama_tensors(**SHAPE, vocab=300, tied=False, biases=(), seed=3)
    for name, array in weights.items():
        if "_proj" not in name:
            raw[name] = "F16", array.astype(np.float16)
            continue
        n_out, n_in = array.shape
        group = torch.arange(n_in) // 32
        group = group[torch.from_numpy(rng.permutation(n_in))] if act_order else group
        scales = torch.from_numpy((rng.random((n_out, n_in // 32)) * 0.1 + 0.01).astype(np.float16))
        zeros = torch.full(scales.shape, 8.0)
        if not symmetric:
            zeros = torch.from_numpy(rng.integers(0, 16, scales.shape).astype(np.float32))
        linear = torch.nn.Linear(n_in, n_out, bias=False)
        linear.weight.data = torch.from_numpy(array)
        module = TorchLinear(4, 32, symmetric, act_order, n_in, n_out, bias=False)
        module.pack_original(linear, scales, zeros, group.int())
        module.post_init()
        for part, dtype in (("qweight", "I32"), ("qzeros", "I32"), ("scales", "F16"), ("g_idx", "I32")):
            raw[f"{name.removesuffix('weight')}{part}"] = dtype, getattr(module, part).numpy()
        expected[name] = theirs(module)
    settings = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": act_order, "sym": symmetric,
        "checkpoint_format": "gptq_v2",
    }  # fmt: skip
    make_llama_dir(tmp_path / "m", **SHAPE, config={"quantization_config": settings})
    write_safetensors(tmp_path / "m/model.safetensors", raw)
    kind = None if act_order else "int4" if symmetric else "int4z"
    with open_source(tmp_path / "m") as source:
        for name, value in expected.items():
            coding = source.tensors[name].coding
            assert (coding.kind if coding else None) == kind
            assert np.array_equal(source.read(name).astype(np.float16), value), name


@pytest.mark.parametrize("layout", ["auto_round", "auto_awq"])
def test_auto_round(tmp_path: Path, layout: str) -> None:
    """Files of AutoRound, read by GPTQModel, transformers and w4conv."""
    auto_round = pytest.importorskip("auto_round", reason="auto-round is the writer; `make test-peers` installs it")
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the oracle group")
    source = make_llama_dir(tmp_path / "in", **SHAPE | {"head_dim": None})
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    # Without iterations and with zero points it asks for no calibration text.
    rounder = auto_round.AutoRound(model, tokenizer, bits=4, group_size=32, sym=False, iters=0, device_map="cpu")
    rounder.quantize_and_save(str(tmp_path / "out"), format=layout)
    (directory,) = (path.parent for path in (tmp_path / "out").rglob("config.json"))
    w4conv.quantize(directory, tmp_path / "m.w4", effort=0)
    assert w4conv.verify(tmp_path / "m.w4", against=directory).ok
    if layout == "auto_awq":
        loaded = load(directory, "TORCH_AWQ")
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float16, device_map="cpu")
    n_compared = 0
    with open_source(directory) as opened, open_container(tmp_path / "m.w4") as container:
        assert opened.kind == {"auto_round": "auto-round", "auto_awq": "awq"}[layout]
        for name, module in loaded.named_modules():
            if hasattr(module, "qweight"):
                assert container.tensors[f"{name}.weight"].scheme.kind == "int4z"
                assert np.array_equal(opened.read(f"{name}.weight").astype(np.float16), theirs(module)), name
                n_compared += 1
    assert n_compared == 7
