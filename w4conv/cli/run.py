"""`w4conv run FILE`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from w4conv.cli import _output
from w4conv.cli._errors import INTERRUPTED, print_message
from w4conv.cli._options import Activations, Json, KvKind, SpecialTokens, Threads
from w4conv.commands.options import has_integers, refuse_idle
from w4conv.errors import InputError, UsageError

if TYPE_CHECKING:
    from w4conv.runtime.engine import Model
    from w4conv.runtime.generation import Generation

MAX_PROMPT_NBYTES = 1 << 26
SPELLED = (
    "the prompt spells special tokens, which are taken as such; --special-tokens text takes them as text, parse says "
    "that this is meant"
)
# Of an answer that no end token ended, by how it ended.
CUT = {
    "length": "the answer was cut after {n:,} token{s}; -n allows more",
    "context": "the answer was cut: the context of {ctx:,} tokens is full",
}
EPILOG = """\
\b
Examples:
  w4conv run out.w4 -p 'Once upon a time' -n 64
  w4conv run out.w4 --chat --stats -p 'Why is it so?'
  w4conv run out.w4 -f p.txt --temperature 0.8 --seed 7
  echo 'Dear Sir,' | w4conv run out.w4 --json
"""


def run(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The .w4 file")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt")] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a file; - for standard input"),
    ] = None,
    n: Annotated[int, typer.Option("--tokens", "-n", min=1, metavar="N", help="Most tokens to generate")] = 256,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template")] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --chat: that chat template, of a model with several [default: default]"
        ),
    ] = None,
    special_tokens: SpecialTokens = None,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 is greedy: always the most probable token")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="N", help="Draw from the N most probable tokens; 0 is off")] = 0,
    top_p: Annotated[float, typer.Option(metavar="X", help="Draw from the fewest tokens with share X; 1 is off")] = 1.0,
    min_p: Annotated[
        float, typer.Option(metavar="X", help="Draw from tokens at least X times as probable as the first; 0 is off")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed draws the same text")] = 0,
    ctx: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of prompt and answer together [default: the model's limit]"),
    ] = None,
    lookup: Annotated[
        int,
        typer.Option(
            metavar="N", help="Draft up to N tokens from the text so far, say 5; same output, faster where it repeats"
        ),
    ] = 0,
    kv: KvKind = "f16",
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory for keys and values, such as 512M: where a text outgrows it, its first 16 and its newest "
            "tokens are kept [default: room for the context]",
        ),
    ] = None,
    activations: Activations = "int16",
    threads: Threads = None,
    stats: Annotated[bool, typer.Option("--stats", help="Speed and memory, on standard error")] = False,
    json: Json = False,
) -> None:
    """Generate text from a container.

    The prompt comes from -p, -f or standard input; one line end at the end of a file or of standard input is not part
    of it. The text streams to standard output until an end token, N tokens, or a full context; a note says which of the
    latter two has cut it. On a terminal, control characters in it are shown as escapes. With --json it comes at the
    end, with the ids of its tokens and the figures of --stats.
    """
    from w4conv.container import open_container
    from w4conv.runtime.chat import ChatTemplate, encode_chat
    from w4conv.runtime.engine import Model
    from w4conv.runtime.generation import generate_text
    from w4conv.runtime.sampling import Sampler
    from w4conv.runtime.tokenizer import Tokenizer
    from w4conv.sizes import nbytes_of

    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    text = _read_prompt(prompt, prompt_file)
    with ExitStack() as stack:
        container = stack.enter_context(open_container(file))
        # First, since its process needs some 80 ms, in which the model is opened.
        template = ChatTemplate.from_blobs(container.blobs, name=chat_template) if chat else None
        if template is not None:
            stack.enter_context(template)
        integers = has_integers(t.scheme.kind for t in container.tensors.values())
        refuse_idle("run", {"activations": activations, "has_integers": integers})
        nbytes = None if kv_memory is None else nbytes_of(kv_memory, "kv-memory")
        with Model(container, threads=threads, ctx=ctx, kv=kv, kv_memory=nbytes, activations=activations) as model:
            tokenizer = Tokenizer(container.blobs)
            special = "parse" if special_tokens is None else special_tokens
            if template is None:
                ids = tokenizer.encode(text, special_tokens=special)
            else:
                messages = [{"role": "user", "content": text}]
                ids = encode_chat(template, tokenizer, messages, special_tokens=special)
                template.close()
                if special_tokens is None and tokenizer.special_ids(tokenizer.encode(text, add_bos=False)):
                    print_message("note", SPELLED)
            generation = generate_text(
                model,
                tokenizer,
                ids,
                max_tokens=n,
                sampler=sampler,
                stop_ids=tokenizer.stop_ids(chat=chat),
                at_start=chat or not text,
                on_piece=_ignore if json else _stream,
                on_drop=_tell_of_drops,
                lookup=lookup,
            )
            figures = statistics(model, generation)
            # Before the mapping is closed, which takes a large file some 50 ms.
            if json:
                report = {
                    "model_digest": container.digest,
                    "prompt": text,
                    "prompt_ids": ids,
                    "text": generation.text,
                    "generated_ids": generation.ids,
                    "end_id": generation.end_id,
                    "finish": generation.finish,
                    "sampling": {
                        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed,
                    },
                    "stats": figures,
                }  # fmt: skip
                _output.write_json("run", report)
            elif not generation.text.endswith("\n"):
                _output.write("\n")
            if not json and (cut := CUT.get(generation.finish)):
                print_message("note", cut.format(n=n, s="s" * (n > 1), ctx=model.ctx))
            if stats:
                _output.write(stats_text(figures, generation.finish), stream=sys.stderr)
    if generation.finish == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _ignore(_piece: str) -> None:
    pass


def _stream(piece: str) -> None:
    _output.write(_output.streamed(piece))


def _tell_of_drops(n_kept: int) -> None:
    print_message(
        "note",
        f"the text outgrew --kv-memory: from here on the model sees its first 16 tokens and the newest {n_kept:,}",
    )


def _read_prompt(prompt: str | None, file: str | None) -> str:
    if prompt is not None and file is not None:
        raise UsageError("both -p and -f name a prompt; give one of them")
    if prompt is not None:
        if bad := next((c for c in prompt if "\ud800" <= c <= "\udfff"), None):  # as Python has such bytes
            raise UsageError(
                f"-p is not UTF-8 text: byte 0x{ord(bad) - 0xDC00:02x} at character {prompt.index(bad)}. Give text in "
                "UTF-8"
            )
        return prompt
    if file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give -p TEXT or -f FILE, or pipe one in")
    where = "standard input" if file in (None, "-") else str(file)
    try:
        if file is None or file == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_NBYTES + 1)
        else:
            with Path(file).open("rb") as stream:
                data = stream.read(MAX_PROMPT_NBYTES + 1)
        if len(data) > MAX_PROMPT_NBYTES:
            raise InputError(f"{where}: a prompt of more than {MAX_PROMPT_NBYTES:,} bytes; shorten it")
        return data.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise InputError(f"{where}: the prompt cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: the prompt is not UTF-8 text: {error.reason} at byte {error.start}") from None


def statistics(model: Model, g: Generation) -> dict[str, Any]:
    """Figures of one run. Rates are None where nothing was decoded."""
    from w4conv.runtime.generation import resident_memory

    rate = g.decode_per_second
    return {
        "prompt_tokens": g.n_prompt,
        "prefill_seconds": g.prefill_seconds,
        "prefill_tokens_per_second": g.prefill_per_second,
        "first_token_seconds": g.first_token_seconds,
        "generated_tokens": g.n_generated,
        "decoded_tokens": g.n_decoded,
        "drafted_tokens": g.n_drafted,
        "accepted_tokens": g.n_accepted,
        "dropped_tokens": g.n_dropped,
        "decode_ms_per_token": None if rate is None else 1000 / rate,
        "decode_tokens_per_second": rate,
        "weight_bytes_per_token": model.bytes_per_token,
        "weight_gb_per_second": None if rate is None else rate * model.bytes_per_token / 1e9,
        "resident_bytes": resident_memory(),
        "isa": model.isa,
        "threads": model.threads,
        "activations": model.activations,
        "kv": model.kv,
    }


def stats_text(s: dict[str, Any], finish: str) -> str:
    from w4conv.cpus import allowed_cpus

    decoded = f"{s['decoded_tokens']} tokens"
    speed = "nothing decoded"
    if s["decode_tokens_per_second"] is not None:
        decoded += f", {s['decode_ms_per_token']:.2f} ms/token, {s['decode_tokens_per_second']:.1f} tokens/s"
        speed = f"{s['weight_gb_per_second']:.1f} GB/s"
    if s["drafted_tokens"]:
        decoded += f"; {s['accepted_tokens']} of {s['drafted_tokens']} drafted tokens accepted"
    prefill = f"{s['prompt_tokens']} tokens in {s['prefill_seconds']:.3f} s"
    if s["prefill_tokens_per_second"] is not None:
        prefill += f", {s['prefill_tokens_per_second']:.1f} tokens/s"
    memory = "unknown"
    if s["resident_bytes"] is not None:
        file, anonymous = (_output.nbytes(s["resident_bytes"][kind]) for kind in ("file", "anonymous"))
        memory = f"{file} file-backed, {anonymous} anonymous"
    engine = f"{s['isa']}, {s['threads']} threads, {s['activations']} activations, {s['kv']} keys and values"
    if s["dropped_tokens"]:
        engine += f", {s['dropped_tokens']:,} tokens dropped from them"
    return _output.facts(
        [
            ("prefill", prefill),
            ("first token", f"after {s['first_token_seconds']:.3f} s"),
            ("decode", decoded),
            ("weights read", f"{_output.nbytes(s['weight_bytes_per_token'])}/token, {speed}"),
            ("memory", memory),
            ("engine", engine),
            ("may use", str(allowed_cpus())),
            ("ended by", finish),
        ]
    )
