"""Styled text as values: drawings consist of lines, and only `quire.cli.terminal` knows escape codes.

A line is a tuple of spans, so that its width can be computed and tested. Every character is one column wide, and every
character beyond ASCII that is drawn has a form of the same width in `ASCII_FORMS`: a drawing keeps its shape if the
encoding lacks these characters.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import NamedTuple


class Colour(NamedTuple):
    """A colour of the palette of 256, and its substitute in the palette of 16."""

    rich: int
    plain: int


@dataclass(frozen=True, slots=True)
class Style:
    """How a span looks. `ink`: colour of the characters, `ground`: of the background; None: the terminal's own."""

    ink: Colour | None = None
    ground: Colour | None = None
    bold: bool = False


class Span(NamedTuple):
    """Characters of one style."""

    text: str
    style: Style


Line = tuple[Span, ...]

PLAIN = Style()
BOLD = Style(bold=True)
FAINT = Style(Colour(243, 8))  # the grey that stands out equally from black and from white

ASCII_FORMS = str.maketrans(
    {
        "█": "#",
        "▌": "+",
        "░": ".",
        "▒": "%",
        "━": "=",
        "─": "-",
        "│": "|",
        "·": ".",
        "×": "x",
        "−": "-",
        "–": "-",
        "→": ">",
        "←": "<",
        "✓": "+",
    }
)


def line(*parts: str | Span | Line) -> Line:
    """Put spans, lines and plain strings together.

    >>> plain(line("a", span("b", BOLD), line("c")))
    'abc'
    """
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, str):
            spans.append(Span(part, PLAIN))
        elif isinstance(part, Span):
            spans.append(part)
        else:
            spans.extend(part)
    return tuple(spans)


def span(text: str, style: Style = PLAIN) -> Span:
    """Make a span."""
    return Span(text, style)


def plain(drawn: Line) -> str:
    """Return the characters of a line."""
    return "".join(part.text for part in drawn)


def width(drawn: Line) -> int:
    """Return how many columns a line takes."""
    return sum(len(part.text) for part in drawn)


def pad(drawn: Line, columns: int) -> Line:
    """Pad a line with blanks. A wider line stays unchanged.

    >>> plain(pad(line("ab"), 4)) + "|"
    'ab  |'
    """
    missing = columns - width(drawn)
    return drawn if missing <= 0 else (*drawn, Span(" " * missing, PLAIN))


def clip(drawn: Line, columns: int) -> Line:
    """Cut a line off after this many columns.

    >>> plain(clip(line("abc", span("def", BOLD)), 4))
    'abcd'
    """
    if width(drawn) <= columns:
        return drawn
    kept: list[Span] = []
    for part in drawn:
        kept.append(Span(part.text[: max(columns, 0)], part.style))
        columns -= len(part.text)
    return tuple(part for part in kept if part.text)


def indent(lines: list[Line], columns: int) -> list[Line]:
    """Move lines to the right; empty ones stay empty."""
    return [(Span(" " * columns, PLAIN), *drawn) if drawn else drawn for drawn in lines]


def side_by_side(left: list[Line], right: list[Line], left_columns: int) -> list[Line]:
    """Set two drawings next to each other, the right one at column `left_columns`.

    >>> [plain(drawn) for drawn in side_by_side([line("a")], [line("b"), line("c")], 3)]
    ['a  b', '   c']
    """
    height = max(len(left), len(right))
    lefts = left + [()] * (height - len(left))
    rights = right + [()] * (height - len(right))
    return [(*pad(ours, left_columns), *theirs) if theirs else ours for ours, theirs in zip(lefts, rights, strict=True)]


def paragraph(text: str, columns: int, style: Style = PLAIN) -> list[Line]:
    """Wrap a text at blanks.

    >>> [plain(drawn) for drawn in paragraph("one two three", 8)]
    ['one two', 'three']
    """
    return [(Span(wrapped, style),) for wrapped in textwrap.wrap(text, max(columns, 1))]
