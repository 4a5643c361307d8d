"""The report of bench as one HTML page: no scripts, nothing fetched, light or dark as the reader has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from w4conv.cli import _output
from w4conv.cli._bench_table import cells, columns, facts, labels
from w4conv.cli._output import markup
from w4conv.cli._svg import COLOURS, DARK_COLOURS, STYLE, Axis, Chart, colour, colours, stacked_bars

if TYPE_CHECKING:
    from w4conv.commands.bench import BenchReport
    from w4conv.measure.speed import Rate

LIGHT: Final = "--ink: #1c2126; --quiet: #66707a; --line: #e3e6e9; --page: #ffffff; --band: #f5f6f8;"
DARK: Final = "--ink: #e6e9ec; --quiet: #9aa4ae; --line: #343b43; --page: #15191d; --band: #1d2328;"
THEME: Final = (
    f":root {{ {LIGHT} }}\n{colours(COLOURS)}"
    f"@media (prefers-color-scheme: dark) {{\n:root {{ {DARK} }}\n{colours(DARK_COLOURS)}}}\n"
)
PAGE: Final = """\
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 42rem; }
p, dt { color: var(--quiet); }
.scroll { overflow-x: auto; }
.chart { display: block; width: 100%; min-width: 30rem; max-width: 48rem; height: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; vertical-align: bottom; white-space: normal; min-width: 4.2rem; }
th:first-child, td:first-child { text-align: left; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .25rem 1.25rem; margin: .5rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
"""


def as_html(report: BenchReport) -> str:
    names = labels(report)
    parts = [
        "<h1>w4conv bench</h1>",
        f"<p>{markup('; '.join(value for _, value in facts(report)))}.</p>",
        _table(columns(report), [cells(row, name) for row, name in zip(report.rows, names, strict=True)]),
        _section(
            "Roofline",
            "How many multiplications each byte of weights serves, and how many are done in a second. Decoding reads "
            "all weights for each token, so that the plain read of the same bytes is its roof; a prompt uses each byte "
            "many times, up to the roof of dot products from registers. Circles: decode. Squares: prefill. Lines "
            "through them: from the lowest round to the highest.",
            roofline(report),
        ),
        _section(
            "Decode over the length of the context",
            "Each token also reads the keys and values of all before it. Medians of a few tokens behind each length.",
            _context_chart(report, names),
        ),
        _section(
            "Where the time goes",
            "Each token of the prompt, and each one decoded, by part of the forward pass: linear layers, attention "
            "over the KV cache, the head, and the rest (norms, RoPE, quantization of activations).",
            _parts_chart(report, names),
        ),
        _counters(report, names),
        _section("Environment", "", _environment(report)),
    ]
    title = ", ".join(dict.fromkeys(names))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>w4conv bench: {markup(title)}</title>\n<style>\n:root {{ color-scheme: light dark; }}\n"
        f"{THEME}{PAGE}{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def roofline(report: BenchReport, *, alone: bool = False) -> str:
    """The picture as SVG. alone: with its own colours, for a file of its own."""
    rows = report.rows
    read = max(row.ceiling_gbs.median for row in rows)
    peaks = {row.peak_gmacs.median: ("integer" if "int" in row.schemes else "float") for row in rows}
    figures = [d for row in rows for d in (row.decode, row.prefill)]
    x = Axis(
        "multiplications for each byte of weights read",
        min(d.macs_per_byte for d in figures) / 2,
        max(max(d.macs_per_byte for d in figures) * 2, 4 * max(peaks) / read),
        log=True,
    )
    y = Axis("1e9 multiplications a second", min(d.gmacs.low for d in figures) / 2, max(peaks) * 1.6, log=True)
    legend = [(colour(i), name) for i, name in enumerate(labels(report))]
    chart = Chart(x, y, legend, height=420)
    start = max(x.low, y.low / read)
    chart.line([(start, start * read), (max(peaks) / read, max(peaks))], "roof")
    for peak, kind in _distinct(peaks):
        chart.line([(peak / read, peak), (x.high, peak)], "roof" if peak == max(peaks) else "roof dashed")
        chart.text(peak / read, peak, f"{kind} dot products, {peak:.0f} GMAC/s", dx=8, dy=-6)
    knee = max(peaks) / read
    chart.text(knee / 2, max(peaks) / 2, f"plain read, {read:.1f} GB/s", dx=-10, anchor="end")
    for i, (row, name) in enumerate(zip(rows, labels(report), strict=True)):
        for what, d, share in (
            ("decode", row.decode, f"{row.decode.read_share.median:.0%} of the plain read"),
            ("prefill", row.prefill, f"{row.prefill.peak_share.median:.0%} of the dot product's peak"),
        ):
            chart.point(
                d.macs_per_byte,
                d.gmacs.median,
                colour(i),
                title=f"{name}, {what}: {d.tokens_per_second.median:.1f} tokens/s, {share}",
                low=d.gmacs.low,
                high=d.gmacs.high,
                square=what == "prefill",
            )
    return chart.svg(
        "Roofline: prefill and decode below the ceilings of the machine", style=THEME + STYLE if alone else ""
    )


def _distinct(peaks: dict[float, str]) -> Iterable[tuple[float, str]]:
    """Of each kind the highest; rows measure their peak one after another."""
    highest = {kind: max(peak for peak, other in peaks.items() if other == kind) for kind in peaks.values()}
    return [(peak, kind) for kind, peak in highest.items()]


def _context_chart(report: BenchReport, names: Sequence[str]) -> str:
    curves = [row.context for row in report.rows]
    points = [point for curve in curves for point in curve]
    longest = max(point.n_tokens for point in points)
    x = Axis("tokens of context", 0, longest)
    y = Axis("ms a token", 0, max(point.ms_per_token for point in points) * 1.1)
    chart = Chart(x, y, [(colour(i), name) for i, name in enumerate(names)], height=320)
    for i, curve in enumerate(curves):
        chart.line([(p.n_tokens, p.ms_per_token) for p in curve], f"curve {colour(i)}")
        for p in curve:
            title = f"{names[i]}: {p.ms_per_token:.2f} ms behind {p.n_tokens} tokens"
            chart.point(
                p.n_tokens, p.ms_per_token, colour(i), title=title, low=p.ms_per_token, high=p.ms_per_token
            )  # fmt: skip
    return chart.svg("Decode over the length of the context")


def _parts_chart(report: BenchReport, names: Sequence[str]) -> str:
    parts = list(report.rows[0].decode.parts)
    legend = [(colour(i), part) for i, part in enumerate(parts)]
    out = ""
    for what, shares in (
        ("prefill", [row.prefill.parts for row in report.rows]),
        ("decode", [row.decode.parts for row in report.rows]),
    ):
        bars = [(f"{name}, {what}", [s[part] for part in parts]) for name, s in zip(names, shares, strict=True)]
        out += stacked_bars(f"Time of each token by part, {what}", bars, legend, unit="ms")
    return out


def _counters(report: BenchReport, names: Sequence[str]) -> str:
    kinds = list(dict.fromkeys(kind for row in report.rows for kind in row.decode.counters))
    if not set(kinds) - {"page_faults"}:  # those alone say little
        return ""
    head = ["a token of", *(kind.replace("_", " ") for kind in kinds)]
    rows = []
    for row, name in zip(report.rows, names, strict=True):
        for what, counters in (("prefill", row.prefill.counters), ("decode", row.decode.counters)):
            rows.append([f"{name}, {what}", *(_count(counters[kind]) for kind in kinds)])
    return _section("Counted by the kernel", "By perf_event_open, for each token.", _table(head, rows))


def _count(n: float) -> str:
    return f"{n:.1f}" if n < 1000 else _output.count(round(n))


def _environment(report: BenchReport) -> str:
    m = report.machine
    pairs = [
        ("CPU", m.cpu),
        ("may use", m.allowed),
        ("last cache", _output.nbytes(m.cache_nbytes)),
        ("memory", _output.nbytes(m.memory_nbytes)),
        ("system", m.system),
        ("w4conv", f"{m.version}, {m.build}"),
        ("engine", f"{report.isa}, {report.dot_instruction}, {report.threads} threads"),
        ("read ceiling", _ranges(row.ceiling_gbs for row in report.rows) + " GB/s"),
        ("codings", "; ".join(dict.fromkeys(row.schemes for row in report.rows))),
    ]
    return "<dl>" + "".join(f"<dt>{markup(k)}</dt><dd>{markup(v)}</dd>" for k, v in pairs) + "</dl>"


def _ranges(rates: Iterable[Rate]) -> str:
    values = list(rates)
    return f"{min(r.low for r in values):.1f} to {max(r.high for r in values):.1f}"


def _section(title: str, words: str, body: str) -> str:
    text = f"<p>{markup(words)}</p>" if words else ""
    return f'<h2>{markup(title)}</h2>\n{text}<div class="scroll">{body}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(tag: str, words: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{markup(word)}</{tag}>" for word in words) + "</tr>\n"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>\n<thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>'
