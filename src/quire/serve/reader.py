"""AnswerReader: turns the output of a model into an answer: reasoning, text, tool calls.

    text in pieces ──► ThinkSplitter ──► reasoning
                            └── answer ──► ToolParser ──► text, calls, their arguments

The same reader serves streams and answers in one piece, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.serve.reasoning import Thinking, ThinkSplitter
from quire.serve.tools.base import Arguments, CallBegun, Event, Reasoning, Text, ToolParser, merged


class AnswerReader:
    """Reads one text. Mutable."""

    def __init__(self, thinking: Thinking, parser: ToolParser | None) -> None:
        self._splitter = ThinkSplitter(thinking)
        self._parser = parser

    def read(self, text: str, *, is_last: bool) -> list[Event]:
        """Add a piece of text, which may be the last; return the new events. Mutates."""
        found: list[Event] = []
        for piece in self._splitter.push(text) + (self._splitter.finish() if is_last else []):
            if isinstance(piece, Text) and self._parser is not None:
                found += self._parser.push(piece.text)
            else:
                found.append(piece)
        if is_last and self._parser is not None:
            found += self._parser.finish()
        return merged(found)


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
