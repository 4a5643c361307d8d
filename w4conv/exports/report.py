"""The report of an export, for text and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from w4conv.container import Container
from w4conv.exports.plan import Exported, FileSize, Plan


@dataclass(frozen=True, slots=True)
class ExportTotal:
    """Tensors of one scheme that became the same thing.

    n_exact: those whose float32 values are the container's, bit for bit but for the sign of zero; None when that is
    known only after writing. max_abs_error: the largest rounding; None likewise.
    """

    scheme: str
    becomes: str
    n_tensors: int
    n_parameters: int
    n_exact: int | None
    max_abs_error: float | None


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written, or with dry_run would be. exact: every value is the container's; None when not known yet.

    digest: of the container. output_nbytes: all files, exact. seconds: None after a dry run.
    """

    source: str
    digest: str
    out: str
    format: str
    dry_run: bool
    exact: bool | None
    architecture: str
    n_tensors: int
    n_parameters: int
    input_nbytes: int
    output_nbytes: int
    files: tuple[FileSize, ...]
    tensors: tuple[ExportTotal, ...]
    notes: tuple[str, ...]
    seconds: float | None


def make_report(container: Container, plan: Plan, out: Path, *, seconds: float | None) -> ExportReport:
    groups: dict[tuple[str, str], list[Exported]] = {}
    for tensor in plan.tensors:
        groups.setdefault((str(tensor.info.scheme), tensor.becomes), []).append(tensor)
    totals = tuple(_total(scheme, becomes, tensors) for (scheme, becomes), tensors in groups.items())
    exact = None if any(t.n_exact is None for t in totals) else all(t.n_exact == t.n_tensors for t in totals)
    return ExportReport(
        source=str(container.path),
        digest=container.digest,
        out=str(out),
        format=plan.format,
        dry_run=seconds is None,
        exact=exact,
        architecture=plan.architecture,
        n_tensors=len(plan.tensors),
        n_parameters=sum(t.info.n_values for t in plan.tensors),
        input_nbytes=container.file_nbytes,
        output_nbytes=plan.nbytes,
        files=tuple(plan.files),
        tensors=totals,
        notes=tuple(plan.notes),
        seconds=seconds,
    )


def _total(scheme: str, becomes: str, tensors: list[Exported]) -> ExportTotal:
    errors = [0.0 if t.rounding is None else t.rounding.max_abs_error for t in tensors]
    known = [e for e in errors if e is not None]
    complete = len(known) == len(errors)
    return ExportTotal(
        scheme=scheme,
        becomes=becomes,
        n_tensors=len(tensors),
        n_parameters=sum(t.info.n_values for t in tensors),
        n_exact=sum(e == 0 for e in known) if complete else None,
        max_abs_error=max(known) if complete else None,
    )
