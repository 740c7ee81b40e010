r"""LFM2: calls are a list as in Python, with keyword arguments.

    <|tool_call_start|>[weather(city="Rome", days=[1, 2]), now()]<|tool_call_end|>

The models write values of Python or of JSON (`True` or `true`). A grammar holds them to JSON, because only for this a
schema is a rule. Clients get JSON.

Most of their templates do not show earlier calls, so these are in the content of their messages, with the marks as the
template's own text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from quire.serve.tools.base import SPACE, AnswerParser, Conversation, Mark, Message, Tool
from quire.serve.tools.bracket_calls import MAX_KEY_LENGTH, BracketCallParser
from quire.serve.tools.json_calls import CallShape, Reading, expect, letter_after_space, require, word_from
from quire.serve.tools.rules import free_text, literal, pattern, repeated, some_of, text_before, value_schema
from quire.serve.tools.tag_calls import keys_of, parameter
from quire.serve.tools.template_format import TemplateFormat, with_calls_as_text

OPENER: Final = "<|tool_call_start|>"
CLOSER: Final = "<|tool_call_end|>"
BARE: Final = "["
SHAPE: Final = CallShape(OPENER, CLOSER, bare=BARE)
KEY: Final = re.compile(r"""[^\s=,:()\[\]{}"']+""")
NOT_IN_KEYS: Final = frozenset(",:()[]{}\"'")
QUOTES: Final = frozenset("\"'")
WORDS: Final = MappingProxyType({"True": "true", "False": "false", "None": "null"})
SAME_IN_JSON: Final = frozenset('"\\/bfnrt')
"""The letters after a backslash that mean the same in JSON."""

NUM_DIGITS: Final = MappingProxyType({"x": 2, "u": 4, "U": 8})
DIGITS: Final = frozenset("0123456789abcdefABCDEF")


