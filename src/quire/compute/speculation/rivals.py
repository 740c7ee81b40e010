"""Rivals: chooses for each row between two proposers, by which was right more often lately.

N-grams and earlier answers cost nothing and are nearly always right if a text repeats another; otherwise they are
mostly wrong. A draft model is in between, and takes time. So the first guess of each proposer is compared with the next
token, even if the other proposer's guesses were taken. Each row is judged by its own text.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from quire.core.guesses import Guesses

WEIGHT_OF_NEW: Final = 0.2


@dataclass(slots=True)
class _Standing:
    """The recent share of correct first guesses, and the last guess: its position, -1 for none, and its token."""

    mean: float
    position: int = -1
    token: int = 0

    def settle(self, text: array[int]) -> None:
        if 0 <= self.position < len(text):
            self.mean += WEIGHT_OF_NEW * ((text[self.position] == self.token) - self.mean)
            self.position = -1


@dataclass(slots=True)
class _Row:
    cheap: _Standing = field(default_factory=lambda: _Standing(0.5))
    model: _Standing = field(default_factory=lambda: _Standing(0.6))


class Rivals:
    """The standings of cheap proposers and of the draft model, by row.

    >>> rivals, text = Rivals(), array("i", [5, 6, 7])
    >>> guess = {0: Guesses("ngram", array("i", [8, 9]))}
    >>> rivals.take(guess, {0: text})       # by n-grams or by the model?
    {}
    >>> for token in (8, 9, 10):
    ...     text.append(token)
    ...     taken = rivals.take({0: Guesses("ngram", array("i", [token + 1]))}, {0: text})
    >>> taken
    {0: Guesses(guesser='ngram', tokens=array('i', [11]))}
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def release(self, row: int) -> None:
        """Forget a row that is free or begins another text. Mutates."""
        self._rows.pop(row, None)

    def take(self, cheap: Mapping[int, Guesses], texts: Mapping[int, array[int]]) -> dict[int, Guesses]:
        """Return the cheap guesses of the rows in which they do better than the model. Mutates the standings."""
        taken: dict[int, Guesses] = {}
        for row, text in texts.items():
            standings = self._rows.setdefault(row, _Row())
            standings.cheap.settle(text)
            standings.model.settle(text)
            if row not in cheap:
                continue
            standings.cheap.position, standings.cheap.token = len(text), cheap[row].tokens[0]
            if cheap[row].guesser == "forced" or standings.cheap.mean >= standings.model.mean:
                taken[row] = cheap[row]
        return taken

    def note(self, guesses: Mapping[int, Guesses], texts: Mapping[int, array[int]]) -> None:
        """Note the model's guesses. Mutates."""
        for row, found in guesses.items():
            standing = self._rows[row].model
            standing.position, standing.token = len(texts[row]), found.tokens[0]
