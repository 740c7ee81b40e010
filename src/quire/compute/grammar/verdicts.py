"""GrammarVerdicts: which grammars can be enforced; kept, up to a limit of bytes.

    check ──► known? ──► its verdict
                └──────► tried in a process of its own (`trial`) ──► it may be compiled, or the reason why not
    condemn ──► a verdict from the engine: it was let in, and a text of it took too much

So a door in another process than the model never reads the vocabulary. Threads may ask at once: of those who ask for
the same grammar one finds out, the others wait for it. Refusals are kept like the rest, or repeating a bad request
would cost us a trial each time. A grammar carries its owner, so tenants share no verdict: nobody learns from an answer,
or from the time it takes, what another tenant has asked.
"""

from __future__ import annotations

import threading
from typing import Final

from quire.compute.grammar.cache import GrammarCache
from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.trial import GrammarTrial, TrialSettings
from quire.compute.grammar.vocabulary import Vocabulary
from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar

MAX_VERDICT_BYTES: Final = 16 << 20


class GrammarVerdicts:
    """Knows which grammars an engine can follow; implements `quire.core.grammar.GrammarChecker`."""

    def __init__(self, vocabulary: Vocabulary, *, limits: GrammarLimits | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or GrammarLimits()
        self._verdicts: GrammarCache[str] = GrammarCache(MAX_VERDICT_BYTES, _weights)
        self._trial: GrammarTrial | None = None
        self._starting = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` with the reason, unless texts can be held to it. Mutates what is kept.

        Raises `ExecutionError`, and keeps nothing, where no trial could be made.
        """
        reason = self._verdicts.get(grammar, lambda tried: self._start_trial().reason(tried))
        if reason:
            raise InvalidRequestError("grammar", grammar.text, reason)

    def knows(self, grammar: Grammar) -> bool:
        """Return whether there is a verdict. Does not mutate."""
        return self._verdicts.knows(grammar)

    def condemn(self, grammar: Grammar, reason: str) -> None:
        """Refuse a grammar from now on. Mutates what is kept."""
        self._verdicts.put(grammar, reason)

    def close(self) -> None:
        """End the process in which grammars are tried. May be called twice."""
        with self._starting:
            if self._trial is not None:
                self._trial.close()

    def _start_trial(self) -> GrammarTrial:
        with self._starting:
            if self._trial is None:
                vocabulary = self._vocabulary
                special, ends = vocabulary.special_tokens(), vocabulary.ends()
                self._trial = GrammarTrial(TrialSettings(vocabulary.vocab_size, special, ends, self._limits))
            return self._trial


def _weights(grammar: Grammar, reason: str) -> tuple[int, int]:
    """Return how many bytes a verdict is counted for: the texts, and what Python needs to keep them."""
    weight = 2 * len(grammar.text) + len(reason) + 1024
    return weight, weight
