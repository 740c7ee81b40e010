"""Guesses: tokens that may come next in a text, and which kind of proposer guessed them."""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

GUESSERS: Final = ("forced", "ngram", "suffix", "draft_model", "mtp")
"""The kinds of proposers; see `quire.compute.speculation`. Wire forms hold an index into this tuple."""


class Guesses(NamedTuple):
    """Guesses of the next tokens of a text, at least one, and the kind of proposer that made them."""

    guesser: str
    tokens: array[int]
