"""Reasoning: separates the text between <think> and </think> from the answer.

    prompt ends with "<think>"      the model thinks first, and only the end is marked
    prompt ends with "</think>"     the model does not think, for example because of enable_thinking false
    otherwise                       the model thinks if its answer begins with "<think>"

The end of a prompt shows which case holds, so templates need not be understood. Space around the marks belongs to
neither part. A text that ends before its end mark is all reasoning.
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
"""Tokens at the end of a prompt in which to look for its last mark."""


class Thinking(Enum):
    """Whether a text begins with reasoning."""

    NO = "no"
    PERHAPS = "perhaps"
    YES = "yes"


def is_thinking_format(name: str, template: str) -> bool:
    """Return whether to separate reasoning: as set, or with auto if the chat template contains its end mark.

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
    """Return the part of a grammar's `start` before the answer, and the rules for it. Does not mutate."""
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
    r"""Separates the reasoning of one text from its answer, in pieces cut anywhere. Mutable.

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
        """Add text; return the new reasoning and text. Mutates."""
        found: list[Reasoning | Text] = []
        self._held += text
        while self._held:
            state, length = self._state, len(self._held)
            found += state()
            if self._state == state and len(self._held) == length:
                break
        return found

    def finish(self) -> list[Reasoning | Text]:
        """End the text; return what is left. Mutates."""
        held, self._held = self._held, ""
        if self._state in (self._before, self._answer):
            return [Text(held)] if held else []
        thought = held.strip(SPACE) if self._state == self._within else ""
        return [Reasoning(held.rstrip(SPACE))] if thought else []

    def _before(self) -> list[Reasoning | Text]:
        """Read the start of a text: space so far, or the beginning of a mark."""
        text = self._held.lstrip(SPACE)
        if text.startswith(BEGIN):
            self._state, self._held = self._leading, text[len(BEGIN) :]
        elif not BEGIN.startswith(text):
            self._state = self._answer
        return []

    def _leading(self) -> list[Reasoning | Text]:
        """Drop the space before the reasoning."""
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._within
        return []

    def _within(self) -> list[Reasoning | Text]:
        text, place = self._held, self._held.find(END)
        if place >= 0:
            thought, self._held, self._state = text[:place].rstrip(SPACE), text[place + len(END) :], self._after
        else:
            length = next(k for k in range(min(len(END) - 1, len(text)), -1, -1) if text.endswith(END[:k]))
            thought = text[: len(text) - length].rstrip(SPACE)
            self._held = text[len(thought) :]
        return [Reasoning(thought)] if thought else []

    def _after(self) -> list[Reasoning | Text]:
        """Drop the space before the answer."""
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._state = self._answer
        return []

    def _answer(self) -> list[Reasoning | Text]:
        text, self._held = self._held, ""
        return [Text(text)]
