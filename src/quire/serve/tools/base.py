"""What a tool format is: how a model writes its calls, and how they are parsed.

    template ──► a format recognises itself            tools ──► rules of a grammar, in llguidance's dialect of Lark
    text in pieces ──► ToolParser ──► Text, CallBegun, Arguments, …        lost is nothing: a wrong call is text

A format is the words that stand around a call; the call itself is always a name and a JSON object. What must hold for
every format, and is tested for all of them: pieces may be cut anywhere and the events add up to the same; what is no
call comes out as text; the arguments, put together, are exactly the characters that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

Message = Mapping[str, Any]

Mark = Callable[[str], str]
"""Returns how a grammar says a mark such as "<tool_call>": as the token that it is, or else letter by letter."""

MAX_CALLS: Final = 32
"""Calls in one answer: a small model that must call something would not stop by itself."""

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. A strict one is refused where its schema cannot be kept to the letter."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    place: str = "tools"
    """Where the request has its parameters."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What may be called. `shown` is what the template is told, in the form of chat; `tools` are those to call."""

    mode: Mode
    tools: tuple[Tool, ...] = ()
    shown: list[dict[str, Any]] | None = None
    max_calls: int = MAX_CALLS


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the call that began last."""

    text: str


Event = Reasoning | Text | CallBegun | Arguments


class ToolParser(Protocol):
    """Reads one text that may have calls. Mutable."""

    def push(self, text: str) -> list[Event]:
        """Add text; return what it has brought. Mutates."""
        ...

    def finish(self) -> list[Event]:
        """Return what is left: the text has ended. Mutates."""
        ...


class ToolFormat(Protocol):
    """One way in which models write calls. Immutable."""

    @property
    def name(self) -> str:
        """What the setting calls it."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a call. Those that are tokens are shown to the parser, though a text does not have them."""
        ...

    def is_of(self, template: str) -> bool:
        """Return whether a chat template tells the model to write its calls so."""
        ...

    @property
    def tells(self) -> bool:
        """Whether its templates want a conversation in a form of their own: `told`."""
        ...

    def told(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> tuple[Sequence[Message], Sequence[Message] | None]:
        """Return a conversation that was validated as the templates want it. Does not mutate."""
        ...

    def rules(self, tools: Sequence[Tool], most: int, mark: Mark) -> str:
        """Return the rules `calls` (from 1 to `most` of them) and `opened` (free text, then calls)."""
        ...

    def parser(self, names: Collection[str]) -> ToolParser:
        """Return a parser for calls of these functions."""
        ...

    def call_id(self, digits: str) -> str:
        """Return the id of a call, made of hexadecimal digits that nobody else has."""
        ...


def merged(events: Sequence[Event]) -> list[Event]:
    """Return the events with neighbours of one kind joined. Does not mutate.

    >>> merged([Text("a"), Text("b"), CallBegun("f"), CallBegun("f")])
    [Text(text='ab'), CallBegun(name='f'), CallBegun(name='f')]
    """
    found: list[Event] = []
    pieces: list[str] = []
    for index, event in enumerate(events):
        if isinstance(event, CallBegun):
            found.append(event)
            continue
        pieces.append(event.text)
        if index + 1 == len(events) or type(events[index + 1]) is not type(event):
            if text := "".join(pieces):
                found.append(type(event)(text))
            pieces = []
    return found
