"""The small parts of the memory against plain models: matches, changes, the host tier, tables, multimaps."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.errors import InvariantError
from quire.core.request import Request
from quire.core.step import NO_BLOCK, BlockCopy, BlockMove
from quire.memory.block_table import BlockTable
from quire.memory.changes import MemoryChanges
from quire.memory.journal import Multimap
from quire.memory.prefix import PrefixEntry
from quire.memory.sequence import PrefixMatch, SequenceMemory
from quire.memory.tiers.host import HostTier
from support.memory import ByHand

# ---- what can be hit ------------------------------------------------------------------------------------------------


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 14)), min_size=1, max_size=3),
    present=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=9),
    tail=st.integers(0, 5),
    block_size=st.integers(1, 5),
)
def test_a_hit_needs_every_block_that_is_still_read(
    windows: list[int | None], present: list[list[bool]], tail: int, block_size: int
) -> None:
    """The longest beginning with all blocks that the next token reads: every one in a group without a window."""
    memory = ByHand(windows=windows, block_size=block_size)
    entries = []
    for blocks in present:
        entry = PrefixEntry(None, b"", len(windows))
        entry.block_ids = [0 if blocks[group] else NO_BLOCK for group in range(len(windows))]
        entries.append(entry)
    num_tokens = len(entries) * block_size + tail
    if not num_tokens:
        return

    def can_hit(hits: int) -> bool:
        next_position = min(hits * block_size, num_tokens - 1)
        for group, window in enumerate(windows):
            first = 0 if window is None else max(0, next_position - window + 1) // block_size
            if any(entries[index].block_ids[group] == NO_BLOCK for index in range(first, hits)):
                return False
        return True

    expected = max(hits for hits in range(len(entries) + 1) if can_hit(hits))
    assert memory.manager._hits.usable([entry.block_ids for entry in entries], num_tokens) == expected


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "expected"), [(0, 0, False), (4, 1, False), (3, 1, True), (8, 2, False), (7, 2, True)]
)
def test_a_match_ends_within_a_block_or_at_its_border(num_tokens: int, num_blocks: int, expected: bool) -> None:
    entries = [PrefixEntry(None, b"", 1)] * num_blocks
    assert PrefixMatch(entries, num_tokens, None).ends_within_block(4) is expected


# ---- what the plan is told ------------------------------------------------------------------------------------------


def sequence(*tables: list[int]) -> SequenceMemory:
    return SequenceMemory(b"", [BlockTable(4, table) for table in tables])


def test_entries_are_set_in_place_or_put_at_the_end() -> None:
    changes, memory, request = MemoryChanges(), sequence([1, 2], [3]), Request("r", [1])
    changes.set_entry(request, memory, (0, 1), 7)
    changes.set_entry(request, memory, (1, 1), 8)
    changes.append_entries(request, memory, 0, [4, 5])
    assert [table.block_ids for table in memory.tables] == [[1, 7, 4, 5], [3, 8]]
    assert changes.table_entries == [
        (request, 0, 1, 7),
        (request, 1, 1, 8),
        (request, 0, 2, 4),
        (request, 0, 3, 5),
    ]
    assert not changes.has_moves


def test_what_was_taken_is_not_told_again() -> None:
    changes, request = MemoryChanges(), Request("r", [1])
    changes.append_entries(request, sequence([]), 0, [4])
    changes.copies.append(BlockCopy(1, 2))
    changes.moves_out.append(BlockMove(3, 4))
    changes.moves_in.append(BlockMove(5, 6))
    taken = changes.take()
    assert (taken.table_entries, taken.copies) == ([(request, 0, 0, 4)], [BlockCopy(1, 2)])
    assert (taken.moves_out, taken.moves_in) == ([BlockMove(3, 4)], [BlockMove(5, 6)])
    assert taken.has_moves
    assert not changes.has_moves
    again = changes.take()
    assert (again.table_entries, again.copies, again.moves_out, again.moves_in) == ([], [], [], [])


@pytest.mark.parametrize("kind", ["moves_out", "copies", "moves_in"])
def test_any_kind_of_move_is_a_move(kind: str) -> None:
    changes = MemoryChanges()
    getattr(changes, kind).append(BlockCopy(1, 2))
    assert changes.has_moves is True


def test_copies_into_blocks_that_were_let_go_are_not_made() -> None:
    changes = MemoryChanges()
    assert changes.forget_copies([1, 2]) == {}
    changes.copies += [BlockCopy(1, 5), BlockCopy(2, 6), BlockCopy(5, 7)]
    assert changes.forget_copies([5, 7, 1]) == {5: 1, 7: 5}
    assert changes.copies == [BlockCopy(2, 6)]
    assert changes.forget_copies([2]) == {}, "a source is not a destination"


# ---- the host tier --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["take", "free", "later", "plan"]), st.integers(0, 5)), max_size=40))
def test_a_host_tier_is_a_stack_and_blocks_of_a_plan_come_back_after_it(actions: list[tuple[str, int]]) -> None:
    tier, free, held, later = HostTier(6, MemoryChanges()), [5, 4, 3, 2, 1, 0], [], []
    for action, number in actions:
        if action == "take":
            expected = [free.pop() for _ in range(number)] if number <= len(free) else None
            assert tier.allocate(number) == expected
            held += expected or []
        elif action == "plan":
            tier.plan_made()
            free, later = free + later[::-1], []
        else:
            given_back, held = held[:number], held[number:]
            if action == "free":
                tier.free(given_back)
                free += given_back[::-1]
            else:
                tier.free_after_plan(given_back)
                later += given_back
        tier.check()
        assert (tier.num_blocks, tier.num_in_use) == (6, 6 - len(free))


# ---- tables ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.lists(st.integers(0, 99), max_size=8), st.integers(0, 8), st.integers(0, 9))
def test_a_table_says_where_each_position_is(size: int, blocks: list[int], given_back: int, kept: int) -> None:
    given_back = min(given_back, len(blocks))
    table = BlockTable(size, [NO_BLOCK] * given_back + blocks[given_back:])
    table.num_given_back = given_back
    assert (len(table), table.num_slots, table.held) == (len(blocks), len(blocks) * size, blocks[given_back:])
    expected = [block * size + offset for block in blocks[given_back:] for offset in range(size)]
    assert table.slots(given_back * size, len(blocks) * size) == expected
    for position in range(given_back * size):
        with pytest.raises(InvariantError, match=f"position {position} is behind the sliding window"):
            table.slot(position)
    fork = table.fork(kept)
    assert fork.block_ids == table.block_ids[:kept]
    assert (fork.num_given_back, fork.block_size) == (min(given_back, kept), size)
    fork.block_ids.append(1)
    assert len(table) == len(blocks), "a fork is a table of its own"


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=3))
def test_a_sequence_covers_what_all_its_tables_cover(tables: list[list[int]]) -> None:
    memory = sequence(*tables)
    assert memory.num_slots == 4 * min(map(len, tables))
    assert memory.num_held == sum(map(len, tables))
    memory.tables[0].num_given_back = len(tables[0])
    assert memory.num_held == sum(map(len, tables[1:]))


# ---- numbers by key -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "drop"]), st.sampled_from("ab"), st.integers(0, 3))))
def test_a_multimap_is_a_dictionary_of_lists(actions: list[tuple[str, str, int]]) -> None:
    numbers, model = Multimap[str](), dict[str, list[int]]()
    for action, key, number in actions:
        known = model.setdefault(key, [])
        if action == "add":
            numbers.add(key, number)
            if number not in known:
                known.append(number)
        elif action == "discard":
            numbers.discard(key, number)
            if number in known:
                known.remove(number)
        else:
            numbers.drop(key)
            known.clear()
        for name, expected in model.items():
            assert numbers.of(name) == expected
            assert numbers.first(name) == (expected[0] if expected else None)
            assert numbers.count(name) == len(expected)
        assert set(numbers._numbers) == {name for name, expected in model.items() if expected}, (
            "nothing is kept for none"
        )
