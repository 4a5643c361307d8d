"""Charts as SVG text: two axes, lines, points and bars. Colours are classes, so that a page sets light and dark."""

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

STYLE: Final = """\
.chart text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.chart text.quiet { fill: var(--quiet); }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .roof { stroke: var(--quiet); stroke-width: 1.5; fill: none; }
.chart .dashed { stroke-dasharray: 5 4; }
.chart .curve { stroke-width: 2; fill: none; stroke-linejoin: round; }
"""
COLOURS: Final = ("#2f6fdb", "#d97a06", "#0e9268", "#b3399f", "#c8452f", "#6b7a12")
DARK_COLOURS: Final = ("#7aa7ff", "#f2aa4c", "#4cc9a0", "#e38ad4", "#ff8c78", "#b7c94f")


def colours(values: Sequence[str]) -> str:
    """CSS rules for the classes c0, c1, ... that lines, points and bars take."""
    return "".join(f".c{i} {{ fill: {c}; stroke: {c}; }}\n" for i, c in enumerate(values))


def colour(i: int) -> str:
    return f"c{i % len(COLOURS)}"


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
        self._body.append(f'<polyline class="{css}" points="{places}" style="fill: none"/>')

    def point(self, x: float, y: float, css: str, *, title: str, low: float, high: float, square: bool = False) -> None:
        """A mark with its range; the title shows when pointed at."""
        (px, py), (_, top), (_, bottom) = self.at(x, y), self.at(x, high), self.at(x, low)
        shape = f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5"/>'
        if square:
            shape = f'<rect x="{px - 4.5:.1f}" y="{py - 4.5:.1f}" width="9" height="9"/>'
        self._body.append(
            f'<g class="{css}"><title>{markup(title)}</title>'
            f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke-width="2"/>{shape}</g>'
        )

    def text(self, x: float, y: float, words: str, *, dx: float = 0, dy: float = 0, anchor: str = "start") -> None:
        px, py = self.at(x, y)
        self._body.append(
            f'<text class="quiet" x="{px + dx:.1f}" y="{py + dy:.1f}" text-anchor="{anchor}">{markup(words)}</text>'
        )

    def svg(self, title: str, *, style: str = "") -> str:
        """title: for those who cannot see it. style: rules to carry along, for a file of its own."""
        out = [_head(title, self.height, style), *self._legend]
        right, bottom = WIDTH - RIGHT, self.height - BOTTOM
        for tick in self.x.ticks():
            px, _ = self.at(tick, self.y.low)
            out.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{self.top}" y2="{bottom}"/>')
            out.append(f'<text class="quiet" x="{px:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
        for tick in self.y.ticks():
            _, py = self.at(self.x.low, tick)
            out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{py:.1f}" y2="{py:.1f}"/>')
            out.append(f'<text class="quiet" x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{tick:g}</text>')
        middle = (self.top + bottom) / 2
        out.append(f'<text x="{(LEFT + right) / 2:.1f}" y="{self.height - 6}" text-anchor="middle">')
        out.append(f"{markup(self.x.label)}</text>")
        out.append(f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">')
        out.append(f"{markup(self.y.label)}</text>")
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
        out.append(f'<text x="0" y="{y + 12}">{markup(name)}</text>')
        for (css, part), value in zip(parts, values, strict=True):
            width = (WIDTH - 90) * value / longest
            out.append(
                f'<rect class="{css}" style="stroke: none" x="{x:.1f}" y="{y + 18}" width="{width:.1f}" '
                f'height="{bar}"><title>{markup(part)}: {value:.3g} {unit}</title></rect>'
            )
            x += width
        out.append(f'<text class="quiet" x="{x + 6:.1f}" y="{y + 31}">{sum(values):.3g} {unit}</text>')
    return "\n".join([*out, "</svg>\n"])


def _head(title: str, height: int, style: str) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}"' + (f' width="{WIDTH}" height="{height}"' if style else "")
    inner = f"<style>\n{style}</style>" if style else ""
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
        out.append(f'<rect class="{css}" x="{x + 1:.1f}" y="{y}" width="11" height="11" rx="2"/>')
        out.append(f'<text x="{x + 18:.1f}" y="{y + 10}">{markup(name)}</text>')
        x += width
    return out, line + 1 if entries else 0
