r"""gpt-oss (harmony): an answer is one or more messages with headers, and the header says what the message is.

    <|channel|>analysis<|message|>Rome, then.<|end|><|start|>assistant<|channel|>final<|message|>It is 19 degrees.
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>

A message to a function is a call, in any channel; the recipient may also come before the channel. Other messages in
`analysis` are reasoning, and all others text. The prompt ends with <|start|>assistant, so the first header begins
without it. <|call|> and <|return|> end the answer, so it has at most one call.

Marks are read as text, so a model could spell one out. Three rules keep quoted marks from becoming calls: the grammar
forbids spelled marks before a call, marks within the strings of arguments are part of the arguments, and after the
header of a final message nothing is a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quire.serve.tools.base import (
    MAX_PIECE,
    SPACE,
    AnswerParser,
    Arguments,
    CallBegun,
    Conversation,
    Event,
    Mark,
    Message,
    Nesting,
    Reasoning,
    ReasoningFormat,
    StateParser,
    Text,
    Thinking,
    Tool,
    length_of_begun,
    merged,
)
from quire.serve.tools.rules import arguments_schema, literal, pattern
from quire.serve.tools.template_format import TemplateFormat, with_all_fields

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
CONSTRAIN: Final = "<|constrain|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
ENDS: Final = (END, CALL, RETURN)
OPENERS: Final = (START, CHANNEL, MESSAGE)
MARKS: Final = (CHANNEL, START, MESSAGE, CONSTRAIN, *ENDS)
RECIPIENT: Final = "to="
FUNCTIONS: Final = "functions."
MAX_HEADER: Final = 256
GAP: Final = "\n\n"
"""What separates two messages that are both reasoning, or both text."""

_HEADER: Final = re.compile(
    r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=(?P<before>[\w.-]+))?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>\w+)\s*(?:to=(?P<after>[\w.-]+))?\s*(?:<\|constrain\|>)?\s*\w*\s*)?"
)


class HarmonyParser(StateParser):
    r"""Reads the messages of one answer. Mutable.

    >>> parser = HarmonyParser([Tool("now", {})])
    >>> parser.push("<|channel|>analysis<|message|>Why?<|end|><|start|>assistant to=functions.now<|channel|>comm")
    [Reasoning(text='Why?')]
    >>> parser.push("entary json<|message|>{}<|call|>"), parser.finish()
    ([CallBegun(name='now'), Arguments(text='{}')], [])
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(self._between)
        self._names = frozenset(tool.name for tool in tools)
        self._kind: type[Reasoning | Text] = Text
        self._name = ""
        self._is_final = False  # the rest of the message is text, and no later message is a call
        self._begun: set[type] = set()  # kinds of messages so far
        self._needs_gap = False
        self._nesting = Nesting()  # of the arguments

    def push(self, text: str) -> list[Event]:
        """Add text; return the new events. Mutates."""
        found: list[Event] = []
        for begin in range(0, len(text), MAX_PIECE):
            self._held += text[begin : begin + MAX_PIECE]
            found += self._read()
        return merged(found)

    def finish(self) -> list[Event]:
        """End the text; return the rest. Drops a header that broke off. Mutates."""
        held, self._held = self._held, ""
        if self._state == self._body:
            return self._said(held)
        bare = held.lstrip(SPACE)
        is_text = bool(bare or not self._begun) and not bare.startswith((*OPENERS, RECIPIENT + FUNCTIONS))
        return self._said(held) if self._state == self._between and is_text else []

    def _between(self) -> list[Event]:
        """Read what precedes a message: its header. Text without one is a message of text."""
        bare = self._held.lstrip(SPACE)
        if len(self._held) - len(bare) >= MAX_HEADER:
            return self._without_header()
        if not bare.startswith((*OPENERS, RECIPIENT)):
            begins = any(each.startswith(bare) for each in (*OPENERS, RECIPIENT))
            return [] if begins else self._without_header()
        place = bare.find(MESSAGE, 0, MAX_HEADER)
        if place < 0:
            return [] if len(bare) < MAX_HEADER else self._without_header()
        header = _HEADER.fullmatch(bare[:place])
        if header is None:
            return self._without_header()
        recipient, channel = header["before"] or header["after"] or "", header["channel"]
        self._name = recipient.removeprefix(FUNCTIONS)
        if recipient:
            is_call = recipient.startswith(FUNCTIONS) and self._name in self._names and not self._is_final
            self._state = self._call
            return [] if is_call else self._without_header()
        self._held, self._state = bare[place + len(MESSAGE) :], self._body
        self._kind = Reasoning if channel == "analysis" else Text
        self._is_final = self._is_final or channel == "final"
        self._needs_gap = self._kind in self._begun
        return []

    def _without_header(self) -> list[Event]:
        """Pass on the first letter, or much space, as text that begins no header."""
        end = min(len(self._held) - len(self._held.lstrip(SPACE)), MAX_HEADER - 1) + 1
        text, self._held = self._held[:end], self._held[end:]
        self._kind, self._state, self._needs_gap = Text, self._body, False
        return self._said(text)

    def _body(self) -> list[Event]:
        """Pass on a message, up to the mark that ends it or begins the next one."""
        marks = ENDS if self._is_final else (*ENDS, START, CHANNEL)
        places = [(self._held.find(mark), mark) for mark in marks if mark in self._held]
        if not places:
            kept = len(self._held) - length_of_begun(self._held, marks)
            text, self._held = self._held[:kept], self._held[kept:]
            return self._said(text)
        place, mark = min(places)
        text, self._held = self._held[:place], self._held[place + (len(mark) if mark in ENDS else 0) :]
        self._state = self._between
        return self._said(text)

    def _said(self, text: str) -> list[Event]:
        if not text:
            return []
        gap, self._needs_gap = GAP if self._needs_gap else "", False
        self._begun.add(self._kind)
        return [self._kind(gap + text)]

    def _call(self) -> list[Event]:
        """Read up to the brace that begins the arguments."""
        body = self._held.partition(MESSAGE)[2]
        after = body.lstrip(SPACE)
        if len(body) - len(after) >= MAX_HEADER or (after and after[0] != "{"):
            return self._without_header()
        if not after:
            return []
        self._held, self._state = after, self._arguments
        self._begun.add(CallBegun)
        return [CallBegun(self._name)]

    def _arguments(self) -> list[Event]:
        """Pass on the arguments, an object, up to its last brace."""
        for position, letter in enumerate(self._held):
            if not self._nesting.is_open_after(letter):
                text, self._held, self._state = self._held[: position + 1], self._held[position + 1 :], self._after
                return [Arguments(text)]
        text, self._held = self._held, ""
        return [Arguments(text)]

    def _after(self) -> list[Event]:
        """Drop the mark that ends a call."""
        self._held = self._held.lstrip(SPACE)
        if not any(end.startswith(self._held) for end in ENDS):
            self._state = self._between
        for end in ENDS:
            if self._held.startswith(end):
                self._held, self._state = self._held[len(end) :], self._between
        return []


