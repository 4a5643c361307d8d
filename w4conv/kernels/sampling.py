"""Tokens chosen from logits, and the sums that log-probabilities need (docs/numerics.md 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv import _native
from w4conv.arrays import F32Array
from w4conv.errors import InputError
from w4conv.kernels.pool import native_pool

Chooser = _native.Sampler
WHOLE_WEIGHT: Final = 1 << 40  # a weight of 1, as a whole number

_WORD: Final = (1 << 64) - 1


def new_chooser(
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    choice: int,
    repetition: float,
    presence: float,
    frequency: float,
    bias: Mapping[int, float],
) -> Chooser:
    """The choices of one sequence; see w4conv.runtime.sampling, which checks the values."""
    return _native.Sampler(
        temperature, top_k, top_p, min_p, (seed & _WORD, seed >> 64), choice, repetition, presence, frequency,
        np.fromiter(bias.keys(), np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias)),
    )  # fmt: skip


def choose(logits: F32Array, choosers: Sequence[Chooser], *, threads: int | None = None) -> npt.NDArray[np.int32]:
    """(n,) token ids, one for each row of logits (n, vocab_size) by its chooser, which then counts it.

    Raises InputError for a row without a largest finite logit; no chooser has moved on then.
    """
    out = np.empty(len(choosers), np.int32)
    _native.choose(native_pool(threads), np.ascontiguousarray(logits, np.float32), list(choosers), out)
    for row, token in enumerate(out):
        if token < 0:
            raise _fault(int(token), row)
    return out


def log_sums(
    logits: F32Array, *, threads: int | None = None
) -> tuple[F32Array, npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
    """Of each row of logits (n, vocab_size): the largest, its first token, and the sum of exp(logit - largest) in units
    of 1 / WHOLE_WEIGHT. Raises InputError for a row without a largest finite logit."""
    n = len(logits)
    tops, tokens, sums = np.empty(n, np.float32), np.empty(n, np.int32), np.empty(n, np.uint64)
    _native.log_sums(native_pool(threads), np.ascontiguousarray(logits, np.float32), tops, tokens, sums)
    for row, token in enumerate(tokens):
        if token < 0:
            raise _fault(int(token), row)
    return tops, tokens, sums


def largest(logits: F32Array, n: int) -> npt.NDArray[np.int32]:
    """Ids of the n largest of logits (vocab_size,), falling; of equal ones the lower id is first."""
    out = np.empty(min(n, len(logits)), np.int32)
    _native.largest(np.ascontiguousarray(logits, np.float32), out)
    return out


def _fault(code: int, row: int) -> InputError:
    what = "every logit is -infinity" if code == -2 else "a logit is infinite or not a number"
    return InputError(
        f"no token can be chosen in row {row}: {what}. A weight of the model, a bias or a penalty is out of range; "
        "verify checks the file"
    )
