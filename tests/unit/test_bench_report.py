"""The HTML report of bench: well-formed, complete, self-contained; axes that say what lies on them."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from helpers import make_llama_dir

from w4conv.cli._report import as_html, roofline
from w4conv.cli._svg import Axis, Chart
from w4conv.commands.bench import BenchReport, bench
from w4conv.commands.quantize import quantize
from w4conv.container import open_container
from w4conv.models import parse_config

SVG = "{http://www.w3.org/2000/svg}"
NAME = "a & <b> w4a16"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    folder = tmp_path_factory.mktemp("bench")
    quantize(make_llama_dir(folder / "in"), folder / "m.w4", group_size=32, effort=0, scheme="w4a16")
    with open_container(folder / "m.w4") as container:
        return bench([(NAME, container), ("two", container)], n_prompt=20, n_tokens=2, rounds=2, context=40)


class Page(HTMLParser):
    """Tags that are open, and everything that was seen."""

    VOID = ("meta", "rect", "circle", "line", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(report: BenchReport) -> None:
    text = as_html(report)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import", text)
    assert "a &amp; &lt;b&gt; w4a16" in text
    assert "<b>" not in text


def test_every_row_is_in_every_picture(report: BenchReport) -> None:
    pictures = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", as_html(report), re.DOTALL)]
    assert len(pictures) == 4
    for picture in pictures[:2]:
        texts = [t.text for t in picture.iter(f"{SVG}text")]
        assert NAME in texts
        assert "two" in texts
        titles = [t.text or "" for t in picture.iter(f"{SVG}title")]
        assert sum(title.startswith(NAME) for title in titles) == sum(title.startswith("two") for title in titles) >= 2


def test_bars_are_as_long_as_their_parts(report: BenchReport) -> None:
    picture = ET.fromstring(re.findall(r"<svg.*?</svg>", as_html(report), re.DOTALL)[3])
    bars = [float(str(r.get("width"))) for r in picture.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    parts = [ms for row in report.rows for ms in row.decode.parts.values()]
    longest = max(sum(row.decode.parts.values()) for row in report.rows)
    assert bars == pytest.approx([ms / longest * 510 for ms in parts], abs=0.06)


def test_points_lie_where_the_figures_say(report: BenchReport) -> None:
    """A row at half the read ceiling lies below the slope by log(2) of the scale, wherever the axes end."""
    row = report.rows[0]
    picture = ET.fromstring(roofline(replace(report, rows=(row,)), alone=True))
    slope, flat = [line for line in picture.iter(f"{SVG}polyline") if "roof" in (line.get("class") or "")]
    (x0, y0), (x1, y1) = (tuple(map(float, p.split(","))) for p in str(slope.get("points")).split())
    knee = row.peak_gmacs.median / row.ceiling_gbs.median
    assert str(flat.get("points")).split()[0] == f"{x1:.1f},{y1:.1f}"
    circle = next(picture.iter(f"{SVG}circle"))
    # both axes are logarithmic, so places are linear in logarithms: two known points of the slope fix each scale
    ticks = {t.text: t for t in picture.iter(f"{SVG}text") if t.get("text-anchor") == "middle" and t.get("x")}
    numbers = sorted(
        (float(str(k)), float(str(t.get("x")))) for k, t in ticks.items() if re.fullmatch(r"[\d.e+-]+", str(k))
    )
    (v0, px0), (v1, px1) = numbers[0], numbers[-1]
    scale = (px1 - px0) / math.log(v1 / v0)
    assert float(str(circle.get("cx"))) == pytest.approx(px0 + scale * math.log(row.decode.macs_per_byte / v0), abs=0.3)
    assert x1 == pytest.approx(px0 + scale * math.log(knee / v0), abs=0.3)
    per_log = (y1 - y0) / (math.log(knee) - math.log(v0 * math.exp((x0 - px0) / scale)))
    below = math.log(row.decode.gmacs.median / (row.decode.macs_per_byte * row.ceiling_gbs.median))
    roof = y1 + per_log * (math.log(row.decode.macs_per_byte) - math.log(knee))
    assert float(str(circle.get("cy"))) == pytest.approx(roof + per_log * below, abs=0.5)


def test_multiplications_and_bytes_are_those_of_the_shapes(report: BenchReport) -> None:
    """A Llama of hidden size 64: 4 heads and 2 KV heads of 16, 96 inner, 2 layers, 300 tokens, head apart."""
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)] * 2
    linear = sum(n * k for n, k in shapes)
    head = 300 * 64
    prefill, decode = report.rows[0].prefill, report.rows[0].decode
    assert decode.gmacs.high * decode.ms_per_token.low * 1e6 == pytest.approx(linear + head)
    assert prefill.gmacs.high * prefill.seconds.low * 1e9 == pytest.approx(20 * linear + head)
    # int4 in groups of 32 with an FP16 scale each; the head int8, its rows padded to a multiple of 16
    coded = sum(n * k // 2 + n * k // 32 * 2 for n, k in shapes)
    head_nbytes = 304 * 64 + 304 * 2 * 2
    nbytes = decode.weight_nbytes - coded - head_nbytes
    norms, row = 5 * 64 * 2, head_nbytes // 300
    assert nbytes in (norms + row, 2 * norms + row), "norms of two or four bytes, one row of the embedding"
    assert decode.macs_per_byte == pytest.approx((linear + head) / decode.weight_nbytes)
    assert prefill.macs_per_byte == pytest.approx((20 * linear + head) / (decode.weight_nbytes - row))


@pytest.mark.parametrize(("tied", "share"), [(True, 1), (False, 1 / 32000)])
def test_a_token_uses_its_experts_and_one_row_of_the_embedding(tied: bool, share: float) -> None:
    config = {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32000, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": tied,
        "sliding_window": None,
    }  # fmt: skip
    spec = parse_config(config)
    used = {t.name: spec.used_by_token(t, 64000) for t in spec.tensors()}
    experts = [n for name, n in used.items() if "experts" in name]
    assert len(experts) == 24
    assert set(experts) == {16000}
    (embedding,) = (n for name, n in used.items() if "embed_tokens" in name)
    assert embedding == 64000 * share
    assert sum(n == 64000 for n in used.values()) == len(used) - 24 - (not tied)


def test_context_is_measured_at_powers_of_two_and_its_end(report: BenchReport) -> None:
    assert [point.n_tokens for point in report.rows[0].context] == [16, 32, 40]


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis("", 0, 100), [0, 20, 40, 60, 80, 100]),
        (Axis("", 0, 0.07), [0, 0.02, 0.04, 0.06]),
        (Axis("", 3, 60, log=True), [5, 10, 20, 50]),
        (Axis("", 1, 1e6, log=True), [1, 10, 100, 1000, 1e4, 1e5, 1e6]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)


@pytest.mark.parametrize(("axis", "middle"), [(Axis("", 2, 8), 5), (Axis("", 2, 8, log=True), 4)])
def test_an_axis_runs_from_0_to_1(axis: Axis, middle: float) -> None:
    assert [axis.place(value) for value in (2, middle, 8)] == pytest.approx([0, 0.5, 1])


def test_a_long_legend_takes_more_lines() -> None:
    axis = Axis("", 0, 1)
    short, long = (Chart(axis, axis, [("c0", "n" * n)] * 3) for n in (5, 60))
    assert long.top - short.top == 40
