"""FreeBlockList: a list through the blocks themselves."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.errors import InvariantError
from quire.memory.block import Block
from quire.memory.free_list import FreeBlockList


def make_list(num_blocks: int) -> tuple[FreeBlockList, list[Block]]:
    blocks = [Block(block_id) for block_id in range(num_blocks)]
    free = FreeBlockList()
    for block in blocks:
        free.append(block)
    return free, blocks


def ids(free: FreeBlockList) -> list[int]:
    return [block.block_id for block in free]


def test_blocks_come_out_in_the_order_in_which_they_went_in() -> None:
    free, _ = make_list(3)
    assert [free.popleft().block_id for _ in range(3)] == [0, 1, 2]
    assert len(free) == 0


@pytest.mark.parametrize(("removed", "left"), [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])])
def test_a_block_leaves_from_anywhere(removed: int, left: list[int]) -> None:
    free, blocks = make_list(3)
    free.remove(blocks[removed])
    free.check()
    assert ids(free) == left


def test_a_block_that_left_goes_to_the_end() -> None:
    free, blocks = make_list(3)
    free.remove(blocks[0])
    free.append(blocks[0])
    assert ids(free) == [1, 2, 0]


def test_a_block_stands_in_one_list_at_most() -> None:
    free, blocks = make_list(1)
    for other in (free, FreeBlockList()):
        with pytest.raises(InvariantError, match="is already in a list"):
            other.append(blocks[0])


def test_a_block_outside_cannot_be_removed() -> None:
    free, _ = make_list(1)
    with pytest.raises(InvariantError, match="is in no list"):
        free.remove(Block(9))


def test_an_empty_list_has_no_first_block() -> None:
    with pytest.raises(InvariantError, match="empty"):
        FreeBlockList().popleft()


@given(st.lists(st.integers(0, 11)))
def test_it_does_what_a_plain_list_does(moves: list[int]) -> None:
    """A number is a block that goes in where it is out, and out where it is in; above 9, the first one goes."""
    free, blocks, expected = FreeBlockList(), [Block(block_id) for block_id in range(10)], list[int]()
    for number in moves:
        if number >= len(blocks):
            if expected:
                assert free.popleft().block_id == expected.pop(0)
        elif number in expected:
            free.remove(blocks[number])
            expected.remove(number)
        else:
            free.append(blocks[number])
            expected.append(number)
        free.check()
        assert (ids(free), len(free)) == (expected, len(expected))


def test_check_finds_a_torn_link() -> None:
    free, blocks = make_list(3)
    blocks[1].previous = blocks[2]
    with pytest.raises(InvariantError, match="disagree"):
        free.check()


def test_check_finds_a_wrong_length() -> None:
    free, blocks = make_list(3)
    blocks[0].next, blocks[2].previous = blocks[2], blocks[0]
    with pytest.raises(InvariantError, match="length"):
        free.check()
