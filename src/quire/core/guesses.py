"""Guesses: tokens that may come next in a text, and which kind of proposer guessed them."""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

GUESSERS: Final = ("forced", "ngram", "suffix", "draft_model")
"""The kinds of proposers; see `quire.compute.speculation`. Wire forms hold the place of one in this list."""


class Guesses(NamedTuple):
    """Guesses of the next tokens of a text, at least one, and who made them."""

    guesser: str
    tokens: array[int]
