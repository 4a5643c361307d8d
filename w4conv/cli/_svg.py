"""Charts as SVG text: two axes, lines, points and bars.

Every mark says its colours twice. Classes let a page set light and dark; attributes are for viewers that know no style
sheet, or no variables in one. Where both are understood, the style sheet wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from w4conv.cli._output import markup

WIDTH: Final = 600
LEFT, RIGHT, BOTTOM = 56, 16, 44
LEGEND_LINE: Final = 20
CHARACTER: Final = 7.0  # width of a letter of the labels, about

INK, QUIET, LINE, PAGE = "#1c2126", "#66707a", "#e3e6e9", "#ffffff"
STYLE: Final = """\
.chart .page { fill: var(--page); }
.chart text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.chart text.quiet { fill: var(--quiet); }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .roof { stroke: var(--quiet); stroke-width: 1.5; fill: none; }
.chart .dashed { stroke-dasharray: 5 4; }
.chart .curve { stroke-width: 2; fill: none; stroke-linejoin: round; }
"""
COLOURS: Final = ("#2f6fdb", "#d97a06", "#0e9268", "#b3399f", "#c8452f", "#6b7a12")
DARK_COLOURS: Final = ("#7aa7ff", "#f2aa4c", "#4cc9a0", "#e38ad4", "#ff8c78", "#b7c94f")
_FONT: Final = 'font-family="system-ui, sans-serif" font-size="12"'
# What STYLE and `colours` say of a class, as attributes.
PLAIN: Final = {
    "grid": {"stroke": LINE, "stroke-width": "1"},
    "roof": {"stroke": QUIET, "stroke-width": "1.5", "fill": "none"},
    "dashed": {"stroke-dasharray": "5 4"},
    "curve": {"stroke-width": "2", "fill": "none", "stroke-linejoin": "round"},
    "page": {"fill": PAGE},
} | {f"c{i}": {"fill": value, "stroke": value} for i, value in enumerate(COLOURS)}


def colours(values: Sequence[str]) -> str:
    """CSS rules for the classes c0, c1, ... that lines, points and bars take."""
    return "".join(f".c{i} {{ fill: {c}; stroke: {c}; }}\n" for i, c in enumerate(values))


def colour(i: int) -> str:
    return f"c{i % len(COLOURS)}"


def painted(css: str, **more: str) -> str:
    """The attribute `class`, what its classes mean as plain attributes, and `more`, which counts last."""
    plain: dict[str, str] = {}
    for word in css.split():
        plain |= PLAIN[word]
    plain |= more
    return f'class="{css}" ' + " ".join(f'{name}="{value}"' for name, value in plain.items())


def label(words: str, place: str, *, quiet: bool = False, anchor: str = "start") -> str:
    """A line of text. place: attributes that say where."""
    css, ink = (' class="quiet"', QUIET) if quiet else ("", INK)
    return f'<text{css} {place} fill="{ink}" {_FONT} text-anchor="{anchor}">{markup(words)}</text>'


@dataclass(frozen=True)
class Axis:
    """Values from low to high, on a logarithmic scale or a linear one."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.log:
            step = nice_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        parts = (1, 2, 5) if self.high / self.low < 2000 else (1,)
        ticks = [part * 10.0**decade for decade in decades for part in parts]
        return [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]


