"""BlockTransfers: moves blocks between the KV memory and the store; no step waits for the disk.

    step's thread    store: block → buffer ──┐            ┌── buffer → block: a load that is done
                                             ▼            │
    disk's thread                      write to a slot    read a slot, compare its checksum

The disk's thread never touches KV memory; it only waits until a device has filled the buffer of a store. So a read that
hangs can be abandoned at once: its block is free, and the buffer is dropped when the read ends, if it ever does. The
number of load buffers is bounded: the thread continues to read when the step's thread has taken some. While steps
compute the bound is low, because reading and copying take time from those steps. Plans bound the stores; blocks of a
bundle are read only when they are written. Loads have priority over stores, because a request waits for them.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from quire.compute.worker.kv_memory import FinishRead, KVMemory
from quire.compute.worker.store.slot_file import DamagedBlockError, FullStoreError, SlotFile
from quire.compute.worker.store.spool import read_spooled
from quire.core.errors import ExecutionError
from quire.core.transfers import NO_OUTCOME, BlockLoad, BlockStore, TransferOutcome, Transfers

LOAD_BYTES: Final = 32 << 20
"""The most bytes that are read but not yet taken by a step, while a plan waits for them."""
FEW_LOAD_BYTES: Final = 8 << 20
"""The same while steps compute."""
WAIT_S: Final = 0.02
"""The longest time that a plan without work waits, so that new requests are seen."""
CLOSE_S: Final = 5.0
"""How long a closing store continues to write pending blocks."""

logger = logging.getLogger("quire.store")


class _Loaded(NamedTuple):
    buffer: bytearray
    reason: str
    duration_us: int


@dataclass(slots=True)
class _Load:
    load: BlockLoad
    deadline_s: float


class _Store(NamedTuple):
    store: BlockStore
    read: Callable[[], bytes | bytearray]  # waits for the bytes


@dataclass(slots=True)
class _Shared:
    """The state that both threads share, under one lock."""

    loads: deque[BlockLoad] = field(default_factory=deque)
    writes: deque[int | _Store] = field(default_factory=deque)  # a slot to void, a store
    loaded: dict[int, _Loaded] = field(default_factory=dict)
    stored: dict[int, str] = field(default_factory=dict)  # a reason, or empty
    is_closing: bool = False


class BlockTransfers:
    """Carries out the plans' transfers to and from the store; belongs to the step's thread."""

    def __init__(self, store: SlotFile, memory: KVMemory) -> None:
        self._store = store
        self._memory = memory
        self._pending: dict[int, _Load] = {}  # loads that no result has reported
        self._shared = _Shared()
        self._changed = threading.Condition()
        self._told: set[str] = set()
        self._is_waited_for = False
        self._thread = threading.Thread(target=self._run, name="quire-store", daemon=True)
        self._thread.start()

    # ---- the step's thread ------------------------------------------------------------------------------------

    def apply(self, transfers: Transfers) -> None:
        """Start to copy the blocks to store, and hand all transfers to the disk's thread. Mutates."""
        stores = [self._begun(each) for each in transfers.stores]
        deadline_s = time.perf_counter() + transfers.patience_us / 1e6
        with self._changed:
            for ticket in transfers.drops:
                self._pending.pop(ticket, None)
                self._shared.loaded.pop(ticket, None)
            self._shared.loads = deque(each for each in self._shared.loads if each.ticket in self._pending)
            self._pending |= {load.ticket: _Load(load, deadline_s) for load in transfers.loads}
            self._shared.loads.extend(transfers.loads)
            self._shared.writes.extend(transfers.voids)
            self._shared.writes.extend(stores)
            self._changed.notify_all()

    def _begun(self, store: BlockStore) -> _Store:
        if store.bundle:
            return _Store(store, partial(read_spooled, store, self._store.block_bytes))
        buffer = bytearray(self._store.block_bytes)
        finish = self._memory.read_block(store.block, store.kept.group, memoryview(buffer))
        return _Store(store, partial(_filled, buffer, finish))

    def wait(self) -> None:
        """Wait until all loads are done, or the buffers are full, or a moment has passed. Does not mutate."""
        with self._changed:
            self._is_waited_for = True
            self._changed.notify_all()
            self._changed.wait_for(self._may_collect, WAIT_S)
            self._is_waited_for = False

    def _may_collect(self) -> bool:
        return len(self._shared.loaded) >= min(len(self._pending), self._max_loaded)

    @property
    def _max_loaded(self) -> int:
        most = LOAD_BYTES if self._is_waited_for else FEW_LOAD_BYTES
        return max(1, most // self._store.block_bytes)

    def collect(self) -> TransferOutcome:
        """Put the loaded blocks in their places, and return the tickets that ended. Mutates the KV memory."""
        with self._changed:
            loaded, self._shared.loaded = self._shared.loaded, {}
            stored, self._shared.stored = self._shared.stored, {}
            if loaded:
                self._changed.notify_all()
        if not (loaded or stored or self._pending):
            return NO_OUTCOME
        done = array("i", [ticket for ticket, reason in stored.items() if not reason])
        undone = {ticket: reason for ticket, reason in stored.items() if reason}
        for ticket, each in loaded.items():
            pending = self._pending.pop(ticket, None)
            if pending is None:
                continue
            if each.reason:
                undone[ticket] = each.reason
            else:
                self._memory.write_block(pending.load.block, pending.load.group, memoryview(each.buffer))
                done.append(ticket)
        now = time.perf_counter()
        for ticket in [ticket for ticket, each in self._pending.items() if each.deadline_s < now]:
            del self._pending[ticket]
            undone[ticket] = "late"
        self._tell(undone)
        return TransferOutcome(done, undone, sum(each.duration_us for each in loaded.values() if not each.reason))

    def _tell(self, undone: dict[int, str]) -> None:
        for reason in set(undone.values()) - self._told:
            self._told.add(reason)
            logger.warning("the disk cache misses blocks: %s (%s)", _NOTICES[reason], self._store.path)

    def close(self) -> None:
        """Write the pending blocks, for some seconds at most, and close the store. Mutates; may be called twice."""
        with self._changed:
            self._shared.is_closing = True
            self._shared.loads.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the disk cache does not respond; unwritten blocks are lost (%s)", self._store.path)

    # ---- the disk's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                loads, writes = self._shared.loads, self._shared.writes
                load = loads.popleft() if loads and len(self._shared.loaded) < self._max_loaded else None
                write = writes.popleft() if load is None and writes else None
                if load is None and write is None:
                    break
            if load is not None:
                result = self._read(load)
                with self._changed:
                    if load.ticket in self._pending:
                        self._shared.loaded[load.ticket] = result
                    self._changed.notify_all()
            elif write is not None:
                self._write(write)
        self._store.close()

    def _has_work(self) -> bool:
        shared = self._shared
        can_load = bool(shared.loads) and len(shared.loaded) < self._max_loaded
        return can_load or bool(shared.writes) or shared.is_closing

    def _read(self, load: BlockLoad) -> _Loaded:
        buffer, began_s = bytearray(), time.perf_counter()
        reason = ""
        try:
            buffer = bytearray(self._store.block_bytes)
            self._store.read(load.slot, memoryview(buffer))
        except DamagedBlockError:
            reason = "damaged"
        except (OSError, MemoryError):
            reason = "failed"
        return _Loaded(buffer, reason, round((time.perf_counter() - began_s) * 1e6))

    def _write(self, write: int | _Store) -> None:
        reason = ""
        try:
            if isinstance(write, int):
                self._store.void(write)
            else:
                self._store.write(write.store.kept, memoryview(write.read()))
        except FullStoreError:
            reason = "full"
        except DamagedBlockError:
            reason = "damaged"
        except (OSError, ExecutionError, MemoryError):
            reason = "failed"
        if not isinstance(write, int):
            with self._changed:
                self._shared.stored[write.store.ticket] = reason


def _filled(buffer: bytearray, finish: FinishRead) -> bytearray:
    finish()
    return buffer


_NOTICES: Final = {
    "damaged": "the bytes on disk are not those that were written",
    "failed": "the disk reports errors",
    "full": "the disk is full, and the cache stays as large as it is",
    "late": "the disk is slower than computing",
}
