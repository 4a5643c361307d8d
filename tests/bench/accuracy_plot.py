"""The pictures of docs/accuracy.md, of which README.md shows one: `python tests/bench/accuracy_plot.py docs`.

Draws the divergence over the bits per weight from the table "All beside each other" of docs/accuracy.md, one picture
a model: accuracy-MODEL.svg.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from w4conv.cli._report import THEME
from w4conv.cli._svg import CHARACTER, LEFT, STYLE, WIDTH, Axis, Chart, colour

HEADING = "## All beside each other"
SERIES = ("w4conv, calibrated", "w4conv, data-free", "llama.cpp, importance matrix", "llama.cpp")


class Point(NamedTuple):
    """kld and its standard error in nats."""

    model: str
    series: str
    name: str
    bits: float
    kld: float
    stderr: float


class Box(NamedTuple):
    """Of a mark or a name, in pixels."""

    left: float
    right: float
    top: float
    bottom: float


def read_points(page: str) -> list[Point]:
    """Rows of the table: model, series, name, bits, perplexity, KLD, ..."""
    found = []
    for line in page.split(HEADING, 1)[1].split("\n## ", 1)[0].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) > 5 and cells[1] in SERIES:
            kld, stderr = re.findall(r"\d+\.\d+", cells[5])
            model, name = cells[0].split(" (")[0], cells[2].replace("`", "")
            found.append(Point(model, cells[1], name, float(cells[3]), float(kld), float(stderr)))
    return found


def overlap(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    return max(width, 0.0) * max(height, 0.0)


def draw(model: str, points: list[Point]) -> str:
    bits, klds = [p.bits for p in points], [p.kld for p in points]
    x = Axis("bits per weight, over all weights", min(bits) - 0.85, max(bits) + 0.35)
    y = Axis("KLD from the source, nats", min(klds) * 0.75, max(klds) * 1.35, log=True)
    shown = [series for series in SERIES if any(p.series == series for p in points)]
    chart = Chart(x, y, [(colour(SERIES.index(series)), series) for series in shown], height=400)
    places = [chart.at(p.bits, p.kld) for p in points]
    taken = [Box(px - 6, px + 6, py - 6, py + 6) for px, py in places]
    for p in sorted(points, key=lambda p: SERIES.index(p.series), reverse=True):
        chart.point(
            p.bits, p.kld, colour(SERIES.index(p.series)), title=f"{p.name}: {p.bits:g} bits, KLD {p.kld:g}",
            low=p.kld - p.stderr, high=p.kld + p.stderr, square=p.series.startswith("llama"),
        )  # fmt: skip
    for p, (px, py) in zip(points, places, strict=True):
        width = CHARACTER * len(p.name)
        tried: list[tuple[float, Box, float, float, str]] = []
        for dx, dy, anchor in ((9, 4, "start"), (-9, 4, "end"), (-5, -9, "start"), (-5, 17, "start"), (5, -9, "end")):
            left = px + dx - (width if anchor == "end" else 0)
            box = Box(left, left + width, py + dy - 10, py + dy + 2)
            outside = max(LEFT - box.left, 0) + max(box.right - WIDTH, 0)
            tried.append((sum(overlap(box, other) for other in taken) + 20 * outside, box, dx, dy, anchor))
        _, box, dx, dy, anchor = min(tried, key=lambda t: t[0])  # the first of the best
        taken.append(box)
        chart.text(p.bits, p.kld, p.name, dx=dx, dy=dy, anchor=anchor)
    return chart.svg(f"Divergence over bits per weight: {model}", style=THEME + STYLE)


def pictures(folder: Path) -> dict[str, str]:
    """{file name: SVG} of every model in the table of `folder`/accuracy.md."""
    points = read_points((folder / "accuracy.md").read_text())
    out = {}
    for model in dict.fromkeys(p.model for p in points):
        name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
        out[f"accuracy-{name}.svg"] = draw(model, [p for p in points if p.model == model])
    return out


def main() -> None:
    folder = Path(sys.argv[1])
    for name, svg in pictures(folder).items():
        (folder / name).write_text(svg)


if __name__ == "__main__":
    main()
