"""inspect: what a `.w4` file or a checkpoint holds, from its headers alone; no weight is read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from w4conv.container import ContainerHeader, TensorInfo, is_container, is_stream, open_container, read_header
from w4conv.errors import InputError
from w4conv.files.blobs import json_object
from w4conv.models import spec_of
from w4conv.models.generic import matrix_role, refuse_to_run
from w4conv.models.spec import ModelSpec
from w4conv.runtime.tokenizer_file import TokenizerFile
from w4conv.sources import open_source
from w4conv.sources.base import Source, SourceTensor
from w4conv.sources.huggingface import open_as_stored

TensorKind = Literal["embedding", "head", "attention", "mlp", "norm", "other"]
KINDS: Final[tuple[TensorKind, ...]] = ("embedding", "head", "attention", "mlp", "norm", "other")
_SOURCE_BITS: Final = {"F16": 16, "BF16": 16, "F32": 32}


@dataclass(frozen=True, slots=True)
class TensorRow:
    """scheme: how it is coded, such as "int4/g128", or in a checkpoint its own word. nbytes: None where unknown."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    scheme: str
    source_dtype: str
    n_parameters: int
    nbytes: int | None

    @property
    def bits_per_weight(self) -> float | None:
        return _bits_per_weight([self])


@dataclass(frozen=True, slots=True)
class Total:
    """Tensors of one kind or one scheme together. nbytes and bits_per_weight count scales and the padding of rows."""

    what: str
    n_tensors: int
    n_parameters: int
    nbytes: int | None
    bits_per_weight: float | None


