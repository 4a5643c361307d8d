"""The calibration set that comes with w4conv: what it must hold, what it must not, and what is recorded of it."""

from __future__ import annotations

import json
import lzma
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from helpers import data_dir, make_llama_dir
from vocabularies import chat_templates, tokenizer_files

from w4conv.calibration import builtin
from w4conv.calibration.builtin import builtin_text, documents
from w4conv.calibration.text import CTX, read_calibration
from w4conv.commands.calibrate import calibrate
from w4conv.commands.quantize import quantize
from w4conv.container import open_container
from w4conv.errors import InputError, UsageError
from w4conv.models import spec_of
from w4conv.runtime.tokenizer import Tokenizer
from w4conv.sources import open_source

FOLDER = Path(builtin.__file__).parent / "texts"
README = (FOLDER / "README.md").read_text()
RUN = 10  # words in a row that no other text may share
SMALL: dict[str, Any] = {"calibration_tokens": 512, "calibration_ctx": 32}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_dir(tmp_path_factory.mktemp("in") / "model", hidden=48, inner=80)


def plain() -> str:
    """The set without a chat template, made without the code under test's own joining."""
    names = {"system": "System: ", "user": "User: ", "assistant": "Assistant: "}
    found = []
    for d in documents():
        found += [d] if isinstance(d, str) else [names[str(m["role"])] + str(m["content"]) for m in d]
    return "\n\n".join(found) + "\n"


def runs(text: str) -> Counter[tuple[str, ...]]:
    """Ten words in a row, by letters and digits alone: so WikiText's marks apart do not hide any."""
    words = re.findall(r"[^\W_]+", text.lower())
    return Counter(zip(*(words[i:] for i in range(RUN)), strict=False))


def text_of(template: str | None, model: Path) -> builtin.BuiltinText:
    with open_source(model) as source:
        blobs = {name: blob for name, blob in source.blobs.items() if name != "chat_template.jinja"}
        if template is not None:
            blobs["chat_template.jinja"] = template.encode()
        return builtin_text(blobs, Tokenizer(blobs))


def test_every_file_is_in_the_set_and_every_document_once() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {*builtin.KINDS, "README.md"}
    assert all(f"`{name}`" in README for name in builtin.KINDS)
    given = [
        document if name.endswith(".txt") else tuple(json.loads(document)["messages"])
        for name in builtin.KINDS
        for document in (FOLDER / name).read_text().rstrip("\n").split("\n%%\n" if name.endswith(".txt") else "\n")
    ]
    key = str
    assert sorted(given, key=key) == sorted(documents(), key=key)
    for d in documents():
        if not isinstance(d, str):
            roles = [m["role"] for m in d if m["role"] != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_digest_and_licence_are_stated() -> None:
    assert blake3(plain().encode()).hexdigest() == builtin.digest() == builtin.DIGEST, "a new version is due"
    assert f"\n    {builtin.DIGEST}\n" in README
    assert f"version {builtin.VERSION}\n" in README
    assert "Apache-2.0" in README


def test_size_and_density() -> None:
    text = plain().encode()
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) <= 300_000
    assert len(lzma.compress(text, preset=9)) >= 0.3 * len(text)
    assert max(runs(plain()).values()) == 1, "ten words in a row come twice"


def test_enough_tokens_for_any_vocabulary() -> None:
    """Tokens of a vocabulary that cuts as GPT-2 does are at least as many as its cuts, however large it is."""
    cuts = re.findall(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+(?!\S)|\s+", plain())
    assert len(cuts) >= builtin.TOKENS


@pytest.mark.services
@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "gpt-oss", "mistral"])
def test_enough_tokens_for_real_vocabularies(name: str) -> None:
    blobs = tokenizer_files(name)
    tokenizer = Tokenizer(blobs)
    found = builtin_text(blobs, tokenizer)
    assert len(tokenizer.encode(found.content)) >= builtin.TOKENS


def test_nothing_of_what_is_scored_is_in_it() -> None:
    scored = runs(data_dir("wikitext-2-raw", "wiki.test.raw").read_text())
    assert len(scored) > 200_000
    assert not [" ".join(run) for run in runs(plain()) if run in scored]


def test_an_even_subset_has_all_kinds() -> None:
    """Of each kind about its share, in each eighth of the set; so whatever is taken evenly from it has all."""
    kinds = {}
    for name in builtin.KINDS:
        for part in (FOLDER / name).read_text().rstrip("\n").split("\n%%\n" if name.endswith(".txt") else "\n"):
            kinds[part if name.endswith(".txt") else json.loads(part)["messages"][-1]["content"]] = name
    where: dict[str, list[float]] = {name: [] for name in builtin.KINDS}
    at, whole = 0, len(plain())
    for d in documents():
        text = d if isinstance(d, str) else str(d[-1]["content"])
        size = len(d) if isinstance(d, str) else sum(len(str(m["content"])) for m in d)
        where[kinds[text]].append((at + size / 2) / whole)
        at += size
    for name, places in where.items():
        counts, _ = np.histogram(places, bins=8, range=(0, 1))
        assert counts.min() >= 1, (name, counts)


def test_dialogues_take_the_form_of_the_chat_template(model: Path) -> None:
    n = sum(not isinstance(d, str) for d in documents())
    without = text_of(None, model)
    assert (without.content, without.n_chat) == (plain(), 0)
    found = text_of(TEMPLATE, model)
    assert found.n_chat == n
    for d in documents():
        form = d if isinstance(d, str) else "\n".join(f"<{m['role']}>{m['content']}</>" for m in d)
        assert f"{form}\n\n" in found.content + "\n"


