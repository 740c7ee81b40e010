"""AnswerReader: turns the output of a model into an answer: reasoning, text, tool calls.

    text in pieces ──► parser of the reasoning format ──► reasoning
                            └── text ──► parser of the tool format ──► text, calls, their arguments

The same reader serves streams and answers in one piece, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.serve.tools.base import AnswerParser, Arguments, CallBegun, Event, Reasoning, Text, merged


class AnswerReader:
    """Reads one text. Mutable."""

    def __init__(self, parsers: Sequence[AnswerParser]) -> None:
        """Each parser reads the text that the one before it returns."""
        self._parsers = parsers

    def read(self, text: str, *, is_last: bool) -> list[Event]:
        """Add a piece of text, which may be the last; return the new events. Mutates."""
        events: list[Event] = [Text(text)]
        for parser in self._parsers:
            read: list[Event] = []
            for event in events:
                read += parser.push(event.text) if isinstance(event, Text) else [event]
            events = read + (parser.finish() if is_last else [])
        return merged(events)


@dataclass(slots=True)
class ReadCall:
    """A function call, as far as it has been read."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ReadAnswer:
    """A complete answer. `text` is None if it has no text."""

    reasoning: str | None = None
    text: str | None = None
    calls: list[ReadCall] = field(default_factory=list)

    @classmethod
    def of(cls, events: Sequence[Event]) -> ReadAnswer:
        """Return the sum of events as an answer. Does not mutate them."""
        answer = cls()
        for event in events:
            if isinstance(event, CallBegun):
                answer.calls.append(ReadCall(event.name))
            elif isinstance(event, Arguments):
                answer.calls[-1].arguments += event.text
            elif isinstance(event, Reasoning):
                answer.reasoning = (answer.reasoning or "") + event.text
            else:
                answer.text = (answer.text or "") + event.text
        return answer


def object_of(arguments: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if they are cut off, or nest deeper than Python's stack."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
