"""Reasoning: separates the text between <think> and </think> from the answer.

    prompt ends with "<think>"      the model thinks first, and only the end is marked
    prompt ends with "</think>"     the model does not think, for example because of enable_thinking false
    otherwise                       the model thinks if its answer begins with "<think>"
    the text continues a message    it is still reasoning if the message has no end mark after the begin mark

The end of a prompt shows which case holds, so templates need not be understood. Space around the marks belongs to
neither part. A text that ends before its end mark is all reasoning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from quire.core.errors import InvalidConfigError
from quire.serve.tools.base import (
    MAX_SPACE,
    SPACE,
    AnswerParser,
    Event,
    Mark,
    Reasoning,
    ReasoningFormat,
    StateParser,
    Text,
    Thinking,
    length_of_begun,
    without_last_space,
)
from quire.serve.tools.harmony import REASONING as HARMONY_REASONING
from quire.serve.tools.rules import literal, pattern

AUTO: Final = "auto"
NONE: Final = "none"
NUM_LAST_TOKENS: Final = 16
"""Tokens at the end of a prompt in which to look for its last mark."""


@dataclass(frozen=True, slots=True)
class MarkedReasoning:
    r"""Reasoning between two marks. Immutable.

    >>> prompts = ("assistant\n<think>\n", "<think>\n\n</think>\n\n", "assistant\n")
    >>> [THINK.after(prompt).value for prompt in prompts]
    ['yes', 'no', 'perhaps']
    """

    name: str
    begin: str
    end: str
    around_answer: tuple[str, ...] = ()
    """The marks before and after an answer, if any."""
    title: str = ""
    """A word between the first mark and the reasoning, if any."""
    may_recur: bool = False
    """Models also reason after a prompt that ends the reasoning, or again after they ended it."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks around the reasoning and the answer."""
        return (self.begin, self.end, *self.around_answer)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template uses this format."""
        return self.end in template

    def after(self, prompt: str) -> Thinking:
        """Return whether a text begins with reasoning, by the end of its prompt. Does not mutate."""
        last = prompt.rstrip()
        if last.endswith((self.begin + self.title).rstrip()):
            return Thinking.YES
        return Thinking.NO if last.endswith(self.end) else Thinking.PERHAPS

    def within(self, begun: str) -> Thinking:
        """Return whether a text that continues a message is reasoning at first. Does not mutate.

        >>> [THINK.within(begun).value for begun in ("<think>Why", "<think>Why?</think>So", "So")]
        ['within', 'no', 'no']
        """
        return Thinking.WITHIN if begun.rfind(self.begin) > begun.rfind(self.end) else Thinking.NO

    def rules(self, thinking: Thinking, mark: Mark) -> tuple[str, str]:
        """Return the part of a grammar's `start` before the answer, and the rules for it. Does not mutate."""
        if thinking is Thinking.NO:
            return "", ""
        end = mark(self.end)
        if end == literal(self.end):
            body = [f"thought[lazy]: /(.|\\n)*{pattern(self.end)}/"]
        else:
            body = [f"thought: THOUGHT? {end}", r"THOUGHT: /(.|\n)+/"]
        is_perhaps = thinking is Thinking.PERHAPS
        title = f"{literal(self.title)} " if self.title else ""
        begin = f"{mark(self.begin)} {title}" if is_perhaps else ""
        rules = [f"think: {begin}thought SPACE", *body, r"SPACE: /[ \n]{0,4}/"]
        return ("think? " if is_perhaps else "think "), "\n".join(rules)

    def answer(self, answer: str, thinking: Thinking, mark: Mark) -> str:
        """Return the rule of an answer, which may have marks around it if they are tokens. Does not mutate."""
        marks = [mark(each) for each in self.around_answer]
        if not marks or marks == [literal(each) for each in self.around_answer]:
            return answer
        return f"({marks[0]} {answer} {marks[1]}? | {answer})"

    def parser(self, thinking: Thinking) -> AnswerParser:
        """Return a parser that separates the reasoning from the answer."""
        return ThinkSplitter(thinking, self)


