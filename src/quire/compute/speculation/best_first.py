"""BestFirst: several proposers, of which the first that has guesses of a row makes them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from quire.compute.speculation.base import Proposer, Wanted
from quire.core.guesses import Guesses
from quire.core.step import RowStart


class BestFirst:
    """Asks proposers in turn, the surest first."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers

    def begin(self, start: RowStart) -> None:
        """A row begins a text. Mutates the proposers."""
        for proposer in self._proposers:
            proposer.begin(start)

    def release(self, row: int, tokens: array[int]) -> None:
        """A row is free. Mutates the proposers."""
        for proposer in self._proposers:
            proposer.release(row, tokens)

    def propose(self, rows: Mapping[int, Wanted]) -> dict[int, Guesses]:
        """Return the guesses of the first proposer that has any, for each row. Mutates what the proposers know."""
        found: dict[int, Guesses] = {}
        left = dict(rows)
        for proposer in self._proposers:
            made = proposer.propose(left)
            found |= made
            left = {row: wanted for row, wanted in left.items() if row not in made}
        return found
