"""Stop strings: against a search in the whole text, however it comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from w4conv.errors import UsageError
from w4conv.runtime.stops import StopStrings, checked_stops

TEXT = st.text("ab\n", max_size=14)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first end of a stop string, by trying every one."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(pieces=st.lists(TEXT, max_size=8), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4))
def test_pieces_and_the_whole_text_stop_alike(pieces: list[str], stops: list[str]) -> None:
    search = StopStrings(stops)
    out = []
    for piece in pieces:
        out.append(search.push(piece))
        so_far = "".join(out)
        assert expected("".join(pieces), stops)[0].startswith(so_far), "nothing is passed on too early"
    text = "".join(out) + search.finish()
    assert (text, search.found) == expected("".join(pieces), stops)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    search = StopStrings(["\n\nUser:"])
    assert [search.push(p) for p in ("Hi", " there\n", "\nUs", "ual\n", "\nUser: ")] == [
        "Hi", " there", "", "\n\nUsual", ""
    ]  # fmt: skip
    assert (search.found, search.push("more"), search.finish()) == ("\n\nUser:", "", "")


@pytest.mark.parametrize("stop", ["", ["a", ""], 5, [None], ["x"] * 65, "x" * 5000, b"a", None])
def test_what_is_no_stop_string(stop: object) -> None:
    with pytest.raises(UsageError, match="stop"):
        checked_stops(stop)  # type: ignore[arg-type]  # that is the point
    assert checked_stops("ab") == ("ab",)
    assert checked_stops(["a", "b"]) == ("a", "b")
