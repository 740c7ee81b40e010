"""Guesses the next tokens, so that a step can verify several at once: see `base` for proposers.

forced.py      the tokens that a grammar forces
ngram.py       the tokens after an earlier occurrence of the last tokens in the same text
suffix.py      the tokens after an occurrence in an earlier answer of the same tenant
best_first.py  several proposers, the most reliable first
"""

from quire.compute.speculation.base import Proposer
from quire.compute.speculation.best_first import BestFirst
from quire.compute.speculation.forced import ForcedProposer
from quire.compute.speculation.ngram import NgramProposer
from quire.compute.speculation.suffix import SuffixProposer

__all__ = ["BestFirst", "ForcedProposer", "NgramProposer", "Proposer", "SuffixProposer", "create_proposer"]


def create_proposer(speculation: str) -> Proposer | None:
    """Return the proposer for the setting `speculation`; None: no guesses without a draft model."""
    if speculation == "off":
        return None
    if speculation == "ngram":
        return NgramProposer()
    return BestFirst([ForcedProposer(), NgramProposer(), SuffixProposer()])
