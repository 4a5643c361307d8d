"""`w4conv inspect PATH`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from w4conv.cli import _output
from w4conv.cli._options import Json, refuse_terminal
from w4conv.files.streams import is_stdin

if TYPE_CHECKING:
    from w4conv.commands.inspect import Inspection, TensorRow, Total
    from w4conv.models.spec import ModelSpec

REPORT = ("w4conv.commands.inspect", "Inspection")
EPILOG = """\
\b
Examples:
  w4conv inspect out.w4
  w4conv inspect out.w4 --tensors
  w4conv inspect SmolLM2-135M/ --json
  curl -s https://example.org/out.w4 | w4conv inspect -
"""


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help=".w4 file, Hugging Face directory or GGUF file; - for a .w4 on standard input"
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor")] = False,
    json: Json = False,
) -> None:
    """Say what a container or a checkpoint holds.

    Model, schemes, bits per weight, sizes, where it comes from, tokenizer. Reads headers only, so it is instant on any
    size; nothing is verified beyond the structure.
    """
    from w4conv.commands.inspect import inspect as describe
    from w4conv.commands.inspect import inspect_stream

    refuse_terminal(path)
    found = inspect_stream(sys.stdin.buffer) if is_stdin(path) else describe(path)
    if json:
        _output.write_json("inspect", found)
        return
    _output.write(as_text(found))
    if tensors:
        _output.write("\n" + tensor_table(found.tensors))


def as_text(found: Inspection) -> str:
    pairs = [
        ("path", _output.path(found.path)),
        ("kind", f"{_KINDS.get(found.kind, found.kind)}, {_output.nbytes(found.nbytes)}"),
        ("model", found.architecture if found.model is None else model_text(found.model)),
        ("parameters", f"{_output.count(found.n_parameters)} in {len(found.tensors):,} tensors"),
        ("bits/weight", _output.bits(found.bits_per_weight)),
    ]
    if found.digest is not None:
        pairs.append(("digest", found.digest))
    if found.provenance is not None:
        pairs += list(provenance_facts(found.provenance))
    t = found.tokenizer
    if t is None:
        pairs.append(("tokenizer", "none"))
    else:
        marks = "".join(f", {name} {token}" for name, token in (("BOS", t.bos_token), ("EOS", t.eos_token)) if token)
        chat = ", chat template" if t.has_chat_template else ""
        pairs.append(("tokenizer", f"{t.model}, {t.n_tokens:,} tokens{marks}{chat}"))
        pairs.append(("end tokens", _end_tokens(found)))
    pairs.append(("files inside" if found.kind == "w4" else "sidecars", ", ".join(found.blobs) or "none"))
    pairs += [("note", note) for note in found.notes]
    return "\n".join((_output.facts(pairs), total_table("kind", found.by_kind), total_table("scheme", found.by_scheme)))


def _end_tokens(found: Inspection) -> str:
    more = [token for token in found.chat_end_tokens if token not in found.end_tokens]
    return (", ".join(found.end_tokens) or "none") + (f"; with --chat also {', '.join(more)}" if more else "")


_KINDS = {"w4": "w4 container", "safetensors": "Hugging Face directory, safetensors", "gguf": "GGUF file"}


def model_text(model: ModelSpec) -> str:
    parts = [
        f"{model.architecture}: {model.n_layers} layers of {model.hidden_size}",
        f"{model.n_heads} heads ({model.n_kv_heads} KV) of {model.head_dim}",
        f"MLP {model.intermediate_size}",
        f"vocabulary {model.vocab_size:,}",
        f"context {model.max_positions:,}",
    ]
    if model.tied_head:
        parts.append("head tied to the embedding")
    return ", ".join(parts)


def provenance_facts(provenance: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    words = [str(provenance.get(key)) for key in ("tool", "method", "scheme") if provenance.get(key)]
    if "group_size" in provenance:
        words.append(f"group {provenance['group_size'] or 'row'}")
    if "embeddings" in provenance:
        words.append(f"embeddings {provenance['embeddings']}")
    recipe = provenance.get("recipe")
    if isinstance(recipe, list):
        words.append(f"a recipe of {len(recipe)} patterns")
    if "target_bpw" in provenance:
        words.append(f"at most {provenance['target_bpw']} bits a weight")
    yield "made by", ", ".join(words) or "unknown"
    source = provenance.get("source")
    if isinstance(source, Mapping):
        files = source.get("files") or []
        names = [f"{f.get('name')} ({_output.nbytes(f.get('nbytes'))})" for f in files if isinstance(f, Mapping)]
        yield "made from", f"{source.get('kind')}: {', '.join(names)}"


def total_table(what: str, totals: Iterable[Total]) -> str:
    rows = (
        (
            t.what,
            f"{t.n_tensors:,}",
            _output.count(t.n_parameters),
            _output.nbytes(t.nbytes),
            _output.bits(t.bits_per_weight),
        )
        for t in totals
    )
    return _output.table((what, "tensors", "parameters", "size", "bits/weight"), rows)


def tensor_table(tensors: Iterable[TensorRow]) -> str:
    rows = (
        (t.name, t.scheme, t.source_dtype, "x".join(map(str, t.shape)) or "scalar", _output.nbytes(t.nbytes))
        for t in tensors
    )
    return _output.table(("tensor", "scheme", "from", "shape", "size"), rows, left=3)
