"""`w4conv verify`: reports, thresholds, damage, wrong sources."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command import Runner
from helpers import make_llama_dir

from w4conv.calibration.builtin import DIGEST

PPL = ("--ppl", "--ctx", "16")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The king and the queen of the land went to the inn in the evening.\n \n" * 12)
    return path


def test_integrity_alone(w4: Runner, container: Path) -> None:
    out = w4("verify", container).done()
    assert "every digest" in out.out
    assert "ok: every check held" in out.out
    assert out.err == ""
    report = json.loads(w4("verify", container, "--json").done().out)
    assert report["schema"] == "w4conv.verify/1"
    assert (report["ok"], report["intact"], report["failures"]) == (True, True, [])
    assert report["round_trip"] is None


def test_round_trip_and_perplexity(w4: Runner, container: Path, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    args = ("verify", container, "--against", checkpoint, *PPL, "--text", text, "--chunks", "5")
    env = {"TMPDIR": str(tmp_path / "tmp")}
    out = w4(*args, env=env).done().out
    for part in (
        "exactly what rtn makes",
        "same bytes as recorded",
        "text.txt",
        "ctx 16, 5 windows",
        "with BOS",
        "+/-",
    ):
        assert part in out
    report = json.loads(w4(*args, "--json", env=env).done().out)
    trip, ppl = report["round_trip"], report["perplexity"]
    assert (trip["same_codes"], trip["changed_files"]) == (True, [])
    assert 15 < trip["quantized"]["sqnr_db"] < 60
    assert len(trip["tensors"]) == report["n_tensors"]
    assert (ppl["convention"], ppl["ctx"], ppl["n_windows"], ppl["n_scored"]) == ("llama.cpp", 16, 5, 5 * 7)
    assert ppl["increase"]["difference"] == pytest.approx(ppl["container"]["value"] - ppl["source"]["value"])
    assert list((tmp_path / "tmp").iterdir()) == [], "the lossless copy is gone"


def test_the_built_in_set_is_named(w4: Runner, checkpoint: Path, tmp_path: Path) -> None:
    cut = ("--calibration-tokens", "512", "--calibration-ctx", "16")
    w4("quantize", checkpoint, tmp_path / "b.w4", "--calibration", "builtin", *cut).done()
    out = w4("verify", tmp_path / "b.w4", "--against", checkpoint).done().out
    assert f"needs its built-in calibration set, blake3 {DIGEST[:16]}" in out


def test_gptq_convention(w4: Runner, container: Path, text: Path) -> None:
    ppl = json.loads(w4("verify", container, *PPL, "--text", text, "--convention", "gptq", "--json").done().out)[
        "perplexity"
    ]
    assert ppl["n_scored"] == ppl["n_windows"] * 15
    assert ppl["source"] is None


def test_thresholds_decide_the_exit_code(w4: Runner, container: Path, checkpoint: Path, text: Path) -> None:
    against = ("verify", container, "--against", checkpoint)
    assert w4(*against, "--min-sqnr", "10").code == 0
    low = w4(*against, "--min-sqnr", "59")
    low.failed(1, "1 check did not hold", "FAILED")
    assert low.out.count("FAILED: SQNR is below 59") == 1
    assert (low.out + low.err).count("SQNR is below") == 1, "what failed is said once"
    measured = (*against, *PPL, "--text", text)
    assert w4(*measured, "--max-ppl-increase", "1e9").code == 0
    assert w4(*measured, "--max-ppl-increase", "1000%").code == 0
    both = w4(*measured, "--max-ppl-increase=-90%", "--min-sqnr", "59")
    both.failed(1, "2 checks did not hold")
    for words in ("perplexity rises by", "at most -90% is allowed", "SQNR is below"):
        assert (both.out + both.err).count(words) == 1
    bad = w4(*measured, "--max-ppl-increase=-1e9", "--json")
    bad.failed(1, "perplexity rises by")
    report = json.loads(bad.out)
    assert not report["ok"]
    assert len(report["failures"]) == 1


def test_damage(w4: Runner, container: Path, checkpoint: Path, tmp_path: Path) -> None:
    data = bytearray(container.read_bytes())
    data[len(data) * 2 // 3] ^= 4  # among the weights
    (tmp_path / "bad.w4").write_bytes(data)
    out = w4("verify", "bad.w4", "--against", checkpoint)
    out.failed(1, "1 check did not hold")
    assert "DAMAGED" in out.out
    assert out.out.count("FAILED: bad.w4") == 1
    assert not json.loads(w4("verify", "bad.w4", "--json").out)["intact"]
    (tmp_path / "cut.w4").write_bytes(data[:-100])
    w4("verify", "cut.w4").failed(3, "cut.w4", "cut short")


def test_another_source(w4: Runner, container: Path, tmp_path: Path) -> None:
    make_llama_dir(tmp_path / "qwen", architecture="Qwen2ForCausalLM", tied=True)
    w4("verify", container, "--against", "qwen").failed(3, "qwen is no source of", "Qwen2ForCausalLM")
    make_llama_dir(tmp_path / "wide", inner=128, tied=True)
    w4("verify", container, "--against", "wide").failed(3, "wide", "gate_proj", "(128, 64)", "(96, 64)")
    make_llama_dir(tmp_path / "flat", layers=1, tied=True)
    w4("verify", container, "--against", "flat").failed(3, "no tensor model.layers.1.")
    make_llama_dir(tmp_path / "other", seed=1, tied=True)
    other = w4("verify", container, "--against", "other")
    other.failed(1, "1 check did not hold")
    assert other.out.count("not what rtn makes of other") == 1
    assert "other bytes than recorded: model.safetensors" in other.out
    w4("verify", container, "--against", "absent").failed(3, "absent")


def test_usage_errors(w4: Runner, container: Path, checkpoint: Path, text: Path) -> None:
    w4("verify", container, "--text", text).failed(2, "--ppl")
    w4("verify", container, "--ctx", "64").failed(2, "--ppl")
    w4("verify", container, "--min-sqnr", "10").failed(2, "--against")
    w4("verify", container, *PPL, "--text", text, "--max-ppl-increase", "1").failed(2, "--against")
    w4("verify", container, "--against", checkpoint, "--min-sqnr", "nan").failed(2, "min-sqnr")
    w4("verify", container, "--against", checkpoint, *PPL, "--max-ppl-increase", "5x").failed(2, "'5x'", "2%")
    w4("verify", container, *PPL, "--text", text, "--convention", "hf").failed(2, "'hf'", "gptq")
    w4("verify", container, "--ppl", "--text", text, "--ctx", "400").failed(2, "ctx 400", "256")
    w4("verify", container, "--ppl", "--text", text, "--ctx", "3").failed(2, "at least 4")
    (text.parent / "short.txt").write_text("the end")
    w4("verify", container, *PPL, "--text", "short.txt").failed(2, "needs at least 32")
    w4("verify").failed(2, "FILE")


def test_texts_that_are_not_there(w4: Runner, container: Path, tmp_path: Path) -> None:
    w4("verify", container, *PPL, "--text", "absent.txt").failed(3, "absent.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    w4("verify", container, *PPL, "--text", "binary").failed(3, "UTF-8")
    (tmp_path / "wiki").write_text("not it")
    w4("verify", container, *PPL, env={"W4CONV_WIKITEXT2": "wiki"}).failed(3, "wiki", "sha256")
    offline = {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    w4("verify", container, *PPL, env=offline).failed(3, "WikiText-2", "W4CONV_WIKITEXT2", "--text")


def test_a_container_without_tokenizer(w4: Runner, tmp_path: Path) -> None:
    make_llama_dir(tmp_path / "mute", tokenizer=False)
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "mute", "mute.w4").done()
    assert re.search(r"^tokenizer +none$", w4("inspect", "mute.w4").done().out, re.MULTILINE)
    assert w4("verify", "mute.w4", "--against", "mute").code == 0
    w4("verify", "mute.w4", *PPL).failed(3, "no tokenizer.json", "verify (without --ppl)")
    w4("run", "mute.w4", "-p", "a").failed(3, "no tokenizer.json")


def test_layers_and_their_picture(w4: Runner, container: Path, checkpoint: Path, tmp_path: Path) -> None:
    text, picture = tmp_path / "t.txt", tmp_path / "e.svg"
    text.write_text("the thing and the end of it. " * 40)
    words = ("verify", container, "--against", checkpoint, "--text", text, "--ctx", "16", "--chunks", "2")
    out = w4(*words, "--plot", picture).done().out
    assert "layer: SQNR dB" in out
    assert "KLD" in out
    assert picture.read_text().startswith("<svg")
    w4(*words, "--plot", picture).failed(4, "e.svg exists already")
    report = json.loads(w4(*words, "--layers", "--json").done().out)
    assert [e["layer"] for e in report["perplexity"]["layers"]] == [0, 1]
    w4("verify", container, "--layers").failed(2, "--against")
