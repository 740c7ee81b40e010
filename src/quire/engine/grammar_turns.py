"""GrammarTurns: grammars that nobody knows yet are checked beside the event loop, and tenants take turns at it.

    tenant a   g1 g2 g3 …  ──► the oldest ─┐
    tenant b   g4          ──► the oldest ─┴─► one thread ──► check          a grammar that is known: at once

A check may take half a second of a processor, and whoever sends two hundred of them must hold up nobody but himself.
So there is one thread for them all, apart from those in which long texts are encoded, and of each tenant one grammar
at a time stands before it. More threads would bring nothing: what takes long happens in one process
(`quire.compute.grammar`), and the rest of the machine has steps to compute.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar, GrammarChecker


class GrammarTurns:
    """Checks grammars for many callers; `grammars` None: there can be none. Belongs to one event loop at a time."""

    def __init__(self, grammars: GrammarChecker | None) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "quire-grammar-check")  # it starts with the first grammar
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of tenants who wait

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` unless texts can be held to it. May take a while; from any thread."""
        if self._grammars is None:
            raise InvalidRequestError("grammar", grammar, "none: this engine was made without a tokenizer")
        self._grammars.check(grammar)

    async def check_beside(self, grammar: Grammar, tenant: str) -> None:
        """Raise as `check` does, and let the event loop go on meanwhile."""
        if self._grammars is None or self._grammars.knows(grammar):
            self.check(grammar)
            return
        turn = self._turns.get(tenant)
        if turn is None:
            turn = self._turns[tenant] = asyncio.Lock()
        async with turn:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.check, grammar)

    def close(self) -> None:
        """Let go of the thread and of what checking has started. May be called twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()
