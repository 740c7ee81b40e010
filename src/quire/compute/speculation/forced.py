"""ForcedProposer: guesses the tokens that a grammar forces: the keys of a JSON object, its braces and commas.

The processes that make masks find these tokens, next to the masks (`TextMatcher.forced`), so nothing waits for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from quire.compute.speculation.base import Wanted
from quire.core.guesses import Guesses
from quire.core.step import RowStart


class ForcedProposer:
    """Guesses by the grammars of rows."""

    def begin(self, start: RowStart) -> None:
        """Do nothing: `propose` gets the forced tokens."""

    def release(self, row: int, tokens: array[int]) -> None:
        """Do nothing."""

    def propose(self, rows: Mapping[int, Wanted]) -> dict[int, Guesses]:
        """Return the forced tokens of the rows that have any. Does not mutate."""
        return {
            row: Guesses("forced", array("i", wanted.forced[: wanted.most]))
            for row, wanted in rows.items()
            if wanted.forced
        }