THINK: Final = MarkedReasoning("think", "<think>", "</think>")
COMMAND: Final = MarkedReasoning(
    "command", "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
MISTRAL: Final = MarkedReasoning("mistral", "[THINK]", "[/THINK]")
SEED: Final = MarkedReasoning("seed", "<seed:think>", "</seed:think>")
GEMMA4: Final = MarkedReasoning("gemma4", "<|channel>", "<channel|>", title="thought\n", may_recur=True)
FORMATS: Final[tuple[ReasoningFormat, ...]] = (THINK, HARMONY_REASONING, COMMAND, MISTRAL, SEED, GEMMA4)
REASONING_FORMATS: Final = (AUTO, NONE, *(each.name for each in FORMATS))


def create_reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the format of a name; for "auto", the format of the chat template, or None if it has none.

    >>> create_reasoning_format("auto", "… </think> …").name, create_reasoning_format("think", "").name
    ('think', 'think')
    >>> create_reasoning_format("auto", ""), create_reasoning_format("none", "</think>")
    (None, None)
    """
    if name not in REASONING_FORMATS:
        raise InvalidConfigError("reasoning_format", name, ", ".join(REASONING_FORMATS))
    return next((each for each in FORMATS if (each.is_of(template) if name == AUTO else each.name == name)), None)


class ThinkSplitter(StateParser):
    r"""Separates the reasoning of one text from its answer, in pieces cut anywhere. Mutable.

    >>> splitter = ThinkSplitter(Thinking.PERHAPS, THINK)
    >>> splitter.push("<thi"), splitter.push("nk>\nWhy? </"), splitter.push("think>\n\nSo.")
    ([], [Reasoning(text='Why?')], [Text(text='So.')])
    """

    def __init__(self, thinking: Thinking, marks: MarkedReasoning) -> None:
        self._after_reasoning = self._before if marks.may_recur else self._answer
        states = {
            Thinking.NO: self._after_reasoning,
            Thinking.PERHAPS: self._before,
            Thinking.YES: self._leading,
            Thinking.WITHIN: self._within,
        }
        super().__init__(states[thinking])
        self._begin = marks.begin
        self._end = marks.end
        self._around_answer = marks.around_answer
        self._title = marks.title

    def push(self, text: str) -> list[Event]:
        """Add text; return the new reasoning and text. Mutates."""
        self._held += text
        return self._read()

    def finish(self) -> list[Event]:
        """End the text; return what is left. Mutates."""
        held, self._held = self._held, ""
        if self._state in (self._before, self._answer):
            return [Text(held)] if held else []
        thought = held.strip(SPACE) if self._state == self._within else ""
        return [Reasoning(held.rstrip(SPACE))] if thought else []

    def _before(self) -> list[Event]:
        """Read the start of a text: space so far, or the beginning of a mark."""
        text = self._held.lstrip(SPACE)
        if len(self._held) - len(text) >= MAX_SPACE:
            self._state = self._answer
        elif text.startswith(self._begin):
            self._state, self._held = self._titled, text[len(self._begin) :]
        elif not self._begin.startswith(text):
            self._state = self._answer
        return []

    def _titled(self) -> list[Event]:
        """Drop the title of the reasoning, if it is there."""
        if len(self._held) >= len(self._title) or not self._title.startswith(self._held):
            self._held, self._state = self._held.removeprefix(self._title), self._leading
        return []

    def _leading(self) -> list[Event]:
        """Drop the space before the reasoning."""
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._within
        return []

    def _within(self) -> list[Event]:
        text, place = self._held, self._held.find(self._end)
        if place >= 0:
            thought = without_last_space(text[:place])
            self._held, self._state = text[place + len(self._end) :], self._after
        else:
            thought = without_last_space(text[: len(text) - length_of_begun(text, [self._end])])
            self._held = text[len(thought) :]
        return [Reasoning(thought)] if thought else []

    def _after(self) -> list[Event]:
        """Drop the space before the answer."""
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._after_reasoning
        return []

    def _answer(self) -> list[Event]:
        text, self._held = self._held, ""
        if self._around_answer:
            *parts, text = re.split("|".join(map(re.escape, self._around_answer)), text)
            kept = len(text) - length_of_begun(text, self._around_answer)
            text, self._held = "".join(parts) + text[:kept], text[kept:]
        return [Text(text)]
