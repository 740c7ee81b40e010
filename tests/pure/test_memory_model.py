"""The memory against plain models: what a sequence takes, where each slot is, what is told to those who watch."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.errors import InvariantError
from quire.core.kv_spec import RECURRENT
from quire.core.request import CacheScope, Request
from quire.core.step import NO_BLOCK
from quire.memory.block import BlockState
from quire.memory.block_pool import BlockPool
from quire.memory.eviction.lru import LRUEviction
from quire.memory.journal import MOST_TAKEN, NOT_PUBLISHED, MemoryJournal
from quire.memory.prefix import PrefixEntry
from quire.memory.sequence import MissReason
from support.block_picture import BlockPicture
from support.memory import ByHand, FailingPool

WINDOWS = st.sampled_from([(None,), (6,), (None, 6), (5, 9), (None, None), (None, RECURRENT)])
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=22)


def leave_some_cached(memory: ByHand, texts: list[list[int]]) -> None:
    for number, text in enumerate(texts):
        request = memory.request(text, name=f"before {number}")
        if memory.open(request):
            memory.commit(request)
            memory.free(request)
            memory.changes()


# ---- what a sequence takes ------------------------------------------------------------------------------------------


@given(
    windows=WINDOWS, before=st.lists(TOKENS, max_size=3), tokens=TOKENS, more=st.integers(0, 9), held=st.integers(0, 9)
)
def test_a_sequence_takes_what_it_was_said_to_need(
    windows: tuple[int | None, ...], before: list[list[int]], tokens: list[int], more: int, held: int
) -> None:
    memory = ByHand(num_blocks=20, windows=windows)
    manager, pool = memory.manager, memory.pool
    leave_some_cached(memory, before)
    assert pool.allocate(held) is not None  # somebody else's
    try:
        request = memory.request(tokens)
        match = manager.match_prefix(request)
        needed, available = manager.num_blocks_needed(request, len(tokens), match), pool.num_available
        assert manager.num_blocks_needed(request, len(tokens)) == needed, "it looks up what it is not told"
        opened = manager.allocate_slots(request, len(tokens), match)
        assert opened == (needed <= available)
        assert pool.num_available == available - (needed if opened else 0)
        if not opened:
            return
        request.num_computed = request.num_planned = len(tokens)
        manager.commit(request, len(tokens))
        manager.give_back()
        needed, available = manager.num_blocks_needed(request, len(tokens) + more), pool.num_available
        assert manager.allocate_slots(request, len(tokens) + more) == (needed <= available)
        assert pool.num_available == available - (needed if needed <= available else 0)
    finally:
        pool.check()


@given(windows=WINDOWS, length=st.integers(1, 30), chunk=st.integers(1, 9), start=st.integers(1, 12))
def test_a_sequence_grows_with_the_blocks_that_it_was_said_to_need(
    windows: tuple[int | None, ...], length: int, chunk: int, start: int
) -> None:
    """Step by step, at most `chunk` tokens at a time, it never holds more than that beyond what it holds at first."""
    memory = ByHand(num_blocks=64, windows=windows, prefix_index="none")
    manager, pool = memory.manager, memory.pool
    request = memory.request(range(start + length))
    assert manager.num_blocks_to_grow(request, start, None, longest_chunk=chunk) <= manager.num_blocks_needed(
        request, start
    )
    assert memory.open(request, min(chunk, start))
    memory.commit(request, min(chunk, start))
    manager.give_back()
    end, available = start + length, pool.num_available
    allowed = manager.num_blocks_to_grow(request, end, None, longest_chunk=chunk)
    if not manager.has_windows:
        assert allowed == manager.num_blocks_needed(request, end)
    most_taken = 0
    while request.num_computed < end:
        step_end = min(end, request.num_computed + chunk)
        assert memory.allocate(request, step_end)
        most_taken = max(most_taken, available - pool.num_available)
        memory.commit(request, step_end)
    assert most_taken <= allowed <= manager.spec.num_blocks_for(end, longest_chunk=chunk)
    if not manager.has_windows:
        assert most_taken == allowed


def test_windows_make_long_sequences_cheap() -> None:
    memory = ByHand(num_blocks=40, windows=(None, 8))
    request = memory.request(range(4))
    # Full attention: 100 tokens in blocks of 4. A window of 8 with steps of 4 reaches over 11 tokens: up to 4 blocks.
    assert memory.manager.num_blocks_to_grow(request, 100, None, longest_chunk=4) == 25 + 4
    assert memory.manager.num_blocks_needed(request, 100) == 25 + 25
    assert memory.manager.num_blocks_to_grow(request, 8, None, longest_chunk=4) == 2 + 2
    assert memory.open(request)
    memory.commit(request)
    assert memory.manager.num_blocks_to_grow(request, 100, None, longest_chunk=4) == 24 + 3
    assert ByHand().manager.num_blocks_to_grow(request, 100, None, longest_chunk=4) == 25
    memory = ByHand(num_blocks=40, windows=(8,))
    request = memory.request(range(40))
    assert memory.open(request)
    assert memory.manager.num_blocks_to_grow(request, 44, None, longest_chunk=1) == 0, "it holds more than it will need"


@given(windows=WINDOWS, length=st.integers(1, 24), more=st.integers(0, 8), others=st.integers(0, 24))
def test_what_was_swapped_out_takes_what_it_was_said_to_need(
    windows: tuple[int | None, ...], length: int, more: int, others: int
) -> None:
    memory = ByHand(num_blocks=24, windows=windows, num_host_blocks=24)
    manager, pool = memory.manager, memory.pool
    request = memory.run(range(length))
    held = sum(map(len, memory.tables(request)))
    assert manager.swap_out(request)
    assert (request.num_slots, pool.num_in_use) == (0, 0)
    memory.changes()
    manager.reset()
    taken = pool.allocate(others)
    if taken is None:
        return
    needed = manager.num_blocks_needed(request, length + more)
    first, available = manager.num_blocks_needed(request, length), pool.num_available
    assert first <= held
    assert manager.swap_in(request) == (first <= available)
    assert pool.num_available == available - (first if first <= available else 0)
    if first > available:
        return
    manager.take_changes()
    manager.give_back()
    assert manager.allocate_slots(request, length + more) == (needed <= available)


# ---- where each slot is ---------------------------------------------------------------------------------------------


def slots_by_position(requests: list[Request], memory: ByHand) -> tuple[int, int, int]:
    """Stored, reserved and fragmented slots, counted one by one."""
    best: dict[tuple[int, int], int] = {}  # 2: stored, 1: reserved, 0: neither
    size = memory.manager.spec.block_size
    for request in requests:
        for group, table in zip(memory.manager.spec.groups, memory.tables(request), strict=True):
            for index, block_id in enumerate(table):
                for offset in range(size) if block_id != NO_BLOCK else ():
                    position = index * size + (0 if group.recurrent else offset)  # a state begins with its first token
                    kind = (position < request.num_computed) + (
                        position < max(request.num_planned, request.num_computed)
                    )
                    best[block_id, offset] = max(kind, best.get((block_id, offset), 0))
    counts = list(best.values())
    return counts.count(2), counts.count(1), counts.count(0)


@given(
    windows=WINDOWS,
    jobs=st.lists(
        st.tuples(TOKENS, st.sampled_from(["", "a", "b"]), st.integers(0, 22), st.integers(0, 22), st.booleans()),
        min_size=1,
        max_size=4,
    ),
)
def test_the_ledger_counts_each_slot_once(
    windows: tuple[int | None, ...], jobs: list[tuple[list[int], str, int, int, bool]]
) -> None:
    memory, requests = ByHand(num_blocks=60, windows=windows), []
    for number, (tokens, tenant, computed, planned, forks) in enumerate(jobs):
        request = memory.request(tokens, CacheScope(tenant), name=f"r{number}")
        assert memory.open(request)
        requests.append(request)
        if computed > request.num_computed:
            memory.commit(request, min(computed, len(tokens)))
        if forks and request.num_computed:
            requests.append(memory.fork(request))
        elif request.num_computed + planned <= len(tokens):
            memory.plan(request, request.num_computed + planned)
        ledger = memory.manager.ledger()
        expected = slots_by_position(requests, memory)
        assert (ledger.stored_slots, ledger.reserved_slots, ledger.fragmented_slots) == expected
        slots = memory.manager.slots_of_tenants()
        for name in {request.scope.tenant for request in requests}:
            own = [request for request in requests if request.scope.tenant == name]
            assert slots[name] == slots_by_position(own, memory)[1:]
        assert set(slots) == {request.scope.tenant for request in requests}
        held = [block_id for one in requests for table in memory.tables(one) for block_id in table if block_id >= 0]
        assert ledger.used_blocks == len(set(held))
        assert ledger.blocks_saved_by_sharing == len(held) - len(set(held))
        for one in requests:
            own_blocks = [block_id for table in memory.tables(one) for block_id in table if block_id >= 0]
            assert memory.manager.memories[one].num_held == len(own_blocks)


def test_a_ledger_of_what_is_swapped_out() -> None:
    memory = ByHand(num_host_blocks=5, windows=(None, None))
    request = memory.run(range(6))
    assert memory.manager.swap_out(request)
    ledger, own = memory.manager.ledger(), memory.manager.memories[request]
    assert (ledger.host_blocks, ledger.used_host_blocks, ledger.used_blocks) == (5, 4, 0)
    assert (own.num_held, sum(map(len, own.host_blocks or ()))) == (0, 4)
    assert memory.manager.slots_of_tenants() == {"": (0, 0)}


# ---- the counters ---------------------------------------------------------------------------------------------------


def test_hits_of_first_admissions_and_of_those_that_resume_are_counted_apart() -> None:
    memory = ByHand()
    memory.leave_cached(range(8))
    assert memory.manager.num_looked_up == (8, 0)
    first = memory.request([*range(8), 9, 9])
    assert memory.open(first)
    assert memory.manager.num_looked_up == (18, 8)
    assert memory.manager.memories[first].num_hit_tokens == 8
    memory.free(first)
    first.num_preemptions = 1
    assert memory.open(first)
    ledger = memory.manager.ledger()
    assert (ledger.queried_tokens, ledger.hit_tokens) == (18, 8)
    assert (ledger.resumed_queried_tokens, ledger.resumed_hit_tokens) == (10, 8)
    assert ledger.misses == {MissReason.NEVER_CACHED: 1, MissReason.NOT_FULL: 1}
    assert ledger.hit_rate == 8 / 18


def test_without_an_index_nothing_is_looked_up() -> None:
    memory = ByHand(prefix_index="none")
    memory.leave_cached(range(8))
    assert memory.manager.num_looked_up == (0, 0)
    assert memory.num_hit(range(8)) == 0


def test_who_let_go_has_no_slots() -> None:
    memory = ByHand()
    request = memory.run(range(6))
    assert request.num_slots == 8
    memory.free(request)
    assert request.num_slots == 0


def test_moves_are_told_until_the_plan_is_made() -> None:
    memory = ByHand(num_host_blocks=4)
    parent = memory.run(range(6))
    assert memory.manager.has_moves is False
    child = memory.fork(parent)
    assert memory.allocate(child, 7)
    assert memory.manager.has_moves is True
    assert [(copy.source, copy.destination) for copy in memory.changes().copies] == [(1, 2)]
    assert memory.manager.has_moves is False
    assert memory.manager.swap_out(child)
    assert memory.manager.has_moves is True
    memory.changes()
    assert memory.manager.swap_in(child)
    assert memory.manager.has_moves is True


# ---- what others wait for -------------------------------------------------------------------------------------------


def test_nobody_waits_for_a_block_that_was_withdrawn() -> None:
    memory = ByHand()
    request = memory.request(range(8))
    assert memory.open(request)
    frontier = memory.manager.match_prefix(memory.request(range(8))).frontier
    assert frontier is not None
    assert memory.manager.is_being_computed(frontier) is True
    memory.manager.withdraw(request)
    assert memory.manager.is_being_computed(frontier) is False
    memory.manager.withdraw(request)
    memory.manager.check()
    memory.commit(request, 4)
    after = memory.manager.match_prefix(memory.request([*range(8), 0])).frontier
    assert after is not None
    assert after[1] == request.tokens[4:8].tobytes()
    assert memory.manager.is_being_computed(after), "the next block is announced at the commit"
    memory.free(request)
    assert not memory.manager.is_being_computed(after)


def test_what_hung_from_a_cleared_index_is_published_no_more() -> None:
    memory = ByHand()
    parent = memory.run(range(6))
    memory.manager.reset()
    memory.manager.check()
    child = memory.fork(parent)
    memory.grow(child, 6, 7, 8)
    memory.grow(parent, 6, 7, 8)
    assert [block.entry for block in memory.pool.blocks] == [None] * 10
    memory.free(parent)
    memory.free(child)
    assert (memory.pool.num_cached, memory.num_hit([*range(9), 0])) == (0, 0)


def test_who_has_published_nothing_yet_goes_on_after_a_reset() -> None:
    memory = ByHand()
    request = memory.request(range(8))
    assert memory.open(request)
    memory.manager.reset()
    memory.commit(request)
    assert memory.num_hit([*range(8), 0]) == 8


def test_a_dropped_path_is_noticed_at_the_next_commit() -> None:
    memory = ByHand()
    request = memory.run(range(5))
    own = memory.manager.memories[request]
    assert own.last_entry is not None
    memory.pool.unpublish(0)
    memory.manager.index.discard(own.last_entry)
    request.tokens.extend(range(5, 9))
    assert memory.manager.allocate_slots(request, 9)
    request.num_computed = request.num_planned = 9
    memory.manager.commit(request, 9)
    assert (own.can_publish, own.num_published) == (False, 1)
    assert memory.pool.blocks[1].entry is None
    memory.free(request)


def test_a_swap_in_that_finds_no_block_after_all_changes_nothing() -> None:
    memory = ByHand(make_pool=FailingPool, num_host_blocks=4)
    request = memory.run(range(10))
    assert memory.manager.swap_out(request)
    memory.changes()
    before = (memory.pool.num_available, memory.ref_counts(), memory.manager.host.num_in_use)
    assert isinstance(memory.pool, FailingPool)
    memory.pool.fails_next = True
    assert memory.manager.swap_in(request) is False
    assert before == (memory.pool.num_available, memory.ref_counts(), memory.manager.host.num_in_use)
    memory.manager.check()
    assert memory.manager.swap_in(request) is True
    with pytest.raises(InvariantError, match="'r' is not swapped out"):
        memory.manager.swap_in(request)


# ---- those who watch ------------------------------------------------------------------------------------------------


def told(journal: MemoryJournal, most: int = MOST_TAKEN) -> dict[int, tuple[Any, ...]]:
    journal.stamp(1.0)
    return {change.block_id: tuple(change[1:]) for change in journal.take(most)}


def test_what_was_there_before_is_told_by_a_survey() -> None:
    memory = ByHand(windows=(None, None))
    memory.leave_cached([7] * 4, CacheScope("left"))
    request = memory.run(range(6), CacheScope("holds"))
    other = memory.fork(request)
    journal = memory.manager.watch()
    assert (told(journal), journal.has_news) == ({}, False)
    num_pauses = sum(1 for _ in journal.survey(at_once=2))
    assert num_pauses == 2 + 4, "after the tables of each request, and between each two blocks"
    found = told(journal)
    in_use, cached = BlockState.IN_USE, BlockState.CACHED
    blocks = [table for pair in zip(*memory.tables(request), strict=True) for table in pair]
    first, first_other, tail, tail_other = blocks
    assert found == {
        0: (cached, 0, None, NO_BLOCK, "left", None),
        1: (cached, 0, None, NO_BLOCK, "left", None),
        first: (in_use, 2, request, NO_BLOCK, "holds", None),
        first_other: (in_use, 2, request, NO_BLOCK, "holds", None),
        tail: (in_use, 2, request, NOT_PUBLISHED, "holds", None),
        tail_other: (in_use, 2, request, NOT_PUBLISHED, "holds", None),
    }
    memory.free(request)
    after = told(journal)
    assert {change[2] for change in after.values()} == {other}
    assert {change[1] for change in after.values()} == {1}
    memory.free(other)
    assert {change[0] for change in told(journal).values()} == {cached, BlockState.FREE}


def test_a_survey_in_one_go_and_one_of_nothing() -> None:
    memory = ByHand()
    assert list(memory.manager.watch().survey()) == []
    request = memory.run(range(6))
    journal = memory.manager.watch()
    assert list(journal.survey()) == []
    assert {block_id: change[2] for block_id, change in told(journal).items()} == {0: request, 1: request}


def test_nothing_is_told_once_nobody_watches() -> None:
    memory = ByHand()
    journal = memory.manager.watch()
    memory.manager.unwatch()
    request = memory.run(range(6))
    memory.free(request)
    assert (journal.has_news, journal.take_evicted(), told(journal)) == (False, [], {})
    assert memory.pool.journal is None
    memory.manager.watch()
    assert memory.pool.journal is not None


def test_a_journal_remembers_nobody_who_has_gone() -> None:
    memory = ByHand()
    journal = memory.manager.watch()
    for number in range(30):
        memory.leave_cached([number] * 6)
        memory.changes()
    told(journal)
    assert (journal._requests, journal._numbers) == ({}, {})


def test_evictions_are_told_by_tenant_and_once() -> None:
    memory = ByHand(num_blocks=4)
    memory.leave_cached([1] * 8, CacheScope("a"))
    memory.leave_cached([2] * 4, CacheScope("b"))
    journal = memory.manager.watch()
    request = memory.run([3] * 16)
    assert (journal.take_evicted(), journal.take_evicted()) == ([("a", 2), ("b", 1)], [])
    memory.free(request)


def test_what_is_taken_is_taken_once_and_at_most_so_many() -> None:
    memory = ByHand()
    journal = memory.manager.watch()
    request = memory.run(range(16))
    assert journal.has_news
    assert journal.take() == [], "nothing is taken that has no time yet"
    journal.stamp(2.5)
    journal.stamp(3.5)
    first, rest = journal.take(most=3), journal.take()
    assert {change.changed_s for change in first} == {2.5}
    assert (len(first), sorted(change.block_id for change in [*first, *rest])[:4]) == (3, [0, 1, 2, 3])
    assert (journal.take(), journal.has_news) == ([], False)
    memory.free(request)


def test_many_who_come_and_go_beside_one_who_stays_are_forgotten() -> None:
    """What is kept of a block's holders does not grow with those who have held it."""
    memory = ByHand(num_blocks=20)
    journal = memory.manager.watch()
    first = memory.run(range(5))
    for _ in range(40):
        child = memory.fork(first)
        memory.free(child)
        assert told(journal)[0][2] is first
        assert journal._holders.count(0) <= 11
    last = memory.fork(first)
    memory.free(first)
    assert told(journal)[0][2] is last
    memory.free(last)
    assert told(journal)[0][2] is None
    assert journal._holders.count(0) == 0


