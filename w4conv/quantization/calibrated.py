"""Calibrated rounding of one matrix. Each method gives a candidate; the least output error on held-out tokens wins.

Weights W (n_rows, n_columns), inputs x with second moments H = mean x x^T. Rounding to W' changes the outputs by E x,
E = W' - W, whose mean square over tokens is trace(E H E^T). H is not centred, so errors that add up over tokens count.

**Output residual.** The inputs x come from the model quantized so far. The outputs wanted are those of the original
model. Their difference is the residual r, and B = mean r x^T its cross moment with the inputs. The loss is then
trace(E H E^T) - 2 trace(E B^T), up to a constant. Rounding the target weights W + B (H + damping)^-1 in place of W
minimizes it: GPTQ's problem with other targets (GPTAQ, Li et al. 2025).

**Query second moments.** Keys are multiplied with queries, so the errors of the outputs of a head count together. With
second moments Q of the queries the loss is trace(Q E H E^T). Rows are then rounded one after another, each corrected
for the errors of the rows before it, as columns are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from w4conv import codes, kernels
from w4conv.arrays import F32Array
from w4conv.quantization.reference_gptq import levels_of
from w4conv.scheme import TILE_ROWS, QuantScheme

Scalar = TypeVar("Scalar", bound=np.generic)

# What each method tries; the one with the least error on the held-out tokens stays, the earlier of equals.
METHODS: Final = {
    "rtn": ("rtn",),
    "search": ("rtn", "search"),
    "awq": ("rtn", "search"),  # of weights whose channels are scaled before (folding.py)
    "gptq": ("rtn", "gptq"),
    "best": ("rtn", "search", "gptq"),
}
# Damping: percent of the mean of the diagonal, added to the diagonal; tenfold after each failed factorization. Tokens
# held out of the calibration set ask for less, other texts for more (docs/decisions/0014-damping-for-other-texts.md).
DAMPING_PERCENT: Final = 100
# Scales tried, in steps of 5 % of that of round-to-nearest, each with both signs: -8 reaches further than 7.
MULTIPLIERS: Final = tuple((sign * (100 - 5 * i) / 100, 0) for i in range(9) for sign in (1, -1))
# Asymmetric: factors of the largest and the smallest value, together and each by itself.
SHRINKS: Final = (
    *((1 - i / 20, 1 - i / 20) for i in range(9)),
    *((1 - i / 10, 1.0) for i in range(1, 5)), *((1.0, 1 - i / 10) for i in range(1, 5)),
)  # fmt: skip
QUERY_DAMPING_PERCENT: Final = 1  # of the mean of the diagonal of Q
REFINEMENTS: Final = 2  # rounds of coordinate descent; more gain little
JUDGED_ROWS: Final = 256  # candidates are compared on so many rows, spread over the matrix


class ScaleError(ValueError):
    """The scale of a group does not fit FP16. row, column: where the group begins."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"a scale beyond FP16 at row {row}, column {column}")
        self.reason, self.row, self.column = "a scale beyond FP16", row, column


