"""AdapterSet: the adapters of a model by name, as its door knows them, and how more of them are loaded.

    load ──► check the files (in a thread) ──► room? ──► LoadAdapter ──► the engine says that it is ready ──► a name
    unload ──► no name ──► DropAdapter: the engine frees it once no request has it

A name is there only while the engine has the adapter. An engine that was started again gets the same ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from quire.core.adapters import LOADING, READY, AdapterFacts
from quire.core.byte_sizes import format_bytes
from quire.core.config import ADAPTER_NAME
from quire.core.errors import ExecutionError, InvalidRequestError
from quire.engine.commands import AnyCommand, DropAdapter, LoadAdapter
from quire.engine.records.stats import EngineStats

ASK_AGAIN_S: Final = 0.05
LOAD_S: Final = 300.0

Send = Callable[[AnyCommand], None]
Stats = Callable[[], EngineStats]


class AdapterSet:
    """The names of adapters. `check` reads the files of one; `more_bytes`: for those that are loaded later."""

    def __init__(
        self, named: Mapping[str, AdapterFacts], check: Callable[[str], AdapterFacts], more_bytes: int
    ) -> None:
        self._at_start = {facts.digest for facts in named.values()}
        self._by_name = dict(named)
        self._check = check
        self._budget = _num_bytes(named.values()) + more_bytes
        self._lock: asyncio.Lock | None = None

    @property
    def by_name(self) -> Mapping[str, AdapterFacts]:
        """The adapters that requests may ask for."""
        return self._by_name

    def digest_of(self, name: str) -> str:
        """Return the digest of an adapter; raises `InvalidRequestError` if there is none of that name."""
        if name not in self._by_name:
            allowed = f"one of {', '.join(self._by_name)}" if self._by_name else "none: no adapter is loaded"
            raise InvalidRequestError("adapter", name, allowed)
        return self._by_name[name].digest

    async def load(self, name: str, folder: str, send: Send, stats: Stats) -> AdapterFacts:
        """Load the adapter in a folder while steps run, and give it a name. Mutates.

        Raises `InvalidRequestError` or `CheckpointError` for one that cannot be, `ExecutionError` if loading fails.
        """
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:  # so that two do not take the same room
            facts = await asyncio.to_thread(self._check, folder)
            self._require_room(name, facts)
            began_s = time.monotonic()
            while not self._is_ready(facts, send, stats, began_s):
                await asyncio.sleep(ASK_AGAIN_S)
            self._by_name[name] = facts
            return facts

    def load_now(self, name: str, folder: str, send: Send, stats: Stats) -> AdapterFacts:
        """The same, while the caller waits. Mutates."""
        facts = self._check(folder)
        self._require_room(name, facts)
        began_s = time.monotonic()
        while not self._is_ready(facts, send, stats, began_s):
            time.sleep(ASK_AGAIN_S / 10)
        self._by_name[name] = facts
        return facts

    def unload(self, name: str, send: Send) -> None:
        """Take a name away; requests that have the adapter go on. Raises as `digest_of`. Mutates."""
        digest = self.digest_of(name)
        del self._by_name[name]
        if all(facts.digest != digest for facts in self._by_name.values()):
            send(DropAdapter(digest))

    def restore(self, send: Send) -> None:
        """Have an engine that was started again load what the one before had. Does not mutate."""
        known = {facts.digest: facts for facts in self._by_name.values()}
        for digest in self._at_start - known.keys():
            send(DropAdapter(digest))
        for digest in known.keys() - self._at_start:
            send(LoadAdapter(digest, known[digest].folder))

    def _require_room(self, name: str, facts: AdapterFacts) -> None:
        """Raise unless an adapter may be loaded under a name. Does not mutate."""
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidRequestError("name", name, "letters, digits and ._/:-, at most 128")
        if name in self._by_name and self._by_name[name].digest != facts.digest:
            raise InvalidRequestError("name", name, "one that no other adapter has; unload that first")
        needed = _num_bytes([*self._by_name.values(), facts])
        if needed > self._budget:
            left = format_bytes(self._budget - _num_bytes(self._by_name.values()))
            allowed = f"at most {left}, which is left of adapter_memory; unload others, or raise it"
            raise InvalidRequestError("memory of the adapter", format_bytes(facts.num_bytes), allowed)

    @staticmethod
    def _is_ready(facts: AdapterFacts, send: Send, stats: Stats, began_s: float) -> bool:
        """Ask the engine for an adapter, and return whether it has it. An idle engine tells nothing unless asked."""
        state = stats().adapters.get(facts.digest, LOADING)
        if state == READY:
            return True
        if state != LOADING or time.monotonic() > began_s + LOAD_S:
            send(DropAdapter(facts.digest))
            raise ExecutionError(f"the adapter in {Path(facts.folder).name} is not loaded: {state}")
        send(LoadAdapter(facts.digest, facts.folder))
        return False


def _num_bytes(adapters: Iterable[AdapterFacts]) -> int:
    """Return the bytes of adapters, of equal files once."""
    return sum({facts.digest: facts.num_bytes for facts in adapters}.values())
