"""`w4conv run FILE`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from w4conv.cli import _output
from w4conv.cli._errors import INTERRUPTED, print_message
from w4conv.cli._options import Activations, Json, KvKind, SpecialTokens, Threads
from w4conv.errors import InputError, UsageError
from w4conv.files.streams import is_stdin

if TYPE_CHECKING:
    from w4conv.commands.run import RunStatistics

MAX_PROMPT_NBYTES = 1 << 26
# Of an answer that no end token ended, by how it ended.
CUT = {
    "length": "the answer was cut after {n:,} token{s}; -n allows more",
    "context": "the answer was cut: the context of {ctx:,} tokens is full",
}
REPORT = ("w4conv.commands.run", "RunReport")
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
    repetition_penalty: Annotated[
        float,
        typer.Option(
            metavar="X", help="Divide the logits above 0 of tokens in the text, multiply the others; 1 is off"
        ),
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(metavar="X", help="Take X off the logits of tokens in the answer; 0 is off")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(metavar="X", help="The same, times how often they are there; 0 is off")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=X", help="Add X to the logit of a token; -inf rules it out. May be given again"),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End the answer before this text. May be given again"),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="With --json: log-probability of each token, and of the N most probable"),
    ] = None,
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
            help="Most memory for the KV cache, such as 512M: where a text outgrows it, its first 16 tokens (attention "
            "sinks) and its newest are kept [default: room for the context]",
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
    from w4conv.commands.run import run as generate
    from w4conv.runtime.sampling import Sampling

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias or []),
    )  # fmt: skip
    text = _read_prompt(prompt, prompt_file)
    with generate(
        file, text, max_tokens=n, chat=chat, chat_template=chat_template, special_tokens=special_tokens,
        sampling=sampling, stop=stop or (), logprobs=logprobs, ctx=ctx, lookup=lookup, kv=kv, kv_memory=kv_memory,
        activations=activations, threads=threads, on_piece=None if json else _stream,
        on_note=partial(print_message, "note"),
    ) as report:  # fmt: skip
        if json:
            _output.write_json("run", report)
        elif not report.text.endswith("\n"):
            _output.write("\n")
        if not json and (cut := CUT.get(report.finish)):
            held = len(report.prompt_ids) + len(report.generated_ids) - 1  # the last one was not run any more
            print_message("note", cut.format(n=n, s="s" * (n > 1), ctx=held))
        if stats:
            _output.write(stats_text(report.stats, report.finish), stream=sys.stderr)
    if report.finish == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _stream(piece: str) -> None:
    _output.write(_output.streamed(piece))


def _biases(given: list[str]) -> dict[int, float]:
    out: dict[int, float] = {}
    for text in given:
        token, _, value = text.partition("=")
        try:
            if not (token.isascii() and token.isdecimal()):
                raise ValueError
            number = float(value)
        except ValueError:
            raise UsageError(
                f"--logit-bias {text!r} is no ID=VALUE, such as 29871=-5 or 13=-inf; ids are in the output of --json"
            ) from None
        if int(token) in out:
            raise UsageError(f"--logit-bias names token {token} twice")
        out[int(token)] = number
    return out


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
        if file is None or is_stdin(file):
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


def stats_text(s: RunStatistics, finish: str) -> str:
    from w4conv.cpus import allowed_cpus

    decoded = f"{s.decoded_tokens} tokens"
    speed = "nothing decoded"
    if s.decode_tokens_per_second is not None:
        decoded += f", {s.decode_ms_per_token:.2f} ms/token, {s.decode_tokens_per_second:.1f} tokens/s"
        speed = f"{s.weight_gb_per_second:.1f} GB/s"
    if s.drafted_tokens:
        decoded += f"; {s.accepted_tokens} of {s.drafted_tokens} drafted tokens accepted"
    prefill = f"{s.prompt_tokens} tokens in {s.prefill_seconds:.3f} s"
    if s.prefill_tokens_per_second is not None:
        prefill += f", {s.prefill_tokens_per_second:.1f} tokens/s"
    memory = "unknown"
    if s.resident_bytes is not None:
        file, anonymous = (_output.nbytes(s.resident_bytes[kind]) for kind in ("file", "anonymous"))
        memory = f"{file} file-backed, {anonymous} anonymous"
    engine = f"{s.isa}, {s.threads} threads, {s.activations} activations, {s.kv} keys and values"
    if s.dropped_tokens:
        engine += f", {s.dropped_tokens:,} tokens dropped from them"
    return _output.facts(
        [
            ("prefill", prefill),
            ("first token", f"after {s.first_token_seconds:.3f} s"),
            ("decode", decoded),
            ("weights read", f"{_output.nbytes(s.weight_bytes_per_token)}/token, {speed}"),
            ("memory", memory),
            ("engine", engine),
            ("may use", str(allowed_cpus())),
            ("ended by", finish),
        ]
    )