@dataclass(frozen=True, slots=True)
class TokenizerSummary:
    """model: "BPE" or whatever tokenizer.json names; n_tokens: vocabulary with added tokens; tokens as text or None."""

    model: str
    n_tokens: int
    bos_token: str | None
    eos_token: str | None
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class Inspection:
    """kind: "w4", "safetensors" or "gguf". nbytes: of the file or files. digest: identifies a conversion; None where it
    is not at hand (a stream, a checkpoint). model: None when the config is not one that w4conv runs; notes say why.

    end_tokens: every one that ends a generation; chat_end_tokens: those that end an answer with --chat.
    """

    path: str
    kind: str
    nbytes: int
    digest: str | None
    architecture: str
    model: ModelSpec | None
    n_parameters: int
    bits_per_weight: float | None
    by_kind: tuple[Total, ...]
    by_scheme: tuple[Total, ...]
    tokenizer: TokenizerSummary | None
    blobs: Mapping[str, int]
    provenance: Mapping[str, Any] | None
    notes: tuple[str, ...]
    tensors: tuple[TensorRow, ...]
    end_tokens: tuple[str, ...] = ()
    chat_end_tokens: tuple[str, ...] = ()


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Describe a `.w4` file, a Hugging Face directory or a GGUF file. Raises InputError."""
    path = Path(path)
    if is_stream(path):
        try:
            with path.open("rb") as stream:
                return inspect_stream(stream, name=str(path))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
    if is_container(path):
        with open_container(path) as container:
            header = ContainerHeader(
                container.tensors, dict(container.blobs), container.provenance, container.file_nbytes
            )
            return _of_container(str(path), header, container.digest)
    try:
        with open_source(path) as source:
            return _of_source(source)
    except InputError as error:
        try:  # a GGUF file of whatever architecture can be described, and tensors that only their format can read
            with open_as_stored(path) if path.is_dir() else open_source(path, raw=True) as source:
                return _of_source(source, refused=error)
        except InputError:
            raise error from None


def inspect_stream(stream: BinaryIO, *, name: str = "-") -> Inspection:
    """Describe the `.w4` file that begins in `stream`; reads no weight. Raises FormatError."""
    return _of_container(name, read_header(stream, where="standard input" if name == "-" else name), None)


def kind_of(name: str) -> TensorKind:
    """What a tensor is for, by its name."""
    if "norm" in name:
        return "norm"
    role = matrix_role(name)
    if role == "embedding" or role == "head":
        return role
    if "attn" in name or "attention" in name:
        return "attention"
    return "mlp" if ".mlp." in name or ".ffn_" in name else "other"


def _of_container(path: str, header: ContainerHeader, digest: str | None) -> Inspection:
    def row(info: TensorInfo) -> TensorRow:
        return TensorRow(
            info.name,
            info.shape,
            kind_of(info.name),
            str(info.scheme),
            info.source_dtype,
            info.n_values,
            info.nbytes,
        )

    notes = header.provenance.get("notes", [])
    return _describe(
        path=path,
        kind="w4",
        nbytes=header.file_nbytes,
        digest=digest,
        blobs=header.blobs,
        provenance=header.provenance,
        notes=[str(note) for note in notes] if isinstance(notes, list) else [],
        tensors=[row(info) for info in header.tensors.values()],
    )


def _of_source(source: Source, *, refused: InputError | None = None) -> Inspection:
    """refused: why the source could not be opened as a model."""

    def row(t: SourceTensor) -> TensorRow:
        n = math.prod(t.shape)
        return TensorRow(t.name, t.shape, kind_of(t.name), t.stored_as, t.stored_as, n, _stored_nbytes(source, t, n))

    return _describe(
        path=str(source.path),
        kind=source.kind,
        nbytes=sum(file.stat().st_size for file in source.files),
        digest=None,
        blobs=source.blobs,
        provenance=None,
        notes=list(source.notes),
        refused=refused,
        tensors=[row(t) for t in source.tensors.values()],
    )


def _stored_nbytes(source: Source, tensor: SourceTensor, n_values: int) -> int | None:
    """Bytes of a tensor in its checkpoint."""
    if tensor.stored_as in _SOURCE_BITS:
        return n_values * _SOURCE_BITS[tensor.stored_as] // 8
    if source.kind != "gguf":
        return tensor.nbytes
    import gguf  # slow to load, and of use here only

    try:
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.stored_as]]
    except KeyError:
        return None
    return int(n_values // block * nbytes)


def _describe(
    *,
    path: str,
    kind: str,
    nbytes: int,
    digest: str | None,
    blobs: Mapping[str, bytes],
    provenance: Mapping[str, Any] | None,
    notes: list[str],
    tensors: list[TensorRow],
    refused: InputError | None = None,
) -> Inspection:
    config = _json(blobs, "config.json")
    model = None
    try:
        if refused is not None:
            raise refused
        if provenance is not None:
            refuse_to_run(path, provenance)
        model = spec_of(blobs)
    except InputError as error:
        generic = kind == "gguf" or (kind != "w4" and refused is None)  # where the tensors can be read
        advice = "" if not generic else "; --architecture generic converts what has no engine"
        notes.append(f"w4conv cannot {'run' if kind == 'w4' else 'convert'} this model: {error}{advice}")
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    ends = _end_tokens(blobs) if "tokenizer.json" in blobs else ((), ())
    return Inspection(
        path=path,
        kind=kind,
        nbytes=nbytes,
        digest=digest,
        architecture=str(named or config.get("model_type") or "unknown"),
        model=model,
        n_parameters=sum(t.n_parameters for t in tensors),
        bits_per_weight=_bits_per_weight(tensors),
        by_kind=_totals(((t.kind, t) for t in tensors), KINDS),
        by_scheme=_totals(((t.scheme, t) for t in tensors), sorted({t.scheme for t in tensors})),
        tokenizer=_tokenizer(blobs, config),
        blobs={name: len(data) for name, data in blobs.items()},
        provenance=provenance,
        notes=tuple(notes),
        tensors=tuple(tensors),
        end_tokens=ends[0],
        chat_end_tokens=ends[1],
    )


def _totals(labelled: Iterable[tuple[str, TensorRow]], order: Iterable[str]) -> tuple[Total, ...]:
    groups: dict[str, list[TensorRow]] = {what: [] for what in order}
    for what, tensor in labelled:
        groups[what].append(tensor)
    return tuple(
        Total(what, len(rows), sum(t.n_parameters for t in rows), _nbytes(rows), _bits_per_weight(rows))
        for what, rows in groups.items()
        if rows
    )


def _nbytes(tensors: Iterable[TensorRow]) -> int | None:
    total = 0
    for tensor in tensors:
        if tensor.nbytes is None:
            return None
        total += tensor.nbytes
    return total


def _bits_per_weight(tensors: list[TensorRow]) -> float | None:
    nbytes, n = _nbytes(tensors), sum(t.n_parameters for t in tensors)
    return None if nbytes is None or not n else 8 * nbytes / n


def _tokenizer(blobs: Mapping[str, bytes], config: Mapping[str, Any]) -> TokenizerSummary | None:
    try:
        file = TokenizerFile(blobs.get("tokenizer.json", b"{}"))
    except InputError:
        return None
    if not isinstance(file.settings.get("model"), dict):
        return None
    settings = _json(blobs, "tokenizer_config.json")

    def special(name: str) -> str | None:
        token = settings.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        ids = config.get(f"{name}_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        return token if isinstance(token, str) else file.token(first) if isinstance(first, int) else None

    return TokenizerSummary(
        model=str(file.model.get("type", "unknown")),
        n_tokens=file.n_tokens,
        bos_token=special("bos"),
        eos_token=special("eos"),
        has_chat_template="chat_template.jinja" in blobs or bool(settings.get("chat_template")),
    )


def _end_tokens(blobs: Mapping[str, bytes]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a continuation and of an answer in a chat, by the rule of the tokenizer that runs the model; none where it
    cannot be built."""
    from w4conv.runtime.tokenizer import Tokenizer  # loads a library

    try:
        tokenizer = Tokenizer(blobs)
        plain, chat = (tokenizer.stop_ids(chat=chat) for chat in (False, True))
    except InputError:
        return (), ()
    return tuple(map(tokenizer.token_text, sorted(plain))), tuple(map(tokenizer.token_text, sorted(chat)))


def _json(blobs: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON blob; one that is none counts as empty here, since inspect describes what it can."""
    try:
        return json_object(blobs, name)
    except InputError:
        return {}
