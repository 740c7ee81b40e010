"""GrammarCompiler: grammars in, matchers out; what was compiled is kept, up to so many bytes.

    check(grammar)   ──► compiled? ──► kept: a matcher at the beginning, or why there is none
    matcher(grammar) ──► a copy of it, which shares its lexer

A compilation is wholly bounded by `GrammarLimits`, and so is the first mask, which is part of it: a grammar without any
text is found out there. Reasons of refusal are kept as well, or whoever repeats a bad request would pay for it with our
time. Threads may ask at once: of those who ask for the same grammar one compiles, the others wait for it.

How much a compiled grammar weighs llguidance does not say, and it grows with use: its lexer makes a state for each way
that texts take, of about a kilobyte. So each is counted for what it may become: its text some times over (measured:
docs/design/structured-output.md), and as many states as its limits allow. That is more than most will ever take, which
is the right side to err on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.matcher import TextMatcher, one_line
from quire.compute.grammar.vocabulary import Vocabulary
from quire.core.errors import InvalidRequestError, InvariantError
from quire.core.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    Compilation: TypeAlias = Future[LLMatcher | InvalidRequestError]

MAX_CACHE_BYTES: Final = 256 << 20
BYTES_PER_STATE: Final = 1 << 10
BYTES_PER_TEXT_BYTE: Final = 100
BYTES_PER_GRAMMAR: Final = 256 << 10
# Where JSON may have space, there may be one: models write it so, and none can write space for ever.
JSON_SPACE: Final = " ?"


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
        self._cache = CompiledCache(max_cache_bytes)
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` with the reason, unless texts can be held to the grammar. Mutates the cache."""
        self._compiled(grammar)

    def matcher(self, grammar: Grammar) -> TextMatcher:
        """Return a matcher of an empty text; raises as `check` does. Mutates the cache."""
        return TextMatcher(self._compiled(grammar).deep_copy(), lambda: self._renewed(grammar))

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        """Return the kept matcher of a grammar, which is only ever copied."""
        mine: Compilation = Future()
        found = self._cache.get_or_add(grammar, mine)
        if found is mine:
            self._settle(grammar, mine)
        compiled = found.result()
        if isinstance(compiled, InvalidRequestError):
            raise InvalidRequestError(compiled.field, compiled.value, compiled.allowed)
        return compiled

    def _settle(self, grammar: Grammar, future: Compilation) -> None:
        try:
            future.set_result(self._compile(grammar))
        except InvalidRequestError as error:
            future.set_result(error)
        except BaseException as error:
            future.set_exception(error)
            self._cache.drop(grammar)
            raise
        self._cache.settle(grammar, self._weight(grammar, future.result()))

    def _renewed(self, grammar: Grammar) -> LLMatcher:
        """Compile anew, and let who comes later have a lexer without the states of the past, too."""
        self._cache.drop(grammar)
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar and make its first mask. Does not mutate; from any thread."""
        from llguidance import LLMatcher

        tokenizer = self._open_tokenizer()
        try:
            source = _source(grammar)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=self.limits.for_library())
        except ValueError as error:
            raise _refusal(grammar, str(error)) from error
        if not matcher.is_error():
            mask = np.zeros(self.vocabulary.num_words, np.uint32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        return matcher

    def _open_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self.vocabulary.build()
            return self._tokenizer

    def _weight(self, grammar: Grammar, compiled: LLMatcher | InvalidRequestError) -> int:
        if isinstance(compiled, InvalidRequestError):
            return 2 * len(grammar.text) + BYTES_PER_STATE
        return BYTES_PER_GRAMMAR + BYTES_PER_TEXT_BYTE * len(grammar.text) + BYTES_PER_STATE * self.limits.max_states


class CompiledCache:
    """What grammars became, the one used longest ago first; those under way weigh nothing yet. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Grammar, Compilation] = OrderedDict()
        self._weights: dict[Grammar, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of grammars that are kept or under way."""
        return len(self._entries)

    def get_or_add(self, grammar: Grammar, mine: Compilation) -> Compilation:
        """Return what is there for a grammar; else enter `mine`, which its owner settles. Mutates."""
        with self._lock:
            found = self._entries.setdefault(grammar, mine)
            self._entries.move_to_end(grammar)
            return found

    def settle(self, grammar: Grammar, weight: int) -> None:
        """Count a grammar that is compiled; those used longest ago go until there is room. Mutates."""
        with self._lock:
            if grammar not in self._entries:
                return
            self._weights[grammar] = weight
            self.num_bytes += weight
            for each in list(self._entries):
                if self.num_bytes <= self.max_bytes:
                    break
                if each in self._weights:
                    self._remove(each)

    def drop(self, grammar: Grammar) -> None:
        """Forget a grammar; who holds it keeps it. Mutates."""
        with self._lock:
            if grammar in self._entries:
                self._remove(grammar)

    def check(self) -> None:
        """Raise `InvariantError` unless the bytes are those of the entries, and within the limit. Does not mutate."""
        with self._lock:
            if self.num_bytes != sum(self._weights.values()) or not self._weights.keys() <= self._entries.keys():
                raise InvariantError("the bytes of the compiled grammars are not those of its entries")
            if self.num_bytes > self.max_bytes:
                raise InvariantError("the compiled grammars take more than their limit")

    def _remove(self, grammar: Grammar) -> None:
        del self._entries[grammar]
        self.num_bytes -= self._weights.pop(grammar, 0)


def _source(grammar: Grammar) -> str:
    """Return the grammar as llguidance reads it; raises `ValueError` for what is no JSON."""
    from llguidance import LLMatcher

    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": JSON_SPACE})


def _refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    reason = reason.replace("NoExtensionBias", "there is no text of it")
    return InvalidRequestError("grammar", grammar.text, f"a {grammar.kind} that can be compiled: {one_line(reason)}")
