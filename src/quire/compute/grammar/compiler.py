"""GrammarCompiler: grammars in, matchers out; what was compiled is kept, up to so many bytes.

    check(grammar)   ──► kept? ──► no: tried in a process of its own, then compiled here ──► kept, or why it cannot be
    matcher(grammar) ──► a copy of what is kept, which shares its lexer

What the door has checked is compiled in the engine's process as well, where no trial is needed any more. Reasons of
refusal are kept as well, or whoever repeats a bad request would pay for it with our time. Threads may ask at once: of
those who ask for the same grammar one compiles, the others wait for it.

How much a compiled grammar weighs llguidance does not say, and it grows with use: its lexer makes states as texts take
new ways. Measured (docs/design/structured-output.md), a fresh one weighs 60 bytes for each byte of its text, and half a
kilobyte more for each token that its texts have advanced, up to a kilobyte for each state that its limits allow. Each
is counted for about twice that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

import numpy as np

from quire.compute.grammar.cache import CompiledCache
from quire.compute.grammar.compilation import compile_grammar
from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.matcher import TextMatcher
from quire.compute.grammar.trial import GrammarTrial, TrialSettings
from quire.compute.grammar.vocabulary import Vocabulary
from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quire.compute.grammar.cache import Compilation

MAX_CACHE_BYTES: Final = 256 << 20
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
        self.cache = CompiledCache(max_cache_bytes)
        self._tokenizer: LLTokenizer | None = None
        self._trial: GrammarTrial | None = None
        self._opening = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` with the reason, unless texts can be held to the grammar. Mutates the cache."""
        self._compiled(grammar, self._try_and_compile)

    def knows(self, grammar: Grammar) -> bool:
        """Return whether it is known what becomes of a grammar. Does not mutate."""
        return self.cache.is_settled(grammar)

    def matcher(self, grammar: Grammar) -> TextMatcher:
        """Return a matcher of an empty text, for a grammar that was checked somewhere. Mutates the cache."""
        compiled = self._compiled(grammar, self._compile)
        return TextMatcher(
            compiled.deep_copy(),
            renew=lambda: self._renewed(grammar),
            note_advance=lambda num_tokens: self.cache.grow(grammar, BYTES_PER_TOKEN * num_tokens),
        )

    def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar that was checked somewhere, so that its matcher is had at once. Mutates the cache."""
        self._compiled(grammar, self._compile)

    def close(self) -> None:
        """End the process in which grammars are tried. May be called twice."""
        with self._opening:
            if self._trial is not None:
                self._trial.close()

    def _compiled(self, grammar: Grammar, compile_it: Callable[[Grammar], LLMatcher]) -> LLMatcher:
        """Return the kept matcher of a grammar, which is only ever copied."""
        mine: Compilation = Future()
        found = self.cache.get_or_add(grammar, mine)
        if found is mine:
            try:
                mine.set_result(compile_it(grammar))
            except InvalidRequestError as error:
                mine.set_result(error)
            except BaseException as error:
                self.cache.drop(grammar)
                mine.set_exception(error)
                raise
            self.cache.settle(grammar, *self._weights(grammar, mine.result()))
        compiled = found.result()
        if isinstance(compiled, InvalidRequestError):
            raise InvalidRequestError(compiled.field, compiled.value, compiled.allowed)
        return compiled

    def _renewed(self, grammar: Grammar) -> LLMatcher:
        """Compile anew, and let who comes later have a lexer without the states of the past, too."""
        self.cache.drop(grammar)
        return self._compile(grammar)

    def _try_and_compile(self, grammar: Grammar) -> LLMatcher:
        """Compile what comes from outside: where it may do harm first."""
        reason = self._open_trial().reason(grammar)
        if reason:
            raise InvalidRequestError("grammar", grammar.text, reason)
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

    def _open_trial(self) -> GrammarTrial:
        with self._opening:
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

    def _weights(self, grammar: Grammar, compiled: LLMatcher | InvalidRequestError) -> tuple[int, int]:
        """Return how many bytes it is counted for now, and at most."""
        if isinstance(compiled, InvalidRequestError):
            weight = 2 * len(grammar.text) + BYTES_PER_STATE
            return weight, weight
        weight = BYTES_PER_GRAMMAR + BYTES_PER_TEXT_BYTE * len(grammar.text)
        return weight, weight + BYTES_PER_STATE * self.limits.max_states
