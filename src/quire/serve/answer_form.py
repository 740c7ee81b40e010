"""AnswerForm: the grammar of the answers to one request, and how the server reads them.

    setting, chat template, tools ──► AnswerForm ──► grammar: reasoning first, then the answer or calls
                                          └────────► AnswerReader for each text, ids of its calls

An answer of plain text has no form: the engine's text goes to the client unchanged.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.reader import AnswerReader
from quire.serve.reasoning import NUM_LAST_TOKENS
from quire.serve.tools.base import Adapt, AnswerParser, ReasoningFormat, Thinking, ToolChoice, ToolFormat
from quire.serve.tools.rules import make_mark

_LINE: Final = re.compile(r"at (\d+)\(\d+\): (.*)")
_ANSWER: Final = re.compile(r"^answer: (?:%json )?(.*)", re.MULTILINE)
_ARGUMENTS: Final = re.compile(r"arguments_(\d+)(?:_\d+)?: ")
JSON_SPACE: Final = " ?"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the answers of one request may have in addition to text."""

    choice: ToolChoice
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    tokenizer: Tokenizer
    adapt: Adapt | None = None
    """Returns the conversation in the form that the template needs, whether or not the answer can have tool calls."""
    begun: str = ""
    """The text of the message that the answers continue."""

    @property
    def shown_token_ids(self) -> frozenset[int]:
        """The tokens that the reader must see and the client must not."""
        marks = [mark for each in (self.tools, self.reasoning) if each is not None for mark in each.marks]
        ids = map(self.tokenizer.id_of, marks)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def thinking(self, prompt_token_ids: Sequence[int]) -> Thinking:
        """Return whether answers to a prompt begin with reasoning. Does not mutate."""
        if self.reasoning is None:
            return Thinking.NO
        if self.begun.strip():
            return self.reasoning.within(self.begun)
        last = prompt_token_ids[-NUM_LAST_TOKENS:]
        return self.reasoning.after(self.tokenizer.decode(last, skip_special_tokens=False))

    def grammar(self, answer: Grammar | None, thinking: Thinking) -> Grammar | None:
        """Return the grammar of a text whose answer must follow `answer`, or None for free text. Does not mutate."""
        mode = self.choice.mode
        if self.tools is None and (answer is None or thinking is Thinking.NO):
            return answer
        mark = make_mark(self.tokenizer.id_of)
        before, rules, framed = "", "", "free" if answer is None else "answer"
        if self.reasoning is not None:
            before, rules = self.reasoning.rules(thinking, mark)
            framed = self.reasoning.answer(framed, thinking, mark)
        found = [rules] if rules else []
        if self.tools is not None:
            found.append(self.tools.rules(self.choice.tools, self.choice.max_calls, mark))
        if self.tools is None:
            body = framed
        elif mode != "auto":
            body = "calls"
        else:
            body = f"{framed} | {'opened' if answer is None else 'calls'}"
        if answer is not None and body != "calls":
            found.append(_answer_rule(answer))
        return Grammar.lark("\n".join([f"start: {before}({body})", *found]))

    def blame(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return the refusal of a grammar as one of a client's values: a tool, all tools, or the answer's format.

        Does not mutate.
        """
        if error.field != "grammar":
            return error
        if self.tools is None:
            answer = _ANSWER.search(str(error.value))
            return error if answer is None else InvalidRequestError("grammar", answer[1], error.allowed)
        found = _LINE.search(error.allowed)
        lines = str(error.value).splitlines()
        line = lines[int(found[1]) - 1] if found and int(found[1]) <= len(lines) else ""
        if rule := _ARGUMENTS.match(line):
            tool = self.choice.tools[int(rule[1])]
            allowed = f"a schema that a tool call can follow: {found[2] if found else ''}"
            return InvalidRequestError(tool.place, tool.parameters, allowed)
        return InvalidRequestError("grammar", [tool.name for tool in self.choice.tools], error.allowed)

    def reader(self, thinking: Thinking) -> AnswerReader:
        """Return a reader for one text. Does not mutate."""
        parsers: list[AnswerParser] = []
        if self.reasoning is not None and (self.tools is None or self.tools.reasoning is None):
            parsers.append(self.reasoning.parser(thinking))
        if self.tools is not None:
            parsers.append(self.tools.parser(self.choice.tools))
        return AnswerReader(parsers)

    def call_id(self, *place: object) -> str:
        """Return a unique id for the tool call at a place. Does not mutate."""
        digits = hashlib.blake2b(repr(place).encode(), digest_size=16).hexdigest()
        return digits if self.tools is None else self.tools.call_id(digits)


def _answer_rule(answer: Grammar) -> str:
    """Return a grammar as a rule of a larger grammar."""
    if answer.kind == "json_schema":
        return f"answer: %json {_spaced(answer.text)}"
    if answer.kind == "regex":
        return f"answer: ANSWER\nANSWER: /(?:{_regex(answer.text)})/"
    return f"answer: %lark {{\n{answer.text}\n}}"


def _spaced(schema: str) -> str:
    """Return a schema with the whitespace rule that a schema without other rules gets.

    >>> _spaced('{"type": "integer"}')
    '{"x-guidance": {"whitespace_pattern": " ?"}, "type": "integer"}'
    """
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        return schema  # the compiler reports what is wrong
    return (
        json.dumps({"x-guidance": {"whitespace_pattern": JSON_SPACE}, **value}) if isinstance(value, dict) else schema
    )


def _regex(text: str) -> str:
    r"""Return a regular expression escaped for use between slashes.

    >>> _regex("a/b"), _regex("a\\/b")
    ('a\\/b', 'a\\/b')
    """
    found, is_escaped = [], False
    for letter in text:
        found.append("\\/" if letter == "/" and not is_escaped else "\\n" if letter == "\n" else letter)
        is_escaped = letter == "\\" and not is_escaped
    return "".join(found)
