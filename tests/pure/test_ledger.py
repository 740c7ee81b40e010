"""The ledger: numbers that add up."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from quire.core.errors import InvariantError
from quire.memory.ledger import MemoryLedger
from support.memory import ByHand

LEDGER = MemoryLedger(
    block_size=4,
    bytes_per_block=256,
    num_blocks=10,
    used_blocks=5,
    cached_blocks=3,
    free_blocks=2,
    stored_slots=14,
    reserved_slots=1,
    fragmented_slots=5,
    blocks_saved_by_sharing=2,
    host_blocks=8,
    used_host_blocks=4,
    queried_tokens=40,
    hit_tokens=10,
    resumed_queried_tokens=0,
    resumed_hit_tokens=0,
    evictions=0,
    merged_blocks=0,
    copied_blocks=0,
)


def test_blocks_are_bytes() -> None:
    assert (LEDGER.used_bytes, LEDGER.cached_bytes, LEDGER.free_bytes) == (1280, 768, 512)


def test_shares_are_of_what_was_looked_up_and_of_what_is_used() -> None:
    assert (LEDGER.hit_rate, LEDGER.fragmentation) == (0.25, 0.25)


def test_shares_of_nothing_are_nothing() -> None:
    empty = replace(LEDGER, used_blocks=0, free_blocks=7, stored_slots=0, reserved_slots=0, fragmented_slots=0)
    empty = replace(empty, queried_tokens=0, hit_tokens=0)
    empty.check()
    assert (empty.hit_rate, empty.fragmentation, empty.used_bytes) == (0.0, 0.0, 0)


def test_a_ledger_that_adds_up_is_sound() -> None:
    LEDGER.check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"used_blocks": 6}, "add up to the pool"),
        ({"cached_blocks": 4}, "add up to the pool"),
        ({"free_blocks": 1}, "add up to the pool"),
        ({"stored_slots": 13}, "19 slots are accounted for, 20 are used"),
        ({"fragmented_slots": 6}, "21 slots are accounted for, 20 are used"),
        ({"stored_slots": 16, "reserved_slots": -1}, "negative"),
    ],
)
def test_a_ledger_that_does_not_add_up_is_found(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        replace(LEDGER, **changes).check()


def test_a_ledger_is_a_value() -> None:
    with pytest.raises(FrozenInstanceError):
        LEDGER.used_blocks = 3  # type: ignore[misc]


def test_a_ledger_does_not_change_with_the_memory() -> None:
    memory = ByHand()
    memory.run([1, 2, 3, 4])
    ledger = memory.manager.ledger()
    memory.run([5, 6])
    assert ledger.used_blocks == 1
    assert sum(ledger.misses.values()) == 1


def test_slots_of_blocks_that_are_shared_count_once() -> None:
    memory = ByHand()
    parent = memory.run([1, 2, 3, 4, 5])
    memory.fork(parent)
    memory.fork(parent)
    ledger = memory.manager.ledger()
    assert (ledger.used_blocks, ledger.blocks_saved_by_sharing) == (2, 4)
    assert (ledger.stored_slots, ledger.fragmented_slots) == (5, 3)


def test_slots_for_tokens_under_way_are_reserved() -> None:
    memory = ByHand()
    request = memory.request([1, 2, 3, 4, 5, 6])
    assert memory.open(request)
    memory.plan(request, 5)
    ledger = memory.manager.ledger()
    assert (ledger.stored_slots, ledger.reserved_slots, ledger.fragmented_slots) == (0, 5, 3)


def test_every_group_of_layers_counts() -> None:
    memory = ByHand(windows=[None, None])
    memory.run([1, 2, 3, 4, 5])
    ledger = memory.manager.ledger()
    assert (ledger.used_blocks, ledger.stored_slots, ledger.fragmented_slots) == (4, 10, 6)


def test_what_was_swapped_out_is_on_the_host() -> None:
    memory = ByHand(num_host_blocks=4)
    request = memory.run([1, 2, 3, 4, 5])
    assert memory.manager.swap_out(request)
    ledger = memory.manager.ledger()
    assert (ledger.used_blocks, ledger.host_blocks, ledger.used_host_blocks) == (0, 4, 2)
