"""GrammarCompiler: grammars in, matchers out; compiled grammars are kept, up to a limit of bytes.

How much a compiled grammar weighs llguidance does not say, and it grows with use: its lexer makes states as texts take
new ways. Measured (docs/design/structured-output.md), a fresh one weighs 60 bytes for each byte of its text, and half a
kilobyte more for each token that its texts have advanced, up to a kilobyte for each state that its limits allow. Each
is counted for about twice that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quire.compute.grammar.cache import GrammarCache
from quire.compute.grammar.compilation import compile_grammar
from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.matcher import TextMatcher
from quire.compute.grammar.vocabulary import Vocabulary
from quire.core.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHE_BYTES: Final = 64 << 20
"""Of each process that makes masks: there are at most two for a tenant."""
BYTES_PER_STATE: Final = 1 << 10
BYTES_PER_TOKEN: Final = 1 << 10
BYTES_PER_TEXT_BYTE: Final = 120
BYTES_PER_GRAMMAR: Final = 64 << 10


class GrammarCompiler:
    """Compiles grammars over one vocabulary. Belongs to one thread, in a process that may end: see `mask_child`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        limits: GrammarLimits | None = None,
        max_cache_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        self.vocabulary = vocabulary
        self.limits = limits or GrammarLimits()
        self.cache: GrammarCache[LLMatcher] = GrammarCache(max_cache_bytes, self._weights)
        self._tokenizer: LLTokenizer | None = None

    def open(self) -> LLTokenizer:
        """Read the vocabulary, unless that is done; raises `InvalidRequestError` where it is of no use. Mutates."""
        if self._tokenizer is None:
            self._tokenizer = self.vocabulary.build()
        return self._tokenizer

    def matcher(self, grammar: Grammar) -> TextMatcher:
        """Return a matcher of an empty text, for a grammar that was checked somewhere. Mutates the cache."""
        compiled = self.cache.get(grammar, self._compile)
        return TextMatcher(
            compiled.deep_copy(),
            4 * self.vocabulary.num_words,
            renew=lambda: self._renewed(grammar),
            note_advance=lambda num_tokens: self.cache.grow(grammar, BYTES_PER_TOKEN * num_tokens),
        )

    def _renewed(self, grammar: Grammar) -> LLMatcher:
        """Compile anew, and let who comes later have a lexer without the states of the past, too."""
        self.cache.drop(grammar)
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        return compile_grammar(self.open(), grammar, self.limits)

    def _weights(self, grammar: Grammar, compiled: LLMatcher) -> tuple[int, int]:
        """Return how many bytes a compiled grammar is counted for now, and at most."""
        weight = BYTES_PER_GRAMMAR + BYTES_PER_TEXT_BYTE * len(grammar.text)
        return weight, weight + BYTES_PER_STATE * self.limits.max_states
