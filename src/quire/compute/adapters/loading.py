"""AdapterLoader: loads adapters in a thread of its own while steps run, at a lower priority than theirs.

load ──► thread: read, check, pack ──► shelf of the runner      a row that needs it before that waits for the thread
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from quire.compute.adapters.folder import Adapter
from quire.compute.backend import AdapterShelf
from quire.core.adapters import LOADING, READY

NICE: Final = 10
"""The niceness of the thread, as Linux counts it: a step is as slow as the processor that does other work too."""


class AdapterLoader:
    """Implements `AdapterLoading` over the shelf of a runner. `read`: returns the adapter in a folder of a digest."""

    def __init__(self, shelf: AdapterShelf, read: Callable[[str, str], Adapter]) -> None:
        self._shelf = shelf
        self._read = read
        self._there: set[str] = set()  # from the start
        self._loads: dict[str, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def load_now(self, adapters: Iterable[Adapter]) -> None:
        """Load adapters before there are steps. Mutates; raises `CheckpointError`."""
        for adapter in adapters:
            self._shelf.load_adapter(adapter)
            self._there.add(adapter.digest)

    def load(self, digest: str, folder: str) -> None:
        """Begin to load an adapter; nothing if it is there or on its way. One that failed is tried again. Mutates."""
        load = self._loads.get(digest)
        if digest in self._there or (load is not None and not (load.done() and _failure_of(load))):
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "quire-adapters")
        self._loads[digest] = self._pool.submit(self._load, digest, folder)

    def _load(self, digest: str, folder: str) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        self._shelf.load_adapter(self._read(folder, digest))

    def has_adapter(self, digest: str) -> bool:
        """Return whether an adapter is in memory; waits for one that is on its way. Does not mutate."""
        if (load := self._loads.get(digest)) is not None:
            _failure_of(load)
        return self._shelf.has_adapter(digest)

    def drop(self, digest: str) -> None:
        """Free the memory of an adapter that no request has, at the end of its load; does not wait. Mutates."""
        load = self._loads.pop(digest, None)
        self._there.discard(digest)
        if load is None:
            self._shelf.drop_adapter(digest)
        else:
            # A disk may never answer. A later load of the same adapter comes after this one, in the same thread.
            load.cancel()
            load.add_done_callback(lambda _: self._shelf.drop_adapter(digest))

    def states(self) -> Mapping[str, str]:
        """Return the state of each adapter by digest. Does not mutate."""
        return dict.fromkeys(self._there, READY) | {
            digest: (_failure_of(load) or READY) if load.done() else LOADING for digest, load in self._loads.items()
        }

    def close(self) -> None:
        """Load nothing more. Mutates."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _failure_of(load: Future[None]) -> str:
    """Return why a load failed, empty if it did not; waits for its end."""
    try:
        error = load.exception()
    except CancelledError:
        return "the engine is closed"
    return "" if error is None else " ".join(f"{error}".split()) or type(error).__name__
