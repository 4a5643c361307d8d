"""`w4conv diff A B`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from w4conv.cli import _errors, _output
from w4conv.cli._options import Json, refuse_terminal
from w4conv.cli._progress import progress_bar

if TYPE_CHECKING:
    from w4conv.commands.diff import DiffReport, TensorDifference
    from w4conv.measure.distortion import Distortion

REPORT = ("w4conv.commands.diff", "DiffReport")
EPILOG = """\
\b
Exit codes:
    0  nothing differs
    1  something differs
    2 and above as for all commands

\b
Examples:
  w4conv diff old.w4 new.w4
  w4conv diff rtn.w4 gptq.w4 --source in/
  w4conv diff out.w4 in/ --all
  w4conv diff a.w4 b.w4 --json
"""
N_SHOWN = 20


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=".w4 file, Hugging Face directory or GGUF file; - for a .w4")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same")],
    source: Annotated[
        str | None, typer.Option(metavar="SRC", help="Say which of the two is closer to this checkpoint or container")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help=f"List every tensor that differs [default: the {N_SHOWN} farthest apart]")
    ] = False,
    json: Json = False,
) -> None:
    """Compare two models, each a container or a checkpoint.

    Tells which tensors differ and by how much: share of codes, root mean square, largest and relative error (SQNR) of
    B's values with A's taken for the source; what differs in the files inside and in the record of the conversion.
    Tensors are the same when coding and bytes are, and equal when only their values are.
    """
    from w4conv.commands.diff import diff as compare

    for path in (a, b):
        refuse_terminal(path)
    with progress_bar() as progress:
        found = compare(a, b, source=source, progress=progress)
    if json:
        _output.write_json("diff", found)
    else:
        _output.write(as_text(found, n_shown=None if all_ else N_SHOWN))
    if not found.same:
        raise typer.Exit(_errors.DIFFERS)


def as_text(r: DiffReport, *, n_shown: int | None) -> str:
    pairs = [
        ("a", _output.path(r.a)),
        ("b", _output.path(r.b)),
        (
            "tensors",
            f"{r.n_same:,} the same, {r.n_equal - r.n_same:,} equal but coded otherwise, {r.n_different:,} differ",
        ),
    ]
    for what, names in (("only in a", r.only_in_a), ("only in b", r.only_in_b)):
        if names:
            pairs.append((what, f"{len(names):,}: {', '.join(names[:3])}{', ..' if names[3:] else ''}"))
    pairs += [(m.what, f"{_short(m.a)} | {_short(m.b)}") for m in r.metadata]
    if r.n_different:
        pairs.append(("b from a", _distortion(r.b_from_a)))
    if r.a_from_source is not None and r.b_from_source is not None:
        pairs += [
            ("source", str(r.source)),
            ("a from source", _distortion(r.a_from_source)),
            ("b from source", _distortion(r.b_from_source)),
            ("closer", {"neither": "neither: both are equally far"}.get(str(r.closer), str(r.closer))),
        ]
    text = _output.facts(pairs)
    different = sorted((t for t in r.tensors if not t.equal), key=_sqnr)
    if different:
        text += "\n" + _table(different[:n_shown], with_source=r.source is not None)
    if n_shown is not None and len(different) > n_shown:
        text += f"and {len(different) - n_shown:,} more: --all lists them\n"
    return text


def _table(tensors: list[TensorDifference], *, with_source: bool) -> str:
    head = ["tensor", "a", "b", "codes", "RMSE", "max error", "SQNR dB"]
    if with_source:
        head += ["a from source", "b from source", "closer"]
    return _output.table(head, [_row(t, with_source=with_source) for t in tensors], left=3)


def _row(t: TensorDifference, *, with_source: bool) -> list[str]:
    if t.b_from_a is None:
        shapes = ("x".join(map(str, shape)) for shape in (t.shape_a, t.shape_b))
        return [
            t.name,
            *(f"{c} {s}" for c, s in zip((t.a, t.b), shapes, strict=True)),
            *[""] * (7 if with_source else 4),
        ]
    codes = "" if t.codes_differing is None else f"{t.codes_differing:.2%}"
    row = [t.name, t.a, t.b, codes, f"{t.b_from_a.rmse:.2e}", f"{t.b_from_a.max_abs_error:.2e}", _decibels(t.b_from_a)]
    if with_source:
        x, y = t.a_from_source, t.b_from_source
        if x is None or y is None:
            return row + [""] * 3
        row += [_decibels(x), _decibels(y), "" if x.rmse == y.rmse else "a" if x.rmse < y.rmse else "b"]
    return row


def _sqnr(t: TensorDifference) -> float:
    """Lowest first; other shapes before all."""
    if t.b_from_a is None or t.b_from_a.sqnr_db is None:
        return -float("inf")
    return t.b_from_a.sqnr_db


def _distortion(d: Distortion) -> str:
    return f"SQNR {_decibels(d)} dB, RMSE {d.rmse:.3e}, largest error {d.max_abs_error:.3e}"


def _decibels(d: Distortion) -> str:
    return "exact" if d.sqnr_db is None else f"{d.sqnr_db:.2f}"


def _short(text: str | None, limit: int = 60) -> str:
    return "-" if text is None else text if len(text) <= limit else f"{text[:limit]}.."
