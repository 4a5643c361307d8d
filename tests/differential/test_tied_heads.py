"""tie_word_embeddings against a stored head: read as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import write_safetensors
from safetensors import safe_open
from test_multimodal import TEXT, VISION
from tiny_models import Case, torch, transformers

import w4conv
from w4conv.errors import InputError

IDS = np.arange(3, 35)


def edit(folder: Path, change: Any, **keys: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps(config))
    with safe_open(folder / "model.safetensors", "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    change(tensors)
    write_safetensors(folder / "model.safetensors", {n: ("F32", a.astype(np.float32)) for n, a in tensors.items()})


def theirs(folder: Path) -> np.ndarray[Any, Any]:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        out: np.ndarray[Any, Any] = model(torch.tensor(IDS)[None]).logits[0].numpy()
    return out


def ours(folder: Path, **options: Any) -> tuple[np.ndarray[Any, Any], w4conv.ConversionReport]:
    out = folder.with_suffix(".w4")
    report = w4conv.quantize(folder, out, scheme="f32", overwrite=True, **options, effort=0)
    assert w4conv.verify(out, against=folder).ok
    with w4conv.Model(out, kv="f32") as model:
        return model.logits(IDS), report


def embedding(tensors: dict[str, Any]) -> Any:
    return next(value for name, value in tensors.items() if name.endswith("embed_tokens.weight"))


def other_head(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = np.random.default_rng(0).standard_normal(embedding(tensors).shape)


def one_row(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = embedding(tensors).copy()
    tensors["lm_head.weight"][7] *= 1.5


def equal_head(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = embedding(tensors).copy()


def only_head(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


FAMILIES = ["llama", "qwen2", "gemma2", "gemma3_text", "granite", "phi3"]


@pytest.mark.parametrize("change", [other_head, one_row, equal_head, only_head])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_head_of_a_tied_model(tmp_path: Path, family: str, change: Any) -> None:
    folder = Case("m", tmp_path, (family, {"tie_word_embeddings": True})).folder
    edit(folder, change)
    got, report = ours(folder)
    want = theirs(folder)
    assert np.abs(got - want).max() < 1e-4 * max(1, np.abs(want).max())
    expected = {"other_head": "in 301 of 301 rows", "one_row": "in 1 of 301 rows", "only_head": "is the embedding too"}
    words = expected.get(change.__name__)
    assert any(words in note for note in report.warnings) if words else not report.warnings
    if words:
        assert set(report.warnings) <= set(report.notes)
        with w4conv.open(folder.with_suffix(".w4")) as container:
            assert set(report.warnings) <= set(container.provenance["notes"])


@pytest.mark.parametrize("inner", [True, False, None])
@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("change", [other_head, equal_head])
def test_flags_of_a_wrapper(tmp_path: Path, outer: bool | None, inner: bool | None, change: Any) -> None:
    torch.manual_seed(1)
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config)
    folder = tmp_path / "m"
    model.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder, change, tie_word_embeddings=outer, text_config={**text, "tie_word_embeddings": inner})
    config = json.loads((folder / "config.json").read_text())
    for where, flag in ((config, outer), (config["text_config"], inner)):
        if flag is None:
            del where["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert np.abs(ours(folder)[0] - theirs(folder)).max() < 1e-4


@pytest.mark.parametrize("declared", [True, False])
def test_head_by_choice(tmp_path: Path, declared: bool) -> None:
    folder = Case("m", tmp_path, ("llama", {"tie_word_embeddings": declared})).folder
    edit(folder, other_head)
    stored, tied = ours(folder, head="stored")[0], ours(folder, head="tied")[0]
    assert np.abs(stored - theirs(folder)).max() < 1e-4
    edit(folder, equal_head)
    np.testing.assert_array_equal(tied, ours(folder)[0])


def test_no_head_at_all(tmp_path: Path) -> None:
    """transformers would fill it with random numbers."""
    folder = Case("m", tmp_path, ("llama", {"tie_word_embeddings": True})).folder
    want = theirs(folder)
    edit(folder, lambda t: None, tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"missing: lm_head\.weight, as tie_word_embeddings is false"):
        ours(folder)
    assert np.abs(ours(folder, head="tied")[0] - want).max() < 1e-4


def test_a_head_of_another_shape(tmp_path: Path) -> None:
    folder = Case("m", tmp_path, ("llama", {"tie_word_embeddings": True})).folder
    edit(folder, lambda t: t.update({"lm_head.weight": embedding(t)[:284]}))
    with pytest.raises(
        InputError, match=r"lm_head.weight has shape \(284, 64\) and model.embed_tokens.weight \(301, 64\)"
    ):
        ours(folder)
