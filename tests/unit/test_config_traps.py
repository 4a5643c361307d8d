"""Configs and checkpoints that say one thing and hold another: each converted, or refused, as it should be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import EOS, make_llama_dir, real_configs, tiny_tokenizer, write_safetensors
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer

import w4conv
from w4conv.commands.quantize import ConversionReport, quantize
from w4conv.errors import InputError, UsageError
from w4conv.models import parse_config
from w4conv.runtime.tokenizer import Tokenizer as OurTokenizer


def edit_config(directory: Path, *, drop: tuple[str, ...] = (), **keys: Any) -> None:
    path = directory / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(config | keys))


def load(directory: Path) -> dict[str, np.ndarray]:
    with safe_open(directory / "model.safetensors", "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping


def save(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    write_safetensors(directory / "model.safetensors", {name: ("F32", value) for name, value in tensors.items()})


def kept(directory: Path) -> ConversionReport:
    return quantize(directory, directory.with_suffix(".w4"), scheme="keep", overwrite=True, effort=0)


def logits(directory: Path) -> np.ndarray:
    with w4conv.Model(directory.with_suffix(".w4")) as model:
        return model.logits([256, 5, 77, 12])


def test_an_explicit_head_dim_counts(tmp_path: Path) -> None:
    """head_dim is not hidden_size / heads in many models; ignoring it would give other shapes."""
    directory = make_llama_dir(tmp_path / "m", head_dim=24, dtype="F32")
    kept(directory)
    assert logits(directory).shape == (4, 300)
    edit_config(directory, drop=("head_dim",))
    with pytest.raises(InputError, match=r"q_proj.weight: shape is \(96, 64\), but the config asks for \(64, 64\)"):
        kept(directory)


def test_a_tied_head_with_a_stored_copy(tmp_path: Path) -> None:
    """An equal copy is left out with a note; a head that differs is used."""
    directory = make_llama_dir(tmp_path / "m", dtype="F32", tied=True)
    kept(directory)
    expected = logits(directory)
    tensors = load(directory)
    embedding = tensors["model.embed_tokens.weight"]
    for head, words in ((embedding, "equals"), (embedding + 1, "differs from .* in 300 of 300 rows")):
        save(directory, tensors | {"lm_head.weight": head})
        report = kept(directory)
        assert any(re.search(f"lm_head.weight {words}", note) for note in report.notes)
        with w4conv.open(directory.with_suffix(".w4")) as container:
            assert ("lm_head.weight" in container.tensors) == (words != "equals")
        assert np.array_equal(logits(directory), expected) == (words == "equals")


def test_a_head_that_is_missing(tmp_path: Path) -> None:
    directory = make_llama_dir(tmp_path / "m", tied=True)
    edit_config(directory, tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"missing: lm_head\.weight"):
        kept(directory)


def test_without_generation_config(tmp_path: Path) -> None:
    directory = make_llama_dir(tmp_path / "m")
    (directory / "generation_config.json").unlink()
    kept(directory)
    with w4conv.open(directory.with_suffix(".w4")) as container:
        assert "generation_config.json" not in container.blobs
        assert OurTokenizer(container.blobs).stop_ids() == {257}


def test_biases_though_the_flag_says_no(tmp_path: Path) -> None:
    """Dropping them would be silent damage; biases of zeros change nothing and are noted."""
    directory = make_llama_dir(tmp_path / "m", biases=("q_proj",))
    edit_config(directory, attention_bias=False)
    with pytest.raises(InputError, match=r"tensors that LlamaForCausalLM does not have: .*q_proj\.bias"):
        kept(directory)


def test_a_sliding_window_longer_than_the_context(tmp_path: Path) -> None:
    """It has no effect, and is no reason to refuse."""
    plain = make_llama_dir(tmp_path / "a", architecture="MistralForCausalLM", dtype="F32")
    windowed = make_llama_dir(
        tmp_path / "b", architecture="MistralForCausalLM", dtype="F32", config={"sliding_window": 1 << 18}
    )
    for directory in (plain, windowed):
        kept(directory)
    np.testing.assert_array_equal(logits(plain), logits(windowed))


@pytest.mark.parametrize("model", ["Phi-4-mini-instruct", "Mistral-7B-v0.1", "Qwen2.5-7B"])
def test_windows_of_real_models(model: str) -> None:
    """Phi-4-mini's is longer than its context, Mistral's shorter, Qwen2.5's switched off."""
    config = real_configs()[model]
    window = {"Phi-4-mini-instruct": 262144, "Mistral-7B-v0.1": 4096, "Qwen2.5-7B": 0}[model]
    spec = parse_config(config)
    assert {spec.window(layer) for layer in range(spec.n_layers)} == {window}


