"""HostTier: host blocks are taken, given back, and given back when the plan is made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvariantError
from quire.core.step import BlockMove
from quire.memory.changes import MemoryChanges
from quire.memory.tiers.host import HostTier
from support.memory import ByHand


def test_all_blocks_are_taken_once() -> None:
    tier = HostTier(5, MemoryChanges())
    taken = [block for count in (2, 0, 3) for block in tier.allocate(count) or []]
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (tier.num_blocks, tier.num_in_use) == (5, 5)


@pytest.mark.parametrize(("num_blocks", "taken", "asked"), [(0, 0, 1), (3, 0, 4), (3, 2, 2), (3, 3, 1)])
def test_too_few_blocks_change_nothing(num_blocks: int, taken: int, asked: int) -> None:
    tier = HostTier(num_blocks, MemoryChanges())
    tier.allocate(taken)
    assert tier.allocate(asked) is None
    assert tier.num_in_use == taken
    assert tier.allocate(num_blocks - taken) is not None


def test_blocks_given_back_can_be_taken_again_at_once() -> None:
    tier = HostTier(2, MemoryChanges())
    blocks = tier.allocate(2)
    assert blocks is not None
    tier.free(blocks)
    assert tier.num_in_use == 0
    assert tier.allocate(2) == blocks


def test_what_the_plan_still_reads_is_not_written_by_it() -> None:
    tier = HostTier(3, MemoryChanges())
    tier.allocate(3)
    tier.free_after_plan([1])
    tier.free([2])
    assert tier.num_in_use == 2
    assert tier.allocate(2) is None
    assert tier.allocate(1) == [2]
    tier.plan_made()
    assert tier.num_in_use == 2
    assert tier.allocate(1) == [1]


def test_a_plan_gives_blocks_back_once() -> None:
    tier = HostTier(1, MemoryChanges())
    tier.allocate(1)
    tier.free_after_plan([0])
    tier.plan_made()
    tier.plan_made()
    tier.check()
    assert tier.num_in_use == 0


@pytest.mark.parametrize(
    ("now", "later"), [([0, 0], []), ([0], [0]), ([], [0, 0])], ids=["now", "now and later", "later"]
)
def test_a_block_is_given_back_once(now: list[int], later: list[int]) -> None:
    tier = HostTier(2, MemoryChanges())
    tier.allocate(2)
    with pytest.raises(InvariantError, match="more often than it was taken"):
        tier.free(now)
        tier.free_after_plan(later)
        tier.plan_made()


@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from(["take", "free", "later", "plan"]), st.integers(0, 4))))
def test_the_tier_holds_what_sets_would(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    tier = HostTier(num_blocks, MemoryChanges())
    free, held, waiting = set(range(num_blocks)), list[int](), list[int]()
    for operation, count in operations:
        if operation == "take":
            taken = tier.allocate(count)
            assert (taken is None) == (count > len(free))
            assert len(taken or []) in (0, count)
            assert set(taken or []) <= free
            free -= set(taken or [])
            held += taken or []
        elif operation == "plan":
            tier.plan_made()
            free |= set(waiting)
            waiting = []
        else:
            given_back, held = held[:count], held[count:]
            (tier.free if operation == "free" else tier.free_after_plan)(given_back)
            if operation == "free":
                free |= set(given_back)
            else:
                waiting += given_back
        tier.check()
        assert tier.num_in_use == num_blocks - len(free) == len(held) + len(waiting)


# ---- copies of cached blocks ----------------------------------------------------------------------------------------


def test_a_block_is_copied_when_its_last_holder_frees_it_and_comes_back_when_it_is_hit() -> None:
    memory = ByHand(num_blocks=4, num_host_blocks=8, keeps_on_host=True)
    blocks = memory.leave_cached(range(12))
    assert memory.changes().moves_out == [BlockMove(blocks[index], 2 - index) for index in (2, 1, 0)], "the tail first"
    memory.leave_cached(range(100, 116))
    assert memory.pool.num_evictions == 3
    assert memory.changes().moves_in == []
    request = memory.run(range(13))
    assert memory.manager.memories[request].num_host_tokens == 12
    assert [move.host_block for move in memory.changes().moves_in] == [2, 1, 0], "the blocks of the text in their order"
    memory.free(request)
    assert memory.changes().moves_out == [], "the copies are there already"


def test_a_copy_is_hit_from_the_next_plan_on() -> None:
    memory = ByHand(num_blocks=2, num_host_blocks=8, keeps_on_host=True)
    memory.leave_cached(range(8))
    other = memory.run(range(100, 108))
    assert memory.num_hit(range(9)) == 0, "the plan that makes the copy cannot read it"
    memory.free(other)
    memory.changes()
    assert memory.num_hit(range(9)) == 8


def test_a_tail_that_will_be_written_is_moved_into_a_block_of_its_own() -> None:
    memory = ByHand(num_blocks=4, num_host_blocks=8, keeps_on_host=True)
    memory.leave_cached(range(8))
    memory.leave_cached(range(100, 116))
    memory.changes()
    first, second = memory.request(range(8), name="first"), memory.request(range(8), name="second")
    assert memory.open(first) and memory.open(second)
    changes = memory.changes()
    assert changes.copies == [], "nothing copies a block that the same plan fills"
    assert len(changes.moves_in) == 3, "the first block once, the tail for each"
    assert memory.table(first)[0] == memory.table(second)[0]
    assert memory.table(first)[1] != memory.table(second)[1]


def test_of_a_text_that_is_longer_than_the_host_the_beginning_stays() -> None:
    memory = ByHand(num_blocks=8, num_host_blocks=2, keeps_on_host=True)
    memory.leave_cached(range(32))
    assert len(memory.changes().moves_out) == 2, "a copy that makes way in the same plan is not made"
    for block in range(8):
        memory.pool.unpublish(block)
    assert memory.num_hit(range(33)) == 8


def test_the_host_evicts_the_copy_used_longest_ago() -> None:
    memory = ByHand(num_blocks=8, num_host_blocks=4, keeps_on_host=True)
    for first in (0, 100, 0, 200):
        memory.leave_cached(range(first, first + 8))
        memory.changes()
    for block in range(8):
        memory.pool.unpublish(block)
    assert [memory.num_hit(range(first, first + 9)) for first in (0, 100, 200)] == [8, 0, 8]


def test_a_sequence_that_is_swapped_out_moves_only_what_has_no_copy() -> None:
    memory = ByHand(num_blocks=6, num_host_blocks=8, keeps_on_host=True)
    memory.leave_cached(range(8))
    memory.changes()
    request = memory.run(range(14))
    assert memory.manager.swap_out(request)
    moved = memory.changes().moves_out
    assert len(moved) == 2, "its third block, which is full, and the tail"
    assert memory.manager.host.num_in_use == 4
    assert memory.manager.swap_in(request)
    memory.changes()
    assert (memory.manager.host.num_in_use, memory.manager.host.num_cached) == (0, 3), "full blocks stay as copies"
    memory.free(request)
    assert memory.changes().moves_out == []


def test_what_failed_and_what_is_reset_is_gone_from_the_host_too() -> None:
    memory = ByHand(num_blocks=6, num_host_blocks=8, keeps_on_host=True)
    memory.leave_cached(range(8))
    memory.leave_cached(range(50, 58))
    request = memory.request(range(20, 28), name="bad")
    assert memory.open(request)
    memory.commit(request)
    memory.manager.drop(request)
    memory.changes()
    assert memory.num_hit(range(20, 29)) == 0
    assert memory.manager.host.num_cached == 4
    memory.manager.reset()
    memory.manager.check()
    assert (memory.manager.host.num_cached, memory.num_hit(range(9))) == (0, 0)


def test_a_block_that_a_plan_fills_goes_to_the_disk_with_the_next_plan() -> None:
    memory = ByHand(num_blocks=4, num_host_blocks=8, keeps_on_host=True, num_disk_slots=8)
    memory.leave_cached(range(8))
    memory.leave_cached(range(100, 116))
    memory.changes()
    first, second = memory.request([*range(8), 50], name="first"), memory.request([*range(8), 60], name="second")
    assert memory.open(first) and memory.open(second)
    changes = memory.changes()
    assert len(changes.moves_in) == 2, "the second request hits them where the plan moves them"
    assert changes.transfers.stores == (), "a store reads its block before the moves of its plan"
    assert [store.block for store in memory.changes().transfers.stores] == memory.table(second)[:2]


def test_what_a_plan_swaps_out_comes_back_with_the_next_plan() -> None:
    memory = ByHand(num_host_blocks=4)
    request = memory.run(range(10))
    assert memory.manager.swap_out(request)
    assert not memory.manager.swap_in(request), "a plan cannot move in what it moves out"
    memory.changes()
    assert memory.manager.swap_in(request)
