r"""Gemma 4: a call is a name and an object, with bare keys and a token around each text.

    <|tool_call>call:weather{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>

After their reasoning the models sometimes leave out the first mark, so an answer may also begin with such a call.

Early templates show the results of calls only from the field `tool_responses` of the message with the calls, and later
ones from there too, so results are moved there.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quire.serve.tools.base import SPACE, AnswerParser, Conversation, Mark, Message, Tool
from quire.serve.tools.bracket_calls import MAX_KEY_LENGTH, BracketCallParser
from quire.serve.tools.gemma4_values import KEY, NOT_IN_KEYS, QUOTE, arguments_rules, shared_rules
from quire.serve.tools.json_calls import (
    CallShape,
    Reading,
    expect,
    letter_after_space,
    require,
    word_from,
)
from quire.serve.tools.rules import free_text, literal, pattern, repeated, text_before
from quire.serve.tools.template_format import TemplateFormat, with_all_fields

OPENER: Final = "<|tool_call>"
CLOSER: Final = "<tool_call|>"
BEFORE_NAME: Final = "call:"


class Gemma4CallParser(BracketCallParser):
    r"""Reads calls of Gemma 4. Mutable.

    >>> parser = Gemma4CallParser([Tool("add", {})])
    >>> parser.push('<|tool_call>call:add{a:<|"|>x"')
    [CallBegun(name='add'), Arguments(text='{"a": "x\\"')]
    >>> parser.push('<|"|>,b:[1'), parser.push(",{}]}<tool_call|>")
    ([Arguments(text='", "b": [')], [Arguments(text='1, {}]}')])
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(CallShape(OPENER, bare=BEFORE_NAME), tools, "}", {})

    def _calls(self) -> Reading:
        require((yield from letter_after_space()) == BEFORE_NAME[0])
        yield from expect(BEFORE_NAME[1:])
        name, letter = yield from word_from((yield from letter_after_space()))
        require(name in self._names)
        if letter in SPACE:
            letter = yield from letter_after_space()
        require(letter == "{")
        self._begin_call(name)
        yield from self._object()
        self._held = ""
        require((yield from letter_after_space()) == CLOSER[0])
        yield from expect(CLOSER[1:])

    def _key(self, letter: str, *, is_argument: bool) -> Generator[None, str, str]:
        return json.dumps((yield from _key(letter)), ensure_ascii=False)

    def _text_or_plain(self, letter: str) -> Generator[None, str, str]:
        begun = yield from _perhaps_quote(letter)
        if begun == QUOTE:
            yield from self._text(QUOTE)
            return (yield from letter_after_space())
        return (yield from self._plain(begun))


def _perhaps_quote(letter: str) -> Generator[None, str, str]:
    """Return the mark around texts, or what begins like it and is something else, whose first letter has been read."""
    begun = letter
    while begun != QUOTE and QUOTE.startswith(begun):
        begun += yield
    return begun


def _key(letter: str) -> Generator[None, str, str]:
    """Return a key whose first letter has been read, up to its colon. It may be written as a text."""
    key = yield from _perhaps_quote(letter)
    if key == QUOTE:
        key = ""
        while not key.endswith(QUOTE):
            require(len(key) < MAX_KEY_LENGTH)
            key += yield
        require((yield from letter_after_space()) == ":")
        return key.removesuffix(QUOTE)
    while not key.endswith(":"):
        require(key[-1] not in NOT_IN_KEYS and len(key) < 2 * MAX_KEY_LENGTH)  # with space around it
        key += yield
    key = key.removesuffix(":").rstrip(SPACE)
    require(bool(KEY.fullmatch(key)))
    return key


@dataclass(frozen=True, slots=True)
class Gemma4Format(TemplateFormat):
    """Calls with bare keys. Immutable."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks around a call, and around a text in it."""
        return (OPENER, CLOSER, QUOTE)

    def rules(self, tools: Sequence[Tool], most: int, mark: Mark) -> str:
        """Return the rules `calls`, `opened` and `free`; raises for a schema that no call can follow."""
        called = [f"{literal(BEFORE_NAME + tool.name)} arguments_{index}" for index, tool in enumerate(tools)]
        names = "|".join(pattern(tool.name) for tool in tools)
        more = repeated(f"{mark(OPENER)} call", most)
        rules = [arguments_rules(index, tool, mark) for index, tool in enumerate(tools)]
        rules += [shared_rules(mark), f"bare: {' | '.join(called)}", f"call: bare {mark(CLOSER)}"]
        rules += [f"calls: {mark(OPENER)} call{more}"]
        rules += [f"opened: {text_before(OPENER, mark)} call{more} | bare | call{more}"]
        rules += [free_text(OPENER, rf"{pattern(BEFORE_NAME)}\s*({names})\s*\{{")]
        return "\n".join(rules)

    def parser(self, tools: Sequence[Tool]) -> AnswerParser:
        """Return a parser for calls of these functions."""
        return Gemma4CallParser(tools)


def _with_responses(messages: Sequence[Message], tools: Sequence[Message] | None) -> Conversation:
    """Return the conversation with the results of calls in the message with the calls. Does not mutate."""
    found = list[dict[str, Any]]()
    for message in messages:
        calls = found[-1].get("tool_calls") if found else None
        if message["role"] != "tool" or not calls:
            found.append(dict(message))
            continue
        names = {call.get("id"): call["function"]["name"] for call in calls}
        name = names.get(message.get("tool_call_id"), message.get("name", "unknown"))
        response = {"name": name, "response": message.get("content", "")}
        found[-1]["tool_responses"] = [*found[-1].get("tool_responses", []), response]
    return found, tools and [_with_type(tool) for tool in with_all_fields(tools) or ()]


def _with_type(tool: Message) -> Message:
    """Return a tool whose parameters have a type: templates close the brace of the parameters after it."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": {"type": "object", **function["parameters"]}}}


GEMMA4: Final = Gemma4Format("gemma4", signs=(OPENER, BEFORE_NAME, QUOTE), adapt=_with_responses)
