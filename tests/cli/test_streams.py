"""Standard streams that are closed or full, and signals as callers leave them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command import COMMAND, TIMEOUT, default_signals, environment

TENSOR = "model.norm.weight"


def shell(folder: Path, line: str) -> tuple[int, str, str]:
    """A line of sh with w4conv in "$W": (exit code, what is in the file `out`, what is in `err`)."""
    env = environment({"W": " ".join(COMMAND)})
    done = subprocess.run(
        ["sh", "-c", line], cwd=folder, env=env, timeout=TIMEOUT, stdin=subprocess.DEVNULL, capture_output=True,
        check=False, preexec_fn=default_signals,
    )  # fmt: skip
    out, err = ((folder / name).read_text() if (folder / name).exists() else "" for name in ("out", "err"))
    assert not done.stdout
    assert not done.stderr
    assert "Traceback" not in out + err
    return done.returncode, out, err


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("$W inspect {w4} >&- 2>err", 4, "cannot write standard output: it is closed"),
        ("$W --help >&- 2>err", 4, "file descriptor"),
        ("$W --version >&- 2>err", 4, "standard output"),
        ("$W verify {w4} --json >&- 2>err", 4, "standard output"),
        ("$W diff {w4} {w4} >&- 2>err", 4, "standard output"),
        ("$W run {w4} -p a -n 2 >&- 2>err", 4, "standard output"),
        ("$W quantize --effort 0 --scheme w4a16 {hf} - >&- 2>err", 4, "standard output"),
        ("$W export {w4} - --to gguf >&- 2>err", 4, "standard output"),
        (f"$W cat {{w4}} {TENSOR} >&- 2>err", 4, "standard output"),
        (f"$W cat {{w4}} {TENSOR} >/dev/full 2>err", 4, "No space left"),
        ("$W run {w4} -p a -n 2 >/dev/full 2>err", 4, "No space left"),
        (f"$W cat {{w4}} {TENSOR} -o n.npy >&- 2>&- <&-", 0, ""),
        ("$W inspect {w4} 2>&- >out", 0, ""),
        ("$W inspect absent 2>&- >out", 3, ""),
        ("$W inspect absent 2>/dev/full >out", 3, ""),
        ("$W nonsense 2>/dev/full >out", 2, ""),
        ("$W quantize --effort 0 --scheme w4a16 {hf} - 2>&- >out.w4", 0, ""),
        ("$W quantize --effort 0 --scheme w4a16 {hf} - --json 2>&- >out.w4", 4, ""),
        ("$W run {w4} -p a -n 2 --stats 2>&- >out", 0, ""),
        ("$W run {w4} -n 2 <&- >out 2>err", 3, "standard input"),
        ("$W inspect - <&- >out 2>err", 3, "standard input is closed"),
        ("$W verify - <&- >out 2>err", 3, "standard input is closed"),
        ("$W inspect absent <&- >&- 2>&-", 3, ""),
        ("$W inspect {w4} <&- >&- 2>&-", 4, ""),
        ("$W quantize --effort 0 --scheme w4a16 {hf} new.w4 <&- >/dev/null 2>&-", 0, ""),
    ],
)
def test_closed_and_full_streams(
    container: Path, checkpoint: Path, tmp_path: Path, line: str, code: int, words: str
) -> None:
    found, _, err = shell(tmp_path, line.format(w4=container, hf=checkpoint))
    assert (found, len(err.splitlines())) == (code, bool(words)), err
    assert words in err


def test_no_message_gets_into_a_file(container: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A file opened while a stream is closed must not take its number."""
    for closed in (">&-", "2>&-", "<&-", ">&- 2>&- <&-"):
        streams = ">/dev/null 2>/dev/null " + closed  # the last that is said of a stream counts
        shell(tmp_path, f"$W quantize --effort 0 --scheme w4a16 {checkpoint} new.w4 --overwrite {streams}")
        assert (tmp_path / "new.w4").read_bytes() == container.read_bytes()


def wait_until_at_work(process: subprocess.Popen[bytes]) -> None:
    """It waits for the prompt, a pipe that stays open."""
    state = Path(f"/proc/{process.pid}/wchan")
    deadline = time.monotonic() + TIMEOUT
    while "pipe" not in state.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("ignored", "sent", "code"),
    [
        ((), signal.SIGINT, 130),
        ((), signal.SIGTERM, 143),
        ((), signal.SIGHUP, 129),
        ((signal.SIGINT,), signal.SIGTERM, 143),
        ((signal.SIGINT, signal.SIGQUIT), signal.SIGHUP, 129),
        ((signal.SIGINT,), signal.SIGINT, None),
        ((signal.SIGHUP,), signal.SIGHUP, None),
        ((signal.SIGTERM,), signal.SIGTERM, None),
    ],
)
def test_signals(container: Path, ignored: tuple[int, ...], sent: int, code: int | None) -> None:
    """code: None where the signal is ignored, as the caller wants, and the work goes on."""

    def set_signals() -> None:
        default_signals()
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    with subprocess.Popen(
        [*COMMAND, "run", str(container), "-n", "2", "--json"], env=environment(), preexec_fn=set_signals,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        wait_until_at_work(process)
        process.send_signal(sent)
        if code is not None:
            assert process.wait(TIMEOUT) == code
        else:
            time.sleep(0.2)
        out, err = process.communicate(b"abc" if code is None else None, timeout=TIMEOUT)
    assert b"Traceback" not in err
    if code is None:
        assert process.returncode == 0
        assert json.loads(out)["stats"]["generated_tokens"] <= 2


@pytest.mark.parametrize("ignored", [True, False])
def test_a_reader_that_stops_early(container: Path, ignored: bool) -> None:
    def set_signals() -> None:
        default_signals()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN if ignored else signal.SIG_DFL)

    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "inspect", str(container)], stdout=writer, stderr=subprocess.PIPE, env=environment(), check=False,
        preexec_fn=set_signals, timeout=TIMEOUT,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
