"""DiskTier and its parts: which blocks go to the disk and come back, and what is left there."""

from __future__ import annotations

from array import array

from quire.core.transfers import TransferOutcome, Transfers
from support.memory import ByHand


def end_stores(memory: ByHand) -> Transfers:
    """Return the transfers of a plan, whose stores are done."""
    transfers = memory.changes().transfers
    memory.manager.note_step(1, 1, TransferOutcome(array("i", [store.ticket for store in transfers.stores])))
    memory.manager.check()
    return transfers


def test_a_cleared_disk_has_no_record_in_the_slots_of_evicted_blocks_either() -> None:
    memory = ByHand(windows=(None, None), num_blocks=16, num_disk_slots=5, disk_write="always")
    for first in (0, 100):
        memory.leave_cached(range(first, first + (4 if first else 8)))
        end_stores(memory)
    assert memory.manager.disk.counts["evicted"] == 1
    assert len(memory.manager.disk.slots.free_slots) == 1
    memory.manager.reset()
    assert end_stores(memory).voids.tolist() == [0, 1, 2, 3, 4]
