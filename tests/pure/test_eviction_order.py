"""EvictionOrder: a list through the blocks themselves."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.errors import InvariantError
from quire.memory.block import Block
from quire.memory.eviction.order import EvictionOrder


def make_list(num_blocks: int) -> tuple[EvictionOrder, list[Block]]:
    blocks = [Block(block_id) for block_id in range(num_blocks)]
    order = EvictionOrder()
    for block in blocks:
        order.append(block)
    return order, blocks


def ids(order: EvictionOrder) -> list[int]:
    return [block.block_id for block in order]


def test_blocks_come_out_in_the_order_in_which_they_went_in() -> None:
    order, _ = make_list(3)
    assert [order.popleft().block_id for _ in range(3)] == [0, 1, 2]
    assert len(order) == 0


@pytest.mark.parametrize(("removed", "left"), [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])])
def test_a_block_leaves_from_anywhere(removed: int, left: list[int]) -> None:
    order, blocks = make_list(3)
    order.remove(blocks[removed])
    order.check()
    assert ids(order) == left


def test_a_block_that_left_goes_to_the_end() -> None:
    order, blocks = make_list(3)
    order.remove(blocks[0])
    order.append(blocks[0])
    assert ids(order) == [1, 2, 0]


def test_a_block_stands_in_one_list_at_most() -> None:
    order, blocks = make_list(1)
    for other in (order, EvictionOrder()):
        with pytest.raises(InvariantError, match="is already in a list"):
            other.append(blocks[0])


def test_a_block_outside_cannot_be_removed() -> None:
    order, _ = make_list(1)
    with pytest.raises(InvariantError, match="is in no list"):
        order.remove(Block(9))


def test_an_empty_list_has_no_first_block() -> None:
    with pytest.raises(InvariantError, match="empty"):
        EvictionOrder().popleft()


@given(st.lists(st.integers(0, 11)))
def test_it_does_what_a_plain_list_does(moves: list[int]) -> None:
    """A number is a block that goes in where it is out, and out where it is in; above 9, the first one goes."""
    order, blocks, expected = EvictionOrder(), [Block(block_id) for block_id in range(10)], list[int]()
    for number in moves:
        if number >= len(blocks):
            if expected:
                assert order.popleft().block_id == expected.pop(0)
        elif number in expected:
            order.remove(blocks[number])
            expected.remove(number)
        else:
            order.append(blocks[number])
            expected.append(number)
        order.check()
        assert (ids(order), len(order)) == (expected, len(expected))


def test_check_finds_a_torn_link() -> None:
    order, blocks = make_list(3)
    blocks[1].previous = blocks[2]
    with pytest.raises(InvariantError, match="disagree"):
        order.check()


def test_check_finds_a_wrong_length() -> None:
    order, blocks = make_list(3)
    blocks[0].next, blocks[2].previous = blocks[2], blocks[0]
    with pytest.raises(InvariantError, match="length"):
        order.check()