@given(WINDOWS, st.lists(st.tuples(st.sampled_from(["run", "fork", "free", "swap", "reset"]), TOKENS), max_size=25))
def test_the_changes_add_up_to_what_there_is(
    windows: tuple[int | None, ...], actions: list[tuple[str, list[int]]]
) -> None:
    memory = ByHand(num_blocks=24, windows=windows, num_host_blocks=8)
    memory.leave_cached([0, 1, 2, 0, 1])
    picture, running = BlockPicture(memory.manager), []
    for number, (action, tokens) in enumerate(actions):
        if action == "run":
            request = memory.request(tokens, CacheScope(f"tenant {number % 2}"), name=f"r{number}")
            if memory.open(request):
                memory.commit(request)
                running.append(request)
        elif action == "reset":
            memory.manager.reset()
        elif running:
            request = running.pop(len(tokens) % len(running))
            if action == "fork":
                running += [request, memory.fork(request)]
            elif action == "swap" and memory.manager.swap_out(request):
                memory.changes()
                running += [request] if memory.manager.swap_in(request) else []
                if request not in running:
                    memory.free(request)
            else:
                memory.free(request)
        memory.changes()
        picture.follow()
    for _ in range(30):
        picture.follow()
    assert picture.num_checks


# ---- the pool -------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 7)),
            st.tuples(st.sampled_from(["free", "share", "publish", "unpublish"]), st.integers(0, 7)),
        ),
        max_size=60,
    )
)
def test_a_pool_is_a_stack_of_free_blocks_and_a_queue_of_cached_ones(actions: list[tuple[str, int]]) -> None:
    evicted: list[PrefixEntry] = []
    pool = BlockPool(8, LRUEviction(), on_evict=evicted.append)
    free, cached, holders, entries = list(range(8))[::-1], [], dict.fromkeys(range(8), 0), {}
    num_evictions = 0
    for action, number in actions:
        if action == "take":
            expected = None
            if number <= len(free) + len(cached):
                lost = [cached.pop(0) for _ in range(max(0, number - len(free)))]
                assert [entries[block] for block in lost] == [entries.pop(block) for block in lost]
                num_evictions += len(lost)
                free += lost
                expected = [free.pop() for _ in range(number)]
                holders |= dict.fromkeys(expected, 1)
            assert pool.allocate(number) == expected
        elif action == "free" and holders[number]:
            pool.free(number)
            holders[number] -= 1
            if not holders[number]:
                (cached if number in entries else free).append(number)
        elif action == "share" and (holders[number] or number in cached):
            pool.share(number)
            holders[number] += 1
            if number in cached:
                cached.remove(number)
        elif action == "publish" and holders[number] and number not in entries:
            entries[number] = PrefixEntry(None, b"", 1)
            pool.publish(number, entries[number], Request("r", [1]), group=0)
            assert entries[number].block_ids == [number]
        elif action == "unpublish":
            entry = entries.pop(number, None)
            assert pool.unpublish(number) is entry
            assert entry is None or entry.block_ids == [NO_BLOCK]
            if number in cached:
                cached.remove(number)
                free.append(number)
        pool.check()
        assert list(pool.cached_blocks()) == [pool.blocks[number] for number in cached]
        assert (pool.num_free, pool.num_cached, pool.num_available) == (len(free), len(cached), len(free) + len(cached))
        assert [block.ref_count for block in pool.blocks] == list(holders.values())
        assert pool.num_in_use == sum(count > 0 for count in holders.values())
        assert pool.num_extra_holders == sum(max(0, count - 1) for count in holders.values())
        assert pool.num_evictions == num_evictions == len(evicted)
        assert {block.block_id: block.entry for block in pool.blocks if block.entry is not None} == entries
