"""Calls with values in brackets, as Gemma 4 and LFM2 write them: what holds for both."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.serve.tools.base import CallBegun, Text
from support.bracket_calls import ARGUMENTS, GEMMA4_CALLS, LFM2_CALLS, Dialect
from support.growth import is_linear
from support.pieces import cut

DIALECTS = (GEMMA4_CALLS, LFM2_CALLS)
dialects = pytest.mark.parametrize("dialect", DIALECTS, ids=["Gemma 4", "LFM2"])


@dialects
@given(data=st.data())
def test_pieces_may_be_cut_anywhere(dialect: Dialect, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(dialect.bits), max_size=20)))
    found = dialect.events_of([text])
    assert dialect.events_of(cut(data.draw, text)) == dialect.events_of(list(text)) == found
    if not any(isinstance(event, CallBegun) for event in found):
        assert all(isinstance(event, Text) for event in found)
        assert text.startswith("".join(event.text for event in found if isinstance(event, Text)))
    # A call that breaks off is the only one whose arguments are not complete.
    calls = dialect.read(f"{text}{2 * dialect.marks[1]} Done.").calls
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls[:-1])


@dialects
def test_a_call_that_breaks_off(dialect: Dialect) -> None:
    """It is dropped before its arguments begin; after that it is returned as far as it got."""
    begins = dialect.call.index(dialect.bracket) + 1
    for length in range(len(dialect.marks[0]), len(dialect.call)):
        answer = dialect.read(dialect.call[:length])
        assert answer.text is None
        assert [call.name for call in answer.calls] == ["weather"] * (length >= begins)
        assert all(ARGUMENTS.startswith(call.arguments) for call in answer.calls)


@pytest.mark.parametrize(("dialect", "text"), [(each, text) for each in DIALECTS for text in each.no_calls])
def test_what_is_no_call_is_text(dialect: Dialect, text: str) -> None:
    assert dialect.events_of([text]) == [Text(text)]
    assert [call.name for call in dialect.read(f"{text}\n{dialect.call}").calls] == ["weather"]


@dialects
@pytest.mark.parametrize("space", ["", "\n"])
def test_the_first_call_may_lack_its_mark(dialect: Dialect, space: str) -> None:
    _, closer = dialect.marks
    for end, names in (("", ["now"]), (closer, ["now"]), (closer + dialect.call, ["now", "weather"])):
        answer = dialect.read(f"{space}{dialect.bare}{end}")
        assert (answer.text, [call.name for call in answer.calls]) == (None, names)
    assert dialect.read(dialect.call + dialect.bare).text == dialect.bare


@pytest.mark.parametrize(("dialect", "place"), [(each, n) for each in DIALECTS for n in range(len(each.hostile))])
def test_no_text_takes_quadratic_time(dialect: Dialect, place: int) -> None:
    make = dialect.hostile[place]
    assert is_linear(lambda size: dialect.events_of([make(size)]), 10_000)
    assert is_linear(lambda size: dialect.events_of(list(make(size))), 2_000)
