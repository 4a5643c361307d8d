"""Hugging Face directories: what is read, and everything that must be refused with a clear word."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import as_dtype, llama_tensors, make_llama_dir, write_safetensors
from safetensors.numpy import load_file
from stories import trained

from w4conv.errors import InputError
from w4conv.sources import open_source

SHAPE = {"hidden": 64, "inner": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 300}
INDEX = "model.safetensors.index.json"


def weights(dtype: str, *, tied: bool = False) -> dict[str, np.ndarray]:
    return {n: as_dtype(v, dtype) for n, v in llama_tensors(**SHAPE, tied=tied, biases=(), seed=0).items()}


def edit_index(directory: Path, change) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_comes_back_exactly(tmp_path, dtype, shards):
    with open_source(make_llama_dir(tmp_path / "m", dtype=dtype, shards=shards)) as source:
        expected = weights(dtype)
        assert source.kind == "safetensors"
        assert set(source.tensors) == set(expected)
        for name, values in expected.items():
            tensor = source.tensors[name]
            assert (tensor.name, tensor.shape, tensor.dtype, tensor.stored_as) == (name, values.shape, dtype, dtype)
            got = source.read(name)
            assert got.dtype == values.dtype
            np.testing.assert_array_equal(got, values)
        assert source.notes == ()
        n_sidecars = 5
        assert [f.name for f in source.files][:1] == ["config.json"]
        assert len(source.files) == n_sidecars + shards + (shards > 1)
        assert source.blobs["config.json"] == (tmp_path / "m/config.json").read_bytes()
        assert set(source.blobs) == {
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        }  # fmt: skip


def test_row_slices(tmp_path):
    name = "model.embed_tokens.weight"
    with open_source(make_llama_dir(tmp_path / "m")) as source:
        whole = source.read(name)
        for rows in (slice(0, 16), slice(16, 33), slice(290, 400), slice(5, 5), slice(9, 3), slice(-2, None)):
            np.testing.assert_array_equal(source.read(name, rows), whole[rows])
        np.testing.assert_array_equal(
            source.read("model.norm.weight", slice(3, 9)), source.read("model.norm.weight")[3:9]
        )
        with pytest.raises(ValueError, match="step"):
            source.read(name, slice(0, 8, 2))
        with pytest.raises(KeyError):
            source.read("no.such.tensor")


def test_arrays_outlive_the_source(tmp_path):
    source = open_source(make_llama_dir(tmp_path / "m"))
    array = source.read("model.norm.weight")
    kept = array.copy()
    source.close()
    np.testing.assert_array_equal(array, kept)


def test_unaligned_tensors(tmp_path):
    directory = make_llama_dir(tmp_path / "m", dtype="F32")
    values = {"odd.buffer": ("U8", np.arange(3, dtype=np.uint8))}
    values |= {n: ("F32", v) for n, v in weights("F32").items()}
    write_safetensors(directory / "model.safetensors", values)
    with open_source(directory) as source:
        for name, expected in weights("F32").items():
            np.testing.assert_array_equal(source.read(name), expected)
        assert "odd.buffer" not in source.tensors
        assert source.notes == ("Left out, as no weight is stored in such a dtype: odd.buffer (U8).",)


def test_agrees_with_the_safetensors_package_on_a_real_model():
    directory = trained()
    expected = load_file(directory / "model.safetensors")
    with open_source(directory) as source:
        assert set(source.tensors) == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(source.read(name), values)


def test_links_of_the_download_cache(tmp_path):
    real = make_llama_dir(tmp_path / "real", shards=2)
    snapshot = tmp_path / "hub/models--a--b/snapshots/0123abc"
    blobs = tmp_path / "hub/models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(real.iterdir())):
        file.rename(blobs / f"digest{i}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"digest{i}")
    with open_source(snapshot) as source:
        np.testing.assert_array_equal(source.read("model.norm.weight"), weights("F16")["model.norm.weight"])
        assert {f.name for f in source.files} >= {"config.json", INDEX, "model-00001-of-00002.safetensors"}
    with pytest.raises(InputError, match=r"cache folder; name the snapshot in it: .*/snapshots/0123abc"):
        open_source(snapshot.parents[1])
    (snapshot / "model-00002-of-00002.safetensors").resolve().unlink()
    with pytest.raises(InputError, match=r"1 of 2 shards that the index names are missing: model-00002-of-00002"):
        open_source(snapshot)


def test_truncated_while_open(tmp_path):
    directory = make_llama_dir(tmp_path / "m")
    with open_source(directory) as source:
        os.truncate(directory / "model.safetensors", 4096)
        with pytest.raises(InputError, match=r"shrank from .* to 4096 bytes"):
            source.read("model.norm.weight")
    whole = make_llama_dir(tmp_path / "whole")
    with open_source(whole) as source:
        (whole / "model.safetensors").unlink()  # what is mapped stays, as the file that was opened
        np.testing.assert_array_equal(source.read("model.norm.weight"), weights("F16")["model.norm.weight"])


def test_the_single_file_wins_and_the_rest_is_named(tmp_path):
    directory = make_llama_dir(tmp_path / "m", shards=2)
    write_safetensors(directory / "model.safetensors", {"w": ("F32", np.zeros(1, np.float32))})
    (directory / "pytorch_model.bin").write_bytes(b"PK")
    with open_source(directory) as source:
        assert set(source.tensors) == {"w"}, "as in transformers"
        assert source.warnings == source.notes
        assert re.search(
            rf"more than one set .* model.safetensors holds .* left aside: {INDEX}; model-0", source.notes[0]
        )


def test_choice_of_the_weight_file(tmp_path):
    directory = make_llama_dir(tmp_path / "m")
    model = directory / "model.safetensors"
    (directory / "consolidated.safetensors").write_bytes(b"not read")
    with open_source(directory) as source:
        assert source.notes == ("Left aside, as model.safetensors holds the weights: consolidated.safetensors.",)
    model.rename(directory / "other.safetensors")
    with pytest.raises(InputError, match=r"which weights are meant\? There are consolidated.safetensors, other"):
        open_source(directory)
    (directory / "consolidated.safetensors").unlink()
    with open_source(directory) as source:
        assert source.files[-1].name == "other.safetensors"
    (directory / "other.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    with pytest.raises(InputError, match=rf"shards \(model-00001-of-00001.safetensors\) without {INDEX}"):
        open_source(directory)


def test_index_and_shards_must_agree(tmp_path):
    directory = make_llama_dir(tmp_path / "m", shards=2)
    good = (directory / INDEX).read_text()
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    norm = "model.norm.weight"

    def refused(change, match):
        (directory / INDEX).write_text(good)
        edit_index(directory, change)
        with pytest.raises(InputError, match=match):
            open_source(directory)

    refused(
        lambda m: m.update({"model.extra.weight": first}), "tensors that the index names are in no shard: model.extra"
    )
    refused(lambda m: m.pop(norm), f"{second}: {norm}: the index does not list it")
    refused(lambda m: m.update({norm: first}), f"{second}: {norm}: the index puts it into {first}")
    refused(lambda m: m.update({norm: "model-00003-of-00002.safetensors"}), "1 of 3 shards .* are missing: model-00003")
    for name in (
        "/etc/a.safetensors",
        "../a.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "..",
        "x.bin",
        "a\0.safetensors",
        3,
    ):
        refused(lambda m, name=name: m.update({norm: name}), f"{norm}: .* is not the name of a .safetensors file")
    refused(lambda m: m.clear(), "no weight_map")
    (directory / INDEX).write_text(good.replace('"weight_map": {', f'"weight_map": {{"{norm}": "{first}", '))
    with pytest.raises(InputError, match=f"the key '{norm}' stands twice"):
        open_source(directory)
    (directory / INDEX).write_text(good)
    write_safetensors(directory / first, {norm: ("F32", np.zeros(64, np.float32))})
    edit_index(directory, lambda m: [m.pop(k) for k, v in list(m.items()) if v == first] and m.update({norm: first}))
    with pytest.raises(InputError, match=f"{norm} is in two shards, {first} and {second}|does not list|puts it"):
        open_source(directory)


def test_a_tensor_in_two_shards(tmp_path):
    directory = make_llama_dir(tmp_path / "m", shards=2)
    tensor = {"a.weight": ("F32", np.zeros(4, np.float32))}
    write_safetensors(directory / "one.safetensors", tensor)
    write_safetensors(directory / "two.safetensors", tensor | {"b.weight": ("F32", np.zeros(4, np.float32))})
    shards = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    with pytest.raises(InputError, match=r"a\.weight is in two shards, one\.safetensors and two\.safetensors"):
        open_source(directory)


def test_several_indexes(tmp_path):
    directory = make_llama_dir(tmp_path / "m", shards=2)
    (directory / "model.fp32.safetensors.index.json").write_text("{}")
    with open_source(directory) as source:
        assert len(source.tensors) == len(weights("F16"))
    (directory / INDEX).rename(directory / "a.safetensors.index.json")
    with pytest.raises(InputError, match="which index is meant"):
        open_source(directory)
    (directory / "model.fp32.safetensors.index.json").unlink()
    with open_source(directory) as source:
        assert len(source.tensors) == len(weights("F16"))


def test_not_a_model(tmp_path):
    directory = make_llama_dir(tmp_path / "m")
    model = directory / "model.safetensors"
    model.rename(tmp_path / "kept")
    with pytest.raises(InputError, match="no safetensors weights"):
        open_source(directory)
    (directory / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"the only weights are pytorch_model\.bin\. PyTorch pickles can run any code"):
        open_source(directory)
    (directory / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"GGUF files; name one of them: .*m\.gguf"):
        open_source(directory)
    (directory / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"this is an adapter .*merge it into its base model"):
        open_source(directory)
    (directory / "config.json").unlink()
    (tmp_path / "kept").rename(model)
    with pytest.raises(InputError, match=r"no config\.json"):
        open_source(directory)


@pytest.mark.parametrize("key", ["quantization_config", "quantization"])
def test_plain_weights_whose_config_says_quantized(tmp_path, key):
    """What the file holds decides."""
    config = {key: {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    with open_source(make_llama_dir(tmp_path / "m", config=config)) as source:
        assert set(source.tensors) == set(weights("F16"))
        assert ["every tensor is plain" in warning for warning in source.warnings] == [True]


@pytest.mark.parametrize("name", ["q_proj.qweight", "q_proj.weight_packed", "q_proj.weight.absmax", "q_proj.scales"])
def test_packed_tensors_are_refused(tmp_path, name):
    directory = make_llama_dir(tmp_path / "m")
    write_safetensors(directory / "model.safetensors", {name: ("I32", np.zeros((2, 2), np.int32))})
    with pytest.raises(
        InputError, match=f"{name} belongs to a quantized checkpoint, but config.json says nothing of it"
    ):
        open_source(directory)


@pytest.mark.parametrize(("dtype", "numpy"), [("F8_E4M3", np.uint8), ("F64", np.float64), ("I8", np.int8)])
def test_weights_of_another_dtype_are_refused(tmp_path, dtype, numpy):
    directory = make_llama_dir(tmp_path / "m")
    write_safetensors(directory / "model.safetensors", {"model.norm.weight": (dtype, np.zeros(4, numpy))})
    with pytest.raises(InputError, match=f"model.norm.weight: stored as {dtype}; only F16, BF16 and F32"):
        open_source(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_sidecars_that_are_no_files(tmp_path, name):
    directory = make_llama_dir(tmp_path / "m")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(InputError, match=f"{name}: is not a regular file"):
        open_source(directory)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' stands twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_broken_config(tmp_path, text, match):
    directory = make_llama_dir(tmp_path / "m")
    (directory / "config.json").write_text(text)
    with pytest.raises(InputError, match=f"config.json: .*{match}"):
        open_source(directory)


def test_missing_tokenizer_is_noted(tmp_path):
    with open_source(make_llama_dir(tmp_path / "m", tokenizer=False)) as source:
        assert source.notes == ("There is no tokenizer.json: the result cannot turn text into tokens.",)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("model.safetensors", b"", "name the directory that holds it"),
        ("model.safetensors.index.json", b"{}", "name the directory that holds it"),
        ("config.json", b"{}", "name the directory that holds it"),
        ("a.w4", b"", "already converted"),
        ("noname", b"\x89W4C\r\n\x1a\n", "already converted"),
        ("pytorch_model.bin", b"PK\3\4", "can run any code"),
        ("model.pt", b"", "can run any code"),
        ("legacy", b"\x80\x02}", "can run any code"),
        ("decoder.onnx", b"\x08\x07", "ONNX is not supported"),
        ("weights.npz", b"PK\3\4", "MLX or numpy is not supported"),
        ("README", b"text", "this file's format is not supported"),
    ],
)
def test_other_files(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=match):
        open_source(tmp_path / name)


def test_missing_path(tmp_path):
    make_llama_dir(tmp_path / "SmolLM2-135M")
    with pytest.raises(InputError, match=r"no such file or directory; is .*/SmolLM2-135M meant\?"):
        open_source(tmp_path / "SmolLM-135M")
    with pytest.raises(InputError, match=r"no such file or directory; .*/nowhere does not exist either"):
        open_source(tmp_path / "nowhere/model")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a file or a directory"):
        open_source(tmp_path / "pipe")
