"""AdapterLoader: loads adapters in threads while steps run, at a lower priority than theirs.

load ──► thread: read, check, pack ──► shelf of the runner      a row that needs it before that waits for the thread

A disk may never answer. So each load has a thread of its own, which nothing waits for when the process ends, and some
of them may run at once: a load that hangs holds up the others only when all turns are taken by such loads. A later load
of the same adapter waits for the end of an earlier one.
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
"""The niceness of a thread, as Linux counts it: a step is as slow as the processor that does other work too."""
LOADS_AT_ONCE: Final = 4
CLOSE_S: Final = 10.0
"""How long a loader that is closed waits for the loads that run."""


class _Load:
    """A load of an adapter. `before`: a load of the same adapter that has to end first."""

    def __init__(self, before: _Load | None) -> None:
        self.before = before
        self.is_wanted = True
        self.failure = ""
        self.ended = threading.Event()

    @property
    def state(self) -> str:
        """Whether it is loading or ready, or why it has failed."""
        return (self.failure or READY) if self.ended.is_set() else LOADING


class AdapterLoader:
    """Implements `AdapterLoading` over the shelf of a runner. `read`: returns the adapter in a folder of a digest."""

    def __init__(self, shelf: AdapterShelf, read: Callable[[str, str], Adapter]) -> None:
        self._shelf = shelf
        self._read = read
        self._there: set[str] = set()  # from the start
        self._loads: dict[str, _Load] = {}
        self._dropped: dict[str, _Load] = {}  # the last one of each adapter, which may still run
        self._turns = threading.Semaphore(LOADS_AT_ONCE)
        self._lock = threading.Lock()  # of `is_wanted`, and of what follows from it

    def load_now(self, adapters: Iterable[Adapter]) -> None:
        """Load adapters before there are steps. Mutates; raises `CheckpointError`."""
        for adapter in adapters:
            self._shelf.load_adapter(adapter)
            self._there.add(adapter.digest)

    def load(self, digest: str, folder: str) -> None:
        """Begin to load an adapter; nothing if it is there or on its way. One that failed is tried again. Mutates."""
        load = self._loads.get(digest)
        if digest in self._there or (load is not None and not load.failure):
            return
        load = self._loads[digest] = _Load(self._dropped.pop(digest, None))
        threading.Thread(target=self._run, args=(load, digest, folder), name="quire-adapters", daemon=True).start()

    def _run(self, load: _Load, digest: str, folder: str) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        if load.before is not None:
            load.before.ended.wait()
            load.before = None
        failure = ""
        with self._turns:
            try:
                if load.is_wanted:
                    self._shelf.load_adapter(self._read(folder, digest))
            except Exception as error:  # those who want the adapter are told
                failure = " ".join(f"{error}".split()) or type(error).__name__
        with self._lock:
            if not load.is_wanted:
                self._shelf.drop_adapter(digest)
            load.failure = failure
            load.ended.set()

    def has_adapter(self, digest: str) -> bool:
        """Return whether an adapter is in memory; waits for one that is on its way, not forever. Does not mutate."""
        if (load := self._loads.get(digest)) is not None:
            load.ended.wait(LOAD_S)
        return self._shelf.has_adapter(digest)

    def drop(self, digest: str) -> None:
        """Free the memory of an adapter that no request has, at the end of its load; does not wait. Mutates."""
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
        """Load nothing more. Mutates."""
        loads = [*self._loads.values(), *self._dropped.values()]
        with self._lock:
            for load in loads:
                load.is_wanted = load.ended.is_set()
        for load in loads:
            if not load.ended.wait(CLOSE_S):
                return
