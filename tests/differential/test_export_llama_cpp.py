"""GGUF exports in llama.cpp: it loads them, cuts text into the same tokens, and computes the same thing.

llama.cpp rounds activations to 8 bits, w4conv to 16, so results agree to a percent, not to a bit.
"""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from exports import same, schemes, values
from helpers import data_dir, make_llama_dir
from stories import trained

import w4conv
from w4conv.commands.export import export
from w4conv.container import open_container
from w4conv.measure.perplexity import make_windows, token_nlls
from w4conv.runtime.chat import ChatTemplate
from w4conv.runtime.tokenizer import Tokenizer

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is the consumer; it is built from source")

TEXT = """Hello, World! It's 12345.678 degrees; don't   panic...\ttab
Grüße aus Köln — naïve café, 日本語のテキスト, русский текст. 😀👍🏽
def f(x):
    return x**2 + 1  # comment


"quotes" 'single' (a+b)*c == 100% I'LL we'Ve 3rd 2024-01-02   end
"""


def load(path: Path, ctx: int) -> object:
    return llama_cpp.Llama(
        str(path), n_ctx=ctx, n_batch=ctx, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1
    )


def logits(llm: object, ids: list[int]) -> np.ndarray:
    llm.reset()
    llm.eval(ids)
    return np.array(llm.scores[: len(ids)], np.float64)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
def test_logits_of_float_weights(tmp_path: Path, architecture: str) -> None:
    """Nothing is quantized, so every mistake of order, name or metadata shows."""
    make_llama_dir(tmp_path / "in", architecture=architecture, dtype="F32", hidden=64, inner=96)
    w4conv.quantize(tmp_path / "in", tmp_path / "m.w4", scheme="f32", effort=0)
    export(tmp_path / "m.w4", tmp_path / "m.gguf", to="gguf")
    ids = np.random.default_rng(0).integers(0, 300, 40).tolist()
    with w4conv.Model(tmp_path / "m.w4", kv="f32") as model:
        ours = model.logits(ids)
    theirs = logits(load(tmp_path / "m.gguf", 64), ids)
    assert np.abs(ours - theirs).max() < 2e-2 * np.abs(theirs).max()  # its keys and values are FP16


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
def test_chat_template(tmp_path: Path, architecture: str) -> None:
    """llama.cpp finds the template in the file, recognises it, and writes the chat as we do."""
    source = make_llama_dir(tmp_path / "in", architecture=architecture, hidden=64, inner=96)
    (source / "chat_template.jinja").write_text(CHATML)
    w4conv.quantize(source, tmp_path / "m.w4", group_size=32, effort=0)
    export(tmp_path / "m.w4", tmp_path / "m.gguf", to="gguf")
    llm = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    template = llama_cpp.llama_model_chat_template(llm.model, None)
    assert template == CHATML.encode()
    chat = [("system", "Be brief."), ("user", "Grüße 1 + 1?"), ("assistant", "2"), ("user", "Why?")]
    messages = (llama_cpp.llama_chat_message * len(chat))(*((role.encode(), text.encode()) for role, text in chat))
    room = ctypes.create_string_buffer(4096)
    n = llama_cpp.llama_chat_apply_template(template, messages, len(chat), True, room, len(room))
    with open_container(tmp_path / "m.w4") as container:
        template_of_ours = ChatTemplate.from_blobs(container.blobs)
    ours = template_of_ours.render([{"role": role, "content": text} for role, text in chat], special_tokens={})
    assert room.raw[:n].decode() == ours


@pytest.mark.parametrize(
    ("file_type", "qtype", "scheme"),
    [
        (2, "Q4_0", "int4/g32"), (3, "Q4_1", "int4o/g32"), (7, "Q8_0", "int8/g32"), (8, "Q5_0", "int8/g32"),
        (9, "Q5_1", "int8o/g32"), (10, "Q2_K", "int4o/g16/i8"), (11, "Q3_K", "int4/g16/i8"),
        (14, "Q4_K", "int4o/g32/i8"), (16, "Q5_K", "int8o/g32/i8"), (18, "Q6_K", "int8/g16/i8"),
        (25, "IQ4_NL", "iq4nl/g32"), (30, "IQ4_XS", "iq4nl/g32/i8"), (36, "TQ1_0", "int4/g256"),
        (37, "TQ2_0", "int4/g256"),
    ],
)  # fmt: skip
def test_files_that_llama_cpp_has_quantized(tmp_path: Path, file_type: int, qtype: str, scheme: str) -> None:
    """Its own quantizer's blocks are kept by default, mean the same in both engines, and go back as they were."""
    make_llama_dir(tmp_path / "in", dtype="F32", hidden=256, inner=512)
    w4conv.quantize(tmp_path / "in", tmp_path / "f.w4", scheme="f32", effort=0)
    export(tmp_path / "f.w4", tmp_path / "f.gguf", to="gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.pure, settings.nthread = file_type, True, 1
    paths = [str(tmp_path / name).encode() for name in ("f.gguf", "q.gguf")]
    assert llama_cpp.llama_model_quantize(*paths, settings) == 0
    assert w4conv.quantize(tmp_path / "q.gguf", tmp_path / "q.w4", effort=0).scheme == "keep"
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "q.gguf").tensors}
    found = values(tmp_path / "q.w4")
    for ours, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        name, tensor = f"model.layers.1.{ours}.weight", stored[f"blk.1.{theirs}.weight"]
        assert tensor.tensor_type.name == qtype
        assert str(schemes(tmp_path / "q.w4")[name]) == scheme
        assert same(found[name], gguf.dequantize(tensor.data, tensor.tensor_type))
    assert w4conv.verify(tmp_path / "q.w4", against=tmp_path / "q.gguf").ok
    ids = np.random.default_rng(0).integers(0, 300, 40).tolist()
    with w4conv.Model(tmp_path / "q.w4", kv="f32") as model:
        ours = model.logits(ids)
    theirs = logits(load(tmp_path / "q.gguf", 64), ids)
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.1 * np.std(theirs)  # its activations have 8 bits
    assert export(tmp_path / "q.w4", tmp_path / "again.gguf", to="gguf").exact
    if qtype not in ("Q5_0", "TQ1_0", "TQ2_0"):  # these go out as Q8_0 and Q4_0
        for tensor in gguf.GGUFReader(tmp_path / "again.gguf").tensors:
            assert np.array_equal(tensor.data, stored[tensor.name].data), tensor.name