def test_a_template_without_system_messages_gets_their_text_before_the_users(model: Path) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    found = text_of(refusing, model)
    first = next(d for d in documents() if not isinstance(d, str) and d[0]["role"] == "system")
    assert f"<user>{first[0]['content']}\n\n{first[1]['content']}</>" in found.content
    assert found.n_chat == text_of(TEMPLATE, model).n_chat


def test_what_a_template_refuses_is_plain_and_counted(model: Path) -> None:
    assert text_of("{{ raise_exception('never') }}", model) == text_of(None, model)
    assert text_of("{{ 1 + 'a' }}", model) == text_of(None, model)
    assert text_of("{# nothing #}", model) == text_of(None, model)
    with pytest.raises(InputError, match="limits"):  # on another machine it might not be reached
        text_of("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", model)
    with pytest.raises(InputError, match="compiled"):
        text_of("{% if %}", model)


def test_a_long_preamble_does_not_come_with_every_dialogue(model: Path) -> None:
    ours = text_of(TEMPLATE, model)
    long = "Knowledge is a library. " * 99
    always = text_of(long + TEMPLATE, model)
    assert always == text_of(None, model)
    unasked = text_of("{% if messages[0].role != 'system' %}" + long + "{% endif %}" + TEMPLATE, model)
    assert unasked.n_chat == ours.n_chat
    assert long not in unasked.content
    added = "<system>You are a helpful assistant.</>\n"
    assert unasked.content.replace(added, "") == ours.content
    assert added not in ours.content
    short = text_of("A short one.\n" + TEMPLATE, model)
    assert short.content.count("A short one.") == ours.n_chat


@pytest.mark.services
def test_real_templates_give_the_dialogues_their_form(model: Path) -> None:
    """All but those for tools alone, and those that always write a long preamble."""
    without, n = text_of(None, model), sum(not isinstance(d, str) for d in documents())
    found = {name: text_of(template, model) for name, template in chat_templates().items()}
    assert len(found) > 40
    assert sum(one.n_chat == n for one in found.values()) >= 0.9 * len(found)
    for name, one in found.items():
        assert one.n_chat in (0, n), name
        assert 0.99 < len(one.content) / len(without.content) < 1.1, name


def test_the_day_does_not_count(model: Path) -> None:
    asking = "{% if strftime_now is defined %}[{{ strftime_now('%Y %H:%M:%S.%f') }}]{% endif %}" + TEMPLATE
    assert "[26 Jul 2024]<user>" in text_of(asking, model).content


def test_the_record_names_the_set(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "o.w4", calibration="builtin", **SMALL, scheme="w4a16")
    with open_container(tmp_path / "o.w4") as container:
        record = container.provenance["calibration"]
    assert record["set"] == "builtin"
    assert record["set_version"] == builtin.VERSION
    assert record["set_blake3"] == builtin.DIGEST
    with open_source(model) as source:
        found = builtin_text(source.blobs, Tokenizer(source.blobs))
    assert record["chat_dialogues"] == found.n_chat == sum(not isinstance(d, str) for d in documents())
    assert record["text_blake3"] == blake3(found.content.encode()).hexdigest() != builtin.DIGEST
    assert (record["tokens"], record["ctx"]) == (512, 32)
    quantize(model, tmp_path / "again.w4", calibration="builtin", **SMALL, scheme="w4a16")
    assert (tmp_path / "o.w4").read_bytes() == (tmp_path / "again.w4").read_bytes()


def test_statistics_name_the_set_too(model: Path, tmp_path: Path) -> None:
    calibrate(model, "builtin", tmp_path / "s.safetensors", tokens=512, ctx=32)
    quantize(model, tmp_path / "o.w4", calibration=tmp_path / "s.safetensors", method="search", scheme="w4a16")
    with open_container(tmp_path / "o.w4") as container:
        record = container.provenance["calibration"]
    assert (record["set"], record["set_version"], record["set_blake3"]) == ("builtin", builtin.VERSION, builtin.DIGEST)


def test_a_file_of_that_name_is_told_by_a_path(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("builtin").write_text("A file of the user's. " * 1000)
    for i, file in enumerate(("./builtin", Path("builtin"), os.path.join(".", "builtin"))):  # noqa: PTH118
        quantize(model, f"{i}.w4", calibration=file, **SMALL, scheme="w4a16")
        with open_container(Path(f"{i}.w4")) as container:
            record = container.provenance["calibration"]
        assert record["text_blake3"] == blake3(Path("builtin").read_bytes()).hexdigest()
        assert "set" not in record
    quantize(model, "b.w4", calibration="builtin", **SMALL, scheme="w4a16")
    with open_container(Path("b.w4")) as container:
        assert container.provenance["calibration"]["set_blake3"] == builtin.DIGEST


def test_too_many_tokens_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the built-in calibration set has .* fewer than"):
        quantize(
            model,
            tmp_path / "o.w4",
            calibration="builtin",
            calibration_tokens=10_000_000,
            calibration_ctx=32,
            scheme="w4a16",
        )


def test_sequences_are_taken_evenly_from_the_whole(model: Path) -> None:
    with open_source(model) as source:
        tokenizer, spec = Tokenizer(source.blobs), spec_of(source.blobs)
        ctx = min(CTX, spec.max_positions)
        cut = read_calibration(None, source.blobs, spec, tokens=16 * ctx, ctx=ctx)
        ids = tokenizer.encode(builtin_text(source.blobs, tokenizer).content)
    assert cut.sequences[0, 1:].tolist() == ids[1:ctx]
    assert cut.sequences[-1, 1:].tolist() == ids[len(ids) - ctx + 1 :]
