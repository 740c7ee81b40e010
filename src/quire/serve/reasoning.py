"""Reasoning: separates the text between <think> and </think> from the answer.

    prompt ends with "<think>"      the model thinks first, and only the end is marked
    prompt ends with "</think>"     it does not think, for example because of enable_thinking false
    otherwise                       it may think, where its answer begins with "<think>"

What holds for a call is seen from the end of its prompt, so templates need not be understood. Space around the marks
belongs to neither. A text that ends before the mark does is reasoning all through.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from quire.core.errors import InvalidConfigError
from quire.serve.tools.base import Mark, Reasoning, Text
from quire.serve.tools.rules import literal, pattern

BEGIN: Final = "<think>"
END: Final = "</think>"
AUTO: Final = "auto"
REASONING_FORMATS: Final = (AUTO, "none", "think")
SPACE: Final = " \t\r\n"
NUM_LAST_TOKENS: Final = 16
"""Tokens at the end of a prompt in which its last mark is looked for."""


class Thinking(Enum):
    """Whether a text begins with reasoning."""

    NO = "no"
    PERHAPS = "perhaps"
    YES = "yes"


def is_thinking_format(name: str, template: str) -> bool:
    """Return whether reasoning is told apart: as a setting says, or where the chat template has its marks.

    >>> is_thinking_format("auto", "… </think> …"), is_thinking_format("auto", ""), is_thinking_format("think", "")
    (True, False, True)
    """
    if name not in REASONING_FORMATS:
        raise InvalidConfigError("reasoning_format", name, ", ".join(REASONING_FORMATS))
    return END in template if name == AUTO else name == "think"


def thinking_after(prompt: str) -> Thinking:
    r"""Return whether a text begins with reasoning, by the end of its prompt. Does not mutate.

    >>> [thinking_after(text).value for text in ("assistant\n<think>\n", "<think>\n\n</think>\n\n", "assistant\n")]
    ['yes', 'no', 'perhaps']
    """
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return Thinking.YES
    return Thinking.NO if end.endswith(END) else Thinking.PERHAPS


def thinking_rules(thinking: Thinking, mark: Mark) -> tuple[str, str]:
    """Return what a grammar's `start` has before the answer, and the rules for it. Does not mutate."""
    if thinking is Thinking.NO:
        return "", ""
    end = mark(END)
    if end == literal(END):
        body = [f"thought[lazy]: /(.|\\n)*{pattern(END)}/"]
    else:
        body = [f"thought: THOUGHT? {end}", r"THOUGHT: /(.|\n)+/"]
    begin = "" if thinking is Thinking.YES else f"{mark(BEGIN)} "
    rules = [f"think: {begin}thought SPACE", *body, r"SPACE: /[ \n]{0,4}/"]
    return ("think " if thinking is Thinking.YES else "think? "), "\n".join(rules)


class ThinkSplitter:
    r"""Tells the reasoning of one text from its answer, in pieces cut anywhere. Mutable.

    >>> splitter = ThinkSplitter(Thinking.PERHAPS)
    >>> splitter.push("<thi"), splitter.push("nk>\nWhy? </"), splitter.push("think>\n\nSo.")
    ([], [Reasoning(text='Why?')], [Text(text='So.')])
    """

    def __init__(self, thinking: Thinking) -> None:
        self._held = ""
        self._state = {
            Thinking.NO: self._answer,
            Thinking.PERHAPS: self._before,
            Thinking.YES: self._leading,
        }[thinking]

    def push(self, text: str) -> list[Reasoning | Text]:
        """Add text; return what it has brought. Mutates."""
        found: list[Reasoning | Text] = []
        self._held += text
        while self._held:
            state, length = self._state, len(self._held)
            found += state()
            if self._state == state and len(self._held) == length:
                break
        return found

    def finish(self) -> list[Reasoning | Text]:
        """Return what is left: the text has ended. Mutates."""
        held, self._held = self._held, ""
        if self._state in (self._before, self._answer):
            return [Text(held)] if held else []
        thought = held.strip(SPACE) if self._state == self._within else ""
        return [Reasoning(held.rstrip(SPACE))] if thought else []

    def _before(self) -> list[Reasoning | Text]:
        """Nothing but space has come so far, or the beginning of a mark."""
        text = self._held.lstrip(SPACE)
        if text.startswith(BEGIN):
            self._state, self._held = self._leading, text[len(BEGIN) :]
        elif not BEGIN.startswith(text):
            self._state = self._answer
        return []

    def _leading(self) -> list[Reasoning | Text]:
        """The reasoning begins: no space goes before it."""
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._within
        return []

    def _within(self) -> list[Reasoning | Text]:
        text, place = self._held, self._held.find(END)
        if place >= 0:
            said, self._held, self._state = text[:place].rstrip(SPACE), text[place + len(END) :], self._after
        else:
            length = next(k for k in range(min(len(END) - 1, len(text)), -1, -1) if text.endswith(END[:k]))
            said = text[: len(text) - length].rstrip(SPACE)
            self._held = text[len(said) :]
        return [Reasoning(said)] if said else []

    def _after(self) -> list[Reasoning | Text]:
        """The answer begins: no space goes before it."""
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._answer
        return []

    def _answer(self) -> list[Reasoning | Text]:
        said, self._held = self._held, ""
        return [Text(said)]
