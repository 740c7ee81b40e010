"""KVCacheManager, case by case, with the numbers of the blocks."""

from __future__ import annotations

from array import array

import pytest

from quire.core.errors import InvariantError, StaleMatchError
from quire.core.logprobs import TokenLogprobs
from quire.core.request import DEFAULT_SCOPE, CacheScope, Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import NO_BLOCK, BlockCopy, BlockMove
from quire.memory.block import BlockState
from quire.memory.sequence import MissReason
from support.memory import ByHand, FailingPool

EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]
SALTED = CacheScope(salt="s")
INDEXES = ["hash_chain", "radix_tree"]


def states(memory: ByHand, *block_ids: int) -> list[str]:
    return [memory.pool.blocks[block_id].state.value for block_id in block_ids]


# ---- hits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_index", INDEXES)
def test_a_prompt_with_a_known_beginning_takes_its_blocks(prefix_index: str) -> None:
    memory = ByHand(prefix_index=prefix_index)
    memory.run(EIGHT)
    second = memory.run([*EIGHT[:4], 9, 9, 9])
    assert memory.table(second) == [0, 2]
    assert memory.ref_counts()[:3] == [2, 1, 1]


def test_matching_changes_nothing() -> None:
    memory = ByHand()
    memory.leave_cached(EIGHT)
    before = (memory.ref_counts(), len(memory.manager.index), memory.pool.num_cached)
    assert memory.num_hit([*EIGHT, 9]) == 8
    assert (memory.ref_counts(), len(memory.manager.index), memory.pool.num_cached) == before


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9, 12, 13])
def test_only_full_blocks_are_hit_and_never_the_last_token(num_tokens: int) -> None:
    memory = ByHand()
    tokens = list(range(13))
    memory.leave_cached(tokens)
    assert memory.num_hit(tokens[:num_tokens]) == min(num_tokens // 4 * 4, num_tokens - 1)


def test_a_block_is_not_hit_before_it_is_committed() -> None:
    memory = ByHand()
    first = memory.request(EIGHT)
    assert memory.open(first)
    memory.plan(first, 8)
    assert memory.num_hit([*EIGHT, 9]) == 0
    memory.commit(first, 5)
    assert memory.num_hit([*EIGHT, 9]) == 4
    memory.commit(first, 8)
    assert memory.num_hit([*EIGHT, 9]) == 8


def test_generated_tokens_are_hit_like_those_of_a_prompt() -> None:
    memory = ByHand()
    first = memory.run(EIGHT[:3])
    memory.grow(first, *EIGHT[3:])
    assert memory.num_hit([*EIGHT, 9]) == 8


def test_a_full_hit_at_the_end_of_a_block_takes_the_block_over_if_nobody_holds_it() -> None:
    memory = ByHand()
    memory.leave_cached(EIGHT)
    second = memory.request(EIGHT)
    assert memory.open(second)
    assert second.num_computed == 7
    assert memory.table(second) == [0, 1]
    assert memory.changes().copies == []
    assert memory.num_hit([*EIGHT, 9]) == 4, "the block is about to be written, so nobody may hit it"
    memory.commit(second)
    assert memory.num_hit([*EIGHT, 9]) == 8


def test_a_full_hit_at_the_end_of_a_block_copies_the_block_if_somebody_holds_it() -> None:
    memory = ByHand()
    memory.run(EIGHT)
    second = memory.request(EIGHT)
    assert memory.open(second)
    assert second.num_computed == 7
    assert memory.table(second) == [0, 2]
    assert memory.changes().copies == [BlockCopy(1, 2)]
    assert memory.num_hit([*EIGHT, 9]) == 8, "the first one's block can be hit as before"


def test_the_copy_of_a_full_hit_is_merged_again_when_it_is_full() -> None:
    memory = ByHand()
    memory.run(EIGHT)
    second = memory.run(EIGHT)
    assert memory.table(second) == [0, 1]
    assert states(memory, 2) == ["free"]
    assert memory.ref_counts()[:2] == [2, 2]


@pytest.mark.parametrize("held", [False, True], ids=["taken over", "copied"])
def test_blocks_of_one_token(held: bool) -> None:
    memory = ByHand(block_size=1)
    first = memory.run([5, 6, 7])
    if not held:
        memory.free(first)
    second = memory.request([5, 6, 7])
    assert memory.open(second)
    assert second.num_computed == 2
    assert memory.table(second) == ([0, 1, 3] if held else [0, 1, 2])
    memory.commit(second)
    memory.grow(second, 8)
    assert memory.table(second)[:3] == [0, 1, 2]
    assert memory.num_hit([5, 6, 7, 8, 9]) == 4


@pytest.mark.parametrize("held", [False, True], ids=["taken over", "copied"])
def test_a_full_hit_may_be_opened_without_room_for_the_last_token(held: bool) -> None:
    """Beams do so. With blocks of one token, the block of the last one lies beyond the end that they ask for."""
    memory = ByHand(block_size=1)
    first = memory.run([5, 6, 7])
    if not held:
        memory.free(first)
    second = memory.request([5, 6, 7])
    available, needed = memory.pool.num_available, memory.manager.num_blocks_needed(second, 2)
    assert memory.open(second, 2)
    assert memory.table(second) == ([0, 1, 3] if held else [0, 1, 2])
    assert available - memory.pool.num_available == needed


def test_the_room_that_is_needed_counts_cached_hits_and_copies() -> None:
    memory = ByHand()
    first = memory.run(EIGHT)
    again = memory.request(EIGHT)
    assert memory.manager.num_blocks_needed(again, 8) == 1, "the tail is copied, the other block is shared"
    memory.free(first)
    assert memory.manager.num_blocks_needed(again, 8) == 2, "two cached blocks come back into use"
    assert memory.manager.num_blocks_needed(again, 12) == 3
    assert memory.open(again)
    assert memory.manager.num_blocks_needed(again, 8) == 0
    assert memory.manager.num_blocks_needed(again, 9) == 1


# ---- duplicates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_index", INDEXES)
def test_blocks_computed_side_by_side_are_merged_at_commit(prefix_index: str) -> None:
    memory = ByHand(prefix_index=prefix_index)
    first, second = memory.request([*EIGHT, 9]), memory.request([*EIGHT, 10])
    assert memory.open(first) and memory.open(second)
    assert (memory.table(first), memory.table(second)) == ([0, 1, 2], [3, 4, 5])
    memory.commit(first)
    memory.changes()
    memory.commit(second)
    assert memory.table(second) == [0, 1, 5]
    assert states(memory, 3, 4) == ["free", "free"]
    assert [entry[1:] for entry in memory.changes().table_entries] == [(0, 0, 0), (0, 1, 1)]
    assert memory.manager.ledger().merged_blocks == 2


def test_evicting_the_block_of_one_salt_leaves_the_same_tokens_of_the_other() -> None:
    memory = ByHand(num_blocks=4)
    memory.leave_cached(EIGHT, SALTED)
    memory.leave_cached(EIGHT)
    assert memory.run([50] * 4) is not None  # evicts the tail that was let go of first: that of the salted one
    assert memory.num_hit([*EIGHT, 9], SALTED) == 4
    assert memory.num_hit([*EIGHT, 9]) == 8


def test_the_same_tokens_under_another_salt_or_extra_key_are_not_hit() -> None:
    memory = ByHand()
    memory.leave_cached(EIGHT, CacheScope(salt="a", extra_keys=("b",)))
    scopes = [CacheScope(), CacheScope(salt="a"), CacheScope(salt="ab"), CacheScope(extra_keys=("a", "b"))]
    assert [memory.num_hit([*EIGHT, 9], scope) for scope in scopes] == [0, 0, 0, 0]
    assert memory.num_hit([*EIGHT, 9], CacheScope(tenant="t", salt="a", extra_keys=("b",))) == 8


def test_after_an_eviction_within_a_path_only_what_lies_before_it_is_hit() -> None:
    memory = ByHand(num_blocks=4, eviction="priority")
    memory.leave_cached(EIGHT[:4], priority=9)  # the least urgent block: the first to go
    memory.leave_cached([*EIGHT, 9], priority=0)
    assert memory.num_hit([*EIGHT, 9]) == 8
    memory.run([50] * 12)
    assert memory.num_hit([*EIGHT, 9]) == 0


# ---- no room --------------------------------------------------------------------------------------------------------


def test_without_room_nothing_changes() -> None:
    memory = ByHand(num_blocks=4)
    memory.leave_cached(EIGHT)
    memory.run([50] * 8)
    before = memory.ref_counts(), states(memory, 0, 1, 2, 3)
    request = memory.request([*EIGHT, 9])
    assert not memory.open(request)
    assert (memory.ref_counts(), states(memory, 0, 1, 2, 3)) == before
    assert request not in memory.manager.memories
    assert memory.num_hit([*EIGHT, 9]) == 8


def test_a_failed_allocation_leaves_hit_blocks_cached() -> None:
    memory = ByHand(make_pool=FailingPool)
    memory.leave_cached(EIGHT)
    memory.changes()
    memory.pool.fails_next = True  # type: ignore[attr-defined]
    assert not memory.open(memory.request([*EIGHT, 9]))
    assert memory.ref_counts() == [0] * 10
    assert states(memory, 0, 1) == ["cached", "cached"]
    assert memory.changes().table_entries == []
    assert memory.open(memory.request([*EIGHT, 9]))


def test_a_failed_allocation_leaves_a_shared_tail_shared() -> None:
    memory = ByHand(make_pool=FailingPool)
    parent = memory.run([1, 2])
    child = memory.fork(parent)
    memory.changes()
    memory.pool.fails_next = True  # type: ignore[attr-defined]
    assert not memory.allocate(child, 3)
    assert memory.table(child) == [0]
    assert memory.ref_counts()[0] == 2
    assert not memory.manager.has_moves
    assert memory.allocate(child, 3)
    assert memory.changes().copies == [BlockCopy(0, 1)]


def test_a_failed_return_from_the_host_leaves_the_sequence_there() -> None:
    memory = ByHand(make_pool=FailingPool, num_host_blocks=4)
    request = memory.run([*EIGHT, 9])
    assert memory.manager.swap_out(request)
    memory.changes()
    memory.pool.fails_next = True  # type: ignore[attr-defined]
    assert not memory.manager.swap_in(request)
    memory.manager.check()
    assert memory.ref_counts() == [0] * 10
    assert memory.manager.host.num_in_use == 3
    assert memory.manager.swap_in(request)


# ---- forks ----------------------------------------------------------------------------------------------------------


def test_who_writes_first_into_a_shared_tail_copies_it() -> None:
    memory = ByHand()
    parent = memory.run([1, 2, 3, 4, 5, 6])
    child = memory.fork(parent)
    assert memory.table(child) == [0, 1]
    assert memory.ref_counts()[:2] == [2, 2]
    assert (parent.num_slots, child.num_slots) == (6, 6), "neither may write without asking"
    memory.changes()
    memory.grow(child, 7)
    assert memory.table(child) == [0, 2]
    assert memory.changes().copies == [BlockCopy(1, 2)]
    memory.grow(parent, 8)
    assert memory.table(parent) == [0, 1], "it is the tail's one holder by now"
    assert memory.changes().copies == []


def test_a_fork_at_the_end_of_a_block_shares_all_and_copies_nothing() -> None:
    memory = ByHand()
    parent = memory.run(EIGHT)
    child = memory.fork(parent)
    memory.changes()
    memory.grow(parent, 9)
    memory.grow(child, 10)
    assert (memory.table(parent), memory.table(child)) == ([0, 1, 2], [0, 1, 3])
    assert memory.changes().copies == []


def test_a_fork_does_not_share_room_that_was_reserved_ahead() -> None:
    memory = ByHand()
    parent = memory.run([1, 2])
    assert memory.allocate(parent, 12)
    child = memory.fork(parent)
    assert (memory.table(parent), memory.table(child)) == ([0, 1, 2], [0])


def test_three_branches_copy_a_tail_twice() -> None:
    memory = ByHand()
    parent = memory.run([1, 2])
    children = [memory.fork(parent), memory.fork(parent)]
    memory.changes()
    for branch, sequence in enumerate([parent, *children]):
        memory.grow(sequence, 10 + branch)
    assert [memory.table(sequence) for sequence in (parent, *children)] == [[1], [2], [0]]
    assert memory.changes().copies == [BlockCopy(0, 1), BlockCopy(0, 2)]


def test_freeing_one_branch_leaves_the_blocks_of_the_other() -> None:
    memory = ByHand()
    parent = memory.run([1, 2, 3, 4, 5])
    child = memory.fork(parent)
    memory.free(parent)
    assert memory.ref_counts()[:2] == [1, 1]
    memory.grow(child, 6)
    assert memory.table(child) == [0, 1]


def test_a_branch_that_yields_before_its_copy_was_made_is_moved_from_the_original() -> None:
    """Moves out come before copies in a plan: the copy has no bytes yet when they are moved."""
    memory = ByHand(num_host_blocks=4)
    parent = memory.run([1, 2])
    child = memory.fork(parent)
    memory.changes()
    assert memory.allocate(child, 3)
    assert memory.table(child) == [1]
    assert memory.manager.swap_out(child)
    changes = memory.changes()
    assert changes.moves_out == [BlockMove(0, 0)]
    assert changes.copies == []


def test_a_copy_into_a_block_that_is_let_go_of_in_the_same_plan_is_not_made() -> None:
    memory = ByHand()
    parent = memory.run([1, 2])
    child, other = memory.fork(parent), memory.fork(parent)
    memory.changes()
    assert memory.allocate(child, 3)
    memory.free(child)
    assert memory.allocate(other, 3)
    assert memory.table(other) == [1]
    assert memory.changes().copies == [BlockCopy(0, 1)]


# ---- sliding windows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9])
def test_a_window_group_holds_what_the_formula_says(block_size: int, window: int) -> None:
    memory = ByHand(block_size=block_size, num_blocks=64, windows=[None, window])
    request = memory.run([0])
    for position in range(1, 40):
        request.tokens.append(position)
        assert memory.allocate(request, position + 1)
        full, windowed = memory.tables(request)
        first = max(0, position - window + 1) // block_size
        assert NO_BLOCK not in full
        assert windowed[:first] == [NO_BLOCK] * first
        assert NO_BLOCK not in windowed[first:]
        num_held = memory.manager.memories[request].num_held
        assert num_held == len(full) + len(windowed) - first
        assert num_held <= memory.manager.spec.num_blocks_for(position + 1)
        memory.commit(request)


def test_blocks_behind_the_window_are_cached_and_can_be_hit() -> None:
    memory = ByHand(windows=[4])
    request = memory.run(EIGHT)
    memory.grow(request, 9)
    assert memory.table(request) == [NO_BLOCK, 1, 2]
    assert states(memory, 0) == ["cached"]
    assert memory.num_hit([*EIGHT[:4], 50]) == 4


def test_a_hit_needs_only_the_blocks_within_the_window() -> None:
    memory = ByHand(windows=[4], num_blocks=4)
    memory.leave_cached([*EIGHT, 9, 10, 11, 12])
    memory.run([50] * 5)  # takes the free block, and evicts the tail
    memory.pool.unpublish(0)  # the head goes as well: what is left is the block in the middle
    request = memory.request([*EIGHT, 9])
    match = memory.manager.match_prefix(request)
    assert match.num_tokens == 8
    assert [entry.block_ids for entry in match.entries] == [[NO_BLOCK], [1]]


def test_a_full_group_needs_every_block_of_a_hit() -> None:
    memory = ByHand(windows=[None, 4], num_blocks=8)
    memory.leave_cached(EIGHT)
    memory.pool.unpublish(0)
    assert memory.num_hit([*EIGHT, 9]) == 0


def test_what_a_step_under_way_still_reads_is_not_given_back() -> None:
    memory = ByHand(windows=[4])
    request = memory.run(EIGHT)
    request.tokens.extend([9, 10, 11])
    assert memory.allocate(request, 11)
    memory.plan(request, 11)
    request.tokens.append(12)
    assert memory.allocate(request, 12)
    assert memory.table(request) == [NO_BLOCK, 1, 2], "position 8 is not computed, and reads back to 5"


# ---- swap -----------------------------------------------------------------------------------------------------------


def test_a_sequence_goes_to_the_host_and_comes_back_to_its_cached_blocks() -> None:
    memory = ByHand(num_host_blocks=4)
    request = memory.run([*EIGHT, 9, 10])
    memory.changes()
    assert memory.manager.swap_out(request)
    assert memory.changes().moves_out == [BlockMove(0, 0), BlockMove(1, 1), BlockMove(2, 2)]
    assert states(memory, 0, 1, 2) == ["cached", "cached", "free"]
    assert memory.manager.swap_in(request)
    assert memory.table(request) == [0, 1, 2]
    changes = memory.changes()
    assert changes.moves_in == [BlockMove(2, 2)], "full blocks are still here; only the tail is moved"
    assert [entry[1:] for entry in changes.table_entries] == [(0, 0, 0), (0, 1, 1), (0, 2, 2)]
    assert memory.manager.host.num_in_use == 0


def test_blocks_evicted_meanwhile_are_moved_back_and_published_again() -> None:
    memory = ByHand(num_blocks=4, num_host_blocks=4)
    request = memory.run([*EIGHT, 9, 10])
    assert memory.manager.swap_out(request)
    memory.changes()
    other = memory.run([50] * 9)
    assert memory.num_hit([*EIGHT, 11]) == 4, "the second block was evicted"
    memory.free(other)
    assert memory.manager.swap_in(request)
    memory.manager.check()
    assert [move.host_block for move in memory.changes().moves_in] == [1, 2]
    memory.grow(request, 11, 12)
    assert memory.num_hit([*EIGHT, 9, 10, 11, 12, 13]) == 12


def test_the_host_block_of_a_move_back_is_free_for_the_next_plan_only() -> None:
    memory = ByHand(num_host_blocks=1)
    request = memory.run([1, 2])
    assert memory.manager.swap_out(request)
    memory.changes()
    assert memory.manager.swap_in(request)
    other = memory.run([3, 4])
    assert not memory.manager.swap_out(other), "the plan in the making still reads the host block"
    memory.changes()
    assert memory.manager.swap_out(other)


def test_the_host_block_of_content_that_was_cached_is_free_at_once() -> None:
    memory = ByHand(num_host_blocks=2)
    request = memory.run(EIGHT)
    assert memory.manager.swap_out(request)
    memory.changes()
    assert memory.manager.swap_in(request)
    assert not memory.manager.has_moves
    assert memory.manager.host.num_in_use == 0


def test_a_full_host_tier_says_so_and_changes_nothing() -> None:
    memory = ByHand(num_host_blocks=2)
    request = memory.run([*EIGHT, 9])
    memory.changes()
    assert not memory.manager.swap_out(request)
    memory.manager.check()
    assert memory.table(request) == [0, 1, 2]
    assert not memory.manager.has_moves


def test_only_blocks_with_planned_tokens_are_moved_out() -> None:
    memory = ByHand(num_host_blocks=4)
    request = memory.run([1, 2])
    assert memory.allocate(request, 12)
    request.tokens.extend([3, 4, 5])
    memory.plan(request, 5)
    assert memory.manager.swap_out(request)
    assert memory.changes().moves_out == [BlockMove(0, 0), BlockMove(1, 1)]


def test_a_swapped_sequence_gives_back_what_falls_behind_its_window() -> None:
    memory = ByHand(windows=[4], num_host_blocks=8)
    request = memory.run(EIGHT)
    request.tokens.extend([9, 10, 11, 12])
    assert memory.allocate(request, 12)
    memory.plan(request, 12)
    assert memory.manager.swap_out(request)
    assert memory.manager.host.num_in_use == 2, "position 8 reads back to 5"
    memory.changes()
    request.num_computed = 12  # the result came in while it was away
    assert memory.manager.swap_in(request)
    assert memory.table(request)[:2] == [NO_BLOCK, NO_BLOCK]
    memory.changes()
    assert memory.manager.host.num_in_use == 0


def test_a_swapped_sequence_that_ends_leaves_the_host() -> None:
    memory = ByHand(num_host_blocks=4)
    request = memory.run([*EIGHT, 9])
    assert memory.manager.swap_out(request)
    memory.free(request)
    assert memory.manager.host.num_in_use == 0


def test_a_swapped_sequence_gets_no_room_before_it_is_back() -> None:
    memory = ByHand(num_host_blocks=4)
    request = memory.run([1])
    assert memory.manager.swap_out(request)
    with pytest.raises(InvariantError, match="swap it in first"):
        memory.allocate(request, 2)


# ---- why the cache missed -------------------------------------------------------------------------------------------


def reason(memory: ByHand, tokens: list[int], scope: CacheScope = DEFAULT_SCOPE) -> MissReason:
    request = memory.request(tokens, scope)
    assert memory.open(request)
    found = memory.manager.miss_reason(request)
    memory.commit(request)
    memory.free(request)
    return found


@pytest.mark.parametrize("prefix_index", INDEXES)
def test_each_miss_has_its_reason(prefix_index: str) -> None:
    memory = ByHand(prefix_index=prefix_index, num_blocks=4)
    assert reason(memory, EIGHT) is MissReason.NEVER_CACHED
    memory.leave_cached(EIGHT)
    assert reason(memory, [*EIGHT, 9]) is MissReason.NONE
    assert reason(memory, EIGHT) is MissReason.NONE
    assert reason(memory, [*EIGHT, 9, 10]) is MissReason.NOT_FULL
    assert reason(memory, [*EIGHT[:4], 50, 50, 50, 50]) is MissReason.NEVER_CACHED
    assert reason(memory, EIGHT, SALTED) is MissReason.OTHER_SALT
    memory.leave_cached([60] * 16)
    assert reason(memory, [*EIGHT, 9]) is MissReason.EVICTED


@pytest.mark.parametrize("prefix_index", INDEXES)
def test_who_wants_the_logits_of_a_prompt_reads_nothing_and_leaves_it_cached(prefix_index: str) -> None:
    memory = ByHand(prefix_index=prefix_index, num_blocks=8)
    memory.leave_cached(EIGHT)
    request = memory.request([*EIGHT, 9])
    request.sampling = SamplingParams(prompt_logprobs=0)
    assert memory.manager.match_prefix(request).num_tokens == 0
    assert memory.open(request)
    assert memory.manager.miss_reason(request) is MissReason.NOT_ASKED
    memory.commit(request)
    memory.free(request)
    memory.manager.check()
    assert memory.manager.match_prefix(memory.request([*EIGHT, 9])).num_tokens == 8
    request = memory.request([*EIGHT, 9])
    request.sampling = SamplingParams(prompt_logprobs=0)
    request.prompt_logprobs = [TokenLogprobs(-1.0, 1, array("i"), array("d"))] * 8  # as after a preemption
    assert memory.manager.match_prefix(request).num_tokens == 8


def test_the_ledger_counts_a_prompt_that_another_salt_holds() -> None:
    memory = ByHand()
    memory.leave_cached(EIGHT)
    request = memory.run(EIGHT, SALTED)
    assert memory.manager.miss_reason(request) is MissReason.OTHER_SALT
    assert memory.manager.ledger().misses == {MissReason.NEVER_CACHED: 1, MissReason.OTHER_SALT: 1}


@pytest.mark.parametrize(("most", "expected"), [(6, MissReason.EVICTED), (5, MissReason.NEVER_CACHED)])
def test_only_so_many_evictions_are_remembered(
    monkeypatch: pytest.MonkeyPatch, most: int, expected: MissReason
) -> None:
    monkeypatch.setattr("quire.memory.bookkeeping.MAX_REMEMBERED_EVICTIONS", most)
    memory = ByHand(num_blocks=4)
    memory.leave_cached([70, 71, 72, 73])
    memory.leave_cached([*EIGHT, 9, 10, 11, 12])
    memory.leave_cached([60] * 16)  # evicts the four of them
    assert reason(memory, [70, 71, 72, 73, 74]) is expected  # and this two more


@pytest.mark.parametrize("prefix_index", [*INDEXES, "none"])
def test_without_an_index_nothing_is_ever_cached(prefix_index: str) -> None:
    memory = ByHand(prefix_index=prefix_index)
    memory.leave_cached(EIGHT)
    assert memory.pool.num_cached == (0 if prefix_index == "none" else 2)


# ---- waiting for a block that somebody computes ---------------------------------------------------------------------


def test_the_next_full_block_of_a_running_sequence_is_known_to_be_computed() -> None:
    memory = ByHand()
    first = memory.request([*EIGHT, 9])
    assert memory.open(first)
    frontiers = [memory.manager.match_prefix(memory.request(EIGHT)).frontier]
    memory.commit(first, 4)
    frontiers.append(memory.manager.match_prefix(memory.request(EIGHT)).frontier)
    computing = [frontier is not None and memory.manager.is_being_computed(frontier) for frontier in frontiers]
    assert computing == [False, True]
    memory.commit(first, 9)
    assert frontiers[1] is not None and not memory.manager.is_being_computed(frontiers[1])


@pytest.mark.parametrize("how", ["free", "drop", "swap_out", "reset"])
def test_nobody_waits_for_a_sequence_that_stopped_computing(how: str) -> None:
    memory = ByHand(num_host_blocks=4)
    first = memory.request(EIGHT)
    assert memory.open(first)
    frontier = memory.manager.match_prefix(memory.request(EIGHT)).frontier
    assert frontier is not None and memory.manager.is_being_computed(frontier)
    if how == "reset":
        memory.manager.reset()
    else:
        getattr(memory.manager, how)(first)
    memory.manager.check()
    assert not memory.manager.is_being_computed(frontier)


# ---- matches that are too old ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["evicted", "reset", "behind a window"])
def test_a_match_is_refused_when_its_blocks_are_gone(how: str) -> None:
    memory = ByHand(num_blocks=4, windows=(4,) if how == "behind a window" else (None,))
    memory.leave_cached(EIGHT)
    request = memory.request([*EIGHT, 9])
    match = memory.manager.match_prefix(request)
    assert match.num_tokens == 8
    if how == "reset":
        memory.manager.reset()
    else:
        memory.leave_cached([50] * 16)
    before = (memory.ref_counts(), memory.pool.num_available)
    for ask in (memory.manager.allocate_slots, memory.manager.num_blocks_needed):
        with pytest.raises(StaleMatchError, match="has been evicted; match the prefix again"):
            ask(request, 9, match)
    assert (memory.ref_counts(), memory.pool.num_available) == before
    assert request not in memory.manager.memories
    memory.manager.check()
    assert memory.open(request)


# ---- letting go -----------------------------------------------------------------------------------------------------


def test_what_is_freed_stays_cached_and_the_tail_is_evicted_first() -> None:
    memory = ByHand(num_blocks=3)
    assert memory.leave_cached([*EIGHT, 9, 10, 11, 12]) == [0, 1, 2]
    assert memory.pool.num_cached == 3
    assert memory.leave_cached([50] * 3) == [2]
    assert memory.leave_cached([50] * 7) == [1, 2]
    assert memory.num_hit([*EIGHT, 9]) == 4


def test_drop_caches_nothing_that_the_sequence_alone_holds() -> None:
    memory = ByHand()
    first = memory.run([*EIGHT, 9])
    memory.manager.drop(first)
    memory.manager.check()
    assert (memory.pool.num_free, len(memory.manager.index)) == (10, 0)


def test_drop_leaves_what_others_share() -> None:
    memory = ByHand()
    first = memory.run([*EIGHT, 9])
    second = memory.run([*EIGHT[:4], 50])
    memory.manager.drop(first)
    memory.manager.check()
    assert memory.table(second) == [0, 3]
    assert memory.num_hit([*EIGHT, 9]) == 4


def test_drop_forgets_what_was_computed_and_given_back_before() -> None:
    memory = ByHand(windows=(4,))
    found = memory.leave_cached(EIGHT[:4])
    first = memory.run([*EIGHT, 9, 10, 11, 12, 13], name="first")
    memory.grow(first, 14, 15, 16, 17)
    assert memory.pool.num_cached > len(found), "blocks behind the window are cached"
    memory.manager.drop(first)
    memory.manager.check()
    assert [block.block_id for block in memory.pool.cached_blocks()] == found


def test_a_request_that_holds_nothing_any_more_can_be_dropped() -> None:
    memory = ByHand()
    other = memory.run([*EIGHT[:4], 50, 51, 52, 53], name="other")
    first = memory.run([*EIGHT, 9], name="first")
    memory.free(first)
    assert memory.num_hit([*EIGHT, 9]) == 8
    memory.manager.drop(first)
    memory.manager.check()
    assert memory.num_hit([*EIGHT, 9]) == 4
    memory.free(other)
    memory.manager.drop(memory.request(EIGHT, CacheScope("another tenant"), name="other"))
    assert memory.num_hit([*EIGHT[:4], 50, 51, 52, 53, 9]) == 8, "an id of another tenant says nothing"


def test_after_a_reset_running_sequences_go_on_and_are_hit_no_more() -> None:
    memory = ByHand()
    first = memory.run([*EIGHT, 9])
    memory.leave_cached([50] * 8)
    memory.manager.reset()
    memory.manager.check()
    assert memory.pool.num_cached == 0
    assert memory.table(first) == [0, 1, 2]
    memory.grow(first, 10, 11, 12)
    assert memory.num_hit([*EIGHT, 9, 10, 11, 12, 13]) == 0
    memory.free(first)
    assert memory.pool.num_free == 10


def test_a_sequence_with_nothing_published_is_cached_after_a_reset() -> None:
    memory = ByHand()
    first = memory.request(EIGHT)
    assert memory.open(first)
    memory.manager.reset()
    memory.commit(first)
    assert memory.num_hit([*EIGHT, 9]) == 8


def test_a_sequence_that_comes_back_after_a_reset_is_cached_again() -> None:
    memory = ByHand(num_host_blocks=4)
    first = memory.run(EIGHT[:7])
    assert memory.manager.swap_out(first)
    memory.changes()
    memory.manager.reset()
    assert memory.manager.swap_in(first)
    memory.grow(first, 8)
    assert memory.num_hit([*EIGHT, 9]) == 8


# ---- books ----------------------------------------------------------------------------------------------------------


def test_the_ledger_adds_up() -> None:
    memory = ByHand()
    first = memory.run([*EIGHT, 9])
    memory.leave_cached([50] * 4)
    memory.fork(first)
    assert memory.allocate(first, 13)
    request = memory.request([*EIGHT, 60])
    assert memory.open(request)
    memory.plan(request, 9)
    ledger = memory.manager.ledger()
    ledger.check()
    # blocks: 0, 1 shared by three; 2 the child's tail, 4 its copy, 5 the room ahead; 6 the tail of the last
    assert (ledger.used_blocks, ledger.cached_blocks, ledger.free_blocks) == (6, 1, 3)
    assert (ledger.stored_slots, ledger.reserved_slots, ledger.fragmented_slots) == (10, 1, 13)
    assert ledger.blocks_saved_by_sharing == 4
    assert ledger.copied_blocks == 1
    assert (ledger.queried_tokens, ledger.hit_tokens) == (9 + 4 + 9, 8)


def test_a_resumed_request_is_counted_apart() -> None:
    memory = ByHand()
    memory.leave_cached(EIGHT)
    request = memory.request([*EIGHT, 9])
    request.num_preemptions = 1
    assert memory.open(request)
    ledger = memory.manager.ledger()
    assert (ledger.queried_tokens, ledger.hit_tokens) == (8, 0)
    assert (ledger.resumed_queried_tokens, ledger.resumed_hit_tokens) == (9, 8)


def test_a_prompt_that_is_not_looked_up_is_not_counted() -> None:
    memory = ByHand()
    memory.leave_cached(EIGHT)
    for num_preemptions in (0, 1):
        request = memory.request([*EIGHT, 9], name=f"r{num_preemptions}")
        request.sampling = SamplingParams(prompt_logprobs=0)
        request.num_preemptions = num_preemptions
        assert memory.open(request)
        memory.free(request)
    ledger = memory.manager.ledger()
    assert (ledger.queried_tokens, ledger.resumed_queried_tokens) == (8, 0)
    without = ByHand(prefix_index="none")
    without.leave_cached(EIGHT)
    assert without.manager.ledger().queried_tokens == 0


def test_a_tenant_keeps_no_more_than_its_quota() -> None:
    memory = ByHand(max_cached_blocks_per_tenant=1)
    noisy, quiet = CacheScope(tenant="noisy"), CacheScope(tenant="quiet")
    memory.leave_cached(EIGHT, quiet)
    assert memory.num_hit([*EIGHT, 9]) == 4, "the tail was given up for the head"
    memory.leave_cached([50] * 12, noisy)
    assert memory.num_hit([*EIGHT, 9]) == 4
    assert memory.num_hit([50] * 13) == 4
    assert memory.pool.num_cached == 2


def test_a_quota_of_nothing_keeps_nothing() -> None:
    memory = ByHand(max_cached_blocks_per_tenant=0)
    first = memory.run(EIGHT)
    assert memory.num_hit([*EIGHT, 9]) == 8, "what is in use can be hit"
    memory.free(first)
    assert memory.pool.num_free == 10


def test_running_requests_are_not_charged() -> None:
    memory = ByHand(max_cached_blocks_per_tenant=1)
    memory.run([*EIGHT, 9])
    memory.run([50] * 9)
    assert memory.pool.num_in_use == 6


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda memory, request: setattr(memory.pool.blocks[0], "ref_count", 2),
        lambda memory, request: (
            memory.table(request).clear() or memory.manager.memories[request].tables[0].block_ids.pop()
        ),
        lambda memory, request: memory.manager.memories[request].tables[0].block_ids.append(0),
        lambda memory, request: request.tokens.__setitem__(0, 99),
        lambda memory, request: setattr(request, "num_slots", 99),
        lambda memory, request: memory.manager.index.clear(),
        lambda memory, request: memory.pool._free_list.put(next(iter(memory.pool._free_list))),
    ],
    ids=["reference count", "lost block", "block twice", "other tokens", "beyond the table", "index", "free twice"],
)
def test_check_finds_books_that_disagree(corrupt: object) -> None:
    memory = ByHand()
    request = memory.run([*EIGHT, 9])
    assert callable(corrupt)
    corrupt(memory, request)
    with pytest.raises(InvariantError):
        memory.manager.check()


def test_a_block_is_free_or_cached_or_in_use() -> None:
    memory = ByHand(num_blocks=3)
    memory.leave_cached(EIGHT[:4])
    memory.run([9])
    assert [block.state for block in memory.pool.blocks] == [BlockState.CACHED, BlockState.IN_USE, BlockState.FREE]


def test_two_requests_of_one_id_are_two_requests() -> None:
    memory = ByHand()
    first, second = Request("same", [1]), Request("same", [1])
    assert memory.open(first) and memory.open(second)
    assert (memory.table(first), memory.table(second)) == ([0], [1])
