"""Text generation: tokens, pieces of text and clock of one prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from w4conv.arguments import count
from w4conv.errors import UsageError
from w4conv.runtime.decode_loop import DecodeFigures, DecodeLoop, TokenSampler
from w4conv.runtime.engine import Model
from w4conv.runtime.lookup import PromptLookup
from w4conv.runtime.tokenizer import Tokenizer


@dataclass(kw_only=True)
class Generation(DecodeFigures):
    """What was generated, and how it went.

    finish: "stop" (an end token), "length" (max_tokens), "context" (the context is full) or "interrupted".
    ids: the tokens of the text; end_id: the end token behind them, None where none ended it.
    """

    text: str
    finish: str
    n_prompt: int
    ids: tuple[int, ...]
    end_id: int | None

    @property
    def n_generated(self) -> int:
        return len(self.ids)

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
    loop = DecodeLoop(
        model.session(), prompt_ids, n_positions=model.ctx, max_tokens=max_tokens, sampler=sampler, stop_ids=stop_ids,
        drafts=drafts, on_drop=None if on_drop is None else lambda: on_drop(model.kv_window),
    )  # fmt: skip
    decoder = tokenizer.stream(after=() if at_start else prompt_ids)
    pieces: list[str] = []

    def emit(piece: str) -> None:
        if piece:
            pieces.append(piece)
            on_piece(piece)

    ids: list[int] = []
    interrupted = False
    try:
        for token in loop:
            ids.append(token)
            emit(decoder.push(token))
    except KeyboardInterrupt:
        interrupted = True
    emit(decoder.finish())
    return Generation(
        text="".join(pieces),
        finish="interrupted" if interrupted else loop.finish,
        n_prompt=len(prompt_ids),
        ids=tuple(ids),
        end_id=loop.end_id,
        **vars(loop.figures),
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