class Lfm2CallParser(BracketCallParser):
    r"""Reads calls of LFM2. Mutable.

    >>> parser = Lfm2CallParser([Tool("add", {})])
    >>> parser.push("<|tool_call_start|>[add(a='x")
    [CallBegun(name='add'), Arguments(text='{"a": "x')]
    >>> parser.push("\"', b=[Tr"), parser.push("ue, 1]), add()]<|tool_call_end|>")
    ([Arguments(text='\\"", "b": [')], [Arguments(text='true, 1]}'), CallBegun(name='add'), Arguments(text='{}')])
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(SHAPE, tools, ")", WORDS)

    def _calls(self) -> Reading:
        letter = yield from letter_after_space()
        is_list = letter == "["  # a single call may have no list around it
        if is_list:
            letter = yield from letter_after_space()
        while True:
            name, letter = yield from word_from(letter)
            require(name in self._names)
            if letter in SPACE:
                letter = yield from letter_after_space()
            require(letter == "(")
            self._begin_call(name)
            yield from self._object()
            self._held = ""
            letter = yield from letter_after_space()
            if letter != ",":
                break
            letter = yield from letter_after_space()
        if is_list:
            require(letter == "]")
            self._held = ""
            letter = yield from letter_after_space()
        require(letter == CLOSER[0])
        yield from expect(CLOSER[1:])

    def _key(self, letter: str, *, is_argument: bool) -> Generator[None, str, str]:
        if is_argument:
            key = letter
            while not key.endswith("="):
                require(key[-1] not in NOT_IN_KEYS and len(key) < 2 * MAX_KEY_LENGTH)  # with space around it
                key += yield
            key = key.removesuffix("=").rstrip(SPACE)
            require(bool(KEY.fullmatch(key)))
            return json.dumps(key, ensure_ascii=False)
        require(letter in QUOTES)
        key, quote, letter = '"', letter, (yield)
        while letter != quote:
            require(len(key) < 2 * MAX_KEY_LENGTH)
            piece, letter = yield from _as_json(letter)
            key, letter = key + piece, letter or (yield)
        require((yield from letter_after_space()) == ":")
        return key + '"'

    def _text_or_plain(self, letter: str) -> Generator[None, str, str]:
        if letter not in QUOTES:
            return (yield from self._plain(letter))
        self._pass_on('"')
        quote, letter = letter, (yield)
        while letter != quote:
            piece, letter = yield from _as_json(letter)
            self._pass_on(piece)
            letter = letter or (yield)
        self._pass_on('"')
        return (yield from letter_after_space())


def _as_json(letter: str) -> Generator[None, str, tuple[str, str]]:
    r"""Return a part of a text as JSON, whose first letter has been read, and the next letter if it has been read.

    As in Python, an unknown letter after a backslash leaves the backslash.
    """
    if letter != "\\":
        return json.dumps(letter, ensure_ascii=False)[1:-1], ""
    letter = yield
    if letter in SAME_IN_JSON:
        return f"\\{letter}", ""
    if letter == "'":
        return letter, ""
    digits, num_digits = "", NUM_DIGITS.get(letter, 0)
    if not num_digits:
        return "\\\\" + json.dumps(letter, ensure_ascii=False)[1:-1], ""
    while len(digits) < num_digits:
        if (digit := (yield)) not in DIGITS:
            return f"\\\\{letter}{digits}", digit
        digits += digit
    number = int(digits, 16)
    return (json.dumps(chr(number))[1:-1] if number <= sys.maxunicode else f"\\\\{letter}{digits}"), ""


@dataclass(frozen=True, slots=True)
class Lfm2Format(TemplateFormat):
    """Calls as a list in Python. Immutable."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks around the list of calls."""
        return (OPENER, CLOSER)

    def rules(self, tools: Sequence[Tool], most: int, mark: Mark) -> str:
        """Return the rules `calls`, `opened` and `free`; raises for a schema that no call can follow."""
        rules = list[str]()
        for index, tool in enumerate(tools):
            rules.append(f"call_{index}: {literal(tool.name + '(')} arguments_{index} {literal(')')}")
            rules += _arguments(index, tool)
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        separator = literal(", ")
        rules.append(f"list: {literal(BARE)} call{repeated(f'{separator} call', most)} {literal(']')}")
        names = "|".join(pattern(tool.name) for tool in tools)
        rules += [f"group: list {mark(CLOSER)}", f"calls: {mark(OPENER)} group"]
        rules += [f"opened: {text_before(OPENER, mark)} group | list | group"]
        rules += [free_text(OPENER, rf"{pattern(BARE)}\s*({names})\s*\(")]
        return "\n".join(rules)

    def parser(self, tools: Sequence[Tool]) -> AnswerParser:
        """Return a parser for calls of these functions."""
        return Lfm2CallParser(tools)


def _arguments(index: int, tool: Tool) -> list[str]:
    """Return the rule for the arguments of a tool, and those for its parts."""
    rules, items = list[str](), list[str]()
    keys = keys_of(tool, KEY)
    for number, key in enumerate(keys):
        rules.append(f"arguments_{index}_{number}: {value_schema(tool, parameter(tool, key))}")
        items.append(f"{literal(key + '=')} arguments_{index}_{number}")

    def add(body: str) -> str:
        name = f"arguments_{index}_{len(rules)}"
        rules.append(f"{name}: {body}")
        return name

    whole = some_of(items, list(keys.values()), literal(", "), add) if items else literal("")
    return [*rules, f"arguments_{index}: {whole if any(keys.values()) or not items else f'({whole})?'}"]


def _with_calls_as_text(messages: Sequence[Message], tools: Sequence[Message] | None) -> Conversation:
    """Return the conversation with calls in the content of their messages, as the model wrote them."""
    return [_with_thought(with_calls_as_text(message, SHAPE, _written)) for message in messages], tools


def _with_thought(message: Message) -> Message:
    """Return a message with its reasoning in the field that the templates show."""
    thought = message.get("reasoning_content")
    return {"thinking": thought, **message} if thought else message


def _written(function: Mapping[str, Any]) -> str:
    """Return a call as the model writes it."""
    values = {key: json.dumps(value, ensure_ascii=False) for key, value in function["arguments"].items()}
    return f"{function['name']}({', '.join(f'{key}={value}' for key, value in values.items())})"


LFM2: Final = Lfm2Format("lfm2", signs=("List of tools: ", "<|im_start|>"), adapt=_with_calls_as_text)
