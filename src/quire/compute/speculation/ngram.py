"""NgramProposer: guesses that a text continues as it did after an earlier occurrence of its last tokens.

Answers repeat their subject: an edited text, a quoted source, a name, the lines of a program. So the last three tokens,
or else the last two, are looked up in the prompt and the answer so far; the guess is the tokens after their latest
occurrence.

    … the block table maps … of the block table │ maps …
          └── last place ──┘      └── now ──┘     guess

Each row has a table of hashes for each length: a token takes constant time, and a table takes eight to sixteen bytes
per token. A prompt is entered in one pass of numpy. If two grams have the same hash, the later one replaces the
earlier; so the tokens of a match are compared before it is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Final

import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.speculation.base import Wanted
from quire.core.guesses import Guesses
from quire.core.step import RowStart

LENGTHS: Final = (3, 2)
FEWEST_PLACES: Final = 256
FACTORS: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
MASK: Final = (1 << 32) - 1


class GramTable:
    """The latest position of each gram of a text, by its hash.

    >>> table = GramTable(2)
    >>> text = array("i", [7, 8, 9, 7, 8])
    >>> table.enter(text, 4)
    >>> table.find(text)
    2
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._num_entered = 0  # tokens of the text whose grams are in the table
        self._ends = np.full(FEWEST_PLACES, -1, np.int64)  # by hash: the position after the gram

    def find(self, tokens: array[int]) -> int:
        """Return the position after the previous occurrence of a text's last gram; -1: none."""
        return self.place_of(tokens, tokens) if len(tokens) > self._length else -1

    def place_of(self, tokens: array[int], entered: array[int]) -> int:
        """Return the position after the latest occurrence of the tokens' last gram in the entered text; -1: none."""
        length = self._length
        if len(tokens) < length:
            return -1
        end = int(self._ends[self._hash(tokens, len(tokens))])
        return end if end >= 0 and entered[end - length : end] == tokens[-length:] else -1

    def enter(self, tokens: array[int], count: int) -> None:
        """Enter the grams of the first `count` tokens, except those already entered. Mutates."""
        if 2 * count > len(self._ends):
            self._ends = np.full(4 * 2 ** (count - 1).bit_length(), -1, np.int64)
            self._num_entered = 0
        first = max(self._num_entered + 1, self._length)
        if count - first > 8:
            ends = np.arange(first, count + 1)
            self._ends[self._hashes(np.array(tokens[:count], np.int64), first)] = ends  # of equal hashes the last stays
        else:
            for end in range(first, count + 1):
                self._ends[self._hash(tokens, end)] = end
        self._num_entered = max(count, self._num_entered)

    def _hash(self, tokens: array[int], end: int) -> int:
        value = 0
        for place in range(self._length):
            value += tokens[end - 1 - place] * FACTORS[place]
        return ((value & MASK) >> 7) % len(self._ends)

    def _hashes(self, tokens: IntArray, first: int) -> IntArray:
        """Return the hashes of the grams that end at `first`, `first + 1` … and with the text."""
        count = len(tokens)
        value = np.zeros(count + 1 - first, np.int64)
        for place in range(self._length):
            value += tokens[first - 1 - place : count - place] * FACTORS[place]
        hashes: IntArray = ((value & MASK) >> 7) % len(self._ends)
        return hashes


class NgramProposer:
    """Guesses by the last tokens of each row."""

    def __init__(self) -> None:
        self._tables: dict[int, list[GramTable]] = {}

    def begin(self, start: RowStart) -> None:
        """Note that a row begins a text. Mutates."""
        self._tables[start.row] = [GramTable(length) for length in LENGTHS]

    def release(self, row: int, tokens: array[int]) -> None:
        """Note that a row is free. Mutates."""
        self._tables.pop(row, None)

    def propose(self, rows: Mapping[int, Wanted]) -> dict[int, Guesses]:
        """Return the tokens after earlier occurrences of the rows' last tokens. Mutates the tables."""
        found: dict[int, Guesses] = {}
        for row, (tokens, most, _) in rows.items():
            place = -1
            for table in self._tables[row]:
                table.enter(tokens, len(tokens) - 1)  # all except the gram to look up
                place = table.find(tokens) if place < 0 else place
            if place >= 0:
                found[row] = Guesses("ngram", continued(tokens, place, most))
        return found


def continued(tokens: array[int], place: int, count: int) -> array[int]:
    """Return `count` tokens of a text from a place on; at the end of the text, start again from the place.

    >>> continued(array("i", [1, 2, 3, 4]), 2, 5)
    array('i', [3, 4, 3, 4, 3])
    """
    guesses = tokens[place : place + count]
    while len(guesses) < count:
        guesses.extend(guesses[: count - len(guesses)])
    return guesses
