"""The documents: links lead somewhere, numbers agree, pictures need no style sheet, words are the field's."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import sys
import tokenize
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from w4conv.cli import _svg
from w4conv.cli._heat_map import heat_map
from w4conv.cli._report import LIGHT
from w4conv.cli._svg import COLOURS, STYLE, Axis, Chart, colour, colours, stacked_bars

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "formats").rglob("*.md")])
PICTURES = sorted(DOCS.glob("*.svg"))
# Pages that say what is. What was belongs to decisions.
PRESENT = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
# Replaced by the words of docs/glossary.md: a field engineer would have to decode them.
PRIVATE_WORDS = (
    "add_products", "digits of base", "octet", "the model as it was", "branch off", "round_with_feedback",
    "in form", "without a text", "spans", "folded lanes", "lost pages", "for want of", "hidden rows", "of those that",
    "remade", "made again", "with feedback", "by feedback", "fed back", "pinned", "sequences held out",
    "aims at", "aimed at", "the aim", "descent by coordinates", "place by place", "which one is told", "told at once",
    "cannot be had", "no telling", "for us to judge",
)  # fmt: skip
# The same as whole identifiers, and as parts of identifiers.
PRIVATE_NAMES = {
    "add_products", "products", "round_with_feedback", "is_shifted", "Turns", "explain_lost_pages", "attended",
    "of_place", "PLACES",
}  # fmt: skip
PRIVATE_PARTS = {"lack", "lows", "aim", "aimed", "met", "remade", "remake", "octet", "octets", "pinned", "spans"}
HISTORY = ("before that", "in an earlier state", "last time", "used to ", "than before", "aimed at,", "was aimed at")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: str) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file.read_text()), f"{name(page)} links to {target}"


def private_words(text: str) -> list[str]:
    text = " ".join(text.lower().split())
    return [word for word in PRIVATE_WORDS if re.search(rf"\b{re.escape(word)}\b", text)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_use_words_of_the_glossary(page: Path) -> None:
    text = page.read_text()
    if page.name == "glossary.md":  # which says what "reproduced" is
        text = text.replace("**reproduced**: made again", "")
    assert private_words(text) == []


@pytest.mark.parametrize("page", PRESENT, ids=name)
def test_pages_that_say_what_is(page: Path) -> None:
    text = " ".join(page.read_text().lower().split())
    assert [word for word in HISTORY if word in text] == []


def prose(code: str) -> str:
    """Comments, docstrings, messages and names of functions of Python code, the latter as words."""
    words = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant) and node.value != ""]
    words = [word for word in words if isinstance(word, str)]
    words += [n.name.replace("_", " ") for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef)]
    comments = tokenize.generate_tokens(io.StringIO(code).readline)
    return "\n".join([*words, *(t.string for t in comments if t.type == tokenize.COMMENT)])


@pytest.mark.parametrize("folder", ["w4conv", "tests"])
def test_code_is_written_in_words_of_the_glossary(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path != Path(__file__):
            assert private_words(prose(path.read_text())) == [], f"{name(path)}: docs/glossary.md has the words to use"


def test_private_words_are_found() -> None:
    code = 'def test_the_aim():\n    """Rounded with\n    feedback."""\n    raise E(f"{1}: octet")  # for want of\n'
    assert private_words(prose(code)) == ["octet", "for want of", "with feedback", "the aim"]


def identifiers(code: str) -> set[str]:
    """Names that Python code defines or uses, but those of the native module."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(value=ast.Name(id="_native")):
                pass
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                found.add(word)
            case ast.FunctionDef(name=word) | ast.ClassDef(name=word) | ast.alias(name=word):
                found.add(word)
    return found


def private(words: set[str]) -> list[str]:
    return sorted(w for w in words if w.strip("_") in PRIVATE_NAMES or PRIVATE_PARTS & set(w.lower().split("_")))


@pytest.mark.parametrize("folder", ["w4conv", "tests/reference_forward"])
def test_identifiers_are_words_of_the_glossary(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert private(identifiers(path.read_text())) == [], f"{name(path)}: docs/glossary.md has the words to use"


def test_private_identifiers_are_found() -> None:
    code = "def round_with_feedback(lows, *, met): _native.products(lows); x.is_shifted = Turns; allow = metric = 1"
    assert private(identifiers(code)) == ["Turns", "is_shifted", "lows", "met", "round_with_feedback"]


def test_the_glossary_is_one_line_a_term() -> None:
    page = (DOCS / "glossary.md").read_text()
    terms = re.findall(r"^- (\*\*.*)$", page, re.MULTILINE)
    assert len(terms) > 50
    assert [line for line in page.splitlines() if line and not line.startswith(("- **", "#", "One word"))] == []
    for other in ("architecture.md", "contributing.md"):
        assert "(glossary.md)" in (DOCS / other).read_text()


def test_the_readme_is_short() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) <= 130
    assert page.count("![") == 1  # one picture


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.strip().splitlines()[2:]]


