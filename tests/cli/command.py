"""The installed command as a subprocess: how it is called, and what came of it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

COMMAND = (sys.executable, "-m", "w4conv")
TIMEOUT = 120


@dataclass
class Result:
    code: int
    out: str
    err: str
    raw: bytes

    def failed(self, code: int, *parts: str) -> None:
        """Exit code, and exactly one message on stderr that holds `parts`."""
        assert self.code == code, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("w4conv: error: ")
        for part in parts:
            assert part in lines[0]

    def done(self) -> Result:
        assert self.code == 0, (self.code, self.out, self.err)
        return self


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A clean one: nothing that the user of the tests has set changes what is tested."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("W4CONV_", "_W4CONV", "COLUMNS", "NO_COLOR"))}
    return keep | {"PYTHONWARNINGS": "error"} | dict(extra or {})


def default_signals() -> None:
    """For `preexec_fn`: a child's signals as a terminal gives them, whatever the test run itself was started with."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


Runner = Callable[..., Result]
