"""Text generation: tokens, pieces of text and clock of one prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from w4conv.arguments import count
from w4conv.arrays import F32Array
from w4conv.errors import UsageError
from w4conv.runtime.decode_loop import DecodeFigures, DecodeLoop
from w4conv.runtime.engine import Model, Session
from w4conv.runtime.lookup import PromptLookup
from w4conv.runtime.sampling import MAX_LOGPROBS, Sampler, Sampling, TokenLogprob, logprob
from w4conv.runtime.stops import StopStrings, checked_stops
from w4conv.runtime.tokenizer import Tokenizer


@dataclass(kw_only=True)
class Generation(DecodeFigures):
    """What was generated, and how it went.

    finish: "stop" (an end token or a stop string), "length" (max_tokens), "context" (the context is full), or
    "interrupted". ids: the tokens of the text, and those of a stop string. end_id: the end token behind it; stop: the
    stop string that ended it; None where none did. logprobs: one for each of `ids`, None where not asked for.
    n_reused: tokens of the prompt that the session held already.
    """

    text: str
    finish: str
    n_prompt: int
    n_reused: int
    ids: tuple[int, ...]
    end_id: int | None
    stop: str | None
    logprobs: tuple[TokenLogprob, ...] | None

    @property
    def n_generated(self) -> int:
        return len(self.ids)

    @property
    def prefill_per_second(self) -> float | None:
        return (self.n_prompt - self.n_reused) / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_per_second(self) -> float | None:
        return self.n_decoded / self.decode_seconds if self.n_decoded and self.decode_seconds else None


class TextStream:
    """The continuation of `prompt_ids`: iterating over it once yields the text as it becomes complete.

    session: what it holds in common with the prompt does not run again; default: a new one.
    choice: the number of this answer among several of one prompt.
    logprobs: so many most probable tokens beside each token's own logprob; None: no logprobs.
    stop: stop strings, which are no part of the text. stop_ids: end tokens.
    at_start: the answer starts a new text; else it continues the prompt (see Tokenizer.stream).
    lookup: most tokens to draft from the text so far, verified in one pass; the output does not change.
    on_drop: called once when `kv_memory` first drops tokens, with the number of newest tokens that stay.
    Raises UsageError when the prompt is empty or does not fit the context, and for a bias beyond the vocabulary.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        choice: int = 0,
        logprobs: int | None = None,
        stop: str | Iterable[str] = (),
        stop_ids: Collection[int] = (),
        at_start: bool = False,
        lookup: int = 0,
        session: Session | None = None,
        on_drop: Callable[[int], None] | None = None,
    ) -> None:
        max_tokens = count(max_tokens, "max-tokens")
        sampling = sampling or Sampling()
        self._stops = StopStrings(checked_stops(stop))
        self._n_logprobs = None if logprobs is None else count(logprobs, "logprobs", high=MAX_LOGPROBS)
        beyond = [token for token in sampling.logit_bias if token >= model.spec.vocab_size]
        if beyond:
            raise UsageError(f"logit-bias: token id {beyond[0]} is outside the vocabulary of {model.spec.vocab_size}")
        if not len(prompt_ids):
            raise UsageError("the prompt is empty and this model has no BOS token to start from; give some text")
        if len(prompt_ids) > model.ctx:
            raise UsageError(
                f"the prompt has {len(prompt_ids):,} tokens, the context holds {model.ctx:,}; shorten it or raise --ctx"
            )
        drafts = PromptLookup(lookup)
        drafts.extend(prompt_ids)
        session = session or model.session()
        self._n_prompt, self._n_reused = len(prompt_ids), session.shared(prompt_ids[:-1])
        session.truncate(self._n_reused)
        self._sampler = Sampler(sampling, prompt_ids=prompt_ids, choice=choice)
        self._loop = DecodeLoop(
            session, prompt_ids[self._n_reused :], n_positions=model.ctx, max_tokens=max_tokens, sampler=self._choose,
            stop_ids=stop_ids, drafts=drafts, on_drop=None if on_drop is None else lambda: on_drop(model.kv_window),
        )  # fmt: skip
        self._decoder = tokenizer.stream(after=() if at_start else prompt_ids)
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._is_over = False

    def __iter__(self) -> Iterator[str]:
        for token in self._loop:
            self._ids.append(token)
            yield from self._passed(self._stops.push(self._decoder.push(token)))
            if self._stops.found is not None:
                break
        yield from self.rest()

    def rest(self) -> Iterator[str]:
        """The text that is still held back, where the iteration is not ended but broken off."""
        if not self._is_over:
            self._is_over = True
            yield from self._passed(self._stops.push(self._decoder.finish()) + self._stops.finish())

    def result(self, *, interrupted: bool = False) -> Generation:
        """What there is by now."""
        ended = self._stops.found is not None
        return Generation(
            text="".join(self._pieces),
            finish="stop" if ended else "interrupted" if interrupted else self._loop.finish,
            n_prompt=self._n_prompt,
            n_reused=self._n_reused,
            ids=tuple(self._ids),
            end_id=self._loop.end_id,
            stop=self._stops.found,
            logprobs=None if self._n_logprobs is None else tuple(self._logprobs[: len(self._ids)]),
            **vars(self._loop.figures),
        )

    def _passed(self, piece: str) -> Iterator[str]:
        if piece:
            self._pieces.append(piece)
            yield piece

    def _choose(self, logits: F32Array) -> int:
        token = self._sampler(logits)
        if self._n_logprobs is not None:
            self._logprobs.append(logprob(logits, token, n_top=self._n_logprobs))
        return token


def generate_text(stream: TextStream, *, on_piece: Callable[[str], None]) -> Generation:
    """Run a stream to its end; on_piece gets the text as it becomes complete.

    KeyboardInterrupt ends the run; what there is by then is returned, with finish "interrupted".
    """
    interrupted = False
    try:
        for piece in stream:
            on_piece(piece)
    except KeyboardInterrupt:
        interrupted = True
        for piece in stream.rest():
            on_piece(piece)
    return stream.result(interrupted=interrupted)


def resident_memory() -> dict[str, int] | None:
    """Resident bytes of this process: "file" (mapped files, those in memory file systems too) and "anonymous". None off
    Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    try:
        file, shared, anonymous = (int(fields[name].split()[0]) * 1024 for name in ("RssFile", "RssShmem", "RssAnon"))
    except (KeyError, ValueError):
        return None
    return {"file": file + shared, "anonymous": anonymous}
