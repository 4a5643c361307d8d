"""Recipes: which rule counts for which tensor, what is refused, and what a conversion makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import WORDS, make_llama_dir

from w4conv.cli import quantize as command
from w4conv.commands.quantize import quantize
from w4conv.commands.verify import verify
from w4conv.container import open_container
from w4conv.errors import InputError, UsageError
from w4conv.models import parse_config
from w4conv.models.spec import ModelSpec
from w4conv.quantization.recipe import built_in_recipes, make_recipe, read_rules
from w4conv.scheme import TENSOR_WORDS

DOWN, V = "model.layers.{}.mlp.down_proj.weight", "model.layers.{}.self_attn.v_proj.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def spec(*, tied: bool = False) -> ModelSpec:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": tied,
    }  # fmt: skip
    return parse_config(config)


def choices(tmp_path: Path, text: str, *, tied: bool = False, **options: Any) -> dict[str, str]:
    file = tmp_path / "recipe.toml"
    file.write_text(f"[tensors]\n{text}\n")
    recipe = make_recipe(options.pop("scheme", "w4a16"), rules=read_rules(str(file)), **options)
    return {
        name: str(c.coding("BF16")) + (f" {c.method}" if c.method else "")
        for name, c in recipe.choices(spec(tied=tied)).items()
    }


def test_the_last_word_counts_for_each_key(tmp_path: Path) -> None:
    got = choices(
        tmp_path,
        """
        linear = {group = 64}
        "*.down_proj.weight" = {scheme = "int8", method = "rtn"}
        "model.layers.1.*" = {group = "row"}
        "model.layers.1.mlp.down_proj.weight" = {scheme = "nf4"}
        "*.v_proj.weight" = {scheme = "keep"}
        "*.[qk]_proj.weight" = {group = 32}
        """,
        embeddings="int4",
    )
    assert got[EMBED] == got[HEAD] == "int4/g128"
    assert got[DOWN.format(0)] == "int8/g64 rtn"
    assert got[DOWN.format(1)] == "nf4/row rtn"
    assert got[V.format(0)] == got[V.format(1)] == "bf16"
    assert got["model.layers.0.self_attn.q_proj.weight"] == "int4/g32"
    assert got["model.layers.0.self_attn.o_proj.weight"] == "int4/g64"
    assert got["model.layers.1.self_attn.o_proj.weight"] == "int4/row"
    assert got["model.norm.weight"] == got["model.layers.1.input_layernorm.weight"] == "bf16"


def test_roles(tmp_path: Path) -> None:
    both = 'embedding = {scheme = "f16"}\nhead = {scheme = "int4z", group = 32}'
    got = choices(tmp_path, both, scheme="fp4")
    assert (got[EMBED], got[HEAD], got[V.format(0)]) == ("f16", "int4z/g32", "fp4/g128")
    assert choices(tmp_path, both, tied=True)[EMBED] == "int4z/g32"  # which is the head too


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '"*.dwn_proj.weight" = {scheme = "int8"}',
            r"'\*\.dwn_proj\.weight' matches no matrix .* head, linear",
        ),
        ('linear = {group = 64}\n"model.norm.weight" = {scheme = "int8"}', "'model.norm.weight' matches no matrix"),
        ('"down_proj" = {scheme = "int8"}', "'down_proj' matches no matrix"),  # the whole name is meant
    ],
)
def test_a_pattern_that_matches_nothing(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choices(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('linear = {bits = 4}', "unknown key 'bits'; there are scheme, group and method"),
        ('linear = {scheme = "int3"}', "scheme is 'int3', expected one of int4"),
        ('linear = {scheme = "w4a16"}', "scheme is 'w4a16'"),
        ('linear = {group = 48}', "group is 48, expected one of 16, 32, 64"),
        ('linear = {group = true}', "group is True"),
        ('linear = {scheme = "f16", group = 64}', "scheme f16 has no groups"),
        ('linear = {scheme = "keep", group = 64}', "scheme keep has no groups"),
        ('linear = {method = 3}', "method is 3"),
        ('linear = "int8"', "is 'int8', expected a table"),
        ('linear = {}', "expected a table"),
        ('[other]', "unknown key 'other'; a recipe has description"),
        ('linear = {group = 64}\nlinear = {group = 32}', "not TOML"),
        ('', "no patterns"),
    ],
)  # fmt: skip
def test_files_that_say_nothing_clear(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choices(tmp_path, text)


def test_recipes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no recipe 'smal' is built in; there are mixed, small, values\. A file"):
        read_rules("smal")
    with pytest.raises(InputError, match="No such file"):
        read_rules(str(tmp_path / "none.toml"))
    (tmp_path / "raw.toml").write_bytes(b"\xff")
    with pytest.raises(InputError, match="not TOML"):
        read_rules(str(tmp_path / "raw.toml"))


def test_built_in_recipes_are_told_and_fit_any_model() -> None:
    help_text = " ".join(command.EPILOG.split())
    for name, description in built_in_recipes():
        assert f"{name} {description}" in help_text
        for tied in (False, True):
            make_recipe("w4a16", rules=read_rules(name)).choices(spec(tied=tied))
    assert {name for name, _ in built_in_recipes()} == set(command.RECIPES)
    assert set(command.EMBEDDINGS) == set(TENSOR_WORDS)


def test_a_conversion_by_recipe(tmp_path: Path) -> None:
    model = make_llama_dir(tmp_path / "model", dtype="F16", layers=2)
    file = tmp_path / "mine.toml"
    file.write_text('[tensors]\nembedding = {scheme = "keep"}\n"*.layers.1.*" = {scheme = "nf4", group = 32}\n')
    out = tmp_path / "out.w4"
    report = quantize(model, out, recipe=str(file), group_size=64, effort=0, scheme="w4a16")
    assert {(t.scheme, t.n_tensors) for t in report.schemes} == {
        ("f16", 6), ("int4/g64", 7), ("nf4/g32", 7), ("int8/g64", 1),
    }  # fmt: skip
    with open_container(out) as container:
        assert container.provenance["recipe"] == [
            ["embedding", {"scheme": "keep"}],
            ["*.layers.1.*", {"scheme": "nf4", "group": 32}],
        ]
    checked = verify(out, against=model)
    assert checked.round_trip is not None
    assert checked.round_trip.same_codes is True


SMALL: dict[str, Any] = {"calibration_tokens": 256, "calibration_ctx": 32}


def test_methods_for_each_tensor(tmp_path: Path) -> None:
    """A matrix that a recipe rounds to nearest has the bytes of the data-free conversion; the others differ."""
    model = make_llama_dir(tmp_path / "model", layers=2)
    text, file = tmp_path / "text.txt", tmp_path / "mine.toml"
    text.write_text(WORDS * 60)
    file.write_text('[tensors]\n"*.layers.0.*" = {method = "rtn"}\n"*.layers.1.mlp.*" = {scheme = "f16"}\n')
    quantize(model, tmp_path / "plain.w4", group_size=32, effort=0, scheme="w4a16")
    quantize(
        model,
        tmp_path / "out.w4",
        group_size=32,
        recipe=str(file),
        method="gptq",
        calibration=text,
        **SMALL,
        scheme="w4a16",
    )
    with open_container(tmp_path / "plain.w4") as plain, open_container(tmp_path / "out.w4") as out:
        for i, same in ((0, True), (1, False)):
            assert (plain.part(V.format(i), "codes").tobytes() == out.part(V.format(i), "codes").tobytes()) is same
        assert str(out.tensors[DOWN.format(1)].scheme) == "f16"
    checked = verify(tmp_path / "out.w4", against=model)
    assert checked.round_trip is not None
    assert {t.same_codes for t in checked.round_trip.tensors if ".0." in t.name} == {True}
    assert checked.round_trip.same_codes is None


@pytest.mark.parametrize(
    ("rule", "calibrated", "message"),
    [
        ('linear = {method = "gptq"}', False, "method gptq for .*q_proj.weight needs a calibration set"),
        ('embedding = {method = "gptq"}', True, "method gptq for model.embed_tokens.weight, embedding as int8"),
        ('"*.v_proj.weight" = {scheme = "f16", method = "search"}', True, "linear as f16; calibrated are"),
        ('linear = {method = "magic"}', True, "unknown method 'magic'"),
        ('linear = {scheme = "f16"}', True, "nothing to calibrate"),
    ],
)
def test_methods_that_make_no_sense(tmp_path: Path, rule: str, calibrated: bool, message: str) -> None:
    model = make_llama_dir(tmp_path / "model", layers=1)
    text, file = tmp_path / "text.txt", tmp_path / "mine.toml"
    text.write_text(WORDS * 60)
    file.write_text(f"[tensors]\n{rule}\n")
    options: dict[str, Any] = {"calibration": text, **SMALL} if calibrated else {"effort": 0}
    with pytest.raises(UsageError, match=message):
        quantize(model, tmp_path / "out.w4", recipe=str(file), **options, scheme="w4a16")
