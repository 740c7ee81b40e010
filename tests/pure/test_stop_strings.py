"""Stop strings: the same text however it is cut, and equal to looking at every place of the whole text."""

from __future__ import annotations

import time
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidRequestError
from quire.engine.text.stop_strings import StopStrings

LETTERS = st.text("ab\U0001f600", max_size=24)
STOPS = st.lists(st.text("ab\U0001f600", min_size=1, max_size=5), max_size=4).map(tuple)


def oracle(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """What is shown, and what stopped it: try every end of every stop string."""
    for end in range(len(text) + 1):
        found = sorted((s for s in stop if text[:end].endswith(s)), key=len)
        if found:
            return text[: end if include else end - len(found[-1])], found[-1]
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    """The text in pieces that end at `cuts`; some are empty."""
    places = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def could_begin(text: str, stop: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that begins a stop string."""
    return max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)


@given(text=LETTERS, stop=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 99), max_size=8))
def test_any_cut_gives_what_the_oracle_gives(text, stop, include, cuts):
    stream = StopStrings(stop, include)
    shown = "".join(stream.push(piece) for piece in cut(text, cuts))
    assert (shown + stream.finish(), stream.matched) == oracle(text, stop, include)


def test_every_short_stop_string_in_every_short_text():
    texts = ["".join(letters) for letters in product("ab", repeat=8)]
    for stop in ("".join(letters) for length in range(1, 6) for letters in product("ab", repeat=length)):
        for text in texts:
            stream = StopStrings((stop,), False)
            assert stream.push(text) + stream.finish() == text.partition(stop)[0]


@given(text=LETTERS, stop=STOPS, cuts=st.lists(st.integers(0, 99), max_size=8))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text, stop, cuts):
    stream, read, shown = StopStrings(stop, False), "", ""
    for piece in cut(text, cuts):
        read += piece
        shown += stream.push(piece)
        if stream.matched is None:
            assert shown == read[: len(read) - could_begin(read, stop)]


@pytest.mark.parametrize(
    ("stop", "text", "shown", "matched"),
    [
        (("bc", "abcd"), "xabcd", "xa", "bc"),  # the one that ends first
        (("c", "bc", "xbc"), "abcd", "a", "bc"),  # at one place, the longest that is there
        (("aab",), "aaab", "a", "aab"),  # a beginning that overlaps itself
        (("é",), "caf\u0065\u0301é!", "caf\u0065\u0301", "é"),  # code points, not what they look like
        ((), "all", "all", None),
    ],
)
def test_which_one_counts(stop, text, shown, matched):
    stream = StopStrings(stop, False)
    assert (stream.push(text) + stream.finish(), stream.matched) == (shown, matched)


@pytest.mark.parametrize("cuts", [[], [1], [2], [3], [1, 2, 3, 4]])
def test_a_stop_string_that_may_not_end_the_text_yet_is_text(cuts):
    stream = StopStrings(("aa", "ab"), False)
    early = "".join(stream.push(piece, may_end=False) for piece in cut("baaab", cuts))
    assert (early, stream.matched) == ("baaab", None)
    assert (stream.push("caab"), stream.matched) == ("c", "aa")


def test_a_stop_string_may_begin_where_it_may_not_end():
    stream = StopStrings(("aba",), False)
    assert (stream.push("aba", may_end=False), stream.push("ba"), stream.matched) == ("ab", "", "aba")


def test_nothing_comes_after_a_match():
    stream = StopStrings(("b",), True)
    assert [stream.push("ab"), stream.push("c"), stream.finish(), stream.matched] == ["ab", "", "", "b"]


def test_a_stop_string_that_is_shown_is_not_waited_for():
    stream = StopStrings(("end",), True)
    assert [stream.push("the en"), stream.push("d of"), stream.finish()] == ["the en", "d", ""]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequestError, match="stop"):
        StopStrings(("a", ""), False)


def test_a_long_stop_string_costs_no_more_per_character():
    """Searching the held-back text again after every character would take minutes."""
    stream, start = StopStrings(("a" * 50_000 + "b",), False), time.process_time()
    assert "".join(stream.push("a") for _ in range(100_000)) == "a" * 50_000
    assert time.process_time() - start < 10