@dataclass(frozen=True, slots=True)
class HarmonyReasoning:
    """Reasoning as messages in the channel `analysis`. Immutable."""

    name: str = "harmony"

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a message."""
        return MARKS

    def is_of(self, template: str) -> bool:
        """Return whether a chat template uses this format."""
        return CHANNEL in template and MESSAGE in template

    def after(self, prompt: str) -> Thinking:
        """Return that a text may begin with reasoning: the headers of its messages show it."""
        return Thinking.PERHAPS

    def within(self, begun: str) -> Thinking:
        """Return that it does not: the template writes a message that is continued as a final one."""
        return Thinking.NO

    def rules(self, thinking: Thinking, mark: Mark) -> tuple[str, str]:
        """Return the part of a grammar's `start` before the answer, and the rules of a message. Does not mutate."""
        end = mark(END)
        spelled = "|".join(pattern(each) for each in MARKS if each != END)
        if end == literal(END):
            body = f"said[lazy]: /(.|\\n)*{pattern(END)}/ & ~/(.|\\n)*({spelled})(.|\\n)*/"
        else:
            body = f"said: SAID? {end}\nSAID: /(.|\\n)+/ & ~/(.|\\n)*({pattern(END)}|{spelled})(.|\\n)*/"
        next_one = f'{mark(START)} "assistant"'
        rules = [
            f'thought: {mark(CHANNEL)} "analysis" {mark(MESSAGE)} said {next_one}',
            f'preamble: {mark(CHANNEL)} "commentary" {mark(MESSAGE)} said {next_one}',
            body,
        ]
        return "thought* ", "\n".join(rules)

    def answer(self, answer: str, thinking: Thinking, mark: Mark) -> str:
        """Return the rule for a final message, whose header may be in the prompt. Does not mutate."""
        return answer if thinking is Thinking.NO else f'{mark(CHANNEL)} "final" {mark(MESSAGE)} {answer}'

    def parser(self, thinking: Thinking) -> AnswerParser:
        """Return a parser that separates the reasoning; calls are text."""
        return HarmonyParser(())