@pytest.mark.parametrize("file_type", [10, 12, 15, 17], ids=["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M"])
def test_mixtures_that_llama_cpp_has_quantized(tmp_path: Path, file_type: int) -> None:
    """Its own choice of types: kept whole, and nothing of it lost."""
    make_llama_dir(tmp_path / "in", dtype="F32", hidden=256, inner=512)
    w4conv.quantize(tmp_path / "in", tmp_path / "f.w4", scheme="f32", effort=0)
    export(tmp_path / "f.w4", tmp_path / "f.gguf", to="gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = file_type, 1
    paths = [str(tmp_path / name).encode() for name in ("f.gguf", "q.gguf")]
    assert llama_cpp.llama_model_quantize(*paths, settings) == 0
    assert w4conv.quantize(tmp_path / "q.gguf", tmp_path / "q.w4", effort=0).scheme == "keep"
    assert w4conv.verify(tmp_path / "q.w4", against=tmp_path / "q.gguf").ok
    found = values(tmp_path / "q.w4")
    (tensor,) = (t for t in gguf.GGUFReader(tmp_path / "q.gguf").tensors if t.name == "blk.1.attn_v.weight")
    want = gguf.dequantize(tensor.data, tensor.tensor_type)
    assert same(found["model.layers.1.self_attn.v_proj.weight"], want)


def test_a_trained_model_with_pieces(tmp_path: Path) -> None:
    w4conv.quantize(trained(), tmp_path / "s.w4", group_size=32, effort=0)
    export(tmp_path / "s.w4", tmp_path / "s.gguf", to="gguf")
    llm = load(tmp_path / "s.gguf", 256)
    with open_container(tmp_path / "s.w4") as container:
        tokenizer = Tokenizer(container.blobs)
    ids = tokenizer.encode(TEXT)
    assert llm.tokenize(TEXT.encode(), add_bos=True, special=True) == ids
    start = tokenizer.encode("Once upon a time")
    with w4conv.Model(tmp_path / "s.w4") as model:
        ours = list(model.generate(start, max_tokens=12))
    theirs = []
    for token in llm.generate(start, temp=0.0, repeat_penalty=1.0):
        theirs.append(token)
        if len(theirs) == len(ours):
            break
    assert theirs == ours


@pytest.mark.parametrize("group_size", [32, 128])
def test_perplexity_of_a_real_model(tmp_path: Path, group_size: int) -> None:
    folder = os.environ.get("W4CONV_TEST_MODEL")
    if folder is None:
        pytest.skip("no real model (set W4CONV_TEST_MODEL to the directory of one, such as SmolLM2-135M-Instruct)")
    text = data_dir("wikitext-2-raw", "wiki.test.raw").read_text()[:100_000]
    w4conv.quantize(folder, tmp_path / "m.w4", group_size=group_size, effort=0)
    export(tmp_path / "m.w4", tmp_path / "m.gguf", to="gguf")
    llm = load(tmp_path / "m.gguf", 512)
    with open_container(tmp_path / "m.w4") as container:
        tokenizer = Tokenizer(container.blobs)
        assert llm.tokenize(TEXT.encode(), add_bos=True, special=True) == tokenizer.encode(TEXT)
        bos_id = tokenizer.bos_id if tokenizer.adds_bos else None
        windows = make_windows(tokenizer.encode(text), convention="llama.cpp", ctx=512, bos_id=bos_id, chunks=8)
        with w4conv.Model(container, ctx=512) as model:
            ours = float(np.mean(token_nlls(model, windows)))
    nlls = []
    for window in windows.tokens.tolist():
        rows = logits(llm, window)[256:511]
        top = rows.max(axis=1, keepdims=True)
        log_p = rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True))
        nlls.append(-log_p[np.arange(255), window[257:512]])
    assert math.exp(float(np.mean(nlls)) - ours) == pytest.approx(1, abs=0.01)
