"""Texts cut into pieces anywhere, as a stream brings them, and the events that a parser makes of pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from quire.serve.tools.base import AnswerParser, Event, merged


def cut(draw: Any, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def parsed(parser: AnswerParser, pieces: Iterable[str]) -> list[Event]:
    """Return the events of a whole text, joined as far as they go together."""
    return merged([event for piece in pieces for event in parser.push(piece)] + parser.finish())
