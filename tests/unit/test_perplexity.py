"""Perplexity: windows of both conventions, log-sum-exp, standard errors; texts and where they come from."""

from __future__ import annotations

import hashlib
import math
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from helpers import data_dir, english, shared_data

from w4conv.errors import InputError, UsageError
from w4conv.measure import texts
from w4conv.measure.perplexity import (
    Windows,
    estimate,
    increase,
    make_windows,
    negative_log_likelihoods,
    token_nlls,
)
from w4conv.measure.texts import Text, load_text

VOCAB = 50


class FakeModel:
    """Logits that depend on all tokens so far, so that a wrong window, order or position changes them."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def session(self) -> FakeSession:
        self.seen.append([])
        return FakeSession(self.seen[-1])

    @staticmethod
    def logits(prefix: list[int]) -> npt.NDArray[np.float32]:
        seed = int.from_bytes(hashlib.sha256(bytes(prefix)).digest()[:4], "little")
        return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 3


class FakeSession:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def append(self, token_ids: npt.NDArray[np.int64], *, all_logits: bool = False) -> npt.NDArray[np.float32]:
        rows = []
        for token in token_ids.tolist():
            self.tokens.append(token)
            rows.append(FakeModel.logits(self.tokens))
        return np.stack(rows if all_logits else rows[-1:])


def nll(window: list[int], position: int) -> float:
    x = FakeModel.logits(window[:position]).astype(np.float64)
    return float(np.log(np.exp(x).sum()) - x[window[position]])


def test_llama_cpp_windows_score_the_second_half_after_a_replaced_bos() -> None:
    ids = [7, *range(2, 28)]  # 27 tokens: 2 windows of 10, the rest dropped
    windows = make_windows(ids, convention="llama.cpp", ctx=10, bos_id=1)
    assert windows.tokens.tolist() == [[1, *ids[1:10]], [1, *ids[11:20]]]
    assert windows.n_scored == 8
    model = FakeModel()
    got = token_nlls(model, windows)
    expected = [[nll(w, i) for i in range(6, 10)] for w in windows.tokens.tolist()]
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert model.seen == [w[:9] for w in windows.tokens.tolist()], "the last token of a window is only a target"


def test_255_targets_a_window_at_ctx_512() -> None:
    windows = make_windows([3] * 1024, convention="llama.cpp", ctx=512, bos_id=None)
    assert windows.n_scored == 2 * 255
    assert (windows.tokens == 3).all(), "no BOS, nothing replaced"


def test_gptq_windows_score_all_but_the_first_token() -> None:
    ids = [1, *range(2, 24)]
    windows = make_windows(ids, convention="gptq", ctx=11, bos_id=1)
    assert windows.tokens.tolist() == [ids[:11], ids[11:22]], "BOS only before the text"
    assert windows.n_scored == 20
    expected = [[nll(w, i) for i in range(1, 11)] for w in windows.tokens.tolist()]
    np.testing.assert_allclose(token_nlls(FakeModel(), windows), expected, rtol=1e-12)


def test_blocks_join_without_a_seam() -> None:
    ids = [i * 7 % VOCAB for i in range(700)]
    windows = make_windows(ids, convention="gptq", ctx=300, bos_id=None, chunks=1)
    done: list[int] = []
    got = token_nlls(FakeModel(), windows, advance=done.append)
    assert done == [300]
    np.testing.assert_allclose(got[0], [nll(ids[:300], i) for i in range(1, 300)], rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"convention": "hf", "ctx": 8}, "neither"),
        ({"convention": "gptq", "ctx": 3}, "at least 4"),
        ({"convention": "gptq", "ctx": 8, "chunks": 0}, "chunks is 0"),
        ({"convention": "llama.cpp", "ctx": 8}, "15 tokens; .* needs at least 16"),
        ({"convention": "gptq", "ctx": 16}, "needs at least 16"),
    ],
)
def test_impossible_windows(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_windows([1] * 15, bos_id=None, **options)  # type: ignore[arg-type]  # wrong on purpose


def test_log_sum_exp_is_exact_where_a_plain_one_overflows() -> None:
    logits = np.array([[1000.0, 999.0, -1e30], [0.0, 0.0, 0.0], [-5000.0, -5001.0, -6000.0]], np.float32)
    got = negative_log_likelihoods(logits, np.array([0, 1, 1]))
    np.testing.assert_allclose(got, [math.log1p(math.exp(-1)), math.log(3), 1 + math.log1p(math.exp(-1))], rtol=1e-14)


def test_logits_that_are_not_finite_are_an_error() -> None:
    class Broken(FakeSession):
        def append(self, token_ids: npt.NDArray[np.int64], *, all_logits: bool = False) -> npt.NDArray[np.float32]:
            return np.full((len(token_ids), VOCAB), np.nan, np.float32)

    class BrokenModel:
        def session(self) -> Broken:
            return Broken([])

    with pytest.raises(InputError, match="not finite"):
        token_nlls(BrokenModel(), Windows(np.ones((1, 8), np.int64), 1, 8))


def test_stderr_as_llama_cpp_states_it() -> None:
    nlls = np.array([[1.0, 2.0], [4.0, 0.5]])
    mean, mean_square = 7.5 / 4, (1 + 4 + 16 + 0.25) / 4
    got = estimate(nlls)
    assert got.value == pytest.approx(math.exp(mean))
    assert got.stderr == pytest.approx(math.exp(mean) * math.sqrt((mean_square - mean**2) / 3))


def test_increase_is_paired() -> None:
    rng = np.random.default_rng(0)
    base = rng.gamma(2, 1.5, (40, 25))
    worse = base + 0.02 + rng.standard_normal(base.shape) * 0.05
    got = increase(worse, base)
    assert got.difference == pytest.approx(estimate(worse).value - estimate(base).value)
    assert got.ratio == pytest.approx(estimate(worse).value / estimate(base).value)
    # The covariance-aware formula, written with variances and covariance.
    n, (a, b) = base.size, (estimate(worse).value, estimate(base).value)
    cov = np.cov(worse.ravel(), base.ravel(), ddof=0)
    variance = (a * a * cov[0, 0] + b * b * cov[1, 1] - 2 * a * b * cov[0, 1]) / (n - 1)
    assert got.difference_stderr == pytest.approx(math.sqrt(variance), rel=1e-6)
    assert got.ratio_stderr == pytest.approx(got.ratio * math.sqrt(((worse - base).var()) / (n - 1)))
    assert got.ratio_stderr < estimate(worse).stderr / b / 5, "pairing is what makes it small"
    assert increase(base, base).difference_stderr == pytest.approx(0, abs=1e-9)


# Texts


def test_joined_rows_of_wikitext2_have_the_published_size() -> None:
    text = load_text(data_dir("wikitext-2-raw", "wiki.test.raw"))
    assert (text.nbytes, len(text.joined_rows().encode())) == (1_290_590, 1_296_370)
    assert text.name == texts.WIKITEXT2_NAME, "recognised by its digest under any name"


def test_joined_rows_rule() -> None:
    content = " \n = T = \n \n a\x85b\r\n\u2028\nlast"
    expected = "\n\n".join(["", " = T = \n", "", " a\x85b\r\n", "", "last"])
    assert Text("t", 0, "", content).joined_rows() == expected


@pytest.fixture
def default_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """WikiText-2 where the shared data is; elsewhere some English under the name of WikiText-2."""
    if real := shared_data("wikitext-2-raw", "wiki.test.raw"):
        return real
    path = tmp_path / "english.txt"
    path.write_text(english())
    monkeypatch.setattr(texts, "WIKITEXT2_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No variable, an empty cache, no huggingface_hub."""
    monkeypatch.delenv(texts.WIKITEXT2_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return tmp_path


def test_default_text_by_variable_and_cache(alone: Path, default_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = default_text
    monkeypatch.setenv(texts.WIKITEXT2_VARIABLE, str(source))
    assert load_text().sha256 == texts.WIKITEXT2_SHA256
    monkeypatch.delenv(texts.WIKITEXT2_VARIABLE)
    cached = alone / "w4conv" / "wikitext-2-raw" / "wiki.test.raw"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(source)
    assert load_text().name == texts.WIKITEXT2_NAME
    cached.unlink()
    cached.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(InputError, match="not the WikiText-2 raw"):
        load_text()


def test_absent_text_says_where_to_get_it(alone: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_text()
    for part in ("W4CONV_WIKITEXT2", str(alone), "--text", "huggingface_hub is not installed"):
        assert part in str(caught.value)


def install_hub(monkeypatch: pytest.MonkeyPatch, archive: Path) -> None:
    """A stand-in for huggingface_hub that has `archive` in its cache."""
    hub, utils = types.ModuleType("huggingface_hub"), types.ModuleType("huggingface_hub.utils")
    hub.hf_hub_download = lambda **_: str(archive)  # type: ignore[attr-defined]  # a stand-in
    utils.disable_progress_bars = lambda: None  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)


def test_fetched_text_is_checked_and_kept(alone: Path, default_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = alone / "wikitext-2-raw-v1.zip"
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("wikitext-2-raw/wiki.test.raw", b"something else")
    install_hub(monkeypatch, archive)
    with pytest.raises(InputError, match="the file that was fetched: not the WikiText-2"):
        load_text()
    assert not (alone / "w4conv").exists(), "what fails the check is not kept"
    with zipfile.ZipFile(archive, "w") as z:
        z.write(default_text, "wikitext-2-raw/wiki.test.raw")
    assert load_text().sha256 == texts.WIKITEXT2_SHA256
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert load_text().sha256 == texts.WIKITEXT2_SHA256, "now from the cache"


def test_failed_fetch_says_where_to_get_it(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_hub(monkeypatch, alone / "absent.zip")
    with pytest.raises(InputError, match=r"could not be fetched \(FileNotFoundError\)"):
        load_text()


def test_text_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"not UTF-8 text: .* at byte 3"):
        load_text(tmp_path / "latin1.txt")
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_text(tmp_path / "absent.txt")