def test_results_of_the_readme_are_those_of_performance() -> None:
    """One number a cell, each from the row of the same shape on machine X."""
    begin, end = "<!-- results: checked by tests/unit/test_documents.py -->", "<!-- end -->"
    found = rows((ROOT / "README.md").read_text().split(begin)[1].split(end)[0])
    assert len(found) >= 3
    page = (DOCS / "performance.md").read_text().split("## Beside llama.cpp")[1]
    measured = {row[0]: row for row in rows(page.split("Machine X")[1].split("\n\n")[1])}
    for shape, *cells in found:
        assert all(re.fullmatch(r"\d+(\.\d+)?", cell) for cell in cells), shape
        _, _, _, prefill, prefill_other, _, decode, decode_other, _ = measured[shape]
        assert cells[:4] == [decode, decode_other, prefill, prefill_other]
        assert f"{shape} {cells[4]} and {cells[5]}" in page


def test_the_index_of_decisions() -> None:
    index = (DOCS / "decisions/README.md").read_text()
    linked = re.findall(r"^- \[(\d+)\]\((\d{4})-([\w-]+\.md)\): \S.*\.$", index, re.MULTILINE)
    files = sorted(path.name for path in (DOCS / "decisions").glob("[0-9]*.md"))
    assert [f"{digits}-{rest}" for _, digits, rest in linked] == files
    assert all(int(number) == int(digits) for number, digits, _ in linked)


def unpainted(svg: str) -> list[str]:
    """Marks that a viewer without a style sheet would not show as they are meant: none that inherits is counted out."""
    found = []

    def walk(node: ET.Element, inherited: dict[str, str]) -> None:
        tag = node.tag.rpartition("}")[2]
        known = inherited | {k: v for k, v in node.attrib.items() if k in ("fill", "stroke", "font-size")}
        needs = {
            "line": ("stroke",), "polyline": ("stroke", "fill"), "path": ("stroke", "fill"), "rect": ("fill",),
            "circle": ("fill",), "polygon": ("fill",), "text": ("fill", "font-size"),
        }.get(tag, ())  # fmt: skip
        missing = [what for what in needs if what not in known or "var(" in known[what]]
        if tag == "line" and known.get("stroke") == "none":
            missing.append("a stroke")
        if missing:
            found.append(f"{tag} {node.attrib}: {missing}")
        for child in node:
            walk(child, known)

    walk(ET.fromstring(svg), {})
    return found


@pytest.mark.parametrize("picture", PICTURES, ids=name)
def test_pictures_need_no_style_sheet(picture: Path) -> None:
    assert unpainted(picture.read_text()) == []


def test_what_is_unpainted_is_seen() -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg" font-size="9"><style>line { stroke: red }</style>%s</svg>'
    assert len(unpainted(svg % "<line/><text>a</text><rect fill='var(--ink)'/>")) == 3
    assert unpainted(svg % "<g stroke='red'><line/></g><text fill='red'>a</text>") == []


def test_charts_and_heat_maps_need_no_style_sheet() -> None:
    axis = Axis("x", 1, 10)
    chart = Chart(axis, Axis("y", 1, 100, log=True), [(colour(i), f"series {i}") for i in range(8)])
    chart.line([(1, 1), (2, 2)], "roof dashed")
    chart.line([(1, 1), (2, 2)], f"curve {colour(7)}")
    chart.point(2, 2, colour(1), title="a & b", low=1, high=3, square=True)
    chart.text(3, 3, "words")
    bars = stacked_bars("t", [("a", (1.0, 2.0))], [(colour(0), "p"), (colour(1), "q")], unit="ms")
    heat = heat_map(title="t", subtitle="s", columns=(["x"],), rows=[("0", [3.0]), ("1", [None])], unit="dB")
    for svg in (chart.svg("t"), chart.svg("t", style=STYLE), bars, heat):
        assert unpainted(svg) == []


def test_attributes_say_what_the_style_sheet_says() -> None:
    """Of every class: the rule, with the variables of the light theme put in, and the attributes beside it."""
    light = dict(re.findall(r"(--\w+): (#\w+);", LIGHT))
    rules = re.findall(r"^(?:\.chart )?\.(\w+) \{ (.*) \}$", STYLE + colours(COLOURS), re.MULTILINE)
    assert len(rules) == len(_svg.PLAIN) == 5 + len(COLOURS)
    for css, rule in rules:
        said = dict(part.strip().split(": ") for part in rule.strip(" ;").split(";"))
        said = {key: re.sub(r"var\((--\w+)\)", lambda m: light[m[1]], value) for key, value in said.items()}
        assert _svg.PLAIN[css] == said, css
    assert (light["--ink"], light["--quiet"]) == (_svg.INK, _svg.QUIET)


def test_accuracy_pictures_are_those_of_the_table() -> None:
    path = ROOT / "tests/bench/accuracy_plot.py"
    spec = importlib.util.spec_from_file_location("accuracy_plot", path)
    assert spec is not None
    assert spec.loader is not None
    plot = importlib.util.module_from_spec(spec)
    sys.modules["accuracy_plot"] = plot
    spec.loader.exec_module(plot)
    drawn = plot.pictures(DOCS)
    assert sorted(drawn) == [path.name for path in PICTURES if path.name.startswith("accuracy-")]
    for file, svg in drawn.items():
        assert (DOCS / file).read_text() == svg, "run: python tests/bench/accuracy_plot.py docs"
