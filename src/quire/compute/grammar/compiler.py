"""GrammarCompiler: grammars in, matchers out; what was found out is kept, up to so many bytes.

    check(grammar)   ──► tried in a process of its own ──► may be compiled, or the reason why not     at the door
    matcher(grammar) ──► compiled here ──► a copy of it, which shares its lexer                       where the model is

So a door in another process than the model never reads the vocabulary, which stops all of Python for a second where it
is large; where the model is, `open` has it read while the weights are. Threads may ask at once: of those who ask for
the same grammar one finds out, the others wait for it. Refusals are kept like the rest, or whoever repeats a bad
request would pay for it with our time.

How much a compiled grammar weighs llguidance does not say, and it grows with use: its lexer makes states as texts take
new ways. Measured (docs/design/structured-output.md), a fresh one weighs 60 bytes for each byte of its text, and half a
kilobyte more for each token that its texts have advanced, up to a kilobyte for each state that its limits allow. Each
is counted for about twice that.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from quire.compute.grammar.cache import GrammarCache
from quire.compute.grammar.compilation import compile_grammar
from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.matcher import TextMatcher
from quire.compute.grammar.trial import GrammarTrial, TrialSettings
from quire.compute.grammar.vocabulary import Vocabulary
from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHE_BYTES: Final = 256 << 20
MAX_VERDICT_BYTES: Final = 16 << 20
BYTES_PER_STATE: Final = 1 << 10
BYTES_PER_TOKEN: Final = 1 << 10
BYTES_PER_TEXT_BYTE: Final = 120
BYTES_PER_GRAMMAR: Final = 64 << 10


class GrammarCompiler:
    """Compiles grammars over one vocabulary; implements `quire.core.grammar.GrammarChecker`. Threads may share it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        limits: GrammarLimits | None = None,
        max_cache_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        self.vocabulary = vocabulary
        self.limits = limits or GrammarLimits()
        self.verdicts: GrammarCache[str] = GrammarCache(MAX_VERDICT_BYTES, _verdict_weights)
        self.cache: GrammarCache[LLMatcher] = GrammarCache(max_cache_bytes, self._weights)
        self._tokenizer: LLTokenizer | None = None
        self._opening = threading.Lock()
        self._trial: GrammarTrial | None = None
        self._starting = threading.Lock()

    def open(self) -> None:
        """Read the vocabulary, which the first grammar would wait for. Mutates; from any thread."""
        self._open_tokenizer()

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` with the reason, unless texts can be held to it. Mutates what is kept."""
        reason = self.verdicts.get(grammar, lambda tried: self._start_trial().reason(tried))
        if reason:
            raise InvalidRequestError("grammar", grammar.text, reason)

    def knows(self, grammar: Grammar) -> bool:
        """Return whether it is known what becomes of a grammar. Does not mutate."""
        return self.verdicts.knows(grammar)

    def matcher(self, grammar: Grammar) -> TextMatcher:
        """Return a matcher of an empty text, for a grammar that was checked somewhere. Mutates the cache."""
        compiled = self.cache.get(grammar, self._compile)
        return TextMatcher(
            compiled.deep_copy(),
            renew=lambda: self._renewed(grammar),
            note_advance=lambda num_tokens: self.cache.grow(grammar, BYTES_PER_TOKEN * num_tokens),
        )

    def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar that was checked somewhere, so that its matcher is had at once. Mutates the cache."""
        self.cache.get(grammar, self._compile)

    def close(self) -> None:
        """End the process in which grammars are tried. May be called twice."""
        with self._starting:
            if self._trial is not None:
                self._trial.close()

    def _renewed(self, grammar: Grammar) -> LLMatcher:
        """Compile anew, and let who comes later have a lexer without the states of the past, too."""
        self.cache.drop(grammar)
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar that was tried. From any thread."""
        mask = np.zeros(self.vocabulary.num_words, np.uint32)
        return compile_grammar(self._open_tokenizer(), grammar, self.limits, mask)

    def _open_tokenizer(self) -> LLTokenizer:
        with self._opening:
            if self._tokenizer is None:
                self._tokenizer = self.vocabulary.build()
            return self._tokenizer

    def _start_trial(self) -> GrammarTrial:
        with self._starting:
            if self._trial is None:
                vocabulary = self.vocabulary
                self._trial = GrammarTrial(
                    TrialSettings(
                        vocabulary.vocab_size,
                        vocabulary.special_tokens(),
                        vocabulary.ends(),
                        self.limits,
                    )
                )
            return self._trial

    def _weights(self, grammar: Grammar, compiled: LLMatcher) -> tuple[int, int]:
        """Return how many bytes a compiled grammar is counted for now, and at most."""
        weight = BYTES_PER_GRAMMAR + BYTES_PER_TEXT_BYTE * len(grammar.text)
        return weight, weight + BYTES_PER_STATE * self.limits.max_states


def _verdict_weights(grammar: Grammar, reason: str) -> tuple[int, int]:
    """Return how many bytes a verdict is counted for: the texts, and what Python needs to keep them."""
    weight = 2 * len(grammar.text) + len(reason) + 1024
    return weight, weight
