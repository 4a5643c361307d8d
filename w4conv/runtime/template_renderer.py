"""The process that renders a chat template: started, asked and ended; its time, its memory and its answers bounded.

Whatever a template does, w4conv gets an answer or an InputError, within bounds, and no process outlives its Renderer.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from w4conv.errors import InputError, UsageError
from w4conv.runtime import template_process

MAX_PROMPT_CHARS: Final = 1 << 21
MAX_SECONDS: Final = 2.0  # of one rendering, by the clock
START_SECONDS: Final = 60.0
# The variables of the environment that the process gets.
_ENVIRONMENT: Final = ("TZ", "TZDIR", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH")


class RefusalError(InputError):
    """The template refuses these messages, or fails on them, as it will again. No limit was reached."""


class _LimitError(Exception):
    """A limit was reached; the message names it."""


class _StartError(InputError):
    """The process did not start; it may start another time."""


class Renderer:
    """The process of one template. An error ends it; the next request starts another."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._fault: str | None = None  # why the template cannot be compiled
        _RENDERERS.add(self)
        self._start()

    def run(self, request: bytes | None) -> str:
        """The rendered text; without a request, the template is only compiled."""
        with self._lock:
            if self._fault is not None:
                raise InputError(self._fault)
            process = self._process or self._start()
            try:
                if not process.is_ready:
                    process.make_ready()
                return "" if request is None else process.ask(request)
            except _LimitError as error:
                self.stop()
                raise InputError(f"the chat template exceeds its limits: {error}") from None
            except InputError as error:
                if not process.is_ready:
                    self._fault = None if isinstance(error, _StartError) else str(error)
                    self.stop()
                raise
            except BaseException:  # else its late answer would be taken for the next one
                self.stop()
                raise

    def _start(self) -> _Process:
        self._process = _Process(self._source)
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def forget(self) -> None:
        """In a child that was forked: the process belongs to the parent."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            process.let_go()


_RENDERERS: Final[weakref.WeakSet[Renderer]] = weakref.WeakSet()


def _forget_all() -> None:
    for renderer in list(_RENDERERS):
        renderer.forget()


os.register_at_fork(after_in_child=_forget_all)


class _Process:
    """A running template_process.py, and the protocol that its first lines describe."""

    def __init__(self, source: str) -> None:
        """Starts it, and does not wait. Raises OSError when the system cannot."""
        if not sys.executable:
            raise UsageError("chat templates are rendered by a Python of their own, and sys.executable names none")
        self.is_ready = False
        self._buffer = bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", template_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        for stream in (self._in, self._out):
            os.set_blocking(stream.fileno(), False)
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        path = [str(Path(entry).absolute()) for entry in sys.path]
        self._unsent = _frame(json.dumps({"path": path})) + _frame(json.dumps({"source": source}))
        n = 0
        with contextlib.suppress(OSError):  # as much as the pipe takes; the rest, and errors, later
            n = os.write(self._in.fileno(), self._unsent)
        self._unsent = self._unsent[n:]

    def make_ready(self) -> None:
        """Wait until the template is compiled. Raises InputError when it cannot be."""
        deadline = time.monotonic() + START_SECONDS
        try:
            self._send(self._unsent, deadline)
            self._receive(deadline)
        except _LimitError as error:
            raise _StartError(f"the process that renders chat templates does not start: {error}") from None
        answer = self._receive(time.monotonic() + MAX_SECONDS)
        if "error" in answer:
            raise InputError(f"the chat template cannot be compiled: {_fault(answer)}")
        self.is_ready = True

    def ask(self, request: bytes) -> str:
        deadline = time.monotonic() + MAX_SECONDS
        self._send(_frame(request.decode()), deadline)
        text, n_chars = io.StringIO(), 0
        while "done" not in (answer := self._receive(deadline)):
            if answer.get("error") == "refused":
                raise RefusalError(f"the chat template refuses these messages: {answer['text']}")
            if "error" in answer:
                failed = InputError if answer["error"] == "memory" else RefusalError
                raise failed(f"the chat template failed {_fault(answer)}")
            n_chars += text.write(str(answer.get("piece")))
            if n_chars > MAX_PROMPT_CHARS:
                raise _LimitError(f"it writes more than {MAX_PROMPT_CHARS:,} characters")
        return text.getvalue()

    def end(self) -> None:
        self._end()

    def let_go(self) -> None:
        self._end.detach()
        for stream in (self._in, self._out):
            stream.close()
        self._process.returncode = 0  # not a child of this process

    def _send(self, data: bytes, deadline: float) -> None:
        while data:
            try:
                data = data[os.write(self._in.fileno(), data) :]
            except BlockingIOError:
                self._wait(self._in, select.POLLOUT, deadline)
            except OSError:
                raise self._death() from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        while True:
            length = int.from_bytes(self._buffer[:4], "little") + 4
            if 4 < length <= len(self._buffer):
                frame, self._buffer = self._buffer[4:length], self._buffer[length:]
                try:
                    answer = json.loads(frame.decode(errors="surrogatepass"))
                except (ValueError, RecursionError):
                    answer = None
                if isinstance(answer, dict) and answer.keys() & {"ready", "done", "error", "piece"}:
                    return answer
                raise _LimitError("it writes to the output of the process that renders it")
            if len(self._buffer) >= 4 and length > 8 * MAX_PROMPT_CHARS:
                raise _LimitError(f"it writes more than {MAX_PROMPT_CHARS:,} characters")
            self._wait(self._out, select.POLLIN, deadline)
            try:
                data = os.read(self._out.fileno(), 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                raise self._death()
            self._buffer += data

    def _wait(self, stream: Any, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(stream.fileno(), event)
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise _LimitError(f"it takes longer than {MAX_SECONDS:g} s")

    def _death(self) -> _LimitError:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            code = 0
        if code == -signal.SIGPROF:
            return _LimitError(f"it takes more than {template_process.CPU_SECONDS:g} s of processor time")
        return _LimitError(f"it ended its process ({f'signal {-code}' if code < 0 else f'exit code {code}'})")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    if os.getpid() == owner and process.poll() is None:
        process.kill()
        process.wait()


def _frame(message: str) -> bytes:
    data = message.encode()
    return len(data).to_bytes(4, "little") + data


def _fault(answer: Mapping[str, Any]) -> str:
    if answer["error"] == "memory":
        return f"(LimitError): it needs more than {template_process.MEMORY_NBYTES >> 20} MiB"
    return f"({answer['error']}): {answer['text']}"
