"""BlockTable: from positions to slots."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.errors import InvariantError
from quire.core.step import NO_BLOCK
from quire.memory.block_table import BlockTable


@given(block_size=st.integers(1, 64), block_ids=st.lists(st.integers(0, 999), min_size=1, max_size=9, unique=True))
def test_every_position_has_the_slot_of_its_block_and_offset(block_size: int, block_ids: list[int]) -> None:
    table = BlockTable(block_size, block_ids)
    expected = [block_id * block_size + offset for block_id in block_ids for offset in range(block_size)]
    assert table.slots(0, table.num_slots) == expected
    assert [table.slot(position) for position in range(table.num_slots)] == expected
    assert len(set(expected)) == len(expected)


def test_a_new_table_is_empty() -> None:
    table = BlockTable(16)
    assert (len(table), table.num_slots, table.held, table.slots(0, 0)) == (0, 0, [], [])


def test_two_new_tables_share_nothing() -> None:
    first, second = BlockTable(16), BlockTable(16)
    first.block_ids.append(3)
    assert second.block_ids == []


def test_a_position_behind_the_window_has_no_slot() -> None:
    table = BlockTable(2, [NO_BLOCK, 7])
    table.num_given_back = 1
    assert (table.slots(2, 4), table.held, len(table)) == ([14, 15], [7], 2)
    with pytest.raises(InvariantError, match="position 1 is behind the sliding window"):
        table.slot(1)


@pytest.mark.parametrize(
    ("num_blocks", "block_ids", "num_given_back"),
    [(0, [], 0), (1, [NO_BLOCK], 1), (2, [NO_BLOCK, 5], 1), (3, [NO_BLOCK, 5, 6], 1)],
)
def test_a_fork_has_the_first_blocks(num_blocks: int, block_ids: list[int], num_given_back: int) -> None:
    table = BlockTable(4, [NO_BLOCK, 5, 6])
    table.num_given_back = 1
    fork = table.fork(num_blocks)
    assert (fork.block_ids, fork.num_given_back, fork.block_size) == (block_ids, num_given_back, 4)


def test_a_fork_grows_on_its_own() -> None:
    table = BlockTable(4, [5])
    table.fork(1).block_ids.append(6)
    assert table.block_ids == [5]
