"""Calls whose arguments are in brackets, as in JSON, with keys and values that a format writes in its own way.

Clients get JSON: the parser quotes texts as they arrive, and passes on numbers and the like when they are complete. It
reads lists and objects without recursion, because a model can nest them deeper than Python's stack. A plain value that
is not JSON becomes a text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from quire.serve.tools.base import SPACE, Arguments, Tool
from quire.serve.tools.json_calls import (
    CallShape,
    JsonCallParser,
    Reading,
    WrongCall,
    is_json,
    letter_after_space,
    require,
)

BRACKETS: Final[Mapping[str, str]] = MappingProxyType({"{": "}", "[": "]"})
MAX_KEY_LENGTH: Final = 128


class BracketCallParser(JsonCallParser, ABC):
    """Reads calls of one shape, whose arguments end with the letter `end`; `words` are other names of JSON values.

    Mutable.
    """

    def __init__(self, shape: CallShape, tools: Sequence[Tool], end: str, words: Mapping[str, str]) -> None:
        super().__init__(shape, tools)
        self._end = end
        self._words = words
        self._after_values = frozenset(",}]" + end)

    @abstractmethod
    def _key(self, letter: str, *, is_argument: bool) -> Generator[None, str, str]:
        """Return a key whose first letter has been read, as JSON, and read what separates it from its value."""

    @abstractmethod
    def _text_or_plain(self, letter: str) -> Generator[None, str, str]:
        """Pass on a text, or another value, whose first letter has been read; return the letter after it."""

    def _object(self) -> Reading:
        """Pass on arguments whose first letter has been read; completes them if other text follows."""
        ends = ["}"]
        self._pass_on("{")
        try:
            yield from self._contents(ends)
        except WrongCall:
            self._events.append(Arguments("".join(reversed(ends))))
            raise

    def _contents(self, ends: list[str]) -> Reading:
        """Pass on what precedes the last of the brackets that end the open lists and objects. Mutates `ends`."""
        is_first = True
        letter = yield from letter_after_space()
        while True:
            before, is_argument = "", len(ends) == 1
            if not is_first and letter == ",":
                before = ", "
                letter = yield from letter_after_space()
            if letter == (self._end if is_argument else ends[-1]):
                self._pass_on(ends.pop())
                if not ends:
                    return
                letter, is_first = (yield from letter_after_space()), False
                continue
            require(is_first or bool(before))
            if ends[-1] == "}":
                before += f"{(yield from self._key(letter, is_argument=is_argument))}: "
                letter = yield from letter_after_space()
            else:
                require(letter not in self._after_values)
            self._pass_on(before)
            if is_first := letter in BRACKETS:
                self._pass_on(letter)
                ends.append(BRACKETS[letter])
                letter = yield from letter_after_space()
            else:
                letter = yield from self._text_or_plain(letter)

    def _plain(self, begun: str) -> Generator[None, str, str]:
        """Pass on a value that is neither a text nor in brackets; return the letter after it."""
        letters = list(begun)
        while letters[-1] not in self._after_values:
            letters.append((yield))
            self._held = ""
        value = "".join(letters[:-1]).strip(SPACE)
        value = self._words.get(value, value)
        self._pass_on(value if is_json(value) else json.dumps(value, ensure_ascii=False))
        self._held = letters[-1]
        return letters[-1]
