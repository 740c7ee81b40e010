"""BlockTransfers: the step's thread waits neither for a disk nor for a device that is still copying a block."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from quire.compute.worker.store.folder import StoreFolder
from quire.compute.worker.store.slot_file import SlotFile, StoreForm
from quire.compute.worker.store.transfers import BlockTransfers
from quire.core.errors import ExecutorLostError
from quire.core.kept_block import KeptBlock
from quire.core.request import CacheScope
from quire.core.transfers import BlockLoad, BlockStore, TransferOutcome, Transfers

BLOCK_SIZE, BLOCK_BYTES = 4, 64


class SlowMemory:
    """KV memory of a device whose copies arrive when `arrived` is set; block 9 fails."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.written: dict[int, bytes] = {}

    def read_block(self, block: int, group: int, buffer: memoryview) -> Callable[[], None]:
        def finish() -> None:
            assert self.arrived.wait(60)
            if block == 9:
                raise ExecutorLostError("the device has failed")
            buffer[:] = bytes([block]) * BLOCK_BYTES

        return finish

    def write_block(self, block: int, group: int, buffer: memoryview) -> None:
        self.written[block] = bytes(buffer)


def store(ticket: int, block: int) -> BlockStore:
    kept = KeptBlock(ticket, ticket + 1, 0, 0, bytes([block]) * 4 * BLOCK_SIZE, CacheScope("ada", "salt"))
    return BlockStore(ticket, block, kept)


@pytest.fixture
def memory() -> SlowMemory:
    return SlowMemory()


@pytest.fixture
def transfers(memory: SlowMemory, tmp_path: Path) -> Iterator[BlockTransfers]:
    form = StoreForm({"model": "m"}, BLOCK_SIZE, BLOCK_BYTES)
    file = SlotFile(StoreFolder.open(tmp_path, "f"), form, num_slots=8, calls=None)
    opened = BlockTransfers(file, memory)  # type: ignore[arg-type]
    yield opened
    memory.arrived.set()
    opened.close()


def outcome_of(transfers: BlockTransfers, count: int) -> TransferOutcome:
    """Collect until this many tickets have ended."""
    done, undone = array("i"), dict[int, str]()
    until = time.monotonic() + 60
    while len(done) + len(undone) < count:
        assert time.monotonic() < until
        found = transfers.collect()
        done.extend(found.done)
        undone |= found.undone
        time.sleep(0.001)
    return TransferOutcome(done, undone)


def test_a_store_waits_for_the_device_in_the_thread_of_the_disk(transfers: BlockTransfers, memory: SlowMemory) -> None:
    transfers.apply(Transfers(stores=(store(0, 5), store(1, 6))))
    assert not transfers.collect(), "the device is still copying, and nobody has waited for it"
    memory.arrived.set()
    assert sorted(outcome_of(transfers, 2).done) == [0, 1]
    transfers.apply(Transfers(loads=(BlockLoad(2, 0, 3, 0), BlockLoad(3, 1, 4, 0)), patience_us=60_000_000))
    assert sorted(outcome_of(transfers, 2).done) == [2, 3]
    assert memory.written == {3: bytes([5]) * BLOCK_BYTES, 4: bytes([6]) * BLOCK_BYTES}


def test_a_block_that_cannot_be_read_is_not_stored_and_the_next_one_is(
    transfers: BlockTransfers, memory: SlowMemory
) -> None:
    memory.arrived.set()
    transfers.apply(Transfers(stores=(store(0, 9), store(1, 6))))
    found = outcome_of(transfers, 2)
    assert (found.done.tolist(), found.undone) == ([1], {0: "failed"})


def test_a_load_for_which_there_is_no_memory_fails_and_the_next_one_does_not(
    transfers: BlockTransfers, memory: SlowMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.arrived.set()
    transfers.apply(Transfers(stores=(store(0, 5),)))
    outcome_of(transfers, 1)
    monkeypatch.setattr(SlotFile, "read", Mock(side_effect=MemoryError))
    transfers.apply(Transfers(loads=(BlockLoad(1, 0, 3, 0),), patience_us=2_000_000))
    assert outcome_of(transfers, 1).undone == {1: "failed"}
    monkeypatch.undo()
    transfers.apply(Transfers(loads=(BlockLoad(2, 0, 3, 0),), patience_us=2_000_000))
    assert outcome_of(transfers, 1).done.tolist() == [2]
