"""Proposer: guesses the next tokens of rows, after the tokens of a step are known.

    step ──► tokens of each row ──► Proposer.propose ──► StepResult.proposals ──► drafts of the next plan

A proposer identifies a row by its number; `begin` and `release` report when a row begins another text and when it is
free. Guesses change no text: the worker accepts a draft only if it would have drawn it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from quire.core.guesses import Guesses
from quire.core.step import RowStart


class Wanted(NamedTuple):
    """A request for guesses for a row: its known tokens, which must not be changed, and the most guesses.

    `forced`: the next tokens that its grammar is known to force.
    """

    tokens: array[int]
    most: int
    forced: Sequence[int] = ()


class Proposer(Protocol):
    """Guesses tokens."""

    def begin(self, start: RowStart) -> None:
        """Note that a row begins a text, possibly the same as before. Mutates."""
        ...

    def release(self, row: int, tokens: array[int]) -> None:
        """Note that a row is free; its text was these tokens. Mutates."""
        ...

    def propose(self, rows: Mapping[int, Wanted]) -> dict[int, Guesses]:
        """Return guesses, at least one, for each row that has any; all are token ids. Mutates the proposer."""
        ...
