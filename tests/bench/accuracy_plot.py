"""The pictures of docs/accuracy.md: `python tests/bench/accuracy_plot.py docs`.

Draws the divergence over the bits per weight from the table "All beside each other" of docs/accuracy.md, one picture
a model: accuracy-MODEL.svg.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from w4conv.cli._report import THEME
from w4conv.cli._svg import CHARACTER, LEFT, STYLE, Axis, Chart, colour

HEADING = "## All beside each other"
SERIES = ("w4conv, calibrated", "w4conv, without a text", "llama.cpp, with importances", "llama.cpp")


class Point(NamedTuple):
    """kld and its standard error in nats."""

    model: str
    series: str
    name: str
    bits: float
    kld: float
    stderr: float


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


def draw(model: str, points: list[Point]) -> str:
    bits, klds = [p.bits for p in points], [p.kld for p in points]
    x = Axis("bits per weight, over all weights", min(bits) - 0.15, max(bits) + 0.35)
    y = Axis("KLD from the source, nats", min(klds) * 0.75, max(klds) * 1.35, log=True)
    shown = [series for series in SERIES if any(p.series == series for p in points)]
    chart = Chart(x, y, [(colour(SERIES.index(series)), series) for series in shown], height=400)
    for p in sorted(points, key=lambda p: SERIES.index(p.series), reverse=True):
        chart.point(
            p.bits, p.kld, colour(SERIES.index(p.series)), title=f"{p.name}: {p.bits:g} bits, KLD {p.kld:g}",
            low=p.kld - p.stderr, high=p.kld + p.stderr, square=p.series.startswith("llama"),
        )  # fmt: skip
        # Where another mark would lie in the name: on the left or, without room there either, above.
        (px, py), width = chart.at(p.bits, p.kld), 14 + CHARACTER * len(p.name)
        near = [qx - px for qx, qy in (chart.at(q.bits, q.kld) for q in points) if abs(qy - py) < 10]
        if not any(0 < x < width for x in near):
            chart.text(p.bits, p.kld, p.name, dx=9, dy=4)
        elif px - width > LEFT - 5 and not any(-width < x < 0 for x in near):
            chart.text(p.bits, p.kld, p.name, dx=-9, dy=4, anchor="end")
        else:
            chart.text(p.bits, p.kld, p.name, dx=-5, dy=-9)
    return chart.svg(f"Divergence over bits per weight: {model}", style=THEME + STYLE)


def main() -> None:
    folder = Path(sys.argv[1])
    points = read_points((folder / "accuracy.md").read_text())
    for model in dict.fromkeys(p.model for p in points):
        name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
        (folder / f"accuracy-{name}.svg").write_text(draw(model, [p for p in points if p.model == model]))


if __name__ == "__main__":
    main()
