"""CompiledCache: what grammars became, kept up to so many bytes; those used longest ago go first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from quire.core.errors import InvalidRequestError, InvariantError
from quire.core.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    Compilation: TypeAlias = Future[LLMatcher | InvalidRequestError]


@dataclass(slots=True)
class Weight:
    """The bytes that a grammar is counted for, and at most may be."""

    num_bytes: int
    most: int


class CompiledCache:
    """What grammars became, the one used longest ago first; those under way weigh nothing yet. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Grammar, Compilation] = OrderedDict()
        self._weights: dict[Grammar, Weight] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of grammars that are kept or under way."""
        return len(self._entries)

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._entries

    def is_settled(self, grammar: Grammar) -> bool:
        """Return whether it is known what a grammar became. Does not mutate."""
        found = self._entries.get(grammar)
        return found is not None and found.done()

    def get_or_add(self, grammar: Grammar, mine: Compilation) -> Compilation:
        """Return what is there for a grammar; else enter `mine`, which its owner settles. Mutates."""
        with self._lock:
            found = self._entries.setdefault(grammar, mine)
            self._entries.move_to_end(grammar)
            return found

    def settle(self, grammar: Grammar, weight: int, most: int) -> None:
        """Count a grammar that is compiled; those used longest ago go until there is room. Mutates."""
        with self._lock:
            if grammar in self._entries:
                self._weights[grammar] = Weight(0, most)
                self._grow(grammar, weight)

    def grow(self, grammar: Grammar, num_bytes: int) -> None:
        """Count what a grammar has grown by, up to what it may weigh at most. Mutates."""
        with self._lock:
            if grammar in self._weights:
                self._grow(grammar, num_bytes)

    def drop(self, grammar: Grammar) -> None:
        """Forget a grammar; who holds it keeps it. Mutates."""
        with self._lock:
            if grammar in self._entries:
                self._remove(grammar)

    def check(self) -> None:
        """Raise `InvariantError` unless the bytes are those of the entries, and within the limit. Does not mutate."""
        with self._lock:
            if (
                self.num_bytes != sum(each.num_bytes for each in self._weights.values())
                or not self._weights.keys() <= self._entries.keys()
            ):
                raise InvariantError("the bytes of the compiled grammars are not those of its entries")
            if self.num_bytes > self.max_bytes:
                raise InvariantError("the compiled grammars take more than their limit")

    def _grow(self, grammar: Grammar, num_bytes: int) -> None:
        weight = self._weights[grammar]
        added = min(num_bytes, weight.most - weight.num_bytes)
        weight.num_bytes += added
        self.num_bytes += added
        for each in list(self._entries) if self.num_bytes > self.max_bytes else ():
            if self.num_bytes <= self.max_bytes:
                break
            if each in self._weights:
                self._remove(each)

    def _remove(self, grammar: Grammar) -> None:
        del self._entries[grammar]
        if grammar in self._weights:
            self.num_bytes -= self._weights.pop(grammar).num_bytes
