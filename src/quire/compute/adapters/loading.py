"""AdapterLoader: loads adapters in threads while steps run, at a lower priority than the steps.

load ──► thread: read, check, pack ──► shelf of the runner      a row that needs it earlier waits for the thread

A disk may never respond. So each adapter that loads has its own thread, for which nothing waits when the process ends,
and up to `LOADS_AT_ONCE` loads run at once: hanging loads delay others only if they take all turns. A later load of the
same adapter follows an earlier one in the same thread: however often it is repeated, a hang holds one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from quire.compute.adapters.folder import Adapter
from quire.compute.backend import AdapterShelf
from quire.core.adapters import LOAD_S, LOADING, READY

NICE: Final = 10
"""The niceness of a loading thread on Linux: a step is as slow as its slowest core, which must do no other work."""
LOADS_AT_ONCE: Final = 4
CLOSE_S: Final = 10.0
"""How long `close` waits for running loads."""


class _Load:
    """A load of an adapter. `after`: a load of the same adapter that follows it."""

    def __init__(self, digest: str, folder: str) -> None:
        self.digest = digest
        self.folder = folder
        self.after: _Load | None = None
        self.is_wanted = True
        self.failure = ""
        self.ended = threading.Event()

    @property
    def state(self) -> str:
        """Loading, ready, or the reason of the failure."""
        return (self.failure or READY) if self.ended.is_set() else LOADING


class AdapterLoader:
    """Implements `AdapterLoading` over the shelf of a runner. `read` returns an adapter by digest and folder."""

    def __init__(self, shelf: AdapterShelf, read: Callable[[str, str], Adapter]) -> None:
        self._shelf = shelf
        self._read = read
        self._there: set[str] = set()  # from the start
        self._loads: dict[str, _Load] = {}
        self._dropped: dict[str, _Load] = {}  # the last one of each adapter, which may still run
        self._turns = threading.Semaphore(LOADS_AT_ONCE)
        self._lock = threading.Lock()  # guards `is_wanted`, `after` and their consequences

    def load_now(self, adapters: Iterable[Adapter]) -> None:
        """Load adapters before the first step. Mutates; raises `CheckpointError`."""
        for adapter in adapters:
            self._shelf.load_adapter(adapter)
            self._there.add(adapter.digest)

    def load(self, digest: str, folder: str) -> None:
        """Begin to load an adapter, unless it is loaded or loading. A failed load is repeated. Mutates."""
        load = self._loads.get(digest)
        if digest in self._there or (load is not None and not load.failure):
            return
        load = self._loads[digest] = _Load(digest, folder)
        before = self._dropped.pop(digest, None)
        with self._lock:
            if before is not None and not before.ended.is_set():
                before.after = load
                return
        threading.Thread(target=self._run, args=(load,), name="quire-adapters", daemon=True).start()

    def _run(self, load: _Load | None) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while load is not None:
            failure = self._tried(load)
            with self._lock:
                if not load.is_wanted:
                    self._shelf.drop_adapter(load.digest)
                load.failure = failure
                load.ended.set()
                load = load.after

    def _tried(self, load: _Load) -> str:
        """Load an adapter, if it is still wanted; return the reason of a failure. Mutates."""
        with self._turns:
            try:
                if load.is_wanted:
                    self._shelf.load_adapter(self._read(load.folder, load.digest))
            except Exception as error:  # reported to the requests that need the adapter
                return " ".join(f"{error}".split()) or type(error).__name__
        return ""

    def has_adapter(self, digest: str) -> bool:
        """Return whether an adapter is in memory; waits, not forever, for a running load. Does not mutate."""
        if (load := self._loads.get(digest)) is not None:
            load.ended.wait(LOAD_S)
        return self._shelf.has_adapter(digest)

    def drop(self, digest: str) -> None:
        """Free the memory of an adapter that no request uses, after its load if one runs; does not wait. Mutates."""
        load = self._loads.pop(digest, None)
        self._there.discard(digest)
        with self._lock:
            if load is None or load.ended.is_set():
                self._shelf.drop_adapter(digest)
            else:
                load.is_wanted = False
                self._dropped[digest] = load

    def states(self) -> Mapping[str, str]:
        """Return the state of each adapter by digest. Does not mutate."""
        return dict.fromkeys(self._there, READY) | {digest: load.state for digest, load in self._loads.items()}

    def close(self) -> None:
        """Cancel the loads, and wait for those that run, not forever. Mutates."""
        loads = [*self._loads.values(), *self._dropped.values()]
        with self._lock:
            for load in loads:
                load.is_wanted = load.ended.is_set()
        for load in loads:
            if not load.ended.wait(CLOSE_S):
                return
