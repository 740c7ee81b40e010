"""The interface of a tool format: how a model writes its calls, and how they are parsed.

    template ──► a format recognises itself            tools ──► rules of a grammar, in llguidance's dialect of Lark
    text in pieces ──► AnswerParser ──► Text, CallBegun, Arguments, …      nothing is lost: a wrong call is text

A format is the text around a call; the call itself is a name and a JSON object, or tags of which the parser makes one.
Tests check three rules for every format: pieces may be cut anywhere with the same result; anything that is not a call
is passed on as text; the joined arguments are exactly the characters, or the values, that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, Protocol

Message = Mapping[str, Any]

Conversation = tuple[Sequence[Message], Sequence[Message] | None]
"""The messages, and the tools that the model is shown, if any."""

Adapt = Callable[[Sequence[Message], Sequence[Message] | None], Conversation]
"""Returns a validated conversation in the form that a template needs. Does not mutate."""

Mark = Callable[[str], str]
"""Returns a mark such as "<tool_call>" in a grammar: as its token if it has one, else letter by letter."""

MAX_CALLS: Final = 32
"""Maximum calls in one answer: a small model that must call something would not stop on its own."""

MAX_NAME_LENGTH: Final = 128
"""Of a function: the limit of Anthropic, which is above that of OpenAI (64). Claude Code makes long names."""

SPACE: Final = " \t\r\n"
MAX_SPACE: Final = 1024
"""Maximum space that a parser holds back."""

MAX_PIECE: Final = 1024
"""Letters that are read at once: with more, a text of short messages or many marks would take quadratic time."""

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. A strict one is refused if its schema cannot be enforced exactly."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    place: str = "tools"
    """The request's field that has the parameters."""
    namespace: str = ""
    """The namespace that `name` begins with. An answer of /v1/responses has it apart from the rest, `own_name`."""

    @property
    def own_name(self) -> str:
        """The name within the namespace."""
        return self.name.removeprefix(full_name(self.namespace, ""))


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function.

    >>> full_name(None, "now"), full_name("agents", "spawn")
    ('now', 'agents__spawn')
    """
    return f"{namespace}__{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may call: `tools`. `shown` are the tools for the template, in chat form."""

    mode: Mode
    tools: tuple[Tool, ...] = ()
    shown: list[dict[str, Any]] | None = None
    max_calls: int = MAX_CALLS


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the model's answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a function call."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the latest call."""

    text: str


Event = Reasoning | Text | CallBegun | Arguments


class AnswerParser(Protocol):
    """Reads one text that may contain reasoning or calls. Mutable."""

    def push(self, text: str) -> list[Event]:
        """Add text; return the new events. Mutates."""
        ...

    def finish(self) -> list[Event]:
        """End the text; return the remaining events. Mutates."""
        ...


State = Callable[[], list[Event]]


class StateParser:
    """Reads text in states: each takes what it can of the held text, and may set the next state. Mutable."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._held = ""

    def _read(self) -> list[Event]:
        """Read until a state takes nothing and sets no other. Mutates."""
        found: list[Event] = []
        while self._held:
            state, length = self._state, len(self._held)
            found += state()
            if self._state == state and len(self._held) == length:
                break
        return found


class Nesting:
    """Follows a JSON object, letter by letter, to its last brace. Mutable.

    >>> nesting = Nesting()
    >>> [nesting.is_open_after(letter) for letter in '{"}":[]}']
    [True, True, True, True, True, True, True, False]
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def is_open_after(self, letter: str) -> bool:
        """Take the next letter; return whether more of the object follows. Mutates."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._in_string, self._is_escaped = letter != '"', letter == "\\"
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
        return self._depth > 0


class Thinking(Enum):
    """Whether a text begins with reasoning."""

    NO = "no"
    PERHAPS = "perhaps"
    YES = "yes"
    WITHIN = "within"
    """The reasoning has begun in the message that the text continues."""


class MarkedFormat(Protocol):
    """One way of marking parts of an answer. Immutable."""

    @property
    def name(self) -> str:
        """The format's name in the settings."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks around these parts. The parser also sees those that are special tokens, which texts omit."""
        ...

    def is_of(self, template: str) -> bool:
        """Return whether a chat template uses this format."""
        ...


class ReasoningFormat(MarkedFormat, Protocol):
    """One way of marking the reasoning before an answer. Immutable."""

    def after(self, prompt: str) -> Thinking:
        """Return whether a text begins with reasoning, by the end of its prompt. Does not mutate."""
        ...

    def within(self, begun: str) -> Thinking:
        """Return whether a text that continues a message is reasoning at first. Does not mutate."""
        ...

    def rules(self, thinking: Thinking, mark: Mark) -> tuple[str, str]:
        """Return the part of a grammar's `start` before an answer or a call, and the rules for it. Does not mutate."""
        ...

    def answer(self, answer: str, thinking: Thinking, mark: Mark) -> str:
        """Return the rule for an answer, given the rule for its text. Does not mutate."""
        ...

    def parser(self, thinking: Thinking) -> AnswerParser:
        """Return a parser that separates the reasoning from the rest, which it returns as text."""
        ...


class ToolFormat(MarkedFormat, Protocol):
    """One way of writing calls. Immutable."""

    @property
    def adapt(self) -> Adapt | None:
        """Returns a conversation in the form that the templates need; None: they need none."""
        ...

    def rules(self, tools: Sequence[Tool], most: int, mark: Mark) -> str:
        """Return the rules `calls` (from 1 to `most` of them) and `opened` (free text, then calls)."""
        ...

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of the reasoning, if the parser of calls separates it too."""
        ...

    def parser(self, tools: Sequence[Tool]) -> AnswerParser:
        """Return a parser for calls of these functions."""
        ...

    def call_id(self, digits: str) -> str:
        """Return the id of a call, made from unique hexadecimal digits."""
        ...


def without_last_space(text: str) -> str:
    r"""Return a text without the space at its end; of a long run of space, all but the last part is kept.

    Parsers hold this space back, because it may precede a mark. The limit keeps their work per token constant.

    >>> without_last_space("So. \n"), len(without_last_space(" " * 2500))
    ('So.', 2048)
    """
    num_last = len(text) - len(text.rstrip(SPACE))
    return text[: len(text) - num_last % MAX_SPACE]


def length_of_begun(text: str, marks: Sequence[str]) -> int:
    """Return how many letters at the end of a text may begin one of the marks. Does not mutate.

    >>> length_of_begun("So </th", ["</think>"]), length_of_begun("So", ["</think>"])
    (4, 0)
    """
    longest = min(len(text), max(map(len, marks)) - 1)
    ends = (text[len(text) - length :] for length in range(longest, 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) and mark != end for mark in marks)), 0)


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
