"""Guesses of the tokens that follow, to be verified several in a step: see `base` for what a proposer is.

forced.py      what a grammar leaves no choice about
ngram.py       what followed the last tokens when the text had them before
suffix.py      what followed them in an earlier answer of the same tenant
best_first.py  several proposers, the surest first
"""

from quire.compute.speculation.base import Proposer
from quire.compute.speculation.best_first import BestFirst
from quire.compute.speculation.forced import ForcedProposer
from quire.compute.speculation.ngram import NgramProposer
from quire.compute.speculation.suffix import SuffixProposer

__all__ = ["BestFirst", "ForcedProposer", "NgramProposer", "Proposer", "SuffixProposer", "create_proposer"]


def create_proposer(speculation: str) -> Proposer | None:
    """Return who guesses, by the setting `speculation`; None: nobody."""
    if speculation == "off":
        return None
    if speculation == "ngram":
        return NgramProposer()
    return BestFirst([ForcedProposer(), NgramProposer(), SuffixProposer()])
