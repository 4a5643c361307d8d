"""A text set as WikiText has it: `python tests/bench/as_wikitext.py < text > set.txt`.

Words and marks stand apart, hyphens inside of words become " @-@ ", commas and points inside of numbers " @,@ " and
" @.@ ", as in "a well @-@ known song , which sold 1 @,@ 200 copies"; a line has a blank at either end. Empty lines go.
"""

from __future__ import annotations

import re
import sys

ABBREVIATION = re.compile(r"Mr|Mrs|Ms|Dr|St|vs|No|Jr|Sr|Gen|Col|Lt|Rev|Prof|etc|[A-Z]|.*\..*")  # before its point
SPACED = (
    (re.compile(r"(?<=\w)-(?=\w)"), " @-@ "),
    (re.compile(r"(?<=\d)([,.])(?=\d)"), r" @\1@ "),
    (re.compile(r'(?<!@)([,;:?!()\[\]"“”…])(?!@)'), r" \1 "),
    (re.compile(r"(?<=\w)(['\u2019](?:s|re|ve|ll|d|m)\b)"), r" \1"),
    (re.compile(r"(?<=\w)(n['\u2019]t\b)"), r" \1"),
)


def as_wikitext(line: str) -> str:
    for pattern, spaced in SPACED:
        line = pattern.sub(spaced, line)
    words: list[str] = []
    raw = line.split()
    for i, word in enumerate(raw):
        bare = word.removesuffix(".")
        is_end = bare != word and bare != "" and (i == len(raw) - 1 or not ABBREVIATION.fullmatch(bare))
        words += [bare, "."] if is_end else [word]
    return " ".join(["", *words, ""]) if words else ""


def main() -> None:
    for line in sys.stdin:
        if spaced := as_wikitext(line):
            print(spaced)


if __name__ == "__main__":
    main()
