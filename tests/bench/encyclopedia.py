"""Calibration text from an encyclopedia: `python tests/bench/encyclopedia.py DUMP.xml.bz2 > encyclopedia.txt`.

The running prose of the articles of a MediaWiki dump, without lists, tables, formulas and notes; articles with less
than 3,000 characters of it are left out. Needs mwparserfromhell 0.7.2. The test data of gensim 4.4.0 hold a dump of the
first articles of the English Wikipedia, from Anarchism to Algorithm.
"""

from __future__ import annotations

import bz2
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import mwparserfromhell

LEAST_ARTICLE, LEAST_PARAGRAPH = 3000, 200  # characters
LEFT_OUT = re.compile(
    r"<!--.*?-->|<ref[^>/]*/>|\{\|.*?\n\|\}|<(ref|math|gallery|timeline|table|pre|code|nowiki|imagemap)\b.*?</\1>",
    re.DOTALL | re.IGNORECASE,
)
OF_A_LIST = re.compile(r"\s*([*#:;|!{=<]|\[\[)")
NO_PROSE_LINK = re.compile(r"\s*[a-z][a-z-]+:", re.IGNORECASE)  # to files, categories, other languages


def articles(path: str) -> Iterator[tuple[str, str]]:
    """Titles and wikitexts; no redirections."""
    with bz2.open(path) as dump:
        for _, element in ET.iterparse(dump):
            if element.tag.endswith("}page"):
                text = element.findtext("{*}revision/{*}text") or ""
                if not text.lstrip().lower().startswith("#redirect"):
                    yield element.findtext("{*}title") or "", text
                element.clear()


def prose(wikitext: str) -> list[str]:
    """Its paragraphs."""
    code = mwparserfromhell.parse(LEFT_OUT.sub("", wikitext))
    for link in code.filter_wikilinks(recursive=False):
        if NO_PROSE_LINK.match(str(link.title)):
            code.remove(link)
    lines = code.strip_code().split("\n")
    return [" ".join(line.split()) for line in lines if len(line) >= LEAST_PARAGRAPH and not OF_A_LIST.match(line)]


def main() -> None:
    for title, wikitext in articles(sys.argv[1]):
        paragraphs = prose(wikitext)
        if sum(map(len, paragraphs)) >= LEAST_ARTICLE:
            print(title, *paragraphs, sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