def nice_step(about: float) -> float:
    """1, 2 or 5 times a power of ten, not below `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= about * 0.999)


@dataclass
class Chart:
    """legend: (class of the colour, name); what is drawn later lies above."""

    x: Axis
    y: Axis
    legend: Sequence[tuple[str, str]] = ()
    height: int = 380
    _body: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._legend, lines = _legend(self.legend)
        self.top = 12 + lines * LEGEND_LINE

    def at(self, x: float, y: float) -> tuple[float, float]:
        right, bottom = WIDTH - RIGHT, self.height - BOTTOM
        return LEFT + (right - LEFT) * self.x.place(x), bottom - (bottom - self.top) * self.y.place(y)

    def line(self, points: Iterable[tuple[float, float]], css: str) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        self._body.append(f'<polyline {painted(css, fill="none")} points="{places}" style="fill: none"/>')

    def point(self, x: float, y: float, css: str, *, title: str, low: float, high: float, square: bool = False) -> None:
        """A mark with its range; the title shows when pointed at."""
        (px, py), (_, top), (_, bottom) = self.at(x, y), self.at(x, high), self.at(x, low)
        paint = painted(css)
        shape = f'<circle {paint} cx="{px:.1f}" cy="{py:.1f}" r="5"/>'
        if square:
            shape = f'<rect {paint} x="{px - 4.5:.1f}" y="{py - 4.5:.1f}" width="9" height="9"/>'
        self._body.append(
            f"<g><title>{markup(title)}</title>"
            f'<line {paint} x1="{px:.1f}" x2="{px:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke-width="2"/>{shape}</g>'
        )

    def text(self, x: float, y: float, words: str, *, dx: float = 0, dy: float = 0, anchor: str = "start") -> None:
        px, py = self.at(x, y)
        self._body.append(label(words, f'x="{px + dx:.1f}" y="{py + dy:.1f}"', quiet=True, anchor=anchor))

    def svg(self, title: str, *, style: str = "") -> str:
        """title: for those who cannot see it. style: rules to carry along, for a file of its own."""
        out = [_head(title, self.height, style), *self._legend]
        right, bottom = WIDTH - RIGHT, self.height - BOTTOM
        for tick in self.x.ticks():
            px, _ = self.at(tick, self.y.low)
            out.append(f'<line {painted("grid")} x1="{px:.1f}" x2="{px:.1f}" y1="{self.top}" y2="{bottom}"/>')
            out.append(label(f"{tick:g}", f'x="{px:.1f}" y="{bottom + 16}"', quiet=True, anchor="middle"))
        for tick in self.y.ticks():
            _, py = self.at(self.x.low, tick)
            out.append(f'<line {painted("grid")} x1="{LEFT}" x2="{right}" y1="{py:.1f}" y2="{py:.1f}"/>')
            out.append(label(f"{tick:g}", f'x="{LEFT - 6}" y="{py + 4:.1f}"', quiet=True, anchor="end"))
        centre, middle = (LEFT + right) / 2, (self.top + bottom) / 2
        out.append(label(self.x.label, f'x="{centre:.1f}" y="{self.height - 6}"', anchor="middle"))
        out.append(label(self.y.label, f'transform="translate(14 {middle:.1f}) rotate(-90)"', anchor="middle"))
        return "\n".join([*out, *self._body, "</svg>\n"])


def stacked_bars(
    title: str, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[tuple[str, str]], *, unit: str
) -> str:
    """A bar a row, its values side by side; parts: (class of the colour, name) of each value."""
    legend, lines = _legend(parts)
    step, bar, top = 44, 16, 12 + lines * LEGEND_LINE
    height = top + step * len(rows)
    longest = max(sum(values) for _, values in rows)
    out = [_head(title, height, ""), *legend]
    for i, (name, values) in enumerate(rows):
        y, x = top + i * step, 0.0
        out.append(label(name, f'x="0" y="{y + 12}"'))
        for (css, part), value in zip(parts, values, strict=True):
            width = (WIDTH - 90) * value / longest
            out.append(
                f'<rect {painted(css, stroke="none")} style="stroke: none" x="{x:.1f}" y="{y + 18}" '
                f'width="{width:.1f}" height="{bar}"><title>{markup(part)}: {value:.3g} {unit}</title></rect>'
            )
            x += width
        out.append(label(f"{sum(values):.3g} {unit}", f'x="{x + 6:.1f}" y="{y + 31}"', quiet=True))
    return "\n".join([*out, "</svg>\n"])


def _head(title: str, height: int, style: str) -> str:
    """style: that of a file of its own, which gets a page of its own too."""
    size = f'viewBox="0 0 {WIDTH} {height}"' + (f' width="{WIDTH}" height="{height}"' if style else "")
    page = f'<rect {painted("page")} width="{WIDTH}" height="{height}"/>'
    inner = f"<style>\n{style}</style>\n{page}" if style else ""
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{markup(title)}</title>{inner}'
    )


def _legend(entries: Sequence[tuple[str, str]]) -> tuple[list[str], int]:
    """Marks and names in as many lines as they take."""
    out, x, line = [], 0.0, 0
    for css, name in entries:
        width = 28 + CHARACTER * len(name)
        if x > 0 and x + width > WIDTH:
            x, line = 0.0, line + 1
        y = 4 + line * LEGEND_LINE
        out.append(f'<rect {painted(css)} x="{x + 1:.1f}" y="{y}" width="11" height="11" rx="2"/>')
        out.append(label(name, f'x="{x + 18:.1f}" y="{y + 10}"'))
        x += width
    return out, line + 1 if entries else 0
