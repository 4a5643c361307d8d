"""Text set as WikiText has it: WikiText itself, put together and set again, is the oracle."""

from __future__ import annotations

import re
import runpy
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from helpers import data_dir

BENCH = Path(__file__).parents[1] / "bench"
as_wikitext = runpy.run_path(str(BENCH / "as_wikitext.py"))["as_wikitext"]

# What setting does, undone.
TOGETHER = (
    (r" @(.)@ ", r"\1"), (r" ([,;:.?!)\]])", r"\1"), (r"([(\[]) ", r"\1"), (r" (n't|'(?:s|re|ve|ll|d|m)\b)", r"\1"),
    (r'" ([^"]*) "', r'"\1"'),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Self-made (1,200.5 kg), isn't Dr. No's.",
            " Self @-@ made ( 1 @,@ 200 @.@ 5 kg ) , is n't Dr. No 's . ",
        ),
        ('He said: "A.H. and J. left."', ' He said : " A.H. and J. left . " '),
        (" \n", ""),
    ],
)
def test_marks_stand_apart(text: str, expected: str) -> None:
    assert as_wikitext(text) == expected


def test_wikitext_comes_back() -> None:
    page = data_dir("wikitext-2-raw", "wiki.test.raw").read_text()
    n_words = n_same = 0
    for line in [line for line in page.split("\n")[:300] if line.strip() and not line.startswith(" =")]:
        text = line.strip()
        for spaced, plain in TOGETHER:
            text = re.sub(spaced, plain, text)
        words = line.split()
        n_words += len(words)
        blocks = SequenceMatcher(None, words, as_wikitext(text).split(), autojunk=False).get_matching_blocks()
        n_same += sum(block.size for block in blocks)
    assert n_same >= 0.999 * n_words > 10_000
