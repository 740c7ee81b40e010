"""GrammarCompiler: compiles grammars to matchers, and keeps compiled grammars up to a limit of bytes.

llguidance does not report the memory of a compiled grammar, which grows with use: its lexer makes states as texts reach
them. Measurements (docs/design/structured-output.md): a fresh grammar takes 60 bytes per byte of its text, plus half a
kilobyte per token that its texts have advanced, up to a kilobyte per state that its limits allow. The cache counts
about twice that.
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
"""The limit for each process that makes masks: a tenant has at most two."""
BYTES_PER_STATE: Final = 1 << 10
BYTES_PER_TOKEN: Final = 1 << 10
BYTES_PER_TEXT_BYTE: Final = 120
BYTES_PER_GRAMMAR: Final = 64 << 10


class GrammarCompiler:
    """Compiles grammars over one vocabulary, for one thread, in a process that can be killed: see `mask_child`."""

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
        """Read the vocabulary at the first call; raises `InvalidRequestError` if grammars cannot use it. Mutates."""
        if self._tokenizer is None:
            self._tokenizer = self.vocabulary.build()
        return self._tokenizer

    def matcher(self, grammar: Grammar) -> TextMatcher:
        """Return a matcher of an empty text, for an already checked grammar. Mutates the cache."""
        compiled = self.cache.get(grammar, self._compile)
        return TextMatcher(
            compiled.deep_copy(),
            4 * self.vocabulary.num_words,
            renew=lambda: self._renewed(grammar),
            note_advance=lambda num_tokens: self.cache.grow(grammar, BYTES_PER_TOKEN * num_tokens),
            bytes_of=self._bytes_of,
        )

    def _bytes_of(self, token: int) -> bytes:
        tokenizer = self.open()
        return b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])

    def _renewed(self, grammar: Grammar) -> LLMatcher:
        """Compile again, so that later matchers also get a lexer without old states."""
        self.cache.drop(grammar)
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        return compile_grammar(self.open(), grammar, self.limits)

    def _weights(self, grammar: Grammar, compiled: LLMatcher) -> tuple[int, int]:
        """Return the bytes to count for a compiled grammar now, and at most."""
        weight = BYTES_PER_GRAMMAR + BYTES_PER_TEXT_BYTE * len(grammar.text)
        return weight, weight + BYTES_PER_STATE * self.limits.max_states
