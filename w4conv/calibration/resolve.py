"""What the user gives to calibrate on: told apart by its first bytes, and read once the model is known."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

from w4conv.arguments import path_of
from w4conv.calibration import builtin
from w4conv.calibration.imatrix import ImportanceMatrix
from w4conv.calibration.statistics import SavedStatistics, Statistics
from w4conv.calibration.text import CTX, TOKENS, CalibrationSet, read_calibration
from w4conv.errors import UsageError
from w4conv.models.spec import ModelSpec
from w4conv.runtime.tokenizer import settle_special_tokens
from w4conv.sources.base import Source

Calibration = CalibrationSet | Statistics  # what a conversion is planned with


@dataclass(frozen=True, slots=True)
class TextFile:
    """A text of which so many tokens are taken, in sequences of ctx. path: None is the set built in. special_tokens:
    how those that the text spells are read, `settle_special_tokens`."""

    path: Path | None
    tokens: int = TOKENS
    ctx: int = CTX
    special_tokens: str = "parse"


def calibration_path(given: str | os.PathLike[str] | None) -> Path | None:
    """The file that is meant; None where nothing is given, or the word "builtin" itself: "./builtin" is a file."""
    return None if given is None or given == builtin.NAME else path_of(given, "calibration")


def text_file(
    path: Path | None, *, tokens: int | None = None, ctx: int | None = None, special_tokens: str | None = None
) -> TextFile:
    """With defaults; path as in TextFile. Raises UsageError."""
    word = settle_special_tokens(special_tokens)
    if path is None and special_tokens is not None:
        raise UsageError(
            "special-tokens says how a text is read that may spell them. The built-in calibration set spells none but "
            "those of the model's chat template: leave it out"
        )
    usual = builtin.TOKENS if path is None else TOKENS
    return TextFile(path, usual if tokens is None else tokens, CTX if ctx is None else ctx, word)


def open_calibration(
    given: str | os.PathLike[str],
    *,
    tokens: int | None = None,
    ctx: int | None = None,
    special_tokens: str | None = None,
) -> TextFile | Statistics:
    """The word "builtin", a text, a file of statistics, or an importance matrix of llama.cpp.

    Raises UsageError where statistics are given and a text is to be cut; InputError for statistics that are damaged.
    """
    path = calibration_path(given)
    if path is None:
        return text_file(None, tokens=tokens, ctx=ctx, special_tokens=special_tokens)
    head = _first_bytes(path)
    is_importance_matrix = head.startswith(b"GGUF")
    if not is_importance_matrix and head[4:] != b"\0\0\0\0{":  # as safetensors begin, and no text does
        return text_file(path, tokens=tokens, ctx=ctx, special_tokens=special_tokens)
    if any(value is not None for value in (tokens, ctx, special_tokens)):
        raise UsageError(
            f"calibration-tokens, calibration-ctx and special-tokens are for a text, and {path} has statistics: leave "
            "them out"
        )
    return ImportanceMatrix(path) if is_importance_matrix else SavedStatistics(path)


def check_calibration(given: TextFile | Statistics, spec: ModelSpec) -> None:
    """Raises UsageError for statistics where a model has experts: each of them has inputs of its own."""
    if isinstance(given, Statistics) and spec.experts is not None:
        raise UsageError(
            f"{given.path}: statistics serve dense models, and {spec.architecture} is a mixture of experts. Name a "
            "text, or builtin, with --calibration"
        )


def resolve_calibration(given: TextFile | Statistics, source: Source, spec: ModelSpec) -> Calibration:
    """A text is read and cut into tokens by the source's tokenizer. Raises UsageError, InputError."""
    return given if isinstance(given, Statistics) else resolve_text(given, source, spec)


def resolve_text(given: TextFile, source: Source, spec: ModelSpec) -> CalibrationSet:
    """As `resolve_calibration`."""
    return read_calibration(
        given.path, source.blobs, spec, tokens=given.tokens, ctx=given.ctx, special_tokens=given.special_tokens
    )


def _first_bytes(path: Path) -> bytes:
    """9 of them; none of a pipe, which can be read only once, nor of a file that cannot be opened: an error later."""
    try:
        with path.open("rb") if path.is_file() else io.BytesIO() as stream:
            return stream.read(9)
    except OSError:
        return b""
