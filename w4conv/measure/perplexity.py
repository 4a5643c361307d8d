"""Perplexity by two published conventions, and the difference between two models on the same tokens.

    convention   text               windows of ctx tokens               scored targets
    "llama.cpp"  the file verbatim  disjoint, remainder dropped, 2 or   positions ctx/2 + 1 .. ctx - 1;
                                    more; the first token of each is    255 a window at ctx 512
                                    replaced by BOS if the model adds it
    "gptq"       rows joined by     disjoint, remainder dropped, 1 or   positions 1 .. ctx - 1;
                 blank lines        more; BOS only before the text      2047 a window at ctx 2048

perplexity = exp(mean of -ln p(target)). In "gptq" all windows have the same number of targets, so the mean over tokens
is the mean of window means that the papers give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from w4conv import elementary
from w4conv.arguments import count, optional_count
from w4conv.arrays import F32Array, F64Array
from w4conv.errors import InputError, UsageError

IntArray = npt.NDArray[np.int64]

DEFAULT_CTX: Final = {"llama.cpp": 512, "gptq": 2048}
_MIN_WINDOWS: Final = {"llama.cpp": 2, "gptq": 1}
_BLOCK_TOKENS: Final = 128  # logits held at a time


class TokenSequence(Protocol):
    """The part of a session of the engine that is used here."""

    def append(self, token_ids: IntArray, *, all_logits: bool = False) -> F32Array: ...


class Scorer(Protocol):
    """The part of a model that is used here."""

    def session(self) -> TokenSequence: ...


@dataclass(frozen=True, slots=True)
class Windows:
    """tokens: (n_windows, ctx) int64. first_target: position of the first scored token of each window."""

    tokens: IntArray
    first_target: int
    n_text_tokens: int

    @property
    def n_scored(self) -> int:
        n_windows, ctx = self.tokens.shape
        return int(n_windows * (ctx - self.first_target))


def make_windows(
    token_ids: Sequence[int], *, convention: str, ctx: int, bos_id: int | None, chunks: int | None = None
) -> Windows:
    """Cut a tokenized text. bos_id: the BOS token if the model adds one (the text then starts with it), else None.

    chunks: only the first so many windows. Raises UsageError when the text is too short, or for impossible options.
    """
    if convention not in DEFAULT_CTX:
        raise UsageError(f"convention {convention!r} is neither llama.cpp nor gptq")
    ctx, chunks = count(ctx, "ctx", low=4, what="at least 4 tokens a window"), optional_count(chunks, "chunks", low=1)
    needed = _MIN_WINDOWS[convention] * ctx
    if len(token_ids) < needed:
        raise UsageError(
            f"the text has {len(token_ids):,} tokens; convention {convention} with ctx {ctx} needs at least "
            f"{needed:,}. Use a longer text or a smaller --ctx"
        )
    n_windows = len(token_ids) // ctx
    if chunks is not None:
        n_windows = min(n_windows, chunks)
    tokens = np.array(token_ids[: n_windows * ctx], np.int64).reshape(n_windows, ctx)
    if convention == "gptq":
        return Windows(tokens, 1, len(token_ids))
    if bos_id is not None:
        tokens[:, 0] = bos_id
    return Windows(tokens, ctx // 2 + 1, len(token_ids))


def token_nlls(model: Scorer, windows: Windows, *, advance: Callable[[int], None] | None = None) -> F64Array:
    """-ln p of every scored token: (n_windows, n_targets) float64. advance: called with the number of tokens just done.

    Raises NotFiniteError when the model yields logits that are not finite.
    """
    n_windows, ctx = windows.tokens.shape
    first = windows.first_target - 1  # position whose logits predict the first target
    out = np.empty((n_windows, ctx - 1 - first))
    for window, nll in zip(windows.tokens, out, strict=True):
        session = model.session()
        if first:
            session.append(window[:first])
        for start in range(first, ctx - 1, _BLOCK_TOKENS):
            end = min(start + _BLOCK_TOKENS, ctx - 1)
            logits = session.append(window[start:end], all_logits=True)
            nll[start - first : end - first] = negative_log_likelihoods(logits, window[start + 1 : end + 1])
        if advance is not None:
            advance(ctx)
    check_finite(out)
    return out


class NotFiniteError(InputError):
    """A model yields logits that are not finite."""


def check_finite(nlls: F64Array) -> None:
    """Raise NotFiniteError for a model whose logits are not finite."""
    if not np.isfinite(nlls).all():
        raise NotFiniteError(
            "the model yields logits that are not finite, so it has no perplexity; its weights are broken"
        )


@np.errstate(invalid="ignore")  # of logits that are not finite; `check_finite` raises for them
def negative_log_likelihoods(logits: F32Array, targets: IntArray) -> F64Array:
    """logits: (n, vocab_size) float32, targets: (n,). The log-sum-exp is taken in float64, relative to the maximum."""
    out = np.empty(len(targets))
    shifted = np.empty(logits.shape[1])  # one row at a time stays in the cache: twice as fast as all at once
    for i, (row, target) in enumerate(zip(logits, targets, strict=True)):
        largest = float(row.max())
        np.subtract(row, largest, out=shifted, dtype=np.float64)
        out[i] = elementary.log(elementary.total(elementary.exp(shifted))) + (largest - float(row[target]))
    return out


@dataclass(frozen=True, slots=True)
class Estimate:
    """A perplexity and its standard error: ppl * sqrt(var(nll) / (n - 1)), tokens taken as independent.

    log, log_stderr: the mean of -ln p in nats, and its standard error. They stay finite where the perplexity of a
    broken model exceeds float64; value and stderr are infinite then.
    """

    value: float
    stderr: float
    log: float
    log_stderr: float


@dataclass(frozen=True, slots=True)
class Increase:
    """How much larger one perplexity is than another on the same tokens.

    difference and ratio with standard errors, from the paired differences of -ln p of each token. log_ratio: the mean
    of these differences in nats, with its standard error. It stays finite where a perplexity exceeds float64; the
    difference, and the ratio too, may then be infinite or NaN.
    """

    difference: float
    difference_stderr: float
    ratio: float
    ratio_stderr: float
    log_ratio: float
    log_ratio_stderr: float


def estimate(nlls: F64Array) -> Estimate:
    log, log_stderr = elementary.mean(nlls), _stderr(nlls)
    value = _exp(log)
    return Estimate(value, value * log_stderr if math.isfinite(value) else math.inf, log, log_stderr)


def increase(nlls: F64Array, base: F64Array) -> Increase:
    """Of `nlls` over `base`, two arrays of the same shape from `token_nlls` over the same windows."""
    value, base_value = _exp(elementary.mean(nlls)), _exp(elementary.mean(base))
    log_ratio, log_ratio_stderr = elementary.mean(nlls - base), _stderr(nlls - base)
    ratio = _exp(log_ratio)
    # First order: d(e^a - e^b) = e^a da - e^b db, whose variance is that of the weighted differences.
    with np.errstate(over="ignore", invalid="ignore"):
        difference_stderr = _stderr(value * nlls - base_value * base)
    return Increase(
        difference=value - base_value,
        difference_stderr=difference_stderr if math.isfinite(difference_stderr) else math.inf,
        ratio=ratio,
        ratio_stderr=ratio * log_ratio_stderr if math.isfinite(ratio) else math.inf,
        log_ratio=log_ratio,
        log_ratio_stderr=log_ratio_stderr,
    )


def _exp(x: float) -> float:
    """e^x, infinite where that exceeds float64."""
    return float(elementary.exp(np.float64(x)))


def _stderr(values: F64Array) -> float:
    return math.sqrt(elementary.variance(values) / (values.size - 1)) if values.size > 1 else math.inf
