"""HostTier: host blocks are taken, given back, and given back when the plan is made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvariantError
from quire.memory.tiers.host import HostTier


def test_all_blocks_are_taken_once() -> None:
    tier = HostTier(5)
    taken = [block for count in (2, 0, 3) for block in tier.allocate(count) or []]
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (tier.num_blocks, tier.num_in_use) == (5, 5)


@pytest.mark.parametrize(("num_blocks", "taken", "asked"), [(0, 0, 1), (3, 0, 4), (3, 2, 2), (3, 3, 1)])
def test_too_few_blocks_change_nothing(num_blocks: int, taken: int, asked: int) -> None:
    tier = HostTier(num_blocks)
    tier.allocate(taken)
    assert tier.allocate(asked) is None
    assert tier.num_in_use == taken
    assert tier.allocate(num_blocks - taken) is not None


def test_blocks_given_back_can_be_taken_again_at_once() -> None:
    tier = HostTier(2)
    blocks = tier.allocate(2)
    assert blocks is not None
    tier.free(blocks)
    assert tier.num_in_use == 0
    assert tier.allocate(2) == blocks


def test_what_the_plan_still_reads_is_not_written_by_it() -> None:
    tier = HostTier(3)
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
    tier = HostTier(1)
    tier.allocate(1)
    tier.free_after_plan([0])
    tier.plan_made()
    tier.plan_made()
    tier.check()
    assert tier.num_in_use == 0


@pytest.mark.parametrize("block", [2, -1, 100])
def test_check_catches_a_block_that_is_none(block: int) -> None:
    tier = HostTier(2)
    tier.allocate(2)
    tier.free([block])
    with pytest.raises(InvariantError, match="given back twice, or is none"):
        tier.check()


@pytest.mark.parametrize(
    ("now", "later"), [([0, 0], []), ([0], [0]), ([], [0, 0])], ids=["now", "now and later", "later"]
)
def test_check_catches_a_block_given_back_twice(now: list[int], later: list[int]) -> None:
    tier = HostTier(2)
    tier.allocate(2)
    tier.free(now)
    tier.free_after_plan(later)
    with pytest.raises(InvariantError, match="given back twice, or is none"):
        tier.check()


@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from(["take", "free", "later", "plan"]), st.integers(0, 4))))
def test_the_tier_holds_what_sets_would(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    tier = HostTier(num_blocks)
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
