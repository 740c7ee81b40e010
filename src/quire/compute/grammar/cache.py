"""GrammarCache: compiled grammars and their masks, up to a limit of bytes; evicts the least recently used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.core.errors import InvariantError
from quire.core.grammar import Grammar

Known = TypeVar("Known")


@dataclass(slots=True)
class Weight:
    """The bytes counted for a grammar now, and the limit for it."""

    num_bytes: int
    most: int


class GrammarCache(Generic[Known]):
    """Values by grammar, the least recently used first. Threads may share it.

    `weigh` returns the bytes to count for a value, and their limit. A value that is being computed counts for nothing.
    """

    def __init__(self, max_bytes: int, weigh: Callable[[Grammar, Known], tuple[int, int]]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._weigh = weigh
        self._entries: OrderedDict[Grammar, Future[Known]] = OrderedDict()
        self._weights: dict[Grammar, Weight] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of grammars with a value, or with one being computed."""
        return len(self._entries)

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._entries

    def knows(self, grammar: Grammar) -> bool:
        """Return whether `get` would return at once. Does not mutate."""
        found = self._entries.get(grammar)
        return found is not None and found.done()

    def get(self, grammar: Grammar, find_out: Callable[[Grammar], Known]) -> Known:
        """Return the value of a grammar. If several threads need it at once, one computes it. Mutates."""
        mine: Future[Known] = Future()
        with self._lock:
            found = self._entries.setdefault(grammar, mine)
            self._entries.move_to_end(grammar)
        if found is mine:
            try:
                known = find_out(grammar)
            except BaseException as error:
                with self._lock:
                    if self._entries.get(grammar) is mine:
                        self._remove(grammar)
                mine.set_exception(error)
                raise
            mine.set_result(known)
            self._settle(grammar, mine)
        return found.result()

    def put(self, grammar: Grammar, known: Known) -> None:
        """Replace the value of a grammar. Mutates."""
        told: Future[Known] = Future()
        told.set_result(known)
        with self._lock:
            if grammar in self._entries:
                self._remove(grammar)
            self._entries[grammar] = told
        self._settle(grammar, told)

    def grow(self, grammar: Grammar, num_bytes: int) -> None:
        """Add to the weight of a grammar, up to its limit. Mutates."""
        with self._lock:
            if grammar in self._weights:
                self._grow(grammar, num_bytes)

    def drop(self, grammar: Grammar) -> None:
        """Forget a grammar; callers that hold its value keep it. Mutates."""
        with self._lock:
            if grammar in self._entries:
                self._remove(grammar)

    def check(self) -> None:
        """Raise `InvariantError` unless the bytes are the entries' sum, and within the limit. Does not mutate."""
        with self._lock:
            if (
                self.num_bytes != sum(each.num_bytes for each in self._weights.values())
                or not self._weights.keys() <= self._entries.keys()
            ):
                raise InvariantError("the bytes counted for grammars are not the sum of the entries")
            if self.num_bytes > self.max_bytes:
                raise InvariantError("the grammars take more bytes than their limit")

    def _settle(self, grammar: Grammar, told: Future[Known]) -> None:
        """Count a new value unless it was dropped meanwhile, and evict the least recently used ones until all fit."""
        weight, most = self._weigh(grammar, told.result())
        with self._lock:
            if self._entries.get(grammar) is told:
                self._weights[grammar] = Weight(0, most)
                self._grow(grammar, weight)

    def _grow(self, grammar: Grammar, num_bytes: int) -> None:
        weight = self._weights[grammar]
        added = min(num_bytes, weight.most - weight.num_bytes)
        weight.num_bytes += added
        self.num_bytes += added
        while self.num_bytes > self.max_bytes:
            self._remove(next(each for each in self._entries if each in self._weights))

    def _remove(self, grammar: Grammar) -> None:
        del self._entries[grammar]
        if grammar in self._weights:
            self.num_bytes -= self._weights.pop(grammar).num_bytes
