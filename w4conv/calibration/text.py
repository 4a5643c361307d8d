"""The calibration set: sequences of tokens from a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from w4conv.calibration import builtin
from w4conv.errors import UsageError
from w4conv.measure.texts import load_text
from w4conv.models.spec import ModelSpec
from w4conv.runtime.tokenizer import Tokenizer

TOKENS: Final = 16384
CTX: Final = 512
HELD_OUT: Final = 8  # one sequence in so many is held out


def is_held_out(sequence: int, one_in: int = HELD_OUT) -> bool:
    return sequence % one_in == one_in // 2


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """sequences: (n, ctx) token ids, spread evenly over the text. digest: BLAKE3 of the text's bytes, hexadecimal.
    about: what else the record says of it."""

    digest: str
    sequences: npt.NDArray[np.int64]
    about: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """For the provenance of a container."""
        n, ctx = self.sequences.shape
        cut = {"text_blake3": self.digest, "tokens": n * ctx, "ctx": ctx, "held_out_sequences": n // HELD_OUT}
        return {**self.about, **cut}


def read_calibration(
    path: Path | None,
    blobs: Mapping[str, bytes],
    spec: ModelSpec,
    *,
    tokens: int,
    ctx: int,
    special_tokens: str = "parse",
) -> CalibrationSet:
    """path: a UTF-8 text; None is the set built in. special_tokens: `settle_special_tokens`, of a text.

    Raises UsageError when the text is too short for so many tokens, InputError when it cannot be read.
    """
    if not 2 <= ctx <= spec.max_positions:
        raise UsageError(f"calibration-ctx is {ctx}, expected 2 to {spec.max_positions}, the limit of the model")
    n = tokens // ctx
    if n < HELD_OUT:
        raise UsageError(
            f"{tokens:,} calibration tokens are {n} sequences of {ctx}; at least {HELD_OUT} are needed, since one in "
            f"{HELD_OUT} is held out. Raise calibration-tokens or lower calibration-ctx"
        )
    tokenizer = Tokenizer(blobs)
    if path is None:
        found = builtin.builtin_text(blobs, tokenizer)
        name, content, about = "the built-in calibration set", found.content, found.record()
    else:
        name, content = str(path), load_text(path).content
        about = {"special_tokens": special_tokens} if special_tokens != "parse" else {}
    ids = np.array(tokenizer.encode(content, special_tokens=special_tokens), np.int64)
    if len(ids) < n * ctx:
        raise UsageError(
            f"{name} has {len(ids):,} tokens, fewer than the {n * ctx:,} asked for. Use a longer text or lower "
            "calibration-tokens"
        )
    starts = np.arange(n) * (len(ids) - ctx) // max(n - 1, 1)
    sequences = ids[starts[:, None] + np.arange(ctx)]
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        sequences[:, 0] = tokenizer.bos_id
    return CalibrationSet(blake3(content.encode()).hexdigest(), sequences, about)
