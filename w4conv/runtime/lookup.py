"""Prompt lookup decoding: drafts are copied from the text so far; the model verifies a draft in one pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from w4conv.arguments import count

NGRAM: Final = 3  # length of the n-gram that has to recur
MAX_DRAFT: Final = 64


class PromptLookup:
    """Drafts the tokens that followed the latest earlier occurrence of the last n-gram, at most `n_draft`.

    The output does not change: a drafted token is accepted only when the model chooses it too. 0 drafts nothing.
    """

    def __init__(self, n_draft: int) -> None:
        self.n_draft = count(n_draft, "lookup", high=MAX_DRAFT)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> index after its latest earlier occurrence
        self._latest: tuple[int, ...] = ()

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            if self._latest:
                self._ends[self._latest] = len(self._tokens)
            self._tokens.append(token)
            self._latest = tuple(self._tokens[-NGRAM:]) if len(self._tokens) >= NGRAM else ()

    def draft(self, limit: int) -> list[int]:
        """At most `limit` tokens that may come next."""
        end = self._ends.get(self._latest)
        return [] if end is None else self._tokens[end : end + min(limit, self.n_draft)]
