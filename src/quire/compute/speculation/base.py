"""Proposer: guesses the next tokens of rows, after the tokens of a step are known.

    step ──► tokens of each row ──► Proposer.propose ──► StepResult.proposals ──► drafts of the next plan

A proposer knows a row by its number, and is told when a row begins another text and when it is free. Whatever it
guesses changes no text: the worker accepts a draft only if it would have drawn it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from quire.core.guesses import Guesses
from quire.core.step import RowStart


class Wanted(NamedTuple):
    """A row whose next tokens are to be guessed: its known tokens, not to be changed, and how many guesses at most.

    `forced`: what its grammar is known to leave no choice about.
    """

    tokens: array[int]
    most: int
    forced: Sequence[int] = ()


class Proposer(Protocol):
    """Guesses tokens."""

    def begin(self, start: RowStart) -> None:
        """A row begins a text, which may be the one that it had. Mutates."""
        ...

    def release(self, row: int, tokens: array[int]) -> None:
        """A row is free, after these tokens. Mutates."""
        ...

    def propose(self, rows: Mapping[int, Wanted]) -> dict[int, Guesses]:
        """Return guesses for the rows that have any, at least one each, all of them tokens. Mutates what it knows."""
        ...