class Inputs:
    """Second moments of inputs, and their factors; shared by the matrices that read these inputs."""

    def __init__(
        self, fit: F32Array, held_out: F32Array, *, damping_percent: int = DAMPING_PERCENT, threads: int | None = None
    ) -> None:
        """fit, held_out: second moments (n_columns, n_columns) of the tokens to fit and of the held-out tokens."""
        self.fit, self.held_out, self.damping_percent = fit, held_out, damping_percent
        # Columns by rising mean square. They are rounded from the last to the first.
        self.order = np.argsort(np.diag(fit), kind="stable")
        self._threads = threads
        self._by_size: dict[int, GroupFactors] = {}

    @functools.cached_property
    def _factored(self) -> tuple[F32Array, F32Array, F32Array]:
        """The damped diagonal; factor and pivots of the damped moments, columns in `order`.

        The diagonal is 0 at channels that were never active. Those get the mean of the diagonal.
        """
        diagonal = np.diag(self.fit)
        mean = diagonal.mean(dtype=np.float64) or 1.0
        damping = np.where(diagonal > 0, mean * self.damping_percent / 100, mean)
        return _definite(self.fit, self.order, damping, self._threads)

    @property
    def factor(self) -> F32Array:
        return self._factored[1]

    @functools.cached_property
    def damped(self) -> F32Array:
        out = self.fit.copy()
        np.fill_diagonal(out, self._factored[0])
        return out

    def groups(self, size: int) -> GroupFactors:
        """Factors of the diagonal blocks of the moments, for the scale search of groups of `size` columns."""
        if size not in self._by_size:
            n, damping = len(self.fit), self._factored[0] - np.diag(self.fit)
            order, pivots = np.arange(n), np.empty(n, np.float32)
            factors = np.zeros((-(-n // size), size, size), np.float32)
            for g in range(len(factors)):
                part = slice(g * size, min(n, (g + 1) * size))
                columns = order[part] = part.start + np.argsort(np.diag(self.fit)[part], kind="stable")
                _, factor, pivots[part] = _definite(self.fit, columns, damping, self._threads)
                factors[g].reshape(-1)[: factor.size] = factor.ravel()
            self._by_size[size] = GroupFactors(order, factors, pivots)
        return self._by_size[size]

    def solve(self, b: F32Array) -> F32Array:
        """Solve x (fit + damping) = b for x; b, x: (n_rows, n_columns)."""
        _, factor, pivots = self._factored
        x = np.empty_like(b)
        tiles = tiled(b[:, self.order])
        kernels.solve_rows(tiles, factor, pivots, threads=self._threads)
        x[:, self.order] = untiled(tiles, len(b))
        return x


@dataclass(frozen=True, slots=True)
class GroupFactors:
    """order: of columns, inside their groups. factors: (n_groups, size, size), of the damped moments in that order.
    pivots: (n_columns,)."""

    order: npt.NDArray[np.intp]
    factors: F32Array | None
    pivots: F32Array


@dataclass(frozen=True, slots=True)
class OutputResidual:
    """Cross moments B = mean r x^T, (n_rows, n_columns), of output residuals r and inputs x; tokens as in `Inputs`."""

    fit: F32Array
    held_out: F32Array

    def at(self, rows: npt.NDArray[np.intp]) -> OutputResidual:
        return OutputResidual(self.fit[rows], self.held_out[rows])

    def of(self, w: F32Array, *, threads: int | None = None) -> OutputResidual:
        """The residual of the outputs of w, where this one is of its inputs, (n_columns, n_columns)."""
        fit, held_out = (_product(w, a, threads) for a in (self.fit, self.held_out))
        return OutputResidual(fit, held_out)


@dataclass(frozen=True, slots=True)
class Solution:
    """packed: as the container has it. error: mean square error of the outputs, relative to the outputs, on held-out
    tokens and JUDGED_ROWS rows."""

    method: str
    packed: kernels.PackedRows
    error: float


def solve(
    w: F32Array, inputs: Inputs, scheme: QuantScheme, method: str, *, residual: OutputResidual | None = None,
    query_moments: F32Array | None = None, threads: int | None = None,
) -> Solution:  # fmt: skip
    """The candidate of `method` with the least loss on held-out tokens.

    w: finite (n_rows, n_columns). method: a key of METHODS. residual: None stands for zero.
    query_moments: (n_heads, head_dim, head_dim), of what the outputs of each head are multiplied with; None where each
    output counts by itself.
    Raises ScaleError.
    """
    problem = _Problem(w, inputs, residual, scheme, threads, query_moments=query_moments)
    judged = problem.to_judge()
    few = problem.of(judged)
    best: tuple[float, str, _Rounding | None] | None = None
    failure: ScaleError | None = None
    for name in METHODS[method]:
        try:  # rtn and search seldom win, and round rows independently: at first only the rows to judge by
            whole = problem.run(name) if name == "gptq" else None
            loss = few.loss(whole.of(judged) if whole else few.run(name))
        except ScaleError as error:
            failure = failure or error
            continue
        if best is None or loss < best[0]:
            best = loss, name, whole
    if best is None:
        assert failure is not None
        raise failure
    loss, name, whole = best
    power = few.power()
    packed = problem.packed(whole or problem.run(name))
    return Solution(method=name, packed=packed, error=loss / power if power > 0 else 0.0)


def quick(w: F32Array, inputs: Inputs, scheme: QuantScheme, *, threads: int | None = None) -> kernels.PackedRows:
    """Roughly what `solve` makes of w in a fraction of its time: scales by search, codes by GPTQ's column update.

    Raises ScaleError.
    """
    problem = _Problem(w, inputs, None, scheme, threads)
    return problem.packed(problem.run("quick"))


def _stored_scales(r: _Rounding, grid: codes.Grid) -> npt.NDArray[np.generic]:
    return r.scales.astype(np.float16) if r.steps is None else kernels.pack_steps(r.scales, r.q_min, r.steps, grid)


def _zero_points(q_min: F32Array, n_rows: int) -> npt.NDArray[np.uint8]:
    points = (-q_min).astype(np.uint8)
    if n_rows % TILE_ROWS:
        points[-1, :, n_rows % TILE_ROWS :] = 0  # w4-container 4.5: padding is zero
    return points


@dataclass(frozen=True, slots=True)
class _Scales:
    """Of all groups; as in _Rounding."""

    scales: F32Array
    q_min: F32Array
    steps: F32Array | None


@dataclass(frozen=True, slots=True)
class _Rounding:
    """q: (n_tiles, n_columns, 16) int8 (reference_gptq.codes_of). scales: (n_tiles, n_groups, 16), as stored. q_min: of
    that shape, the lowest integer of each group, minus its zero point where it has one, or its shift. steps: (n_tiles,
    16), of which scales are multiples, where the grid has shifts."""

    q: npt.NDArray[np.int8]
    scales: F32Array
    q_min: F32Array
    steps: F32Array | None

    def of(self, rows: npt.NDArray[np.intp]) -> _Rounding:
        tile, row = rows // TILE_ROWS, rows % TILE_ROWS
        q, scales, q_min = self.q[tile, :, row], self.scales[tile, :, row], self.q_min[tile, :, row]
        steps = None if self.steps is None else tiled(self.steps[tile, row][:, None])[:, 0]
        return _Rounding(tiled(q), tiled(scales), tiled(q_min), steps)

    @classmethod
    def joined(cls, parts: list[tuple[npt.NDArray[np.intp], _Rounding]]) -> _Rounding:
        """From roundings of some rows each, the rounding of all rows in order."""
        where = np.argsort(np.concatenate([rows for rows, _ in parts]))

        def whole(of: Callable[[_Rounding], npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
            return tiled(np.concatenate([untiled(of(r), len(rows)) for rows, r in parts])[where])

        steps = None if parts[0][1].steps is None else whole(lambda r: np.asarray(r.steps)[:, None])[:, 0]
        return cls(whole(lambda r: r.q), whole(lambda r: r.scales), whole(lambda r: r.q_min), steps)


class _Problem:
    def __init__(
        self, w: F32Array, inputs: Inputs, residual: OutputResidual | None, scheme: QuantScheme, threads: int | None,
        *, query_moments: F32Array | None = None, rows: npt.NDArray[np.intp] | None = None,
    ) -> None:  # fmt: skip
        """rows: the index of each row of w in the whole matrix, for error messages."""
        self._w, self._inputs, self._residual, self._scheme, self._threads = w, inputs, residual, scheme, threads
        self._queries, self._rows = query_moments, rows  # (n_heads, head_dim, head_dim) or None
        n = w.shape[1]
        self._size = min(scheme.group_size or n, n)
        self._grid = codes.grid(scheme)
        self._group = (np.arange(n) // self._size).astype(np.int32)

    def packed(self, r: _Rounding) -> kernels.PackedRows:
        q = untiled(r.q, len(self._w))
        if self._grid.is_codebook:
            stored: npt.NDArray[np.generic] = self._grid.codes[q]
        elif self._scheme.bits == 4:
            stored = (q - untiled(self.wide(r.q_min), len(self._w))).astype(np.uint8)
        else:
            stored = q
        return kernels.PackedRows(
            codes=codes.pack(self._scheme, stored[None])[0],
            scales=_stored_scales(r, self._grid),
            super_scales=None if r.steps is None else r.steps.astype(np.float16)[:, None],
            zero_points=_zero_points(r.q_min, len(self._w)) if self._grid.is_asymmetric else None,
            n_underflowed=self.n_underflowed(r),
        )

    def to_judge(self) -> npt.NDArray[np.intp]:
        """At most JUDGED_ROWS rows, or whole heads."""
        if self._queries is None:
            return _spread(len(self._w), JUDGED_ROWS)
        n_heads, size, _ = self._queries.shape
        heads = _spread(n_heads, max(JUDGED_ROWS // size, 1))
        return np.asarray(heads[:, None] * size + np.arange(size)).ravel()

    def of(self, rows: npt.NDArray[np.intp]) -> _Problem:
        """The problem of some rows only; whole heads where there are query moments."""
        residual = self._residual and self._residual.at(rows)
        queries = self._queries
        if queries is not None:
            head_dim = queries.shape[1]
            queries = queries[rows[::head_dim] // head_dim]
        return _Problem(
            self._w[rows], self._inputs, residual, self._scheme, self._threads, query_moments=queries, rows=rows
        )

    def run(self, candidate: str) -> _Rounding:
        tiles = tiled(self._w)
        if candidate == "rtn":
            return self._nearest(tiles, self._search(tiles, self._plain(), whole=False))
        if candidate == "quick":
            return self._gptq(tiles, self._search(tiles, self._multipliers(), whole=False))
        if candidate == "search":
            return self._nearest(tiles, self._search(tiles, self._multipliers(), whole=False))
        target = self._w if self._residual is None else self._w + self._inputs.solve(self._residual.fit)
        if self._queries is not None:
            return self._row_by_row(target, self._queries)
        tiles = tiled(target)
        return self._refined(tiles, self._gptq(tiles, self._search(tiles, self._multipliers(), whole=True)))

    def _multipliers(self) -> F32Array:
        if self._grid.shifts:
            return kernels.shifted(kernels.SHIFTED, self._grid.shifts)
        if self._grid.is_asymmetric:
            return np.array(SHRINKS, np.float32)
        return np.array(MULTIPLIERS, np.float32)

    def _plain(self) -> F32Array:
        """Of round-to-nearest."""
        if self._grid.shifts:
            return kernels.shifted((1,), self._grid.shifts)
        return np.array([(1, 1 if self._grid.is_asymmetric else 0)], np.float32)

    def _row_by_row(self, target: F32Array, queries: F32Array) -> _Rounding:
        """Round the rows of each head from the last to the first, with GPTQ's update between rows.

        As with columns (reference_gptq.py): with Q = U^T D U and e = W' - W, the loss is
        sum_j D_j |e_j + sum_{k > j} U_jk e_k|^2, each square weighted by H. The best target of row j is therefore
        target_j - sum_{k > j} U_jk e_k.
        """
        n_heads, size, _ = queries.shape
        order = np.stack([np.argsort(np.diag(q), kind="stable") for q in queries])  # (n_heads, size)
        units = np.stack([self._unit(q, rows) for q, rows in zip(queries, order, strict=True)])
        update = np.zeros((n_heads, size, target.shape[1]), np.float32)
        found: list[tuple[npt.NDArray[np.intp], _Rounding]] = []
        for j in reversed(range(size)):
            rows = order[:, j] + np.arange(n_heads) * size
            named = rows if self._rows is None else self._rows[rows]
            part = _Problem(target[rows] - update[:, j], self._inputs, None, self._scheme, self._threads, rows=named)
            found.append((rows, part.run("gptq")))
            e = part.dequantized(found[-1][1]) - target[rows]
            update[:, :j] += units[:, :j, j, None] * e[:, None]
        return _Rounding.joined(found)

    def _unit(self, q: F32Array, rows: npt.NDArray[np.intp]) -> F32Array:
        damping = np.full(len(q), np.diag(q).mean(dtype=np.float64) * QUERY_DAMPING_PERCENT / 100 or 1.0)
        return _definite(q, rows, damping, self._threads)[1]

    def dequantized(self, r: _Rounding) -> F32Array:
        """W'."""
        return untiled(levels_of(r.q, self.wide(r.q_min), self._grid) * self.wide(r.scales), len(self._w))

    def loss(self, r: _Rounding) -> float:
        """Mean square error of the outputs on the held-out tokens, up to a constant."""
        e = self.dequantized(r) - self._w
        cross = 0.0 if self._residual is None else _sum(self._weighted(e).astype(np.float64) * self._residual.held_out)
        return self._error(e) - 2 * cross

    def power(self) -> float:
        """Mean square of the outputs on the held-out tokens."""
        return self._error(self._w)

    def _error(self, e: F32Array) -> float:
        return _sum(_product(e, self._inputs.held_out, self._threads).astype(np.float64) * self._weighted(e))

    def _weighted(self, e: F32Array) -> F32Array:
        """Q e, head by head."""
        queries = self._queries
        if queries is None:
            return e
        heads = e.reshape(*queries.shape[:2], e.shape[1])
        return np.concatenate([_product(q, own, self._threads) for q, own in zip(queries, heads, strict=True)])

    def n_underflowed(self, r: _Rounding) -> int:
        lost = (tiled(self._w) != 0) & (self.wide(r.scales) == 0)
        starts = np.arange(0, self._w.shape[1], self._size)
        return int(np.logical_or.reduceat(lost, starts, axis=1).sum())

    def _search(self, tiles: F32Array, multipliers: F32Array, *, whole: bool) -> _Scales:
        """Scales of the least error of nearest codes, weighted by the mean squares of the inputs.

        whole: of the least output error of the group after GPTQ's column updates.
        """
        n, size = self._w.shape[1], self._size
        squares = np.ascontiguousarray(np.diag(self._inputs.fit))
        groups = self._inputs.groups(size) if whole else GroupFactors(np.arange(n), None, squares)
        steps = None
        if self._grid.shifts:
            try:
                steps = kernels.steps_of(tiles, squares, size, self._grid, threads=self._threads)
            except kernels.BadValueError as error:
                raise self._scale_error(error.row, error.column) from None
        scales, q_min, errors = kernels.search_scales(
            np.ascontiguousarray(tiles[:, groups.order]), size, groups.factors, groups.pivots, multipliers,
            grid=self._grid, steps=steps, threads=self._threads,
        )  # fmt: skip
        if np.isinf(errors).any():
            tile, group, row = np.argwhere(np.isinf(errors))[0].tolist()
            raise self._scale_error(tile * TILE_ROWS + row, group * size)
        return _Scales(scales, q_min, steps)

    def _scale_error(self, row: int, column: int) -> ScaleError:
        return ScaleError(row if self._rows is None else int(self._rows[row]), column)

    def _nearest(self, tiles: F32Array, s: _Scales) -> _Rounding:
        q = kernels.gptq_round(tiles, self._group, s.scales, s.q_min, None, grid=self._grid, threads=self._threads)
        return _Rounding(q, s.scales, s.q_min, s.steps)

    def _gptq(self, tiles: F32Array, s: _Scales) -> _Rounding:
        order = self._inputs.order
        q = np.empty(tiles.shape, np.int8)
        q[:, order] = kernels.gptq_round(
            np.ascontiguousarray(tiles[:, order]), self._group[order], s.scales, s.q_min,
            self._inputs.factor, grid=self._grid, threads=self._threads,
        )  # fmt: skip
        return _Rounding(q, s.scales, s.q_min, s.steps)

    def _refined(self, tiles: F32Array, r: _Rounding) -> _Rounding:
        kernels.refine(
            tiles, r.q, r.scales, r.q_min, self._inputs.damped, self._size, grid=self._grid,
            n_rounds=REFINEMENTS, steps=r.steps, threads=self._threads,
        )  # fmt: skip
        return r

    def wide(self, of_groups: npt.NDArray[np.floating[Any]]) -> F32Array:
        """Numbers of groups, repeated for each column: (n_tiles, n_columns, 16)."""
        return np.repeat(of_groups.astype(np.float32), self._size, axis=1)[:, : self._w.shape[1]]


def _definite(
    h: F32Array, columns: npt.NDArray[np.intp], damping: npt.NDArray[np.floating[Any]], threads: int | None
) -> tuple[F32Array, F32Array, F32Array]:
    """(damped diagonal, factor, pivots) of some columns of h; damping grows tenfold until h is positive definite."""
    while True:
        damped = (np.diag(h) + damping).astype(np.float32)
        found = kernels.factor(h, columns.astype(np.int64), damped[columns], threads=threads)
        if not isinstance(found, int):
            return damped, *found
        damping = damping * 10


def output_error(e: F32Array, h: F32Array, *, threads: int | None = None) -> float:
    """trace(e h e^T), e (n_rows, n_columns); the same bits for any number of threads."""
    return _sum(_product(e, h, threads).astype(np.float64) * e)


def _product(a: F32Array, b: F32Array, threads: int | None) -> F32Array:
    """a (m, k) times b (k, n)."""
    out = np.zeros((len(a), b.shape[1]), np.float32)
    kernels.gemm_tn(np.ascontiguousarray(a.T), b, out, threads=threads)
    return out


def _sum(values: npt.NDArray[np.float64]) -> float:
    """The sum of a matrix in a fixed order: cumsum adds in order, sum does not promise any."""
    return float(np.cumsum(np.cumsum(values, axis=1)[:, -1])[-1])


def _spread(n_rows: int, n: int) -> npt.NDArray[np.intp]:
    """Indices of at most n rows, evenly spread."""
    n = min(n, n_rows)
    return np.arange(n) * n_rows // n


def tiled(w: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """(n_rows, n_columns) -> (n_tiles, n_columns, 16), rows padded with zeros."""
    return np.asarray(codes.pack_rows(w[None])[0])


def untiled(tiles: npt.NDArray[Scalar], n_rows: int) -> npt.NDArray[Scalar]:
    """Inverse of `tiled`."""
    return np.asarray(codes.unpack_rows(tiles[None], n_rows)[0])
