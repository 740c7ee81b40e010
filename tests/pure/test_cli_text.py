"""Lines of a drawing: what stands in which column, in which style, and what a terminal without colours shows."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.terminal import DRAWN, Terminal, detect
from quire.cli.text import (
    ASCII_FORMS,
    PLAIN,
    Colour,
    Line,
    Span,
    Style,
    clip,
    indent,
    line,
    pad,
    paragraph,
    plain,
    side_by_side,
    width,
)

COLOURS = st.none() | st.builds(Colour, st.integers(0, 255), st.integers(0, 15))
STYLES = st.builds(Style, COLOURS, COLOURS, st.booleans())
SPANS = st.builds(Span, st.text("ab █─×", max_size=5), STYLES)
LINES = st.lists(SPANS, max_size=5).map(tuple)

Cell = tuple[str, Style]


def cells(drawn: Line) -> list[Cell]:
    """Each column of a line with its style."""
    return [(letter, part.style) for part in drawn for letter in part.text]


@given(LINES, st.integers(-2, 30))
def test_a_clipped_line_is_the_beginning_of_it_in_the_same_styles(drawn: Line, columns: int) -> None:
    clipped = clip(drawn, columns)
    assert cells(clipped) == cells(drawn)[: max(columns, 0)]
    assert width(clipped) == min(width(drawn), max(columns, 0))
    if columns < width(drawn):
        assert all(part.text for part in clipped)


@given(LINES, st.integers(-2, 30))
def test_a_padded_line_is_followed_by_blanks_up_to_its_width(drawn: Line, columns: int) -> None:
    padded = pad(drawn, columns)
    num_missing = max(columns - width(drawn), 0)
    assert cells(padded) == cells(drawn) + [(" ", PLAIN)] * num_missing
    assert padded is drawn or num_missing, "a line that is wide enough stays as it is"


@given(st.lists(LINES, max_size=4), st.lists(LINES, max_size=4), st.integers(0, 12))
def test_drawings_side_by_side_stand_in_their_columns(left: list[Line], right: list[Line], columns: int) -> None:
    both = side_by_side(left, right, columns)
    assert len(both) == max(len(left), len(right))
    for row, drawn in enumerate(both):
        ours = left[row] if row < len(left) else ()
        theirs = right[row] if row < len(right) else ()
        assert cells(drawn)[: width(ours)] == cells(ours)
        if theirs:
            start = max(columns, width(ours))
            assert cells(drawn)[start:] == cells(theirs)
            assert all(cell == (" ", PLAIN) for cell in cells(drawn)[width(ours) : start])
        else:
            assert drawn == ours


@given(st.lists(LINES, max_size=4), st.integers(0, 9))
def test_indented_lines_move_and_empty_ones_stay_empty(lines: list[Line], columns: int) -> None:
    for before, after in zip(lines, indent(lines, columns), strict=True):
        assert after == () if before == () else plain(after) == " " * columns + plain(before)


@given(st.lists(st.text("abc", min_size=1, max_size=9), max_size=9), st.integers(0, 20))
def test_a_paragraph_has_all_its_words_and_no_line_is_too_long(words: list[str], columns: int) -> None:
    drawn = paragraph(" ".join(words), columns, Style(bold=True))
    assert "".join(words) == "".join(plain(each) for each in drawn).replace(" ", "")
    assert all(width(each) <= max(columns, 1) for each in drawn)
    assert all(part.style.bold for each in drawn for part in each)


def test_parts_of_a_line_keep_their_order_and_style() -> None:
    bold = Span("b", Style(bold=True))
    assert line("a", bold, line("c", bold), "") == (
        *(Span("a", PLAIN), bold, Span("c", PLAIN), bold),
        Span("", PLAIN),
    )


# ---- on a terminal --------------------------------------------------------------------------------------------------

ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


def shown(text: str) -> list[Cell]:
    """What a terminal shows for characters and escape codes: a reader of the codes, as their standard has them."""
    ink = ground = None
    bold, found, place = False, [], 0
    while place < len(text):
        if match := ESCAPE.match(text, place):
            place = match.end()
            codes = [int(code) for code in match[1].split(";")]
            while codes:
                code = codes.pop(0)
                if code == 0:
                    ink, ground, bold = None, None, False
                elif code == 1:
                    bold = True
                elif code in (38, 48):
                    assert codes.pop(0) == 5
                    value = codes.pop(0)
                    ink, ground = (value, ground) if code == 38 else (ink, value)
                elif 30 <= code <= 37 or 90 <= code <= 97:
                    ink = code - 30 if code < 90 else code - 82
                else:
                    assert 40 <= code <= 47 or 100 <= code <= 107
                    ground = code - 40 if code < 100 else code - 92
            continue
        found.append((text[place], (ink, ground, bold)))
        place += 1
    return found


@given(LINES, st.sampled_from([0, 16, 256]), st.booleans())
def test_a_terminal_shows_each_cell_in_the_colours_that_it_has(drawn: Line, num_colours: int, unicode: bool) -> None:
    text = Terminal(num_colours=num_colours, unicode=unicode).render(drawn)

    def number(colour: Colour | None) -> int | None:
        return None if colour is None or not num_colours else colour.rich if num_colours == 256 else colour.plain

    expected = [
        (
            letter if unicode else letter.translate(ASCII_FORMS),
            (number(style.ink), number(style.ground), style.bold and num_colours > 0),
        )
        for letter, style in cells(drawn)
    ]
    found = shown(text)
    assert found == expected[: len(found)]
    assert all(letter == " " for letter, _ in expected[len(found) :]), "only blanks at the end may be left out"
    assert unicode or text.isascii()
    assert not text.endswith(" ")


def test_every_character_that_is_drawn_has_a_form_of_one_column() -> None:
    assert all(len(form) == 1 and form.isascii() for form in ASCII_FORMS.values())
    assert not any(letter.isascii() for letter in DRAWN)


class Stream(io.StringIO):
    def __init__(self, encoding: str | None, is_terminal: bool) -> None:
        super().__init__()
        self._encoding, self._is_terminal = encoding, is_terminal

    @property
    def encoding(self) -> Any:
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("environ", "color", "is_terminal", "num_colours"),
    [
        ({}, "auto", True, 256),
        ({}, "auto", False, 0),
        ({}, "always", False, 256),
        ({}, "never", True, 0),
        ({"TERM": "dumb"}, "auto", True, 0),
        ({"TERM": "dumb"}, "always", True, 256),
        ({"TERM": "linux"}, "auto", True, 16),
        ({"TERM": "linux", "COLORTERM": "truecolor"}, "auto", True, 256),
        ({"TERM": "xterm-16color"}, "auto", True, 16),
        ({"TERM": "xterm-256color"}, "auto", True, 256),
        ({"NO_COLOR": "1"}, "auto", True, 0),
        ({"NO_COLOR": ""}, "auto", True, 256),
        ({"NO_COLOR": "1"}, "always", True, 256),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, "auto", True, 0),
        ({"FORCE_COLOR": "1"}, "auto", False, 256),
        ({"FORCE_COLOR": "0"}, "auto", False, 0),
        ({"FORCE_COLOR": ""}, "auto", False, 0),
        ({"FORCE_COLOR": "1"}, "never", True, 0),
    ],
)
def test_who_decides_about_colour(environ: dict[str, str], color: str, is_terminal: bool, num_colours: int) -> None:
    assert detect(Stream("utf-8", is_terminal), environ, color).num_colours == num_colours


@pytest.mark.parametrize(
    ("encoding", "unicode"), [("utf-8", True), ("ascii", False), ("cp437", False), (None, False), ("no-such", False)]
)
def test_blocks_are_drawn_where_the_encoding_has_all_of_them(encoding: str | None, unicode: bool) -> None:
    assert detect(Stream(encoding, True), {}).unicode == unicode


@pytest.mark.parametrize(
    ("term", "is_terminal", "interactive"),
    [("xterm", True, True), ("xterm", False, False), ("dumb", True, False), ("dumb", False, False)],
)
def test_lines_are_redrawn_on_a_terminal_that_can(term: str, is_terminal: bool, interactive: bool) -> None:
    assert detect(Stream("utf-8", is_terminal), {"TERM": term}).interactive == interactive
