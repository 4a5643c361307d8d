"""Text generation: tokens, pieces of text and clock of one prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from w4conv.arguments import count
from w4conv.errors import UsageError
from w4conv.runtime.engine import F32Array, Model, TokenSampler
from w4conv.runtime.lookup import PromptLookup
from w4conv.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Generation:
    """What was generated, and how fast.

    finish: "stop" (an end token), "length" (max_tokens), "context" (the context is full) or "interrupted".
    prefill_seconds: the prompt through the model; first_token_seconds: prefill, and the choice of the first token.
    decode_seconds: the n_decoded tokens that then went through the model, one at a time but for drafts.
    n_drafted, n_accepted: tokens drafted by prompt lookup, and those that the model accepted.
    n_dropped: tokens dropped from the KV cache by `kv_memory`.
    ids: the n_generated tokens; end_id: the end token behind them, None where none ended the text.
    """

    text: str
    finish: str
    n_prompt: int
    n_generated: int
    n_decoded: int
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    n_drafted: int = 0
    n_accepted: int = 0
    n_dropped: int = 0
    ids: tuple[int, ...] = ()
    end_id: int | None = None

    @property
    def prefill_per_second(self) -> float | None:
        return self.n_prompt / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_per_second(self) -> float | None:
        return self.n_decoded / self.decode_seconds if self.n_decoded and self.decode_seconds else None


def generate_text(
    model: Model,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    sampler: TokenSampler,
    stop_ids: Collection[int],
    at_start: bool,
    on_piece: Callable[[str], None],
    on_drop: Callable[[int], None] | None = None,
    lookup: int = 0,
) -> Generation:
    """Continue `prompt_ids`; on_piece gets the text as it becomes complete.

    on_drop: called once when `kv_memory` first drops tokens, with the number of newest tokens that stay.
    lookup: most tokens to draft from the text so far, verified in one pass; the output does not change.
    at_start: the answer starts a new text; else it continues the prompt (see Tokenizer.stream).
    KeyboardInterrupt ends the run; what there is by then is returned, with finish "interrupted". Raises UsageError when
    the prompt is empty or does not fit the context.
    """
    max_tokens = count(max_tokens, "max-tokens")
    if not len(prompt_ids):
        raise UsageError("the prompt is empty and this model has no BOS token to start from; give some text")
    if len(prompt_ids) > model.ctx:
        raise UsageError(
            f"the prompt has {len(prompt_ids):,} tokens, the context holds {model.ctx:,}; shorten it or raise --ctx"
        )
    drafts = PromptLookup(lookup)
    drafts.extend(prompt_ids)
    decoder = tokenizer.stream(after=() if at_start else prompt_ids)
    pieces: list[str] = []

    def emit(piece: str) -> None:
        if piece:
            pieces.append(piece)
            on_piece(piece)

    finish, end_id = "length", None
    ids: list[int] = []
    n_generated = n_decoded = n_drafted = n_accepted = n_dropped = 0
    ahead: list[tuple[int, F32Array]] = []  # tokens drafted and already run, with the logits after each
    prefill = first = decode = 0.0
    begin = time.perf_counter()
    try:
        session = model.session()
        logits = session.append(prompt_ids)[0]
        prefill = time.perf_counter() - begin
        while n_generated < max_tokens:
            was, n_dropped = n_dropped, max(0, session.n_dropped - len(ahead))
            if n_dropped and not was and on_drop is not None:
                on_drop(model.kv_window)
            token = sampler(logits)
            first = first or time.perf_counter() - begin
            if token in stop_ids:
                finish, end_id = "stop", int(token)
                break
            n_generated += 1
            ids.append(int(token))
            emit(decoder.push(token))
            if n_generated == max_tokens:
                break
            drafts.extend([token])
            if ahead and ahead[0][0] == token:
                logits = ahead.pop(0)[1]
                n_accepted += 1
                n_decoded += 1
                continue
            session.truncate(session.n_tokens - len(ahead))
            if session.n_tokens == model.ctx:
                finish = "context"
                break
            room = min(model.ctx - session.n_tokens, max_tokens - n_generated)
            draft = drafts.draft(room - 1)
            start = time.perf_counter()
            rows = session.append([token, *draft], all_logits=True)
            decode += time.perf_counter() - start
            n_decoded += 1
            logits, ahead = rows[0], list(zip(draft, rows[1:], strict=True))
            n_drafted += len(draft)
    except KeyboardInterrupt:
        finish = "interrupted"
    emit(decoder.finish())
    return Generation(
        "".join(pieces),
        finish,
        len(prompt_ids),
        n_generated,
        n_decoded,
        prefill,
        first,
        decode,
        n_drafted,
        n_accepted,
        n_dropped,
        tuple(ids),
        end_id,
    )


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
