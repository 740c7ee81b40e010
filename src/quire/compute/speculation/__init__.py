"""Guesses of the tokens that follow, to be verified several in a step: see `base` for what a proposer is.

ngram.py   what followed the last tokens when the text had them before
"""

from quire.compute.speculation.base import Proposer
from quire.compute.speculation.ngram import NgramProposer

__all__ = ["NgramProposer", "Proposer"]
