"""The engine against transformers (float32, CPU), and against itself: tiers, threads, chunkings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reference_forward import ReferenceModel
from stories import trained
from tiny_models import MODELS, N_TOKENS, Case

import w4conv
from w4conv import kernels
from w4conv.container import open_container
from w4conv.runtime.engine import Model


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("scheme", ["f32", "keep"])
def test_logits_equal_transformers(case: Case, tmp_path: Path, scheme: str) -> None:
    w4conv.quantize(case.folder, tmp_path / "m.w4", scheme=scheme, effort=0)
    with Model(tmp_path / "m.w4", kv="f32") as model:
        got = model.logits(case.tokens)
    want = case.want
    assert np.ptp(want) > 1  # the comparison would be empty on flat logits
    assert np.abs(got - want).max() < 1e-4


def test_greedy_tokens_equal_transformers(case: Case, tmp_path: Path) -> None:
    w4conv.quantize(case.folder, tmp_path / "m.w4", scheme="f32", effort=0)
    prompt = case.tokens[:8].tolist()
    with Model(tmp_path / "m.w4", kv="f32") as model:
        got = list(model.generate(prompt, max_tokens=64))
    # The tokens are the oracle's if at each step they are its choice on what came before.
    want = case.logits(prompt + got)[len(prompt) - 1 : -1].argmax(1)
    assert got == want.tolist()


@pytest.mark.parametrize("scheme", ["w4a16", "f16"])
def test_the_bits_depend_on_no_tier_thread_or_chunking(
    case: Case, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, logits = set(), set()
    for tier in kernels.isa_tiers():
        monkeypatch.setenv("W4CONV_ISA", tier)
        for threads, pieces in ((1, [N_TOKENS]), (2, [1] * N_TOKENS), (2, [13, 1, 50])):
            path = tmp_path / f"{tier}-{threads}-{len(pieces)}.w4"
            w4conv.quantize(case.folder, path, scheme=scheme, threads=threads, effort=0)
            files.add(path.read_bytes())
            with Model(path, threads=threads) as model:
                assert (model.isa, model.threads) == (tier, threads)
                session, rows, start = model.session(), [], 0
                for n in pieces:
                    rows.append(session.append(case.tokens[start : start + n], all_logits=True))
                    start += n
                logits.add(np.concatenate(rows).tobytes())
    assert len(files) == 1
    assert len(logits) == 1


def test_the_bits_are_those_of_the_reference_forward_pass(case: Case, tmp_path: Path) -> None:
    w4conv.quantize(case.folder, tmp_path / "m.w4", scheme="f32", effort=0)
    with open_container(tmp_path / "m.w4") as container, Model(container, kv="int8") as model:
        want = ReferenceModel(container, kv="int8").logits(case.tokens.tolist())
        assert model.logits(case.tokens).tobytes() == want.tobytes()


def test_int8_is_close_and_int4_is_near(case: Case, tmp_path: Path) -> None:
    """A coding that went wrong somewhere would be off by the size of the logits."""
    want = case.want
    errors = {}
    for scheme in ("w8a16", "w4a16"):
        w4conv.quantize(case.folder, tmp_path / f"{scheme}.w4", scheme=scheme, group_size=32, effort=0)
        assert w4conv.verify(tmp_path / f"{scheme}.w4", against=case.folder).ok
        with Model(tmp_path / f"{scheme}.w4") as model:
            of_tokens = ((model.logits(case.tokens) - want) ** 2).mean(1) / np.var(want)
            # The median: where experts are chosen, a small error makes a few tokens choose another one.
            errors[scheme] = float(np.sqrt(np.median(of_tokens)))
    assert errors["w8a16"] < 0.05
    assert errors["w8a16"] < errors["w4a16"] < 0.6


def test_a_truncated_session_goes_on_as_if_new(case: Case, tmp_path: Path) -> None:
    w4conv.quantize(case.folder, tmp_path / "m.w4", effort=0, scheme="w4a16")
    with Model(tmp_path / "m.w4") as model:
        session = model.session()
        session.append(case.tokens)
        session.truncate(10)
        again = session.append(case.tokens[10:], all_logits=True)
        np.testing.assert_array_equal(again, model.logits(case.tokens)[10:])


def test_stories260k_tells_its_documented_story(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = trained()
    w4conv.quantize(folder, tmp_path / "m.w4", scheme="keep", effort=0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    want = (folder / "sample_greedy.txt").read_text().strip()
    with Model(tmp_path / "m.w4") as model:
        bos = tokenizer.token_to_id("<s>")
        text = tokenizer.decode(list(model.generate([bos], max_tokens=model.ctx - 1, stop_ids=[bos])))
    assert text.strip()[: len(want)] == want[: len(text.strip())]
    assert len(text) > 200


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_stories260k_of_other_types_runs(tmp_path: Path, dtype: str) -> None:
    folder = trained(dtype)
    for scheme, group_size in (("keep", None), ("w4a16", 32)):
        w4conv.quantize(folder, tmp_path / f"{scheme}.w4", scheme=scheme, group_size=group_size, effort=0)
        with Model(tmp_path / f"{scheme}.w4") as model:
            assert np.isfinite(model.logits(list(range(1, 60)))).all()
    with open_container(tmp_path / "keep.w4") as container:
        assert {t.scheme.kind for t in container.tensors.values()} == {dtype}
