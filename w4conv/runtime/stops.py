"""Stop strings: texts that end an answer, wherever the borders of tokens and pieces lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from w4conv.arguments import shown
from w4conv.errors import UsageError

MAX_STOPS: Final = 64
MAX_STOP_CHARS: Final = 4096


def checked_stops(stop: str | Iterable[str]) -> tuple[str, ...]:
    """One stop string or several, as a tuple. Raises UsageError for what is none."""
    stops: tuple[Any, ...] = (stop,) if isinstance(stop, str) or not hasattr(stop, "__iter__") else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise UsageError(f"there are {len(stops)} stop strings; at most {MAX_STOPS} are looked for")
    for text in stops:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise UsageError(f"stop is {shown(text)}; it must be a text of 1 to {MAX_STOP_CHARS:,} characters")
    return stops


class StopStrings:
    """Passes a text on in pieces, up to the first stop string. The result does not depend on how it comes in pieces.

    Of several that occur, the one that ends first counts; where several end together, the longest. found: it, or None.
    What may be the beginning of one is kept until it is known.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Text that is certain; after a stop string, nothing."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        kept = max((_overlap(text, s) for s in self._stops), default=0)
        at = len(text) - kept
        self._held = text[at:]
        return text[:at]

    def finish(self) -> str:
        """The text that was kept."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of the text with which the stop string begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
