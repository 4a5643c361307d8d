"""Kullback-Leibler divergence (KLD) of a model from its base on the same tokens, without a file of logits.

At each scored position KLD = sum over the vocabulary of p (ln p - ln q), with the probabilities p of the base and q of
the model, both by a float64 log-sum-exp of float32 logits. Nothing is clipped or rounded, so the KLD of a model from
itself is exactly 0. (llama-perplexity keeps the base's log-probabilities in 16 bits and leaves out those below -16.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from w4conv import elementary
from w4conv.arrays import F64Array
from w4conv.errors import InputError
from w4conv.measure.layerwise import ScoredBlock
from w4conv.measure.perplexity import NotFiniteError, Windows

PERCENTILES: Final = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Percentile:
    percent: float
    value: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """Over the scored positions, tokens taken as independent.

    mean, stderr, maximum and percentiles (linearly interpolated): of the KLD in nats. same_top: share of positions
    where both give the same token the highest probability (the first of equals), with its binomial standard error.
    mean_delta_p, rms_delta_p: q - p of the actual next token: mean and root mean square.
    """

    n_scored: int
    mean: float
    stderr: float
    maximum: float
    percentiles: tuple[Percentile, ...]
    same_top: float
    same_top_stderr: float
    mean_delta_p: float
    rms_delta_p: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """(n_windows, n_targets): -ln q and -ln p of each scored token, KLD, and whether the top token is the same."""

    nlls: F64Array
    base_nlls: F64Array
    klds: F64Array
    same_top: npt.NDArray[np.bool_]

    def divergence(self) -> Divergence:
        k, n = self.klds.ravel(), self.klds.size
        deltas = elementary.exp(-self.nlls) - elementary.exp(-self.base_nlls)
        same = int(self.same_top.sum()) / n
        spread = max(n - 1, 1)
        return Divergence(
            n_scored=n,
            mean=elementary.mean(k),
            stderr=math.sqrt(elementary.variance(k) / spread),
            maximum=float(k.max()),
            percentiles=tuple(Percentile(p, float(np.percentile(k, p))) for p in PERCENTILES),
            same_top=same,
            same_top_stderr=math.sqrt(same * (1 - same) / spread),
            mean_delta_p=elementary.mean(deltas),
            rms_delta_p=math.sqrt(elementary.mean(np.square(deltas))),
        )


@np.errstate(invalid="ignore")  # of logits that are not finite; checked at the end
def compare_models(blocks: Iterable[ScoredBlock], windows: Windows) -> Comparison:
    """From the logits of a model and of its base over the windows (measure/layerwise.py).

    Raises NotFiniteError when the model yields logits that are not finite, InputError when its base does.
    """
    n_windows, ctx = windows.tokens.shape
    first = windows.first_target - 1  # position whose logits predict the first target
    shape = (n_windows, ctx - 1 - first)
    out = Comparison(np.empty(shape), np.empty(shape), np.empty(shape), np.empty(shape, np.bool_))
    for block in blocks:
        for i, (row, base_row) in enumerate(zip(*block.logits, strict=True), block.start):
            at, target = (block.window, i - first), windows.tokens[block.window, i + 1]
            log_q, log_p = log_softmax(row), log_softmax(base_row)
            out.nlls[at], out.base_nlls[at] = -log_q[target], -log_p[target]
            out.klds[at] = kullback_leibler(log_p, log_q)
            out.same_top[at] = np.argmax(row) == np.argmax(base_row)
    if not np.isfinite(out.base_nlls).all():
        raise InputError("the source yields logits that are not finite, so nothing diverges from it; it is broken")
    if not (np.isfinite(out.klds).all() and np.isfinite(out.nlls).all()):
        raise NotFiniteError(
            "the model yields logits that are not finite, so there is no divergence; its weights are broken"
        )
    return out


def log_softmax(logits: npt.NDArray[np.float32]) -> F64Array:
    shifted = logits.astype(np.float64) - float(logits.max())
    shifted -= elementary.log(elementary.total(elementary.exp(shifted)))
    return shifted


def kullback_leibler(log_p: F64Array, log_q: F64Array) -> float:
    """Sum of p (ln p - ln q)."""
    return elementary.total(elementary.exp(log_p) * (log_p - log_q))