REASONING: Final = HarmonyReasoning()


@dataclass(frozen=True, slots=True)
class HarmonyFormat(TemplateFormat):
    """Calls as messages to functions. Immutable."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of a message."""
        return MARKS

    @property
    def reasoning(self) -> ReasoningFormat:
        """The format of the reasoning: the same parser reads all messages."""
        return REASONING

    def rules(self, tools: Sequence[Tool], most: int, mark: Mark) -> str:
        """Return the rules `calls` (one, because its mark ends the answer), `opened` and `free`."""
        before, names = [], []
        for index, tool in enumerate(tools):
            before.append(f"{literal(f' to={FUNCTIONS}{tool.name}')} named arguments_{index}")
            names.append(f"{literal(f'commentary to={FUNCTIONS}{tool.name}')} kind arguments_{index}")
        rules = [f"arguments_{index}: {arguments_schema(tool)}" for index, tool in enumerate(tools)]
        rules += [
            f'kind: (" "? {mark(CONSTRAIN)} "json" | " json")? {mark(MESSAGE)}',
            f'named: {mark(CHANNEL)} "commentary" kind',
            f"calls: {mark(CHANNEL)} ({' | '.join(names)}) | {' | '.join(before)}",
            "opened: preamble? calls",
            "free: TEXT?",
            r"TEXT: /(.|\n)+/",
        ]
        return "\n".join(rules)

    def parser(self, tools: Sequence[Tool]) -> AnswerParser:
        """Return a parser for calls of these functions, and for the reasoning."""
        return HarmonyParser(tools)


def _with_one_call_each(messages: Sequence[Message], tools: Sequence[Message] | None) -> Conversation:
    """Return the conversation with one call in a message, and reasoning as `thinking`. Does not mutate.

    A result belongs to the last call before it that has its id: some clients number the calls of each answer from 0.
    """
    found, moved = list[Message](), set[int]()
    callers: dict[object, int] = {}
    results: dict[tuple[int, object], list[int]] = {}
    for index, message in enumerate(messages):
        callers |= {str(call.get("id", "")): index for call in message.get("tool_calls", [])}
        own_id = message.get("tool_call_id")
        if isinstance(own_id, str) and own_id in callers:
            results.setdefault((callers[own_id], own_id), []).append(index)
    for index, whole in enumerate(messages):
        if index in moved:
            continue
        message, calls = whole, whole.get("tool_calls", [])
        for call in calls[:-1]:
            found.append(_with_thinking({**message, "tool_calls": [call]}))
            message = {"role": "assistant"}
            later = results.pop((index, str(call.get("id", ""))), ())
            found += [messages[each] for each in later]
            moved.update(later)
        found.append(_with_thinking({**message, "tool_calls": calls[-1:]} if calls else message))
    return found, with_all_fields(tools)


def _with_thinking(message: Message) -> Message:
    """Return a message with its reasoning in the templates' field. They refuse a call with both reasoning and text."""
    if message["role"] != "assistant" or "reasoning_content" not in message:
        return message
    found = {key: value for key, value in message.items() if key != "reasoning_content"}
    parts = [str(message["reasoning_content"])]
    if message.get("tool_calls"):
        parts.append(str(found.pop("content", "")))
    return found | {"thinking": GAP.join(part for part in parts if part)}


HARMONY: Final = HarmonyFormat("harmony", signs=(CHANNEL, MESSAGE, "functions"), adapt=_with_one_call_each)
