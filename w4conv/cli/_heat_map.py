"""A heat map as SVG, without any library: rows of cells, dark where the error is large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from w4conv.cli._output import markup

# From small to large: light yellow over orange to dark purple; even steps of lightness, so that grey prints keep them.
_RAMP: Final = ((255, 250, 220), (253, 205, 120), (240, 130, 70), (190, 50, 90), (90, 15, 90), (25, 5, 50))
_CELL_W, _CELL_H, _LEFT, _TOP, _GAP = 62, 17, 46, 88, 18
_INK, _PAPER, _ABSENT = "#222222", "#ffffff", "#dddddd"


def heat_map(
    *, title: str, subtitle: str, columns: Sequence[Sequence[str]], rows: Sequence[tuple[str, Sequence[float | None]]],
    unit: str,
) -> str:  # fmt: skip
    """columns: headings, in groups set apart by a gap. rows: a label, and a value in dB for each column; None: absent.

    High values are good: they are light.
    """
    names = [name for group in columns for name in group]
    values = [v for _, cells in rows for v in cells if v is not None and math.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    lefts, x = [], _LEFT
    for group in columns:
        lefts += [x + i * _CELL_W for i in range(len(group))]
        x += len(group) * _CELL_W + _GAP
    width, height = max(x + _LEFT - _GAP, 560), _TOP + len(rows) * _CELL_H + 70
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="{_PAPER}"/>',
        _text(_LEFT, 24, title, size=15, weight="bold"),
        _text(_LEFT, 42, subtitle),
    ]
    out.append(_text(_LEFT - 8, _TOP - 8, "layer", anchor="end"))
    out += [_text(left + _CELL_W / 2, _TOP - 8, name, anchor="middle") for left, name in zip(lefts, names, strict=True)]
    for i, (label, cells) in enumerate(rows):
        y = _TOP + i * _CELL_H
        out.append(_text(_LEFT - 8, y + 12.5, label, anchor="end"))
        for left, value in zip(lefts, cells, strict=True):
            share = 0.0 if value is None or value == math.inf or high == low else (high - value) / (high - low)
            share = share if math.isfinite(share) else 1.0  # no number: as bad as can be
            fill = _ABSENT if value is None else _colour(share)
            out.append(f'<rect x="{left}" y="{y}" width="{_CELL_W - 1}" height="{_CELL_H - 1}" fill="{fill}"/>')
            if value is not None:
                ink = _PAPER if share > 0.55 else _INK
                words = "exact" if value == math.inf else f"{value:.1f}"
                out.append(_text(left + _CELL_W / 2, y + 12, words, anchor="middle", size=10, fill=ink))
    out += _legend(_TOP + len(rows) * _CELL_H + 24, low, high, unit)
    return "\n".join([*out, "</svg>"]) + "\n"


def _legend(y: float, low: float, high: float, unit: str) -> list[str]:
    n, width = 60, 4
    out = [
        f'<rect x="{_LEFT + i * width}" y="{y}" width="{width + 0.5}" height="12" fill="{_colour(i / (n - 1))}"/>'
        for i in range(n)
    ]
    return [*out, _text(_LEFT, y + 27, f"{high:.1f}"), _text(_LEFT + n * width, y + 27, f"{low:.1f}", anchor="end"),
            _text(_LEFT + n * width + 12, y + 10, unit)]  # fmt: skip


def _colour(share: float) -> str:
    """0: lightest."""
    place = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    i = min(int(place), len(_RAMP) - 2)
    mixed = (round(a + (b - a) * (place - i)) for a, b in zip(_RAMP[i], _RAMP[i + 1], strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, weight: str = "normal", fill: str = _INK
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{markup(words)}</text>'
