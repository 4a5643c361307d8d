"""run: a container and a prompt in, a text and its figures out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from w4conv.commands.options import has_integers, refuse_idle
from w4conv.container import open_container
from w4conv.runtime.chat import ChatTemplate, encode_chat
from w4conv.runtime.engine import Model
from w4conv.runtime.generation import Generation, TextStream, generate_text, resident_memory
from w4conv.runtime.sampling import Sampling, TokenLogprob
from w4conv.runtime.tokenizer import Tokenizer
from w4conv.sizes import nbytes_of

SPELLED = (
    "the prompt spells special tokens, which are taken as such; --special-tokens text takes them as text, parse says "
    "that this is meant"
)


@dataclass(frozen=True)
class RunStatistics:
    """Times, rates and sizes of one run; rates are None where nothing was decoded. isa: the tier that was used."""

    prompt_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float | None
    first_token_seconds: float
    generated_tokens: int
    decoded_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    dropped_tokens: int
    decode_ms_per_token: float | None
    decode_tokens_per_second: float | None
    weight_bytes_per_token: int
    weight_gb_per_second: float | None
    resident_bytes: Mapping[str, int] | None
    isa: str
    threads: int
    activations: str
    kv: str


@dataclass(frozen=True)
class Alternative:
    """A token: its id, its text as the vocabulary has it, and the natural logarithm of its probability."""

    id: int
    token: str
    logprob: float


@dataclass(frozen=True)
class TokenReport:
    """A token of the answer, as an Alternative; top: the most probable tokens in its place, falling. By the model's own
    logits: before bias, penalties, temperature and filters."""

    id: int
    token: str
    logprob: float
    top: tuple[Alternative, ...]


@dataclass(frozen=True)
class RunReport:
    """model_digest: of the container. prompt: as the model reads it, with --chat in the chat template; prompt_ids: its
    tokens, BOS included. text, generated_ids: the answer; the ids with those of a stop string. end_id: the end token
    behind it, stop: the stop string that ended it; None where none did. finish: "stop" (an end token or a stop string),
    "length" (cut by -n), "context" (cut, as the context is full) or "interrupted". logprobs: one for each generated id,
    with --logprobs; else null. sampling.logit_bias: by token id; null is minus infinity."""

    model_digest: str
    prompt: str
    prompt_ids: tuple[int, ...]
    text: str
    generated_ids: tuple[int, ...]
    end_id: int | None
    stop: str | None
    finish: str
    logprobs: tuple[TokenReport, ...] | None
    sampling: Sampling
    stats: RunStatistics


@contextmanager
def run(
    file: str | os.PathLike[str],
    prompt: str,
    *,
    max_tokens: int = 256,
    chat: bool = False,
    chat_template: str | None = None,
    special_tokens: str | None = None,
    sampling: Sampling | None = None,
    stop: str | Iterable[str] = (),
    logprobs: int | None = None,
    ctx: int | None = None,
    lookup: int = 0,
    kv: str = "f16",
    kv_memory: int | str | None = None,
    activations: str = "int16",
    threads: int | None = None,
    on_piece: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Iterator[RunReport]:
    """Generate text from the container `file`; the report is handed out before the file is closed, which takes some
    50 ms of a large one.

    on_piece gets the text as it becomes complete, on_note what the user should know. chat: the prompt is put into the
    model's chat template (chat_template: the one of that name). The rest: see TextStream, Model and Sampling.
    Raises UsageError, InputError.
    """
    sampling = sampling or Sampling()
    on_piece, on_note = on_piece or _ignore, on_note or _ignore
    with ExitStack() as stack:
        container = stack.enter_context(open_container(file))
        # First, since its process needs some 80 ms, in which the model is opened.
        template = ChatTemplate.from_blobs(container.blobs, name=chat_template) if chat else None
        if template is not None:
            stack.enter_context(template)
        integers = has_integers(t.scheme.kind for t in container.tensors.values())
        refuse_idle("run", {"activations": activations, "has_integers": integers})
        nbytes = None if kv_memory is None else nbytes_of(kv_memory, "kv-memory")
        model = stack.enter_context(
            Model(container, threads=threads, ctx=ctx, kv=kv, kv_memory=nbytes, activations=activations)
        )
        tokenizer = Tokenizer(container.blobs)
        if template is None:
            ids = tokenizer.encode(prompt, special_tokens=special_tokens)
        else:
            messages = [{"role": "user", "content": prompt}]
            ids = encode_chat(template, tokenizer, messages, special_tokens=special_tokens)
            template.close()
            if special_tokens is None and tokenizer.special_ids(tokenizer.encode(prompt, add_bos=False)):
                on_note(SPELLED)
        stream = TextStream(
            model,
            tokenizer,
            ids,
            max_tokens=max_tokens,
            sampling=sampling,
            logprobs=logprobs,
            stop=stop,
            stop_ids=tokenizer.stop_ids(chat=chat),
            at_start=chat or not prompt,
            on_drop=lambda n_kept: on_note(
                "the text outgrew --kv-memory: from here on the model sees its first 16 tokens and the newest "
                f"{n_kept:,}"
            ),
            lookup=lookup,
        )
        generation = generate_text(stream, on_piece=on_piece)
        yield RunReport(
            model_digest=container.digest,
            prompt=prompt,
            prompt_ids=tuple(ids),
            text=generation.text,
            generated_ids=generation.ids,
            end_id=generation.end_id,
            stop=generation.stop,
            finish=generation.finish,
            logprobs=None if generation.logprobs is None else tuple(_named(tokenizer, t) for t in generation.logprobs),
            sampling=sampling,
            stats=_statistics(model, generation),
        )


def _named(tokenizer: Tokenizer, t: TokenLogprob) -> TokenReport:
    top = tuple(Alternative(i, tokenizer.token_text(i), p) for i, p in t.top)
    return TokenReport(t.id, tokenizer.token_text(t.id), t.logprob, top)


def _ignore(_text: str) -> None:
    pass


def _statistics(model: Model, g: Generation) -> RunStatistics:
    rate = g.decode_per_second
    return RunStatistics(
        prompt_tokens=g.n_prompt,
        prefill_seconds=g.prefill_seconds,
        prefill_tokens_per_second=g.prefill_per_second,
        first_token_seconds=g.first_token_seconds,
        generated_tokens=g.n_generated,
        decoded_tokens=g.n_decoded,
        drafted_tokens=g.n_drafted,
        accepted_tokens=g.n_accepted,
        dropped_tokens=g.n_dropped,
        decode_ms_per_token=None if rate is None else 1000 / rate,
        decode_tokens_per_second=rate,
        weight_bytes_per_token=model.bytes_per_token,
        weight_gb_per_second=None if rate is None else rate * model.bytes_per_token / 1e9,
        resident_bytes=resident_memory(),
        isa=model.isa,
        threads=model.threads,
        activations=model.activations,
        kv=model.kv,
    )
