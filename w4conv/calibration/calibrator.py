"""Calibration: each matrix is rounded for its inputs, observed on a calibration set or given as statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import codes, kernels
from w4conv.arrays import F32Array
from w4conv.calibration.statistics import HEAD, Statistics
from w4conv.container import Layout
from w4conv.errors import InputError
from w4conv.models.spec import READS, ModelSpec, TensorSpec
from w4conv.quantization.calibrated import METHODS, Inputs, OutputResidual, ScaleError, Solution, solve
from w4conv.quantization.moments import CrossMoments, Moments
from w4conv.sources.base import Source

_READ_ROWS: Final = 1 << 13
NORMED_HOOKS: Final = ("qkv", "gate_up")  # their rows are the output of a norm


@dataclass(slots=True)
class Observed:
    """What one hook has seen.

    residual: at NORMED_HOOKS of the rows themselves, else of the hidden states after the linear layer; None for zero.
    """

    inputs: Inputs
    residual: OutputResidual | None


def summed(blocks: Iterable[tuple[bool, F32Array, F32Array]], where: object, *, threads: int | None) -> Observed:
    """blocks: whether tokens are held out, rows at a hook (n, n_columns), and their residual (n, n_rows).

    Raises InputError, naming `where`, for rows that are not finite.
    """
    sums: list[tuple[Moments, CrossMoments]] = []
    for held_out, rows, residual in blocks:
        if not np.isfinite(rows).all():
            raise InputError(f"{where}: the model's activations are not finite; its weights are broken")
        width = rows.shape[1]
        sums = sums or [(Moments(width), CrossMoments(residual.shape[1], width)) for _ in range(2)]
        moments, cross = sums[held_out]
        moments.add(rows, threads=threads)
        cross.add(residual, rows, threads=threads)
    (fit, fit_residual), (judge, judge_residual) = sums
    return Observed(
        Inputs(fit.matrix(), judge.matrix(), threads=threads),
        OutputResidual(fit_residual.matrix(), judge_residual.matrix()),
    )


def joined(found: Sequence[Solution]) -> Solution:
    """Of blocks of rows, or of the matrices of a stack, one after another; method and error are those of the first."""
    blocks = [s.packed for s in found]
    parts: dict[str, Any] = {kind: np.concatenate([b.parts()[kind] for b in blocks]) for kind in blocks[0].parts()}
    n_underflowed = sum(b.n_underflowed for b in blocks)
    return replace(found[0], packed=blocks[0]._replace(**parts, n_underflowed=n_underflowed))


class Calibrator(ABC):
    """Rounds the matrices of a source for their inputs. `layout` says how each tensor is coded."""

    def __init__(
        self, source: Source, spec: ModelSpec, layout: Layout, methods: Mapping[str, str], *,
        threads: int | None, solved: Callable[[int, str], None], kept: Collection[str] = (),
    ) -> None:  # fmt: skip
        """methods: by name, of the matrices to solve. All others are coded by round-to-nearest.

        solved: called with the bytes and the name of each source matrix, once it is rounded. kept: names of the
        tensors that an interrupted conversion has already written.
        """
        self._source, self._spec, self._layout, self._methods = source, spec, layout, methods
        self._threads, self._solved, self._kept = threads, solved, kept
        # number of matrices by winning method
        self._chosen = {name: 0 for method in methods.values() for name in METHODS[method]}

    @abstractmethod
    def take(self, name: str) -> Solution:
        """The rounding of a matrix that is not kept. Call it once for each, in the order of the model.

        Raises InputError.
        """

    def notes(self) -> list[str]:
        won = ", ".join(f"{method} {n}" for method, n in self._chosen.items() if n)
        return [f"rounding chosen for each matrix by its outputs' error on held-out sequences: {won}"] if won else []

    def _solve_matrix(
        self, t: TensorSpec, observed: Observed, *, of_inputs: bool, query_moments: F32Array | None = None,
        index: int | None = None,
    ) -> Solution:  # fmt: skip
        """of_inputs: the residual is that of the inputs, not of the outputs. query_moments: as in `solve`. index: of a
        stack, that matrix."""
        values = self._values(t, index)
        s = self._solve(t, values, 0, observed, of_inputs=of_inputs, query_moments=query_moments, index=index)
        if t.name not in self._kept:  # of a layer partly kept, all matrices are solved again
            self._chosen[s.method] += 1
            self._solved(values.nbytes, t.name)
        return s

    def _values(self, t: TensorSpec, index: int | None = None) -> npt.NDArray[Any]:
        """index: of a stack, that matrix."""
        return self._source.read(t.name) if index is None else self._source.read(t.name, slice(index, index + 1))[0]

    def _solve_rows(self, t: TensorSpec, observed: Observed) -> Solution:
        """Embedding or head, a block of rows at a time."""
        found = []
        for row in range(0, t.shape[0], _READ_ROWS):
            values = self._source.read(t.name, slice(row, min(row + _READ_ROWS, t.shape[0])))
            found.append(self._solve(t, values, row, observed, of_inputs=True))
            self._chosen[found[-1].method] += row == 0
            self._solved(values.nbytes, t.name)
        return joined(found)

    def _solve(
        self, t: TensorSpec, values: npt.NDArray[Any], row: int, observed: Observed, *, of_inputs: bool,
        query_moments: F32Array | None = None, index: int | None = None,
    ) -> Solution:  # fmt: skip
        """values: rows of t from `row` on; index: of its matrix `index`."""
        w = codes.as_f32(values, self._source.tensors[t.name].dtype)
        residual = observed.residual
        if of_inputs and residual is not None:
            residual = residual.of(w, threads=self._threads)
        scheme, method = self._layout.tensors[t.name].scheme, self._methods[t.name]
        try:
            return solve(
                w, observed.inputs, scheme, method, residual=residual, query_moments=query_moments,
                threads=self._threads,
            )  # fmt: skip
        except ScaleError as error:
            name = t.name if index is None else f"{t.name}: expert {index}"
            raise self._bad_value(name, error, row + error.row) from None

    def _bad_value(self, name: str, error: kernels.BadValueError | ScaleError, row: int | None = None) -> InputError:
        at = error.row if row is None else row
        return InputError(f"{self._source.path}: {name}: {error.reason} at row {at}, column {error.column}")


class StatisticsCalibrator(Calibrator):
    """From statistics of the original model. Each matrix is rounded independently, without output residual."""

    def __init__(
        self, source: Source, spec: ModelSpec, layout: Layout, methods: Mapping[str, str], statistics: Statistics, *,
        threads: int | None, solved: Callable[[int, str], None], kept: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(source, spec, layout, methods, threads=threads, solved=solved, kept=kept)
        self._statistics = statistics
        self._at: tuple[tuple[int | None, str], Observed] | None = None

    def take(self, name: str) -> Solution:
        t = next(t for t in self._spec.tensors() if t.name == name)
        if t.layer is None:
            return self._solve_rows(t, self._at_hook(None, HEAD))
        return self._solve_matrix(t, self._at_hook(t.layer, READS[t.part]), of_inputs=False)

    def _at_hook(self, layer: int | None, hook: str) -> Observed:
        if self._at is None or self._at[0] != (layer, hook):
            moments = self._statistics.at_hook(layer, hook).second_moments()
            self._at = (layer, hook), Observed(Inputs(*moments, threads=self._threads), None)
        return self._at[1]
