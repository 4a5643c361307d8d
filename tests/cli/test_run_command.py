"""`w4conv run`: prompts, streaming, stops, statistics, interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tokenizers
from command import COMMAND, TIMEOUT, Runner, default_signals, environment
from helpers import make_llama_dir, tiny_tokenizer
from stories import trained
from tokenizers import Tokenizer as Reference

import w4conv

DRIVER = """
import os, signal
import w4conv.runtime.sampling as sampling
from w4conv.cli.main import main
calls, original = [], sampling.Sampler.__call__
def choose(self, logits):
    calls.append(1)
    if len(calls) == 8:
        os.kill(os.getpid(), signal.SIGINT)
    return original(self, logits)
sampling.Sampler.__call__ = choose
main()
"""


@pytest.fixture
def stories(w4: Runner, tmp_path: Path) -> Path:
    out = tmp_path / "stories.w4"
    w4("quantize", "--effort", "0", trained(), out, "--scheme", "keep").done()
    return out


def test_greedy_text_is_the_documented_one(w4: Runner, stories: Path) -> None:
    expected = (trained() / "sample_greedy.txt").read_text().strip()
    out = w4("run", stories, "-p", "", "-n", 150).done()
    assert out.out.startswith(expected)
    assert out.err == "w4conv: note: the answer was cut after 150 tokens; -n allows more\n"


def test_a_generic_conversion_cannot_be_run(w4: Runner, tmp_path: Path) -> None:
    out = tmp_path / "out.w4"
    w4(
        "quantize",
        "--effort",
        "0",
        "--scheme",
        "w4a16",
        make_llama_dir(tmp_path / "in"),
        out,
        "--architecture",
        "generic",
    ).done()
    w4("run", out, "-p", "a").failed(3, str(out), "converted with --architecture generic", "cannot be run")
    w4("bench", out, "-p", 8, "-n", 2).failed(3, "converted with --architecture generic")


def test_the_prompt_may_come_from_anywhere(w4: Runner, stories: Path, tmp_path: Path) -> None:
    by_option = w4("run", stories, "-p", "Once upon", "-n", 12).done().out
    assert by_option.startswith(" a time"), "a continuation keeps its space; the prompt is not repeated"
    assert w4("run", stories, "-n", 12, stdin=b"Once upon\n").done().out == by_option
    (tmp_path / "p.txt").write_text("Once upon\n")
    assert w4("run", stories, "-f", "p.txt", "-n", 12).done().out == by_option
    assert w4("run", stories, "-f", "-", "-n", 12, stdin=b"Once upon").done().out == by_option
    assert w4("run", stories, "-n", 12, stdin=b"Once upon\n\n").done().out != by_option, "one line end is taken off"


def test_json_and_stats(w4: Runner, stories: Path) -> None:
    out = w4("run", stories, "-p", "Once upon", "-n", 12, "-t", 1, "--json").done()
    result = json.loads(out.out)
    assert result["schema"] == "w4conv.run/1"
    assert result["text"] + "\n" == w4("run", stories, "-p", "Once upon", "-n", 12).done().out
    assert result["finish"] == "length"
    stats = result["stats"]
    assert (stats["generated_tokens"], stats["decoded_tokens"], stats["threads"]) == (12, 11, 1)
    assert stats["prompt_tokens"] == len(Reference.from_file(str(trained() / "tokenizer.json")).encode("Once upon").ids)
    assert stats["first_token_seconds"] >= stats["prefill_seconds"] > 0
    assert stats["decode_tokens_per_second"] == pytest.approx(1000 / stats["decode_ms_per_token"])
    assert stats["resident_bytes"]["anonymous"] > 0
    text = w4("run", stories, "-p", "Once upon", "-n", 12, "--stats", env={"W4CONV_ISA": "scalar"}).done()
    assert text.out == result["text"] + "\n"
    for part in ("prefill", "first token", "ms/token", "GB/s", "file-backed", "anonymous", "scalar, "):
        assert part in text.err
    assert stats["activations"] == "int16"
    w4("quantize", "--effort", "0", "--scheme", "w4a16", trained(), "int4.w4", "--group-size", "32").done()
    w4("run", stories, "-p", "Once", "--activations", "int8").failed(2, "--activations has no effect")
    one = json.loads(w4("run", "int4.w4", "-p", "Once", "-n", 1, "--activations", "int8", "--json").done().out)
    assert one["stats"]["activations"] == "int8"
    assert one["stats"]["decode_tokens_per_second"] is None
    assert (one["stats"]["kv"], one["stats"]["dropped_tokens"]) == ("f16", 0)


def test_end_token_and_full_context_end_the_text(w4: Runner, tmp_path: Path, container: Path) -> None:
    full = json.loads(w4("run", container, "-p", "abc", "-n", 500, "--ctx", 16, "--json").done().out)
    n_tokens = full["stats"]["prompt_tokens"] + full["stats"]["generated_tokens"]
    assert (full["finish"], n_tokens) == ("context", 17), "the last token needs no place"
    with w4conv.Model(container) as model:  # the first token that this model chooses becomes its end token
        first = next(model.generate(tiny_tokenizer().encode("abc").ids, max_tokens=1))
    make_llama_dir(tmp_path / "ends", tied=True, config={"eos_token_id": first})
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "ends", "ends.w4").done()
    ended = json.loads(w4("run", "ends.w4", "-p", "abc", "-n", 9, "--json").done().out)
    assert (ended["finish"], ended["text"]) == ("stop", "")


def test_chat_uses_the_template(w4: Runner, container: Path) -> None:
    chat = json.loads(w4("run", container, "--chat", "-p", "hi", "-n", 4, "--json").done().out)
    same = w4("run", container, "-p", "<s>[user] hi\n[assistant] ", "-n", 4, "--json").done().out
    assert chat["text"] == json.loads(same)["text"]
    assert chat["stats"]["prompt_tokens"] == json.loads(same)["stats"]["prompt_tokens"], "one BOS, not two"


def test_sampling_by_seed(w4: Runner, stories: Path) -> None:
    def text(*options: object) -> str:
        return w4("run", stories, "-p", "Once", "-n", 20, *options).done().out

    hot = ("--temperature", 1.5, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.01)
    assert text(*hot, "--seed", 3) == text(*hot, "--seed", 3)
    assert text(*hot, "--seed", 3) != text(*hot, "--seed", 4)
    assert text("--temperature", 5, "--top-k", 1) == text(), "the most probable of one is the greedy choice"


def test_a_text_may_outgrow_kv_memory(w4: Runner, stories: Path) -> None:
    """The first tokens and the newest stay: said once, counted, and the same with drafts."""
    options = ("run", stories, "-p", "Once", "-n", 400, "--kv", "int8", "--kv-memory", "160K", "--json")
    plain, drafted = w4(*options).done(), w4(*options, "--lookup", 4).done()
    assert plain.err.count("outgrew --kv-memory") == 1
    result, other = json.loads(plain.out), json.loads(drafted.out)
    assert result["stats"]["kv"] == "int8"
    assert result["stats"]["dropped_tokens"] > 100
    assert [result["text"], result["stats"]["dropped_tokens"]] == [other["text"], other["stats"]["dropped_tokens"]]
    roomy = w4(*options[:-2], "10M", "--json").done()
    assert (json.loads(roomy.out)["stats"]["dropped_tokens"], roomy.err) == (0, "")


def test_errors(w4: Runner, container: Path, stories: Path, tmp_path: Path) -> None:
    w4("run", "absent.w4", "-p", "a").failed(3, "absent.w4", "No such file")
    w4("run", container, "-p", "a", "-f", "b").failed(2, "both -p and -f")
    w4("run", container, "-f", "absent.txt").failed(3, "absent.txt")
    w4("run", container, stdin=b"\xff").failed(3, "standard input", "UTF-8")
    w4("run", container, "-p", "a", "--ctx", 9999).failed(2, "9999", "256")
    w4("run", container, "-p", "a" * 50, "--ctx", 10).failed(2, "51 tokens", "10", "--ctx")
    w4("run", container, "-p", "a", "--top-k", 4).failed(2, "temperature")
    w4("run", container, "-p", "a", "--temperature", "-1").failed(2, "temperature")
    w4("run", container, "-p", "a", "--temperature", "1", "--top-p", "2").failed(2, "top-p")
    w4("run", container, "-p", "a", "-n", "0").failed(2, "-n")
    w4("run", container, "-p", "a", "--activations", "int4").failed(2, "int4", "int16", "int8")
    w4("run", container, "-p", "a", "--kv", "int4").failed(2, "int4", "f16", "int8")
    w4("run", container, "-p", "a", "--kv-memory", "much").failed(2, "kv-memory", "much", "512M")
    w4("run", container, "-p", "a", "--kv-memory", "1K").failed(2, "kv-memory", "1,024 bytes", "64 tokens")
    w4("run", stories, "--chat", "-p", "a").failed(3, "no chat template", "--chat")
    (tmp_path / "cut.w4").write_bytes(container.read_bytes()[:5000])
    w4("run", "cut.w4", "-p", "a").failed(3, "cut short")
    with Path("/dev/full").open("wb") as full:
        w4("run", container, "-p", "a", "-n", 3, stdout=full).failed(4, "No space left")


def test_no_bos_and_no_text(w4: Runner, tmp_path: Path) -> None:
    source = make_llama_dir(tmp_path / "in")
    (source / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    w4("quantize", "--effort", "0", "--scheme", "w4a16", "in", "o.w4").done()
    w4("run", "o.w4", "-p", "").failed(2, "prompt is empty")


def test_interrupt_keeps_the_text_so_far(w4: Runner, stories: Path) -> None:
    whole = w4("run", stories, "-p", "Once upon", "-n", 20).done().out
    out = w4("run", stories, "-p", "Once upon", "-n", 20, code=DRIVER)
    assert out.code == 130
    assert out.out.endswith("\n")
    assert len(out.out) > 5
    assert whole.startswith(out.out[:-1])
    assert out.err == ""
    result = w4("run", stories, "-p", "Once upon", "-n", 20, "--json", code=DRIVER)
    assert result.code == 130
    assert json.loads(result.out)["finish"] == "interrupted"


def test_interrupt_while_waiting_for_the_prompt(container: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "run", str(container)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        preexec_fn=default_signals,
    ) as process:  # fmt: skip
        stat = Path(f"/proc/{process.pid}/wchan")
        deadline = time.monotonic() + TIMEOUT
        while "pipe" not in stat.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT)
        assert (process.returncode, out, err) == (130, b"", b"w4conv: note: interrupted\n")


def test_reader_that_stops_early_is_no_error(container: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "run", str(container), "-p", "abc", "-n", "200"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), preexec_fn=default_signals,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate(timeout=TIMEOUT)
        assert (process.returncode, err) == (0, b"")


def test_json_has_the_ids_and_what_cut_an_answer_is_said(w4: Runner, stories: Path) -> None:
    result = json.loads(w4("run", stories, "-p", "Once upon", "-n", 12, "--json").done().out)
    with w4conv.open(stories) as container:
        tokenizer = tokenizers.Tokenizer.from_str(container.blobs["tokenizer.json"].decode())
        assert result["model_digest"] == container.digest
    assert tokenizer.decode(result["prompt_ids"]) == "Once upon"
    assert tokenizer.decode(result["prompt_ids"] + result["generated_ids"]) == "Once upon" + result["text"]
    assert (len(result["generated_ids"]), result["end_id"], result["finish"]) == (12, None, "length")
    assert result["sampling"] == {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {},
    }  # fmt: skip
    assert "cut after 12 tokens" in w4("run", stories, "-p", "Once upon", "-n", 12).done().err
    full = w4("run", stories, "-p", "Once upon", "--ctx", 8).done()
    assert "the context of 8 tokens is full" in full.err
