"""AdapterSet: a model's adapters by name, and the ones that the engine has in memory.

    load ──► check the files (in one thread) ──► a name
    request ──► hold ──► in memory? ──► held until `release`
                            └── not yet: room? ──► LoadAdapter ──► the engine reports it as ready
                                            └── DropAdapter: the least recently used one that no request holds

Requests for adapters in memory never wait here. The others wait for room, in order, and then for their adapter, up to
`LOAD_S`: the engine loads it in a thread while steps run. An adapter that requests hold stays in memory until they have
ended, even if its name was removed. A restarted engine gets the same adapters, so a text can continue there.

Files are read one adapter at a time, in one thread: a disk that never answers costs no second one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from quire.core.adapters import LOAD_S, LOADING, READY, AdapterFacts
from quire.core.byte_sizes import format_bytes
from quire.core.config import ADAPTER_NAME
from quire.core.errors import ExecutionError, InvalidRequestError, shortened
from quire.engine.commands import AnyCommand, DropAdapter, LoadAdapter
from quire.engine.records.stats import EngineStats
from quire.engine.text.tenant_pool import TenantPool

ASK_AGAIN_S: Final = 0.02
MAX_WAITING: Final = 8
"""The most adapters that wait until the files of another are read."""

Send = Callable[[AnyCommand], None]
Stats = Callable[[], EngineStats]


class AdapterSet:
    """The adapters of a model. `check` reads an adapter's files; `budget`: the bytes of adapters in memory at once.

    The engine starts with the first `named` adapters that fit into the budget together.
    """

    def __init__(self, named: Mapping[str, AdapterFacts], check: Callable[[str], AdapterFacts], budget: int) -> None:
        self._by_name = dict(named)
        self._check = check
        self._budget = budget
        self._at_start = first_that_fit(named.values(), budget)
        self._loaded = {facts.digest: facts for facts in self._at_start}  # least recently used first
        self._holds: Counter[str] = Counter()  # the number of requests that hold each; those are all in memory
        self._coming: Counter[str] = Counter()  # the number of requests that wait for each
        self._awaited: dict[str, AdapterFacts] = {}
        self._dropped: set[str] = set()  # dropped and not loaded again
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock, self._released = asyncio.Lock(), asyncio.Event()  # of that loop
        self._disk = TenantPool("quire-adapter-check", num_threads=1, max_waiting=MAX_WAITING)

    def close(self) -> None:
        """End the thread that reads files. May be called twice."""
        self._disk.close()

    @property
    def by_name(self) -> Mapping[str, AdapterFacts]:
        """The adapters that requests can use."""
        return self._by_name

    def digest_of(self, name: str) -> str:
        """Return the digest of an adapter; raises `InvalidRequestError` if no adapter has this name."""
        if name not in self._by_name:
            allowed = f"one of {', '.join(self._by_name)}" if self._by_name else "none: no adapter is loaded"
            raise InvalidRequestError("adapter", name, allowed)
        return self._by_name[name].digest

    # ---- names ------------------------------------------------------------------------------------------------------

    async def load(self, name: str, find: Callable[[], str], send: Send, stats: Stats) -> AdapterFacts:
        """Load an adapter under a name, while steps run. `find` returns its folder, and may read the disk. Mutates.

        Raises `InvalidRequestError` or `CheckpointError` for an unsuitable adapter, `ExecutionError` if loading fails,
        `TooManyJobsError` if many others wait for the disk.
        """
        try:
            async with asyncio.timeout(LOAD_S):
                facts = await self._disk.run("", lambda: self._check(find()))
        except TimeoutError as error:
            raise ExecutionError(f"the adapter {shortened(name)!r} could not be read within {LOAD_S:.0f} s") from error
        self._require_possible(name, facts)
        await self.hold(facts, send, stats)
        try:
            self._require_possible(name, facts)  # again: another load may have taken the name meanwhile
            self._by_name[name] = facts
        finally:
            self.release(facts, send)
        return facts

    def load_now(self, name: str, folder: str, send: Send, stats: Stats) -> AdapterFacts:
        """Load as `load` does, but block the caller. Mutates."""
        facts = self._check(folder)
        self._require_possible(name, facts)
        self.hold_now(facts, send, stats)
        self._by_name[name] = facts
        self.release(facts, send)
        return facts

    def unload(self, name: str, send: Send) -> None:
        """Remove a name; requests that use the adapter go on. Raises as `digest_of`. Mutates."""
        digest = self.digest_of(name)
        del self._by_name[name]
        self._drop_unused(digest, send)

    def restore(self, send: Send) -> None:
        """Make a restarted engine load the adapters that its predecessor had. Does not mutate."""
        at_start = {facts.digest for facts in self._at_start}
        for digest in at_start - self._loaded.keys():
            send(DropAdapter(digest))
        for digest, facts in self._loaded.items():
            if digest not in at_start:
                send(LoadAdapter(digest, facts.folder))

    def facts_of(self, digest: str) -> AdapterFacts | None:
        """Return the facts of an adapter that has a name or is in memory, else None."""
        return next((facts for facts in self._by_name.values() if facts.digest == digest), self._loaded.get(digest))

    # ---- memory -----------------------------------------------------------------------------------------------------

    async def hold(self, facts: AdapterFacts, send: Send, stats: Stats) -> None:
        """Wait until the engine has an adapter, and hold it there until `release`. Mutates; raises as `load`.

        A request holds its adapter only once there is room for it: a waiting request takes no room from others.
        """
        if not self._touch(facts.digest):
            if self._loop is not asyncio.get_running_loop():  # a model can be used in several loops, one after another
                self._loop, self._lock, self._released = asyncio.get_running_loop(), asyncio.Lock(), asyncio.Event()
            async with self._lock:
                while not self._make_room(facts, send):
                    self._released.clear()
                    await self._released.wait()
                self._await(facts)
            began_s = time.monotonic()
            try:
                while not self._is_ready(facts, send, stats, began_s):
                    await asyncio.sleep(ASK_AGAIN_S)
                self._holds[facts.digest] += 1  # before another request makes room
            finally:
                self._await(facts, -1)
            return
        self._holds[facts.digest] += 1

    def hold_now(self, facts: AdapterFacts, send: Send, stats: Stats) -> None:
        """Hold as `hold` does, but block the caller; raises `ExecutionError` if there is no room. Mutates."""
        self._holds[facts.digest] += 1
        if self._touch(facts.digest):
            return
        try:
            if not self._make_room(facts, send):
                raise ExecutionError("the adapters of running requests leave no room in adapter_memory")
            began_s = time.monotonic()
            while not self._is_ready(facts, send, stats, began_s):
                time.sleep(ASK_AGAIN_S / 10)
        except BaseException:
            self.release(facts, send)
            raise

    def release(self, facts: AdapterFacts, send: Send) -> None:
        """Release an adapter, because a request that held it has ended. Mutates."""
        self._holds[facts.digest] -= 1
        if not self._holds[facts.digest]:
            del self._holds[facts.digest]
            self._drop_unused(facts.digest, send)
            self._released.set()

    def _await(self, facts: AdapterFacts, change: int = 1) -> None:
        """Add `change` to the requests that wait for an adapter for which there is room. Mutates."""
        self._coming[facts.digest] += change
        self._awaited[facts.digest] = facts
        if not self._coming[facts.digest]:
            del self._coming[facts.digest], self._awaited[facts.digest]
            self._released.set()

    def _touch(self, digest: str) -> bool:
        """Return whether an adapter is in memory, and mark it as most recently used. Mutates."""
        facts = self._loaded.pop(digest, None)
        if facts is not None:
            self._loaded[digest] = facts
        return facts is not None

    def _make_room(self, facts: AdapterFacts, send: Send) -> bool:
        """Drop idle adapters until another one fits; return False if those in use take too much. Mutates."""
        if self._touch(facts.digest):
            return True
        while _num_bytes([*self._loaded.values(), *self._awaited.values(), facts]) > self._budget:
            used = self._holds.keys() | self._coming.keys()
            idle = next((digest for digest in self._loaded if digest not in used), None)
            if idle is None:
                return False
            self._drop(idle, send)
        return True

    def _drop_unused(self, digest: str, send: Send) -> None:
        """Drop an adapter that has no name and that no request holds. Mutates."""
        if digest not in self._holds and all(facts.digest != digest for facts in self._by_name.values()):
            self._drop(digest, send)

    def _drop(self, digest: str, send: Send) -> None:
        if self._loaded.pop(digest, None) is not None:
            self._dropped.add(digest)
            send(DropAdapter(digest))

    def _require_possible(self, name: str, facts: AdapterFacts) -> None:
        """Raise unless an adapter fits the budget and can have this name. Does not mutate."""
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidRequestError("name", name, "letters, digits and ._/:-, at most 128")
        if name in self._by_name and self._by_name[name].digest != facts.digest:
            raise InvalidRequestError("name", name, "a name that no other adapter has; unload that adapter first")
        if facts.num_bytes > self._budget:
            allowed = f"at most {format_bytes(self._budget)} (adapter_memory)"
            raise InvalidRequestError("memory of the adapter", format_bytes(facts.num_bytes), allowed)

    def _is_ready(self, facts: AdapterFacts, send: Send, stats: Stats, began_s: float) -> bool:
        """Return whether the engine has an adapter; if not, send a command, for which an idle engine reports again."""
        digest, state = facts.digest, stats().adapters.get(facts.digest)
        if digest in self._dropped and state is None:
            self._dropped.discard(digest)
        if digest in self._loaded or (state == READY and digest not in self._dropped):
            self._loaded[digest] = facts
            return True
        is_late = time.monotonic() > began_s + LOAD_S
        if is_late or (state not in (None, LOADING) and digest not in self._dropped):
            self._dropped.add(digest)
            send(DropAdapter(digest))
            raise ExecutionError(f"the adapter in {Path(facts.folder).name} could not be loaded: {state}")
        # The state of a dropped adapter is out of date until the engine has dropped it.
        send(DropAdapter(digest) if digest in self._dropped else LoadAdapter(digest, facts.folder))
        return False


def first_that_fit(adapters: Iterable[AdapterFacts], budget: int) -> list[AdapterFacts]:
    """Return the first adapters that fit into a budget together; equal files count once. Pure."""
    found: dict[str, AdapterFacts] = {}
    for facts in adapters:
        if _num_bytes([*found.values(), facts]) > budget:
            break
        found.setdefault(facts.digest, facts)
    return list(found.values())


def _num_bytes(adapters: Iterable[AdapterFacts]) -> int:
    """Return the bytes of adapters; equal files count once."""
    return sum({facts.digest: facts.num_bytes for facts in adapters}.values())
