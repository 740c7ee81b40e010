"""WordWrap: breaks a growing text between words, so that a terminal does not break it inside them.

A word is written once its end is known, so the text lags by at most one word. Lines in a Markdown fence are code: they
pass unchanged, and so does a word that is wider than the terminal, such as an address to copy.
Control characters do not pass: a model must not move the cursor or rename the window.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Final

FENCE: Final = "```"
TAB: Final = "    "


class WordWrap:
    """Writes pieces of a text in lines of at most `columns`. Mutable.

    >>> lines: list[str] = []
    >>> wrap = WordWrap(lines.append, 12)
    >>> for piece in ("A block hol", "ds sixteen to", "kens."):
    ...     wrap.write(piece)
    >>> wrap.end()
    >>> print("".join(lines))
    A block
    holds
    sixteen
    tokens.
    """

    def __init__(self, write: Callable[[str], object], columns: int) -> None:
        self._write = write
        self._columns = max(columns, 1)
        self._column = 0
        self._gap = ""
        self._word = ""
        self._word_columns = 0
        self._start = ""  # the beginning of the line as the model wrote it, to detect a fence
        self._is_code = False
        self._ready: list[str] = []

    def write(self, piece: str) -> None:
        """Add a piece of the text, and write the complete words. Mutates."""
        for character in piece:
            self._take(character)
        self._pass_on()

    def end(self) -> None:
        """Write the last word. Mutates."""
        self._end_word()
        self._pass_on()

    def _take(self, character: str) -> None:
        if character == "\n":
            self._end_line()
            return
        if unicodedata.category(character) == "Cc" and character != "\t":
            return
        if len(self._start) < len(FENCE):
            self._start = (self._start + character).lstrip()
        if self._is_code:
            self._ready.append(character)
        elif character in " \t":
            self._end_word()
            self._gap += TAB if character == "\t" else " "
        else:
            self._add_to_word(character)

    def _add_to_word(self, character: str) -> None:
        columns = columns_of(character)
        if columns == 2:  # a line may break before and after each character of Chinese
            self._end_word()
        self._word += character
        self._word_columns += columns
        if columns == 2 or self._word_columns >= self._columns:
            self._end_word()

    def _end_word(self) -> None:
        if not self._word:
            return
        if self._column > 0 and self._columns < self._column + len(self._gap) + self._word_columns:
            self._ready.append("\n")
            self._column, self._gap = 0, ""
        self._ready += (self._gap, self._word)
        self._column += len(self._gap) + self._word_columns
        if self._word_columns >= self._columns:
            self._column = 0  # the terminal breaks the word; text that follows without a space belongs to it
        self._gap, self._word, self._word_columns = "", "", 0

    def _end_line(self) -> None:
        self._end_word()
        self._ready.append("\n")
        self._is_code ^= self._start == FENCE
        self._column, self._gap, self._start = 0, "", ""

    def _pass_on(self) -> None:
        if self._ready:
            self._write("".join(self._ready))
            self._ready.clear()


def columns_of(character: str) -> int:
    r"""Return how many columns of a terminal a character takes: 0, 1 or 2.

    >>> [columns_of(character) for character in ("a", "é", "字", "\u0301")]
    [1, 1, 2, 0]
    """
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
