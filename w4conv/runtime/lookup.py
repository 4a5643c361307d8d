"""Prompt lookup: tokens drafted from what the text already held, to be checked by the model in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from w4conv.arguments import count

NGRAM: Final = 3  # tokens that have to recur before what followed them is drafted
MAX_DRAFT: Final = 64


class PromptLookup:
    """Drafts at most `n_draft` tokens: those that followed the last tokens where they stood before, most recently.

    Drafts never change the output: a drafted token counts only when the model chooses it too. 0 drafts nothing.
    """

    def __init__(self, n_draft: int) -> None:
        self.n_draft = count(n_draft, "lookup", high=MAX_DRAFT)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> index behind its latest occurrence but the last
        self._latest: tuple[int, ...] = ()

    def extend(self, tokens: Iterable[int]) -> None:
        """The text went on with these tokens."""
        for token in tokens:
            if self._latest:
                self._ends[self._latest] = len(self._tokens)
            self._tokens.append(token)
            self._latest = tuple(self._tokens[-NGRAM:]) if len(self._tokens) >= NGRAM else ()

    def draft(self, limit: int) -> list[int]:
        """At most `limit` tokens that may come next."""
        end = self._ends.get(self._latest)
        return [] if end is None else self._tokens[end : end + min(limit, self.n_draft)]
