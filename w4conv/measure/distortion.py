"""Distortion: error statistics of dequantized values against their source, over blocks of rows, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from w4conv import kernels
from w4conv.arrays import F32Array, F64Array


@dataclass(frozen=True, slots=True)
class WorstGroup:
    """The group with the lowest SQNR: its row, its index in the row, its SQNR in dB (-inf: errors on zeros only)."""

    row: int
    group: int
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class Distortion:
    """Error of dequantized values y against source values x.

    max_abs_error: max |y - x|. rmse: sqrt(mean((y - x)^2)). sqnr_db: 10 log10(sum x^2 / sum (y - x)^2), None when there
    is no error. cosine: x.y / (|x| |y|), None when either is all zeros. worst_group: None when no group has an error.
    """

    n_values: int
    max_abs_error: float
    rmse: float
    sqnr_db: float | None
    cosine: float | None
    worst_group: WorstGroup | None


class DistortionMeter:
    """Running sums; `add` blocks of rows in order, then read `result`."""

    def __init__(self, group_size: int = 0) -> None:
        """group_size: columns of a group for `worst_group`; 0 means the whole row."""
        self._group_size = group_size
        self._n_values = self._n_rows = 0
        self._max = self._signal = self._noise = self._cross = 0.0
        self._worst: WorstGroup | None = None

    def add(self, source: F32Array, dequantized: F32Array) -> None:
        """source, dequantized: (n_rows, n_columns) float32, the next rows of one tensor."""
        n_rows, n_columns = source.shape
        if n_columns:
            self.add_found(kernels.compare(source, dequantized, self._group_size or n_columns), n_columns)
        else:
            self._n_rows += n_rows

    def add_found(self, found: kernels.Difference, n_columns: int) -> None:
        """As `add`, from a comparison already made with this group size."""
        signal, noise, cross = found.sums
        self._signal += float(signal.sum())
        self._noise += float(noise.sum())
        self._cross += float(cross.sum())
        self._max = max(self._max, found.largest)
        self._find_worst(signal, noise)
        self._n_values += len(signal) * n_columns
        self._n_rows += len(signal)

    def merge(self, other: DistortionMeter) -> None:
        """Add the sums of another tensor; `worst_group` stays, since its groups are of another tensor."""
        self._n_values += other._n_values
        self._signal += other._signal
        self._noise += other._noise
        self._cross += other._cross
        self._max = max(self._max, other._max)

    def result(self) -> Distortion:
        # With y = x + e: x.y = x.x + x.e and y.y = x.x + 2 x.e + e.e
        dequantized = max(self._signal + 2 * self._cross + self._noise, 0.0)
        norms = math.sqrt(self._signal) * math.sqrt(dequantized)
        return Distortion(
            n_values=self._n_values,
            max_abs_error=self._max,
            rmse=math.sqrt(self._noise / self._n_values) if self._n_values else 0.0,
            sqnr_db=_decibels(self._signal, self._noise) if self._noise else None,
            cosine=min(1.0, (self._signal + self._cross) / norms) if norms else None,
            worst_group=self._worst,
        )

    def _find_worst(self, signal: F64Array, noise: F64Array) -> None:
        ratio = np.full(signal.shape, np.inf)
        np.divide(signal, noise, out=ratio, where=noise > 0)
        if not ratio.size or not np.isfinite(ratio.min()):
            return
        row, group = (int(i) for i in np.unravel_index(np.argmin(ratio), ratio.shape))
        worst = WorstGroup(self._n_rows + row, group, _decibels(float(signal[row, group]), float(noise[row, group])))
        if self._worst is None or worst.sqnr_db < self._worst.sqnr_db:
            self._worst = worst


def _decibels(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if signal else -math.inf
