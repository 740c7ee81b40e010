"""The eviction policies: exact orders on small cases, and each one against the plainest model of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidConfigError
from quire.memory.block import Block
from quire.memory.eviction import EvictionPolicy, create_eviction_policy
from quire.memory.eviction.fifo import FIFOEviction
from support.memory import ByHand

NAMES = ("lru", "fifo", "priority")


def block_of(number: int, *, priority: int = 0, published_at: int = 0) -> Block:
    block = Block(number)
    block.priority = priority
    block.published_at = published_at
    return block


def evicted(policy: EvictionPolicy) -> list[int]:
    return [policy.pop().block_id for _ in range(len(policy))]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", [3, 0, 2, 1, 4]),  # as they were added
        ("fifo", [1, 4, 3, 2, 0]),  # as they were published
        ("priority", [0, 2, 3, 4, 1]),  # priority 5, then 0, then -1; as they were added within
    ],
)
def test_the_order_of_eviction(name: str, order: list[int]) -> None:
    policy = create_eviction_policy(name)
    published_at = [50, 10, 40, 30, 20]
    priority = [5, -1, 5, 0, -1]
    for number in (3, 0, 2, 4, 1) if name == "priority" else (3, 0, 2, 1, 4):
        policy.add(block_of(number, priority=priority[number], published_at=published_at[number]))
    assert evicted(policy) == order
    assert len(policy) == 0


@pytest.mark.parametrize(("name", "order"), [("lru", [1, 2, 0]), ("fifo", [0, 1, 2]), ("priority", [1, 2, 0])])
def test_only_fifo_forgets_that_a_block_was_hit(name: str, order: list[int]) -> None:
    policy = create_eviction_policy(name)
    blocks = [block_of(number, published_at=number) for number in range(3)]
    for block in blocks:
        policy.add(block)
    policy.remove(blocks[0])
    policy.add(blocks[0])
    assert evicted(policy) == order


def test_fifo_goes_by_the_last_publication_of_a_block() -> None:
    policy = create_eviction_policy("fifo")
    first, second = block_of(0, published_at=1), block_of(1, published_at=2)
    policy.add(first)
    policy.add(second)
    policy.remove(first)
    first.published_at = 3
    policy.add(first)
    assert evicted(policy) == [1, 0]


def test_priority_evicts_the_whole_of_the_least_urgent_level_first() -> None:
    policy = create_eviction_policy("priority")
    for number, priority in enumerate([1, 9, 1, 9, -5]):
        policy.add(block_of(number, priority=priority))
    assert evicted(policy) == [1, 3, 0, 2, 4]


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_holds_exactly_the_cached_blocks(name: str) -> None:
    policy = create_eviction_policy(name)
    blocks = [block_of(number, priority=number % 2, published_at=number) for number in range(6)]
    for block in blocks:
        policy.add(block)
    policy.remove(blocks[2])
    popped = policy.pop()
    assert sorted(block.block_id for block in policy) == sorted({0, 1, 3, 4, 5} - {popped.block_id})
    assert len(policy) == 4


@pytest.mark.parametrize("name", ["", "LRU", "mru", "lru "])
def test_a_name_that_is_unknown_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        create_eviction_policy(name)
    assert str(caught.value) == f"eviction is {name!r}; allowed: lru, fifo or priority"


def test_fifo_sweeps_what_is_out_of_date() -> None:
    policy = FIFOEviction()
    kept, hit = block_of(0, published_at=0), block_of(1, published_at=1)
    policy.add(kept)
    for _ in range(10_000):
        policy.add(hit)
        policy.remove(hit)
    assert len(policy._heap) <= 2 * len(policy) + 66
    assert evicted(policy) == [0]


MODELS: dict[str, Callable[[list[Block]], Block]] = {  # of the cached blocks, in the order in which they were added
    "lru": lambda cached: cached[0],
    "fifo": lambda cached: min(cached, key=lambda block: block.published_at),
    "priority": lambda cached: max(cached, key=lambda block: block.priority),  # max: the first of equals
}


@pytest.mark.parametrize("name", NAMES)
@given(
    priorities=st.lists(st.integers(-2, 2), min_size=8, max_size=8),
    operations=st.lists(st.sampled_from([None, *range(8)]), max_size=100),
    hits_republish=st.booleans(),
)
def test_each_policy_against_its_model(
    name: str, priorities: list[int], operations: list[int | None], hits_republish: bool
) -> None:
    policy, model = create_eviction_policy(name), list[Block]()
    blocks = [block_of(number, priority=priority) for number, priority in enumerate(priorities)]
    unpublished = set(range(8))
    for moment, number in enumerate(operations):
        if number is None:
            if model:
                expected = MODELS[name](model)
                assert policy.pop() is expected
                model.remove(expected)
                unpublished.add(expected.block_id)
        elif blocks[number] in model:
            policy.remove(blocks[number])
            model.remove(blocks[number])
            if hits_republish:
                unpublished.add(number)
        else:
            if number in unpublished:
                blocks[number].published_at = moment
                unpublished.remove(number)
            policy.add(blocks[number])
            model.append(blocks[number])
        assert len(policy) == len(model)
        assert set(policy) == set(model)
    while model:
        expected = MODELS[name](model)
        assert policy.pop() is expected
        model.remove(expected)


def test_of_a_model_with_several_groups_the_beginning_of_a_text_stays() -> None:
    """A hit needs the blocks of all groups, so those of the tail go first, whatever their group."""
    memory = ByHand(windows=(None, None), num_blocks=40)
    memory.leave_cached(range(64))
    memory.leave_cached(range(100, 136))  # takes the 8 free blocks, and 10 of 32
    assert memory.num_hit(range(65)) == 64 - 5 * 4
