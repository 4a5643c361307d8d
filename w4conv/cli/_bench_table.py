"""The report of bench as a table: text, Markdown, CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from w4conv.cli import _output

if TYPE_CHECKING:
    from w4conv.commands.bench import BenchReport, Row
    from w4conv.measure.speed import Rate

COLUMNS = (
    "model", "weights", "prefill tokens/s", "first token", "of peak", "decode ms/token", "tokens/s", "GB/s",
    "of read ceiling",
)  # fmt: skip
_MARKS: Final = re.compile(r"[\\`*_\[\]<>|~$&]")
_FORMULAS: Final = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # the full-width ones are formulas to some spreadsheets too


def columns(report: BenchReport) -> tuple[str, ...]:
    return (*COLUMNS, "perplexity", "increase") if report.text is not None else COLUMNS


def labels(report: BenchReport) -> list[str]:
    """The rows' names without the folders, where that leaves them distinct."""
    names = [_output.printable(row.name) for row in report.rows]
    short = [_without_folders(name) for name in names]
    return short if len(set(short)) == len(set(names)) else names


def _without_folders(name: str) -> str:
    path, space, scheme = name.partition(" ") if name.count(" ") == 1 else (name, "", "")
    return f"{Path(path).name}{space}{scheme}"


def cells(row: Row, name: str) -> tuple[str, ...]:
    out = (
        name,
        _output.nbytes(row.weight_nbytes),
        f"{row.prefill.tokens_per_second.median:.1f}",
        f"{row.prefill.seconds.median:.3f} s",
        f"{row.prefill.peak_share.median:.0%}",
        f"{row.decode.ms_per_token.median:.2f}",
        f"{row.decode.tokens_per_second.median:.2f}",
        f"{row.decode.read_gbs.median:.1f} / {row.ceiling_gbs.median:.1f}",
        f"{row.decode.read_share.median:.0%}",
    )
    p = row.perplexity
    if p is None:
        return out
    e, i = p.value, p.increase
    value = f"{e.value:.3f} +/- {e.stderr:.3f}" if math.isfinite(e.value) else f"e^({e.log:.3f} +/- {e.log_stderr:.3f})"
    if i is None:
        return (*out, value, "-")
    if math.isfinite(i.ratio):
        return (*out, value, f"{i.ratio - 1:+.2%} +/- {i.ratio_stderr:.2%}")
    return (*out, value, f"factor e^({i.log_ratio:.3f} +/- {i.log_ratio_stderr:.3f})")


def facts(report: BenchReport) -> list[tuple[str, str]]:
    first, m = report.rows[0], report.machine
    facts = [
        ("machine", m.cpu),
        (
            "engine",
            f"{report.isa} ({report.dot_instruction}), {report.threads} threads, {report.activations} activations; "
            f"{m.allowed}",
        ),
        (
            "measured",
            f"prompt of {first.prefill.n_tokens}, {first.decode.n_tokens} tokens decoded, "
            f"medians of {report.rounds} rounds",
        ),
    ]
    if (t := report.text) is not None:
        facts.append(
            (
                "text",
                f"{t.text} (sha256 {t.text_sha256[:16]}..), {t.convention}, ctx {t.ctx}, {t.n_windows:,} windows, "
                f"{t.n_scored:,} tokens scored{_output.special_tokens(t.special_tokens)}",
            )
        )
    return facts


def _lines(report: BenchReport) -> list[tuple[str, ...]]:
    return [cells(row, name) for row, name in zip(report.rows, labels(report), strict=True)]


def as_text(report: BenchReport) -> str:
    return _output.facts(facts(report)) + "\n" + _output.table(columns(report), _lines(report))


def as_markdown(report: BenchReport) -> str:
    head = columns(report)
    rows = [tuple(map(_plain_markdown, line)) for line in _lines(report)]
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "\n" + _plain_markdown("; ".join(value for _, value in facts(report))) + "\n"


def _plain_markdown(text: str) -> str:
    """Text that Markdown shows as it is, in a cell of a table too: a backslash makes a mark plain (CommonMark 2.4)."""
    return _MARKS.sub(r"\\\g<0>", _output.printable(text))


def _plain_csv(name: str) -> str:
    """A name that no spreadsheet takes for a formula. A path that begins like one gets `./`, so it is the same path."""
    name = _output.printable(name)
    return f"./{name}" if name.startswith(_FORMULAS) else name


def as_csv(report: BenchReport) -> str:
    out = io.StringIO()
    # Every text in quotes, since programs that take ; for the separator would cut one at it.
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    rates = ("prefill_seconds", "prefill_tokens_per_second", "prefill_gmacs", "prefill_peak_share",
             "decode_ms_per_token", "decode_tokens_per_second", "decode_read_gbs", "decode_read_share", "ceiling_gbs",
             "peak_gmacs")  # fmt: skip
    head = [f"{rate}_{figure}" for rate in rates for figure in ("median", "low", "high")]
    facts = ("model", "schemes", "weight_nbytes", "isa", "threads", "rounds")
    writer.writerow([*facts, *head, "perplexity", "perplexity_ratio"])
    for row in report.rows:
        p, d = row.prefill, row.decode
        values: list[Rate] = [
            p.seconds, p.tokens_per_second, p.gmacs, p.peak_share, d.ms_per_token, d.tokens_per_second, d.read_gbs,
            d.read_share, row.ceiling_gbs, row.peak_gmacs,
        ]  # fmt: skip
        figures = [figure for rate in values for figure in (rate.median, rate.low, rate.high)]
        q = row.perplexity
        given = [None if q is None else q.value.value, q.increase.ratio if q is not None and q.increase else None]
        perplexities = [None if value is None or not math.isfinite(value) else value for value in given]
        writer.writerow(
            [
                _plain_csv(row.name),
                row.schemes,
                row.weight_nbytes,
                report.isa,
                report.threads,
                report.rounds,
                *figures,
                *perplexities,
            ]
        )
    return out.getvalue()
