"""Models side by side over a text, layer by layer: memory holds the weights of one layer of one model.

The hidden states of a batch of windows are kept between layers, HIDDEN_NBYTES at most. Each batch reads all layers
once. The logits are bit for bit those of `runtime.engine.Model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from w4conv.arrays import F32Array, F64Array
from w4conv.measure.perplexity import Windows, check_finite, negative_log_likelihoods
from w4conv.runtime.layer_model import Captured
from w4conv.runtime.layers import LayeredModel, LoadedLayer

HIDDEN_NBYTES: Final = 1 << 29  # of the hidden states of all models together
_BLOCK_TOKENS: Final = 64  # logits in memory at a time


class ScoredBlock(NamedTuple):
    """logits: of each model, (n, vocab_size), after the tokens from `start` of a window."""

    window: int
    start: int
    logits: tuple[F32Array, ...]


class Observer(Protocol):
    """Observes layers while they run. n_windows: of the first so many windows."""

    n_windows: int

    def add(
        self, layer: int, loaded: Sequence[LoadedLayer], captured: Sequence[Captured], hidden: Sequence[F32Array]
    ) -> None:
        """One window: of each model, the inputs of the linear layers and the hidden states after the layer."""


def scored_logits(
    models: Sequence[LayeredModel],
    windows: Windows,
    *,
    threads: int | None = None,
    observer: Observer | None = None,
    advance: Callable[[int, str], None] | None = None,
) -> Iterator[ScoredBlock]:
    """Blocks of logits for all scored targets, window after window.

    advance: called after each layer of all models, with the tokens of the batch and the layer.
    """
    n_windows, ctx = windows.tokens.shape
    n_layers = models[0].spec.n_layers
    width = sum(m.spec.hidden_size for m in models)
    step = max(HIDDEN_NBYTES // (ctx * width * 4), 1)
    for first in range(0, n_windows, step):
        tokens = windows.tokens[first : first + step]
        hidden = [model.embed(tokens) for model in models]
        for layer in range(n_layers):
            _run_layer(layer, models, hidden, observer, (observer.n_windows if observer else 0) - first, threads)
            if advance is not None:
                advance(tokens.size, f"layer {layer}")
        heads = [model.head(threads=threads) for model in models]
        for i in range(len(tokens)):
            for start in range(windows.first_target - 1, ctx - 1, _BLOCK_TOKENS):
                rows = slice(start, min(start + _BLOCK_TOKENS, ctx - 1))
                logits = tuple(head.logits(h[i, rows]) for head, h in zip(heads, hidden, strict=True))
                yield ScoredBlock(first + i, start, logits)
        del heads


def layered_nlls(blocks: Iterable[ScoredBlock], windows: Windows) -> F64Array:
    """As `perplexity.token_nlls`, from the blocks of one model."""
    n_windows, ctx = windows.tokens.shape
    out = np.empty((n_windows, ctx - windows.first_target))
    for block in blocks:
        (logits,) = block.logits
        at, end = block.start + 1 - windows.first_target, block.start + len(logits)
        out[block.window, at : at + len(logits)] = negative_log_likelihoods(
            logits, windows.tokens[block.window, block.start + 1 : end + 1]
        )
    check_finite(out)
    return out


def _run_layer(
    layer: int, models: Sequence[LayeredModel], hidden: Sequence[F32Array], observer: Observer | None, n_observed: int,
    threads: int | None,
) -> None:  # fmt: skip
    if observer is not None and n_observed > 0:  # it needs the layer of all models at once
        loaded = [model.layer(layer, threads=threads) for model in models]
        for i in range(min(n_observed, len(hidden[0]))):
            captured = []
            for one, h in zip(loaded, hidden, strict=True):
                found = one.model.run(h[i], capture=True)
                assert found is not None
                captured.append(found)
            observer.add(layer, loaded, captured, [h[i] for h in hidden])
        del loaded
    for model, h in zip(models, hidden, strict=True):
        if len(rest := h[max(n_observed, 0) :]):
            one = model.layer(layer, threads=threads)
            for sequence in rest:
                one.model.run(sequence)
            del one
