"""A text cut into the windows that a container's perplexity is measured on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from w4conv.arguments import count
from w4conv.container import Container
from w4conv.errors import UsageError
from w4conv.measure.perplexity import DEFAULT_CTX, Windows, make_windows
from w4conv.measure.texts import Text, load_text
from w4conv.runtime.tokenizer import Tokenizer, settle_special_tokens


@dataclass(frozen=True, slots=True)
class TextWindows:
    text: Text
    convention: str
    ctx: int
    adds_bos: bool
    special_tokens: str
    windows: Windows


def settle(convention: str | None, ctx: int | None) -> tuple[str, int]:
    """(convention, ctx) with defaults: "llama.cpp"; ctx 512, for "gptq" 2048."""
    convention = "llama.cpp" if convention is None else convention
    if convention not in DEFAULT_CTX:
        raise UsageError(f"convention {convention!r} is not one of {', '.join(DEFAULT_CTX)}")
    return convention, DEFAULT_CTX[convention] if ctx is None else count(ctx, "ctx", low=1)


def cut_text(
    container: Container, text: str | os.PathLike[str] | None, *, convention: str, ctx: int, chunks: int | None = None,
    special_tokens: str | None = None,
) -> TextWindows:  # fmt: skip
    """`text` (None: the WikiText-2 raw test split) in the container's tokens. chunks: only the first so many windows.
    special_tokens: `settle_special_tokens`.

    Raises UsageError for impossible options or too short a text, InputError when the text is missing.
    """
    tokenizer = Tokenizer(container.blobs)
    loaded = load_text(None if text is None else Path(text))
    content = loaded.joined_rows() if convention == "gptq" else loaded.content
    special_tokens = settle_special_tokens(special_tokens)
    tokens = tokenizer.encode(content, special_tokens=special_tokens)
    bos_id = tokenizer.bos_id if tokenizer.adds_bos else None
    windows = make_windows(tokens, convention=convention, ctx=ctx, bos_id=bos_id, chunks=chunks)
    return TextWindows(loaded, convention, ctx, tokenizer.adds_bos, special_tokens, windows)
