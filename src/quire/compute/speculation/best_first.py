"""BestFirst: several proposers; for each row, the first one with guesses is used."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from quire.compute.speculation.base import Proposer, Wanted
from quire.core.guesses import Guesses
from quire.core.step import RowStart


class BestFirst:
    """Calls proposers in turn, the most reliable first."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers

    def begin(self, start: RowStart) -> None:
        """Note that a row begins a text. Mutates the proposers."""
        for proposer in self._proposers:
            proposer.begin(start)

    def release(self, row: int, tokens: array[int]) -> None:
        """Note that a row is free. Mutates the proposers."""
        for proposer in self._proposers:
            proposer.release(row, tokens)

    def propose(self, rows: Mapping[int, Wanted]) -> dict[int, Guesses]:
        """Return for each row the guesses of the first proposer that has any. Mutates the proposers."""
        found: dict[int, Guesses] = {}
        left = dict(rows)
        for proposer in self._proposers:
            made = proposer.propose(left)
            found |= made
            left = {row: wanted for row, wanted in left.items() if row not in made}
        return found