def test_one_is_added_to_the_norms_of_gemma_once(tmp_path: Path) -> None:
    """Norms of zeros there are norms of ones elsewhere; the container holds what the checkpoint does."""
    config = {
        "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64,
        "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 1e3,
    }  # fmt: skip
    directory = make_llama_dir(tmp_path / "m", architecture="Gemma2ForCausalLM", dtype="F32", tied=True, config=config)
    tensors = {name: value for name, value in load(directory).items() if "norm" not in name}
    places = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    names = [f"model.layers.{i}.{place}.weight" for i in range(2) for place in places] + ["model.norm.weight"]
    found = {}
    for value in (0.0, 1.0):
        norms = {name: np.full(64, value, np.float32) for name in names}
        save(directory, tensors | norms)
        kept(directory)
        with w4conv.open(directory.with_suffix(".w4")) as container:
            np.testing.assert_array_equal(container.dequantize("model.norm.weight"), norms["model.norm.weight"])
        found[value] = logits(directory)
    # The last norm doubles what becomes logits; the others double the branches, so that nothing else is that simple.
    last = {name: np.full(64, float(name == "model.norm.weight"), np.float32) for name in names}
    save(directory, tensors | last)
    kept(directory)
    np.testing.assert_allclose(logits(directory), 2 * found[0.0], rtol=1e-3, atol=1e-3)
    assert not np.allclose(found[1.0], 2 * found[0.0], atol=0.1)


@pytest.mark.parametrize("dtype", [None, {"dtype": "float32"}, {"torch_dtype": "bfloat16"}])
def test_the_type_of_weights_is_that_of_the_file(tmp_path: Path, dtype: dict[str, str] | None) -> None:
    """torch_dtype may be absent, have its new name, or be wrong."""
    directory = make_llama_dir(tmp_path / "m", dtype="F16")
    edit_config(directory, drop=("torch_dtype",), **(dtype or {}))
    kept(directory)
    with w4conv.open(directory.with_suffix(".w4")) as container:
        assert {str(info.scheme) for info in container.tensors.values()} == {"f16"}


@pytest.mark.parametrize(
    "architectures", [["LlavaForConditionalGeneration"], ["LlamaForCausalLM", "LlavaForConditionalGeneration"]]
)
def test_a_multimodal_wrapper_is_refused_by_name(tmp_path: Path, architectures: list[str]) -> None:
    directory = make_llama_dir(tmp_path / "m", config={"architectures": architectures})
    with pytest.raises(InputError, match=f"architectures: {', '.join(architectures)} is not supported; known are"):
        kept(directory)


def test_a_vocabulary_that_is_padded(tmp_path: Path) -> None:
    """More logits than tokens: an id without a token has no text."""
    directory = make_llama_dir(tmp_path / "m", vocab=320)
    tiny_tokenizer(300).save(str(directory / "tokenizer.json"))
    kept(directory)
    with w4conv.Model(directory.with_suffix(".w4")) as model:
        tokenizer = OurTokenizer(model.container.blobs)
        assert tokenizer.n_tokens < model.spec.vocab_size
        assert model.logits([319]).shape == (1, 320)
        assert tokenizer.text_token(319) is None
        assert tokenizer.decode([256, 319]) == ""


def test_a_vocabulary_larger_than_the_model_s(tmp_path: Path) -> None:
    directory = make_llama_dir(tmp_path / "m", vocab=270)
    tiny_tokenizer(300).save(str(directory / "tokenizer.json"))
    with pytest.raises(InputError, match=r"tokenizer\.json has tokens up to \d+, but the model only 270: .* another"):
        kept(directory)
    (directory / "tokenizer.json").unlink()
    kept(directory)


def test_added_tokens_beyond_the_model(tmp_path: Path) -> None:
    """As in a text model made from a multimodal one: noted, and refused where one is used."""
    directory = make_llama_dir(tmp_path / "m", vocab=300)
    tokenizer: Tokenizer = tiny_tokenizer(300)
    n = tokenizer.get_vocab_size()
    edit_config(directory, vocab_size=n)
    tensors = load(directory)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:n]
    write_safetensors(directory / "model.safetensors", {name: ("F16", v) for name, v in tensors.items()})
    tokenizer.add_special_tokens([AddedToken("<image>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    report = kept(directory)
    assert any(f"adds tokens up to {n}, but the model has only {n}" in note for note in report.notes)
    with w4conv.Model(directory.with_suffix(".w4")) as model:
        ids = OurTokenizer(model.container.blobs).encode(f"a<image>{EOS}")
        assert n in ids
        with pytest.raises(UsageError, match=f"token id {n} is outside the vocabulary of {n}"):
            model.logits(ids)
