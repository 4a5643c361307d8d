"""AWQ: powers of two that scale channels, chosen for the least output error after rounding the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from w4conv import codes
from w4conv.arrays import F32Array
from w4conv.calibration.statistics import HookStatistics, SecondMoments
from w4conv.models.spec import READS, ModelSpec, TensorSpec
from w4conv.quantization.calibrated import Inputs, ScaleError, output_error, solve
from w4conv.quantization.folding import (
    HOOKS,
    MAX_EXPONENT,
    Exponents,
    Folding,
    can_fold,
    given_to,
    scale,
    spread,
)
from w4conv.scheme import QuantScheme
from w4conv.sources.base import Source

METHOD: Final = "awq"
POWERS: Final = tuple(i / 8 for i in range(7))  # s = rms^power is tried; 0: no scaling
_ROWS: Final = 256  # of each matrix, for comparing powers


class ChannelScaling:
    """Finds the folding for the matrices of a source that are rounded by AWQ."""

    def __init__(
        self, source: Source, spec: ModelSpec, schemes: Mapping[str, QuantScheme], *, threads: int | None,
        advance: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        """schemes: of those matrices. advance: called with the number of weights and the name of each finished one."""
        self._source, self._spec, self._schemes = source, spec, schemes
        self._threads, self._advance = threads, advance

    def find(self, layers: Iterable[Mapping[str, HookStatistics]]) -> Folding:
        """layers: of each layer, statistics by hook."""
        found: dict[tuple[int, str], Exponents] = {}
        for i, hooks in zip(range(self._spec.n_layers), layers, strict=False):
            tensors = self._spec.layer_tensors(i)
            for hook in HOOKS:
                if self._is_free(hook, tensors):
                    e = self._at_hook(i, hook, tensors, hooks[hook].second_moments())
                    if e.any():
                        found[i, hook] = e
            for t in tensors:
                if t.name in self._schemes:
                    self._advance(math.prod(t.shape), t.name)
        return Folding(self._spec, found)

    def _is_free(self, hook: str, tensors: Sequence[TensorSpec]) -> bool:
        """Whether AWQ rounds all matrices that read a hook, and the matrix that produces it."""
        concerned = [t for t in tensors if t.role == "linear" and hook in (READS[t.part], given_to(t.part))]
        return can_fold(self._spec, hook) and all(t.name in self._schemes for t in concerned)

    def _at_hook(self, layer: int, hook: str, tensors: Sequence[TensorSpec], moments: SecondMoments) -> Exponents:
        readers = [(t, self._some_rows(t)) for t in tensors if READS.get(t.part) == hook]
        powers = [output_error(w, moments.held_out, threads=self._threads) for _, w in readers]
        logs = _log2(_per_factor(self._spec, hook, np.diag(moments.fit)))
        best, least = np.zeros(len(logs), np.int8), math.inf
        for power in POWERS:
            e = np.clip(np.rint(power / 2 * logs), -MAX_EXPONENT, MAX_EXPONENT).astype(np.int8)
            e = self._made_exact(Folding(self._spec, {(layer, hook): e}), tensors, e)
            s = np.ldexp(np.float32(1), spread(self._spec, hook, e).astype(np.int32))
            square: F32Array = np.multiply.outer(s, s)
            inputs = Inputs(moments.fit / square, moments.held_out / square, threads=self._threads)
            try:
                loss = sum(
                    solve(w * s, inputs, self._schemes[t.name], METHOD, threads=self._threads).error * p
                    for (t, w), p in zip(readers, powers, strict=True)
                )
            except ScaleError:  # the same weights unscaled raise it again when they are rounded
                continue
            if loss < least:
                best, least = e, loss
        return best

    def _some_rows(self, t: TensorSpec) -> F32Array:
        n = min(t.shape[0], _ROWS)
        rows = self._source.read(t.name)[np.arange(n) * t.shape[0] // n]
        return codes.as_f32(rows, self._source.tensors[t.name].dtype)

    def _made_exact(self, folding: Folding, tensors: Sequence[TensorSpec], e: Exponents) -> Exponents:
        """Zero the exponents that would round a weight of a norm or a bias."""
        out = e.copy()
        for t in tensors:
            of_rows, _ = folding.of(t)
            if of_rows is not None and len(t.shape) == 1:
                dtype = self._source.tensors[t.name].dtype
                _, exact = scale(self._source.read(t.name), dtype, dtype, of_rows)
                out[~exact[-len(out) :]] = 0
        return out


def _per_factor(spec: ModelSpec, hook: str, squares: F32Array) -> F32Array:
    """Mean over the channels that share a factor."""
    if hook != "o":
        return squares
    heads = squares.reshape(spec.n_kv_heads, -1, spec.head_dim)
    return np.asarray(sum(heads[:, i] for i in range(heads.shape[1])) / heads.shape[1]).ravel()


def _log2(x: F32Array) -> F32Array:
    """log2 minus its mean; 0 where x is 0. Linear between powers of two, so that every machine has the same bits."""
    mantissa, exponent = np.frexp(x)
    logs = np.where(x > 0, exponent + 2 * mantissa - 2, 0)
    mean = math.fsum(logs.tolist()) / max(int((x > 0).sum()), 1)
    return np.asarray(np.where(x > 0, logs - mean, 0))
