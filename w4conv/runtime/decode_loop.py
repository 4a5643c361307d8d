"""The decode loop: token after token out of one session, with drafts and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from w4conv.arrays import F32Array
from w4conv.runtime.lookup import PromptLookup


class TokenSampler(Protocol):
    """Chooses the next token from logits of shape (vocab_size,)."""

    def __call__(self, logits: F32Array) -> int: ...


class Positions(Protocol):
    """What the loop asks of a session; see `engine.Session`."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def n_dropped(self) -> int: ...
    def append(self, token_ids: Sequence[int] | npt.NDArray[np.int32], /, *, all_logits: bool = False) -> F32Array: ...
    def truncate(self, n_tokens: int, /) -> None: ...


@dataclass(kw_only=True)
class DecodeFigures:
    """How a run went.

    prefill_seconds: the prompt through the model; first_token_seconds: prefill, and the choice of the first token.
    decode_seconds: the n_decoded tokens that then went through the model, one at a time but for drafts.
    n_drafted, n_accepted: tokens drafted, and those of them that the sampler chose too. n_dropped: see Session.
    """

    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    n_decoded: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_dropped: int = 0


class DecodeLoop:
    """Iterating over it yields the token ids that follow the prompt; a stop id ends it and is not yielded.

    finish: "stop" (a stop id, end_id), "length" (max_tokens) or "context" (n_positions are full).
    """

    def __init__(
        self,
        session: Positions,
        prompt_ids: Sequence[int] | npt.NDArray[np.int32],
        *,
        n_positions: int,
        max_tokens: int,
        sampler: TokenSampler,
        stop_ids: Collection[int] = (),
        drafts: PromptLookup | None = None,
        on_drop: Callable[[], None] | None = None,
    ) -> None:
        """drafts: has seen the prompt. on_drop: called once, when the session has dropped its first token."""
        self._session, self._prompt = session, prompt_ids
        self._n_positions, self._max_tokens = n_positions, max_tokens
        self._sampler, self._stops, self._drafts, self._on_drop = sampler, stop_ids, drafts, on_drop
        self.finish = "length"
        self.end_id: int | None = None
        self.figures = DecodeFigures()

    def __iter__(self) -> Iterator[int]:
        session, drafts, figures = self._session, self._drafts, self.figures
        ahead: list[tuple[int, F32Array]] = []  # tokens drafted and already run, with the logits after each
        begin = time.perf_counter()
        logits = session.append(self._prompt)[0]
        figures.prefill_seconds = time.perf_counter() - begin
        for n_left in range(self._max_tokens - 1, -1, -1):
            self._count_dropped(session.n_dropped - len(ahead))
            token = int(self._sampler(logits))
            figures.first_token_seconds = figures.first_token_seconds or time.perf_counter() - begin
            if token in self._stops:
                self.finish, self.end_id = "stop", token
                return
            yield token
            if n_left == 0:
                return
            if drafts is not None:
                drafts.extend([token])
            if ahead and ahead[0][0] == token:
                logits = ahead.pop(0)[1]
                figures.n_accepted += 1
                figures.n_decoded += 1
                continue
            if ahead:
                session.truncate(session.n_tokens - len(ahead))
            room = min(self._n_positions - session.n_tokens, n_left)
            if room == 0:
                self.finish = "context"
                return
            draft = [] if drafts is None else drafts.draft(room - 1)
            start = time.perf_counter()
            rows = session.append([token, *draft], all_logits=True)
            figures.decode_seconds += time.perf_counter() - start
            figures.n_decoded += 1
            figures.n_drafted += len(draft)
            logits, ahead = rows[0], list(zip(draft, rows[1:], strict=True))

    def _count_dropped(self, n: int) -> None:
        before, self.figures.n_dropped = self.figures.n_dropped, max(0, n)
        if self.figures.n_dropped and not before and self._on_drop is not None:
            self._on_drop()
