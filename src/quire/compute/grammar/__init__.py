"""Grammars over the tokens of a model: the only code that uses llguidance, which is loaded only when needed."""

from quire.compute.grammar.compiler import GrammarCompiler
from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.mask_service import MaskService
from quire.compute.grammar.mask_worker import HeldText
from quire.compute.grammar.matcher import TextMatcher
from quire.compute.grammar.verdicts import GrammarVerdicts
from quire.compute.grammar.vocabulary import Vocabulary

__all__ = [
    "GrammarCompiler",
    "GrammarLimits",
    "GrammarVerdicts",
    "HeldText",
    "MaskService",
    "TextMatcher",
    "Vocabulary",
]
