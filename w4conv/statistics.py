"""Moments of what the products of a model read on a text, place by place: its activations, summed up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from w4conv.errors import InputError
from w4conv.models.spec import ModelSpec
from w4conv.quantization.moments import Moments
from w4conv.runtime.layers import LayeredSource
from w4conv.sources.base import Source

F32Array = npt.NDArray[np.float32]

HELD_OUT: Final = 8  # one sequence in so many is held out to judge by


class SecondMoments(NamedTuple):
    """Mean over tokens of x x^T, x what a place reads: (n, n) each, of the tokens to fit, and of those held out."""

    fit: F32Array
    held_out: F32Array


def is_held_out(sequence: int, one_in: int = HELD_OUT) -> bool:
    return sequence % one_in == one_in // 2


def observe(
    source: Source, spec: ModelSpec, sequences: npt.NDArray[np.int64], *, threads: int | None
) -> Iterator[dict[str, SecondMoments]]:
    """Of each layer, by place. One layer's weights and moments are held at a time, and the hidden rows of all tokens.

    Raises InputError where activations are not finite.
    """
    model = LayeredSource(source, threads=threads)
    hidden = model.embed(sequences)
    for i in range(spec.n_layers):
        layer = model.layer(i, threads=threads).model
        sums: dict[str, tuple[Moments, Moments]] = {}
        for j, sequence in enumerate(hidden):
            captured = layer.run(sequence, capture=True)
            assert captured is not None
            for place, rows in captured._asdict().items():
                if not np.isfinite(rows).all():
                    raise InputError(f"{source.path}: the model's activations are not finite; its weights are broken")
                pair = sums.setdefault(place, (Moments(rows.shape[1]), Moments(rows.shape[1])))
                pair[is_held_out(j)].add(rows, threads=threads)
        yield {place: SecondMoments(fit.matrix(), judge.matrix()) for place, (fit, judge) in sums.items()}
