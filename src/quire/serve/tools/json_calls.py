r"""Calls as JSON objects, as nearly all models write them: {"name": "add", "arguments": {"a": 1}}.

The text around the objects differs. A `CallShape` describes it:

    hermes    <tool_call>\n{…}\n</tool_call>     one object in each pair of marks
    mistral   [TOOL_CALLS] [{…}, {…}]            a list after one mark
    llama3    {…}; {…}                           the whole text, with or without the mark <|python_tag|>

The parser reads a call letter by letter, in coroutines that mirror the grammar. It holds everything back until it has
read a known name and the start of the arguments: if the text turns out not to be a call, it is passed on as text, and
searched again after its first letter. If the text ends there, the incomplete call is dropped. After that, arguments are
passed on as they arrive. Space before a call, after the last one and around the marks belongs to neither text nor call.

Rejected: regular expressions over the text so far. They are quadratic, and their matches depend on the pieces.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

from quire.serve.tools.base import (
    MAX_NAME_LENGTH,
    MAX_PIECE,
    MAX_SPACE,
    SPACE,
    Arguments,
    CallBegun,
    Event,
    Mark,
    Nesting,
    Text,
    Tool,
    length_of_begun,
    merged,
    without_last_space,
)
from quire.serve.tools.rules import arguments_schema, free_text, literal, pattern, repeated, text_before

NAME_LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_KEYS: Final = ("arguments", "parameters")

Reading = Generator[None, str, None]


@dataclass(frozen=True, slots=True)
class CallShape:
    """The text around the objects. `bare`: how a call begins if its opener is missing at the very start of a text."""

    opener: str
    closer: str = ""
    key: str = "arguments"
    before: str = ""  # rule for the text between opener and object, or list
    after: str = ""  # between object, or list, and closer
    is_list: bool = False
    separator: str = ""  # between objects that share an opener outside a list
    bare: str = ""
    has_id: bool = False  # an id may follow the arguments
    id_key: str = ""  # the key of a number before the name
    name_key: str = "name"
    brackets: tuple[str, str] = ("[", "]")


class WrongCall(Exception):
    """The text is not a call."""


class JsonCallParser:
    """Reads calls of one shape from a text. Mutable."""

    def __init__(self, shape: CallShape, tools: Sequence[Tool]) -> None:
        self._shape = shape
        self._names = frozenset(tool.name for tool in tools)
        self._events: list[Event] = []
        self._reading: Reading | None = None
        self._held = ""  # space and the start of an opener; within a call: the text to pass on if it is not a call
        self._has_text = False
        self._has_call = False
        self._ends_with_call = False

    def push(self, text: str) -> list[Event]:
        """Add text; return the new events. Mutates."""
        for begin in range(0, len(text), MAX_PIECE):
            rest = text[begin : begin + MAX_PIECE]
            while rest:
                rest = self._look(rest) if self._reading is None else self._go_on(self._reading, rest)
        return self._taken()

    def finish(self) -> list[Event]:
        """End the text; return the remaining events. Drops a call that broke off before its arguments. Mutates."""
        held = self._held.lstrip(SPACE)
        may_be_text = self._shape.bare and not self._has_call and held.startswith(self._shape.bare)
        closes = not may_be_text if self._reading else self._ends_with_call and not held
        if not closes:
            self._say(self._held)
        self._held, self._reading = "", None
        return self._taken()

    # ---- text ---------------------------------------------------------------------------------

    def _look(self, text: str) -> str:
        """Look for a call; return the rest of the text."""
        text, opener, bare = self._held + text, self._shape.opener, self._shape.bare
        start = len(text) - len(text.lstrip(SPACE))
        begun = text[start : start + len(bare)]
        if begun and bare.startswith(begun) and not (self._has_text or self._has_call):
            if begun == bare:
                return self._begin(text[:start], "", text[start:])
            self._held = text
            return ""
        place = text.find(opener)
        if place >= 0:
            return self._begin(text[:place], opener, text[place + len(opener) :])
        plain = without_last_space(text[: len(text) - length_of_begun(text, [opener])])
        self._say(plain)
        self._held = text[len(plain) :]
        return ""

    def _begin(self, before: str, opener: str, rest: str) -> str:
        plain = without_last_space(before)
        self._say(plain)
        self._held = before[len(plain) :] + opener
        self._reading = self._calls()
        next(self._reading)
        return rest

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))
            self._ends_with_call = False
            self._has_text = self._has_text or bool(text.strip(SPACE))

    def _taken(self) -> list[Event]:
        events, self._events = merged(self._events), []
        return events

    # ---- calls --------------------------------------------------------------------------------

    def _go_on(self, reading: Reading, text: str) -> str:
        """Continue a call; return the rest of the text."""
        for position, letter in enumerate(text):
            self._held += letter
            try:
                reading.send(letter)
            except StopIteration:
                self._reading, self._held = None, ""
                return text[position + 1 :]
            except WrongCall:
                return self._give_back() + text[position + 1 :]
        return ""

    def _give_back(self) -> str:
        """Pass on the first letter of held text that is not a call; return the rest, in which a call may begin."""
        held, self._held, self._reading = self._held, "", None
        end = len(held) - len(held.lstrip(SPACE)) + 1
        self._say(held[:end])
        return held[end:]

    def _calls(self) -> Reading:
        shape = self._shape
        letter = yield from letter_after_space()
        is_list = shape.is_list and letter == "["  # a single call may have no list around it
        if is_list:
            letter = yield from letter_after_space()
        while True:
            yield from self._call(letter)
            if not (is_list or shape.separator):
                break
            letter = yield from letter_after_space()
            if is_list and letter == "]":
                break
            require(letter == (shape.separator.strip() or ","))
            letter = yield from letter_after_space()
        if shape.closer:
            self._held = ""
            require((yield from letter_after_space()) == shape.closer[0])
            yield from expect(shape.closer[1:])

    def _call(self, letter: str) -> Reading:
        """Read an object whose first letter has been read."""
        require(letter == "{")
        key = yield from _name()
        if self._shape.id_key and key == self._shape.id_key:
            require((yield from letter_after_space()) == ":")
            yield from _name()
            require((yield from letter_after_space()) == ",")
            key = yield from _name()
        require(key == self._shape.name_key)
        require((yield from letter_after_space()) == ":")
        name = yield from _name()
        require(name in self._names)
        require((yield from letter_after_space()) == ",")
        require((yield from _name()) in _KEYS)
        require((yield from letter_after_space()) == ":")
        require((yield from letter_after_space()) == "{")
        self._begin_call(name)
        yield from self._arguments()
        letter = yield from letter_after_space()
        if letter == "," and self._shape.has_id:
            require((yield from _name()) == "id")
            require((yield from letter_after_space()) == ":")
            yield from _name()
            letter = yield from letter_after_space()
        require(letter == "}")
        self._held = ""

    def _begin_call(self, name: str) -> None:
        self._events.append(CallBegun(name))
        self._has_call = self._ends_with_call = True

    def _arguments(self) -> Reading:
        """Pass on an object whose first letter has been read."""
        letter, nesting = "{", Nesting()
        self._pass_on(letter)
        while nesting.is_open_after(letter):
            letter = yield
            self._pass_on(letter)

    def _pass_on(self, text: str) -> None:
        """Pass on a piece of the arguments."""
        self._held = ""
        if text:
            self._events.append(Arguments(text))

    def _text(self, end: str, line: str = "") -> Reading:
        """Pass on a text up to its end mark, as a JSON string; it may begin with `line`, which is left out."""
        self._pass_on('"')
        held = ""  # what may begin the end mark
        while held != end:
            held += yield
            self._held, plain = "", ""
            if line:
                held, line = held.removeprefix(line), ""
            while not end.startswith(held):
                plain, held = plain + held[0], held[1:]
            self._pass_on(json.dumps(plain, ensure_ascii=False)[1:-1])
        self._pass_on('"')


class NamedCallParser(JsonCallParser):
    """Reads calls whose name comes before the arguments, possibly with an id between the two. Mutable.

    The name is followed by the arguments, by their mark, or by an id with its mark and then the arguments' mark.
    """

    def __init__(self, shape: CallShape, tools: Sequence[Tool], own_id: str, mark: str) -> None:
        super().__init__(shape, tools)
        self._own_id = own_id
        self._mark = mark

    def _calls(self) -> Reading:
        name, letter = yield from word_from((yield from letter_after_space()))
        require(name in self._names)
        if letter == "[":
            letter = yield
            if letter == self._own_id[1]:
                yield from expect(self._own_id[2:])
                _, letter = yield from word_from((yield from letter_after_space()))
                require(letter == "[")
                letter = yield
            require(letter == self._mark[1])
            yield from expect(self._mark[2:])
            letter = yield from letter_after_space()
        require(letter == "{")
        self._begin_call(name)
        yield from self._arguments()


def letter_after_space() -> Generator[None, str, str]:
    """Return the next letter that is not space. More space than parsers hold back is no part of a call."""
    for _ in range(MAX_SPACE):
        if (letter := (yield)) not in SPACE:
            return letter
    raise WrongCall


def expect(text: str) -> Reading:
    """Read exactly this text."""
    for wanted in text:
        require((yield) == wanted)


def _name() -> Generator[None, str, str]:
    """Return the text between quotes."""
    require((yield from letter_after_space()) == '"')
    name = ""
    while (letter := (yield)) != '"':
        require(letter in NAME_LETTERS and len(name) < MAX_NAME_LENGTH)
        name += letter
    return name


def word_from(letter: str) -> Generator[None, str, tuple[str, str]]:
    """Return a name or an id whose first letter has been read, and the letter after it."""
    word = ""
    while letter in NAME_LETTERS:
        require(len(word) < MAX_NAME_LENGTH)
        word += letter
        letter = yield
    return word, letter


def is_json(text: str) -> bool:
    """Return whether a text is JSON. Python also reads NaN, which is not."""

    def refuse(_: str) -> None:
        raise ValueError

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def require(condition: bool) -> None:
    """Raise `WrongCall` unless the condition holds."""
    if not condition:
        raise WrongCall


def json_call_rules(shape: CallShape, tools: Sequence[Tool], most: int, mark: Mark) -> str:
    """Return the rules of a grammar for calls of one shape; see `ToolFormat.rules`."""
    rules, before = [], literal("{")
    if shape.id_key:
        before = literal(f'{{"{shape.id_key}": "') + " /[0-9]{1,4}/ " + literal('", ')
    for index, tool in enumerate(tools):
        head = literal(f'"{shape.name_key}": "{tool.name}", "{shape.key}": ')
        rules.append(f"call_{index}: {before} {head} arguments_{index} {literal('}')}")
        rules.append(f"arguments_{index}: {arguments_schema(tool)}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    several = most if shape.is_list or shape.separator else 1
    objects = "call" + repeated(f"{literal(shape.separator or ', ')} call", several)
    if shape.is_list:
        objects = f"{literal(shape.brackets[0])} {objects} {literal(shape.brackets[1])}"
    closer = [mark(shape.closer)] if shape.closer else []
    rules.append(" ".join(["group:", shape.before, objects, shape.after, *closer]))
    more = repeated(f"GAP {mark(shape.opener)} group", 1 if several > 1 else most)
    rules.append("calls: " + ("group" if shape.bare else f"{mark(shape.opener)} group{more}"))
    rules.append(f"opened: {text_before(shape.opener, mark)} group{more}" + (" | group" if shape.bare else ""))
    return "\n".join([*rules, free_text(shape.opener, pattern(shape.bare))])
