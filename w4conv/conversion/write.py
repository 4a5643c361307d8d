"""A planned conversion carried out: a block of rows at a time is read, coded and written."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from w4conv import codes, kernels
from w4conv.arrays import VALUE_DTYPES, Array
from w4conv.calibration.calibrator import Calibrator, StatisticsCalibrator
from w4conv.calibration.experts import FewTokens
from w4conv.calibration.sequential import SequentialCalibrator
from w4conv.calibration.statistics import Statistics
from w4conv.container import SIGNATURE, Journal, Writer, stamp
from w4conv.conversion.plan import ConversionPlan
from w4conv.errors import InputError
from w4conv.files.digests import FileDigests
from w4conv.files.target import Target, open_target
from w4conv.progress import Progress
from w4conv.quantization.calibrated import Solution
from w4conv.scheme import QuantScheme
from w4conv.sources.base import CodedRows


class Written(NamedTuple):
    """digest: of the conversion. notes: on the values. few_tokens: where experts saw few."""

    digest: str
    notes: tuple[str, ...]
    few_tokens: tuple[FewTokens, ...]


def write(
    plan: ConversionPlan, out: Path, *, overwrite: bool, resume: bool, threads: int | None, progress: Progress
) -> Written:
    """Raises InputError, OutputError."""
    itemsize = {name: VALUE_DTYPES[t.dtype].itemsize for name, t in plan.source.tensors.items()}
    progress.start(sum(t.n_values * itemsize[t.name] for t in plan.layout.tensors.values()))
    n_underflowed = n_tensors = 0
    sources = stamp(plan.source.files)
    with (
        FileDigests(plan.source.files) as digests,
        open_target(out, plan.layout.file_nbytes, overwrite=overwrite, resume=resume, signature=SIGNATURE) as target,
    ):
        writer = Writer(target, plan.layout, log=Journal(target, plan.layout, sources))
        kept = set(itertools.takewhile(lambda name: name != writer.due, plan.layout.tensors))
        calibrator = _calibrator(plan, target, kept, threads, progress)
        values = _Values(plan, writer, threads, progress)
        for name, info in plan.layout.tensors.items():
            if name in kept:
                progress.advance(info.n_values * itemsize[name], name)
                continue
            if calibrator is not None and name in plan.methods:
                n = _write_solution(writer, name, calibrator.take(name))
            else:
                n = values.write(name, info.scheme)
            n_underflowed += n
            n_tensors += n > 0
        digest = writer.finish(digests.result())
        left = target.removed
    notes = [] if calibrator is None else calibrator.notes()
    if left:
        notes.append("the leftover of an interrupted conversion was removed")
    if kept:
        notes.append(f"resumed: {len(kept)} tensors were complete already; notes on values are about the others")
    if n_underflowed:
        notes.append(
            f"{n_underflowed} groups in {n_tensors} tensors hold values so small that their FP16 scale is zero: "
            "they became zeros"
        )
    few = tuple(calibrator.few_tokens) if isinstance(calibrator, SequentialCalibrator) else ()
    return Written(digest, tuple(notes), few)


def _calibrator(
    plan: ConversionPlan, target: Target, kept: Collection[str], threads: int | None, progress: Progress
) -> Calibrator | None:
    if plan.calibration is None:
        return None
    if isinstance(plan.calibration, Statistics):
        return StatisticsCalibrator(
            plan.source, plan.spec(), plan.layout, plan.methods, plan.calibration, threads=threads,
            solved=progress.advance, kept=kept,
        )  # fmt: skip

    def stored(name: str) -> dict[str, npt.NDArray[np.uint8]]:
        parts = plan.layout.tensors[name].parts
        return {part.kind: np.frombuffer(target.read_at(part.offset, part.nbytes), np.uint8) for part in parts}

    return SequentialCalibrator(
        plan.source, plan.spec(), plan.layout, plan.methods, plan.calibration, threads=threads, solved=progress.advance,
        kept=kept, stored=stored,
    )  # fmt: skip


def _write_solution(writer: Writer, name: str, solution: Solution) -> int:
    for kind, part in solution.packed.parts().items():
        writer.write(name, kind, part)
    return solution.packed.n_underflowed


class _Values:
    """Writes tensors that are not calibrated."""

    def __init__(self, plan: ConversionPlan, writer: Writer, threads: int | None, progress: Progress) -> None:
        self._source, self._coded = plan.source, plan.coded
        self._writer, self._threads, self._progress = writer, threads, progress

    def write(self, name: str, scheme: QuantScheme) -> int:
        """Convert one tensor; returns the number of groups whose scale underflowed."""
        stored = self._source.tensors[name]
        if len(stored.shape) < 2:
            values = self._source.read(name)
            self._check_finite(name, values, stored.dtype)
            self._writer.write(name, "values", values)
            self._progress.advance(values.nbytes, name)
            return 0
        if name in self._coded:
            self._write_coded(name, scheme)
            return 0
        rest: dict[str, list[Array]] = {}
        n_underflowed = 0
        for rows, values in self._blocks(name):
            try:
                if scheme.is_float:
                    self._writer.write(
                        name, "values", kernels.pack_float(values, stored.dtype, scheme, threads=self._threads)
                    )
                else:
                    packed = kernels.quantize_rtn(values, stored.dtype, scheme, threads=self._threads)
                    parts = packed.parts()
                    self._writer.write(name, "codes", parts.pop("codes"))
                    for kind, part in parts.items():
                        rest.setdefault(kind, []).append(part)
                    n_underflowed += packed.n_underflowed
            except kernels.BadValueError as error:
                raise self._bad_value(name, error.reason, (rows.start + error.row, error.column)) from None
            self._progress.advance(values.nbytes, name)
        for kind, blocks in rest.items():
            self._writer.write(name, kind, np.concatenate(blocks))
        return n_underflowed

    def _write_coded(self, name: str, scheme: QuantScheme) -> None:
        """Codes and scales as the source has them."""
        rest: dict[str, list[Array]] = {}
        for rows, coded in self._coded_blocks(name):
            for what, numbers in (
                ("scale of group", coded.scales), ("offset of group", coded.offsets),
                ("super-scale", coded.super_scales), ("super-offset", coded.super_offsets),
            ):  # fmt: skip
                if numbers is not None and not np.isfinite(numbers).all():
                    row, group = np.argwhere(~np.isfinite(numbers))[0].tolist()
                    raise self._bad(f"{name}: the {what} {group} of row {rows.start + row} is NaN or infinite")
            parts = coded.parts(scheme)
            self._writer.write(name, "codes", parts.pop("codes"))
            for kind, part in parts.items():
                rest.setdefault(kind, []).append(part)
            self._progress.advance(coded.codes.size * VALUE_DTYPES["F32"].itemsize, name)
        for kind, blocks in rest.items():
            self._writer.write(name, kind, np.concatenate(blocks, axis=1))

    def _coded_blocks(self, name: str) -> Iterator[tuple[slice, CodedRows]]:
        """Codes of some rows of a matrix, or of a whole matrix of a stack, at a time."""
        shape = self._source.tensors[name].shape
        if len(shape) == 2:
            yield from ((rows, self._source.read_coded(name, rows)) for rows in self._source.row_blocks(name))
            return
        for i in range(shape[0]):
            yield slice(0, shape[1]), self._source.read_coded(name, slice(i, i + 1)).matrix(0)

    def _blocks(self, name: str) -> Iterator[tuple[slice, Array]]:
        """Rows of a matrix, or of each matrix of a stack, with their values."""
        if len(self._source.tensors[name].shape) == 2:
            yield from ((rows, self._source.read(name, rows)) for rows in self._source.row_blocks(name))
            return
        for i in range(self._source.tensors[name].shape[0]):
            stack = self._source.read(name, slice(i, i + 1))
            for matrix in stack.reshape(-1, *stack.shape[-2:]):
                yield from ((rows, np.ascontiguousarray(matrix[rows])) for rows in self._source.row_blocks(name))

    def _check_finite(self, name: str, values: Array, dtype: str) -> None:
        as_float = codes.as_f32(values, dtype)
        bad = np.argwhere(~np.isfinite(as_float))
        if len(bad):
            at = tuple(bad[0].tolist())
            raise self._bad_value(name, "NaN" if np.isnan(as_float[at]) else "infinity", at)

    def _bad_value(self, name: str, reason: str, at: tuple[int, ...]) -> InputError:
        place = f"row {at[0]}, column {at[1]}" if len(at) == 2 else f"element {at[0] if at else 0}"
        advice = "Fetch the checkpoint again; if it is so at its origin, it is broken"
        if "beyond" in reason:
            advice = "Choose a scheme with more range: bf16, f32 or keep"
        return self._bad(f"{name}: {reason} at {place}. {advice}")

    def _bad(self, message: str) -> InputError:
        return InputError(f"{self._source.path}: {message}")
