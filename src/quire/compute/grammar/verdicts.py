"""GrammarVerdicts: decides which grammars can be enforced, and keeps verdicts up to a limit of bytes.

    check ──► known? ──► its verdict
                └──────► tried in a separate process (`trial`) ──► it may be compiled, or the reason why not
    condemn ──► a verdict from the engine: the grammar was accepted, but one of its texts took too long

So a server in another process than the model never reads the vocabulary. It is thread-safe: if several threads check
the same grammar, one tries it and the others wait. Refusals are kept too, or repeating a bad request would cost a trial
each time. A grammar includes its owner, so tenants share no verdicts: neither an answer nor its timing reveals another
tenant's requests.
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

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._verdicts: GrammarCache[str] = GrammarCache(MAX_VERDICT_BYTES, _weights)
        self._trial: GrammarTrial | None = None
        self._starting = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` with the reason unless texts can follow the grammar. Mutates the cache.

        Raises `ExecutionError`, and keeps nothing, if no trial could be made.
        """
        reason = self._verdicts.get(grammar, lambda tried: self._start_trial().reason(tried))
        if reason:
            raise InvalidRequestError("grammar", grammar.text, reason)

    def knows(self, grammar: Grammar) -> bool:
        """Return whether there is a verdict. Does not mutate."""
        return self._verdicts.knows(grammar)

    def condemn(self, grammar: Grammar, reason: str) -> None:
        """Refuse a grammar from now on. Mutates the cache."""
        self._verdicts.put(grammar, reason)

    def close(self) -> None:
        """End the process that tries grammars; may be called twice."""
        with self._starting:
            if self._trial is not None:
                self._trial.close()

    def _start_trial(self) -> GrammarTrial:
        with self._starting:
            if self._trial is None:
                vocabulary = self._vocabulary
                special, ends = vocabulary.special_tokens(), vocabulary.ends()
                self._trial = GrammarTrial(TrialSettings(vocabulary.vocab_size, special, ends, GrammarLimits()))
            return self._trial


def _weights(grammar: Grammar, reason: str) -> tuple[int, int]:
    """Return the bytes to count for a verdict: the texts, and Python's overhead."""
    weight = 2 * len(grammar.text) + len(reason) + 1024
    return weight, weight
