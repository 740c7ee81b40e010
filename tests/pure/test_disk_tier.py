"""DiskTier and its parts: which blocks go to the disk and come back, and what is left there."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest

from quire.core.kept_block import CacheJob, KeptBlock
from quire.core.request import DEFAULT_SCOPE, Request
from quire.core.transfers import TransferOutcome, Transfers
from quire.memory.prefix import PrefixEntry
from quire.memory.tiers.disk import MOST_FAILURES, RETRY_EVERY
from quire.memory.tiers.rates import FEW_TOKENS, LONGEST_PATIENCE_US, SHORTEST_PATIENCE_US, LoadRates
from quire.memory.tiers.slots import SlotBooks
from support.memory import ByHand

NUM_SLOTS = 8


def end_transfers(memory: ByHand, reason: str = "") -> Transfers:
    """Return the transfers of a plan, all of which are done, or undone for a reason."""
    transfers: Transfers = memory.changes().transfers
    tickets = array("i", [each.ticket for each in (*transfers.stores, *transfers.loads)])
    undone = dict.fromkeys(tickets, reason) if reason else {}
    memory.manager.note_step(1, 1, TransferOutcome(array("i") if reason else tickets, undone, 10 * len(tickets)))
    memory.manager.check()
    return transfers


def stored(memory: ByHand) -> list[KeptBlock]:
    """Write everything that waits; return the blocks in their order."""
    blocks = []
    while transfers := end_transfers(memory):
        blocks += [store.kept for store in transfers.stores]
    return blocks


def restarted(blocks: list[KeptBlock], **config: int) -> ByHand:
    """Return a memory with an empty device and these blocks on disk."""
    memory = ByHand(num_disk_slots=NUM_SLOTS, **config)
    memory.manager.disk.restore(blocks)
    return memory


def loading(memory: ByHand, request: Request) -> bool:
    """Try to load what the disk has of a request."""
    is_loading = memory.manager.start_load(request, memory.manager.match_prefix(request))
    memory.manager.check()
    return is_loading


# ---- slots ----------------------------------------------------------------------------------------------------------


def is_on_disk(entry: PrefixEntry) -> bool:
    return entry.kept is not None and max(entry.kept.slots) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_the_leaf_used_longest_ago_makes_room(seed: int) -> None:
    rng, books, root, pins = random.Random(seed), SlotBooks(NUM_SLOTS, 2), PrefixEntry(None, b"", 2), Counter()
    used: list[PrefixEntry] = []  # those on disk, the one used longest ago first
    for step in range(200):
        entry = rng.choice(used) if used else root
        action = rng.choice(["store", "store", "touch", "pin", "unpin", "release"] if used else ["store"])
        if action == "store":
            parent = rng.choice([root, entry])
            inner = {each.parent for each in used}
            leaves = [each for each in used if each not in inner and not pins[each] and each is not parent]
            evicted: list[PrefixEntry] = []
            is_full = books.num_held == NUM_SLOTS
            entry = PrefixEntry(parent, step.to_bytes(2), 2)
            slot = books.take((entry, parent), evicted)
            assert evicted == (leaves[:1] if is_full else [])
            assert (slot is None) == (is_full and not leaves)
            used = [each for each in used if each not in evicted]
            if slot is not None:
                books.hold(entry, rng.randrange(2), slot)
                used.append(entry)
        elif action == "touch":
            books.touch(entry)
            used.remove(entry)
            used.append(entry)
        elif action == "pin":
            books.pin(entry)
            pins[entry] += 1
        elif action == "unpin" and pins[entry]:
            books.unpin(entry)
            pins[entry] -= 1
        elif action == "release" and not pins[entry]:
            assert [books.release(entry, group) for group in (0, 1)] != [-1, -1]
            used.remove(entry)
        books.check()
        assert all(map(is_on_disk, used)) and books.num_held == len(used)


def test_a_full_disk_opens_no_slot_and_a_bad_slot_is_never_used_again() -> None:
    books, root = SlotBooks(4, 1), PrefixEntry(None, b"", 1)
    entry = PrefixEntry(root, b"a", 1)
    books.hold(entry, 0, books.take((), []) or 0)
    books.freeze()
    assert books.num_slots == 1
    assert books.take((entry,), []) is None
    assert books.release(entry, 0, is_bad=True) == 0
    assert books.take((), []) is None
    assert (books.num_bad, books.num_held) == (1, 0)
    books.check()


def test_a_use_is_noted_in_constant_time_and_outdated_notes_do_not_pile_up() -> None:
    books, entry = SlotBooks(4, 1), PrefixEntry(PrefixEntry(None, b"", 1), b"a", 1)
    books.hold(entry, 0, books.take((), []) or 0)
    lengths = []
    for _ in range(1000):
        books.touch(entry)
        lengths.append(len(books._leaves))
    assert lengths[50] > 50
    assert max(lengths) < 100


# ---- rates ----------------------------------------------------------------------------------------------------------


def test_a_load_pays_if_it_takes_less_time_than_computing() -> None:
    rates = LoadRates()
    assert rates.pays(1, 1) and rates.patience_us(1) == LONGEST_PATIENCE_US
    rates.note_step(FEW_TOKENS - 1, 1_000_000)
    rates.note_step(FEW_TOKENS, 0)
    rates.note_loads(0, 100)
    rates.note_loads(3, 0)
    assert rates.token_us is rates.block_us is None, "these show nothing"
    rates.note_step(FEW_TOKENS, 2000 * FEW_TOKENS)
    assert rates.pays(9, 1), "only a load shows how fast loads are"
    rates.note_loads(2, 20_000)
    assert rates.pays(1, 6) and not rates.pays(1, 5)
    patience = [rates.patience_us(num_tokens) for num_tokens in (10, 1000, 10_000)]
    assert patience == [SHORTEST_PATIENCE_US, 2_000_000, LONGEST_PATIENCE_US]
    rates.note_loads(1, 20_000)
    assert rates.block_us == pytest.approx(13_000)


# ---- stores ---------------------------------------------------------------------------------------------------------


def test_a_cleared_disk_has_no_record_in_the_slots_of_evicted_blocks_either() -> None:
    memory = ByHand(windows=(None, None), num_blocks=16, num_disk_slots=5, disk_write="always")
    for first in (0, 100):
        memory.leave_cached(range(first, first + (4 if first else 8)))
        end_transfers(memory)
    assert memory.manager.disk.counts["evicted"] == 1
    assert len(memory.manager.disk.slots.free_slots) == 1
    memory.manager.reset()
    assert end_transfers(memory).voids.tolist() == [0, 1, 2, 3, 4]


def test_blocks_are_stored_later_if_too_many_wait() -> None:
    memory = ByHand(num_disk_slots=NUM_SLOTS, disk_write="always")
    disk = memory.manager.disk
    disk._max_stores = 2
    memory.leave_cached(range(20))
    found = []
    while disk.is_storing:
        found.append([(each.kept.serial, each.kept.parent) for each in end_transfers(memory).stores])
    assert found == [[(1, 0), (2, 1)], [(3, 2), (4, 3)], [(5, 4)]]
    assert (disk.counts["stored"], disk.slots.num_held) == (5, 5)


def test_only_what_is_hit_is_stored_by_default() -> None:
    memory = ByHand(num_disk_slots=NUM_SLOTS)
    memory.leave_cached(range(12))
    assert not memory.changes().transfers
    memory.leave_cached([*range(8), 50])
    assert [kept.serial for kept in stored(memory)] == [1, 2]
    memory.leave_cached([*range(8), 60])
    assert not memory.changes().transfers, "they are there already"


def test_jobs_tell_how_far_they_are() -> None:
    memory = ByHand(num_disk_slots=NUM_SLOTS)
    memory.leave_cached(range(9))
    jobs = memory.manager.jobs
    jobs.keep("keep", array("i", range(9)), DEFAULT_SCOPE, wants_slots=True)
    assert jobs.figures() == {"keep": CacheJob(2, 8, 0)}
    blocks = stored(memory)
    assert jobs.figures() == {"keep": CacheJob(0, 8, 8, (0, 1))}
    jobs.end("keep")
    lost = KeptBlock(2, 9, 7, 0, bytes(16), None)  # without its parent
    other = restarted(blocks[:1]).manager
    other.jobs.take("take", "bundle", [*blocks, lost])
    assert other.jobs.figures() == {"take": CacheJob(1, 0, 0, (), 3, 1, 1)}
    (store,) = other.take_changes().transfers.stores
    assert (store.bundle, store.block, store.kept.parent) == ("bundle", 1, 1)
    other.note_step(1, 1, TransferOutcome(undone={store.ticket: "damaged"}))
    assert other.jobs.figures() == {"take": CacheJob(0, 0, 0, (), 3, 1, 2)}


# ---- loads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept() -> list[KeptBlock]:
    """The blocks of a text of 16 tokens on disk."""
    memory = ByHand(num_disk_slots=NUM_SLOTS, disk_write="always")
    memory.leave_cached(range(16))
    return stored(memory)


def test_a_request_waits_for_its_loads_and_hits_them(kept: list[KeptBlock]) -> None:
    memory = restarted(kept, num_blocks=40)
    request = memory.request(range(17))
    assert loading(memory, request)
    (frontier,) = {memory.manager.match_prefix(request).frontier}
    assert frontier is not None and memory.manager.is_being_computed(frontier)
    assert [load.slot for load in end_transfers(memory).loads] == [0, 1, 2, 3]
    assert memory.manager.disk.rates.block_us == 10
    assert memory.num_hit(range(17)) == 16
    assert memory.open(request)
    assert memory.manager.note_hits(request, 16) == (0, 16)
    memory.manager.disk.end_loads(request)
    assert memory.manager.disk.figures()["disk_hit_tokens_total"] == 16


def test_loads_that_do_not_pay_are_tried_now_and_then(kept: list[KeptBlock]) -> None:
    memory = restarted(kept, num_blocks=40)
    memory.manager.disk.rates.note_step(FEW_TOKENS, FEW_TOKENS)
    memory.manager.disk.rates.note_loads(1, 1_000_000)
    were_loaded = [loading(memory, memory.request(range(17), name=f"r{number}")) for number in range(RETRY_EVERY)]
    assert were_loaded == [False] * (RETRY_EVERY - 1) + [True]
    assert memory.manager.disk.counts["not worth loading"] == RETRY_EVERY


def test_loads_hold_a_part_of_the_memory_and_give_it_back(kept: list[KeptBlock]) -> None:
    memory = restarted(kept, num_blocks=10)
    request = memory.request(range(17))
    assert loading(memory, request)
    assert (memory.pool.num_in_use, memory.manager.disk.landings.num_blocks) == (2, 2)
    assert memory.manager.disk.give_up_loads()
    assert not memory.manager.disk.give_up_loads()
    assert memory.pool.num_in_use == 0
    assert not memory.changes().transfers.loads, "they were not sent yet"
    assert not loading(memory, request), "it loads each part once"


@pytest.mark.parametrize("reason", ["failed", "late"])
def test_after_some_failures_in_a_row_the_disk_is_off(kept: list[KeptBlock], reason: str) -> None:
    memory = restarted(kept, num_blocks=40)
    disk = memory.manager.disk
    for number in range(MOST_FAILURES):
        assert disk.is_on
        request = memory.request(range(5), name=f"r{number}")
        assert loading(memory, request)
        end_transfers(memory, reason)
        disk.end_loads(request)
    assert disk.figures()["disk_is_off"] and disk.counts[reason] == MOST_FAILURES
    assert not loading(memory, memory.request(range(5), name="last"))


def test_what_is_forgotten_while_it_is_loaded_does_not_arrive(kept: list[KeptBlock]) -> None:
    memory = restarted(kept, num_blocks=40)
    request = memory.request(range(17))
    assert loading(memory, request)
    tickets = array("i", [load.ticket for load in memory.changes().transfers.loads])
    memory.manager.disk.forget(memory.manager.match_prefix(request).known[1])
    memory.manager.check()
    assert memory.manager.disk.landings.num_blocks == 3
    transfers = memory.changes().transfers
    assert (transfers.drops.tolist(), transfers.voids.tolist()) == ([tickets[1]], [1])
    memory.manager.note_step(1, 1, TransferOutcome(tickets))
    memory.manager.check()
    assert memory.num_hit(range(17)) == 4


def test_damaged_blocks_count_as_failures_but_not_those_of_a_bundle(kept: list[KeptBlock]) -> None:
    memory = restarted(kept, num_blocks=40)
    assert loading(memory, memory.request(range(17)))
    end_transfers(memory, "damaged")
    assert not memory.manager.disk.is_on
    memory = restarted([])
    memory.manager.jobs.take("take", "bundle", kept)
    end_transfers(memory, "damaged")
    assert memory.manager.disk.is_on


def test_a_load_that_succeeds_in_between_counts(kept: list[KeptBlock]) -> None:
    memory = restarted(kept, num_blocks=40)
    for reason in ["failed"] * (MOST_FAILURES - 1) + [""] + ["failed"] * (MOST_FAILURES - 1):
        request = memory.request(range(5))
        assert loading(memory, request)
        end_transfers(memory, reason)
        memory.manager.disk.end_loads(request)
        for block in range(40):
            memory.pool.unpublish(block)
    assert memory.manager.disk.is_on


def test_a_damaged_block_is_gone_with_its_slot(kept: list[KeptBlock]) -> None:
    memory = restarted(kept[:1], num_blocks=40)
    assert loading(memory, memory.request(range(5)))
    end_transfers(memory, "damaged")
    assert memory.changes().transfers.voids.tolist() == [0]
    assert len(memory.manager.index) == memory.manager.disk.slots.num_held == 0
