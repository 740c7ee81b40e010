"""The audit of the memory: each kind of broken book is noticed. The state machines rely on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.core.errors import InvariantError
from quire.core.request import CacheScope
from quire.core.step import NO_BLOCK
from quire.memory.block_hash import BlockHasher
from quire.memory.eviction.lru import LRUEviction
from quire.memory.eviction.order import EvictionOrder
from quire.memory.ledger import MemoryLedger
from quire.memory.prefix import PrefixEntry
from quire.memory.prefix.hash_chain import HashChainIndex
from quire.memory.prefix.radix_tree import RadixEntry, RadixTreeIndex
from quire.memory.quota import TenantQuota
from support.memory import ByHand


class Memory(ByHand):
    """Blocks 0 and 1 are held and published by `first`, block 1 by `second` too; 3 is its tail, 4 is cached."""

    def __init__(self, **config: object) -> None:
        super().__init__(num_blocks=10, num_host_blocks=4, **config)
        self.first = self.run([1, 2, 3, 4, 5, 6, 7, 8, 9], name="first")
        self.second = self.fork(self.first)
        self.cached = self.leave_cached([20, 21, 22, 23])[0]

    def entry(self, block_id: int) -> PrefixEntry:
        entry = self.pool.blocks[block_id].entry
        assert entry is not None
        return entry


def refuse(memory: ByHand, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        memory.manager.check()


def test_books_that_agree_pass() -> None:
    for index in ("hash_chain", "radix_tree"):
        memory = Memory(prefix_index=index)
        memory.manager.check()
        assert (memory.table(memory.first), memory.table(memory.second), memory.cached) == ([0, 1, 2], [0, 1, 2], 3)


# ---- the pool -------------------------------------------------------------------------------------------------------


def free_a_block_twice(memory: Memory) -> None:
    memory.pool._free_list.put(next(iter(memory.pool._free_list)))


def cache_a_free_block(memory: Memory) -> None:
    memory.pool._cached.add(memory.pool.blocks[next(iter(memory.pool._free_list))])


def free_a_cached_block(memory: Memory) -> None:
    memory.pool._free_list.put(memory.cached)


def free_a_block_in_use(memory: Memory) -> None:
    memory.pool._free_list.put(0)


def lose_a_free_block(memory: Memory) -> None:
    memory.pool._free_list.take(1)[0]


def lose_a_cached_block(memory: Memory) -> None:
    memory.pool._cached.remove(memory.pool.blocks[memory.cached])


def count_below_nothing(memory: Memory) -> None:
    block = memory.pool.blocks[memory.pool._free_list.take(1)[0]]
    block.ref_count = -1


def name_another_block(memory: Memory) -> None:
    memory.entry(0).block_ids[0] = 1


def count_an_extra_holder(memory: Memory) -> None:
    memory.pool.num_extra_holders += 1


def forget_an_extra_holder(memory: Memory) -> None:
    memory.pool.num_extra_holders -= 1


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (free_a_block_twice, "free twice, cached twice, or both"),
        (cache_a_free_block, "free twice, cached twice, or both"),
        (free_a_cached_block, "free twice, cached twice, or both"),
        (free_a_block_in_use, r"Block\(0, in use, ref_count=2\) is listed as free"),
        (lose_a_free_block, "is listed as in use"),
        (lose_a_cached_block, r"Block\(3, cached, ref_count=0\) is listed as in use"),
        (count_below_nothing, "ref_count=-1"),
        (name_another_block, "the entry of Block.* points to another block"),
        (count_an_extra_holder, "4 extra holders are counted, but 3 exist"),
        (forget_an_extra_holder, "2 extra holders are counted, but 3 exist"),
    ],
)
def test_the_pool_notices(break_it: Callable[[Memory], None], message: str) -> None:
    memory = Memory()
    break_it(memory)
    refuse(memory, message)


def test_the_pool_asks_its_quota() -> None:
    memory = Memory(max_cached_blocks_per_tenant=2)
    memory.manager.check()
    quota = memory.pool._quota
    assert quota is not None
    quota.remove(memory.pool.blocks[memory.cached])
    refuse(memory, "count differs from the cached blocks")


def test_a_quota_notices_a_tenant_over_its_limit() -> None:
    quota, blocks = TenantQuota(1), [block for block in Memory().pool.blocks[:2]]
    quota.add(blocks[0])
    quota.check(blocks[:1])
    quota.add(blocks[1])
    with pytest.raises(InvariantError, match="more cached blocks than its quota"):
        quota.check(blocks)


def test_a_quota_keeps_nothing_of_a_tenant_without_cached_blocks() -> None:
    memory = Memory(max_cached_blocks_per_tenant=2)
    for number in range(20):
        memory.leave_cached([number] * 4, CacheScope(f"tenant {number}"))
    quota = memory.pool._quota
    assert quota is not None
    assert set(quota._kept) == {block.tenant for block in memory.pool.cached_blocks()}


# ---- tables, entries, host blocks -----------------------------------------------------------------------------------


def table_of(memory: Memory) -> list[int]:
    return memory.manager.memories[memory.first].tables[0].block_ids


def forget_a_holder(memory: Memory) -> None:
    memory.pool.blocks[2].ref_count -= 1
    memory.pool.num_extra_holders -= 1


def detach_an_entry(memory: Memory) -> None:
    """An entry that the index does not walk any more, though a block stands under it."""
    memory.manager.index.clear()


def name_a_block_that_does_not_know(memory: Memory) -> None:
    memory.entry(memory.cached).block_ids[0] = 1
    memory.pool.blocks[memory.cached].entry = None
    memory.pool._cached.remove(memory.pool.blocks[memory.cached])
    memory.pool._free_list.put(memory.cached)


def keep_an_entry_for_nothing(memory: Memory) -> None:
    index = memory.manager.index
    index.extend(index.root(b"nobody"), bytes(16))


def hold_what_was_given_back(memory: Memory) -> None:
    memory.manager.memories[memory.first].tables[0].num_given_back = 1


def hold_a_block_twice(memory: Memory) -> None:
    table_of(memory)[2] = 1


def have_a_hole(memory: Memory) -> None:
    table_of(memory)[1] = NO_BLOCK


def write_beyond_the_table(memory: Memory) -> None:
    memory.first.num_slots = 13


def plan_beyond_the_table(memory: Memory) -> None:
    memory.first.num_planned = 13


def change_a_published_token(memory: Memory) -> None:
    memory.first.tokens[4] = 99


def hold_another_block_than_the_published(memory: Memory) -> None:
    blocks = table_of(memory)
    blocks[0], blocks[1] = blocks[1], blocks[0]


def miss_a_published_block(memory: Memory) -> None:
    memory.manager.memories[memory.first].num_published = 3


def count_too_few_published(memory: Memory) -> None:
    """The walk to the root then reads the tokens before the first."""
    memory.manager.memories[memory.first].num_published = 1


def write_into_a_shared_tail(memory: Memory) -> None:
    memory.first.num_slots = 12


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (forget_a_holder, r"Block\(2, in use, ref_count=1\) is in 2 tables"),
        (detach_an_entry, "is published under a dropped entry"),
        (name_a_block_that_does_not_know, "an entry points to .*, which does not point back"),
        (keep_an_entry_for_nothing, "the index kept an entry without blocks or children"),
        (hold_what_was_given_back, "holds a block that it has freed"),
        (hold_a_block_twice, "a hole in its table, or a block twice"),
        (have_a_hole, "a hole in its table, or a block twice"),
        (write_beyond_the_table, "may write beyond its table"),
        (plan_beyond_the_table, "may write beyond its table"),
        (change_a_published_token, "block 1 is published under other tokens"),
        (hold_another_block_than_the_published, "block 1 is not the published one"),
        (miss_a_published_block, "published under other tokens"),
        (count_too_few_published, "published under other tokens"),
        (write_into_a_shared_tail, "may write into a block that others hold"),
    ],
)
@pytest.mark.parametrize("index", ["hash_chain", "radix_tree"])
def test_the_books_notice(break_it: Callable[[Memory], None], message: str, index: str) -> None:
    memory = Memory(prefix_index=index)
    break_it(memory)
    refuse(memory, message)


def test_the_path_to_the_root_must_have_as_many_entries_as_blocks_are_published() -> None:
    memory = ByHand()
    request = memory.run([1, 2, 3, 4, 1, 2, 3, 4, 1])
    first = memory.pool.blocks[0].entry
    own = memory.manager.memories[request]
    own.last_entry = None
    refuse(memory, "the published path has 2 blocks too few")
    own.can_publish = False  # what was cleared from the index need not lead anywhere
    memory.manager.check()
    own.last_entry, own.can_publish, own.num_published = first, True, 2
    refuse(memory, "block 1 is not the published one")


def test_an_entry_of_one_group_must_name_a_block_of_that_group() -> None:
    memory = ByHand(windows=(None, None))
    memory.leave_cached([1, 2, 3, 4])
    entry = memory.pool.blocks[0].entry
    assert entry is not None
    assert entry.block_ids == [0, 1]
    memory.pool.blocks[0].group, memory.pool.blocks[1].group = 1, 0
    entry.block_ids = [1, 0]
    memory.manager.check()
    memory.pool.blocks[0].entry = None
    entry.block_ids[1] = NO_BLOCK
    memory.pool._cached.remove(memory.pool.blocks[0])
    memory.pool._free_list.put(0)
    memory.manager.check()
    entry.block_ids = [1, 1]
    refuse(memory, "which does not point back")


def test_more_host_blocks_than_are_in_use_cannot_be_held() -> None:
    memory = Memory()
    memory.free(memory.second)
    assert memory.manager.swap_out(memory.first)
    memory.manager.check()
    hosts = memory.manager.memories[memory.first].host_blocks
    assert hosts == [[0, 1, 2]]
    hosts[0] += [3]
    refuse(memory, r"host Block\(3, free, ref_count=0\) is held 1 times")


def test_a_host_block_that_waits_for_the_plan_is_held() -> None:
    memory = Memory()
    host = memory.manager.host
    taken = host.allocate(1)
    assert taken is not None
    refuse(memory, r"host Block\(0, in use, ref_count=1\) is held 0 times")
    host.free_after_plan(taken)
    memory.manager.check()
    host.free(taken)
    refuse(memory, r"host Block\(0, free, ref_count=0\) is held 1 times")


def test_a_copy_on_the_host_and_its_entry_point_to_each_other() -> None:
    memory = ByHand(num_blocks=4, num_host_blocks=4, keeps_on_host=True)
    memory.leave_cached(range(4))
    memory.changes()
    entry = memory.manager.host.block(0).entry
    assert entry is not None and entry.host_ids == [0]
    entry.host_ids = [1]
    refuse(memory, "points to another block")
    entry.host_ids = [0]
    memory.manager.check()
    entry.attached = False
    refuse(memory, "dropped")


def test_what_is_announced_is_what_sequences_remember() -> None:
    memory = ByHand()
    request = memory.request([1, 2, 3, 4, 5, 6, 7, 8])
    assert memory.open(request)
    own = memory.manager.memories[request]
    assert own.frontier is not None
    frontier, own.frontier = own.frontier, None
    refuse(memory, "differ from the announced ones")
    own.frontier = frontier
    memory.manager.check()
    memory.manager._publisher._computing.clear()
    refuse(memory, "differ from the announced ones")


def test_an_announced_block_belongs_to_the_one_who_announced_it() -> None:
    memory = ByHand()
    request, other = memory.request([1, 2, 3, 4, 5]), memory.run([9], name="other")
    assert memory.open(request)
    computing = memory.manager._publisher._computing
    computing.update(dict.fromkeys(computing, other))
    refuse(memory, "differ from the announced ones")


# ---- the ledger -----------------------------------------------------------------------------------------------------


def ledger(**fields: int) -> MemoryLedger:
    counts = dict.fromkeys(MemoryLedger.__dataclass_fields__, 0) | {"block_size": 4, "num_blocks": 6, "used_blocks": 2}
    counts |= {"cached_blocks": 1, "free_blocks": 3, "stored_slots": 5, "reserved_slots": 2, "fragmented_slots": 1}
    counts |= {"host_blocks": 2, "used_host_blocks": 2}
    return MemoryLedger(**counts | {"misses": {}} | fields)  # type: ignore[arg-type]


def test_a_ledger_that_adds_up_passes() -> None:
    ledger().check()
    ledger(used_blocks=0, cached_blocks=0, free_blocks=6, stored_slots=0, reserved_slots=0, fragmented_slots=0).check()


@pytest.mark.parametrize("field", ["used_blocks", "cached_blocks", "free_blocks", "num_blocks"])
@pytest.mark.parametrize("off", [-1, 1])
def test_blocks_must_add_up(field: str, off: int) -> None:
    with pytest.raises(InvariantError, match="do not add up to the pool"):
        ledger(**{field: getattr(ledger(), field) + off}).check()


@pytest.mark.parametrize("field", ["stored_slots", "reserved_slots", "fragmented_slots", "block_size"])
@pytest.mark.parametrize("off", [-1, 1])
def test_slots_must_add_up(field: str, off: int) -> None:
    with pytest.raises(InvariantError, match="slots are accounted for"):
        ledger(**{field: getattr(ledger(), field) + off}).check()


@pytest.mark.parametrize(
    "fields",
    [
        {"cached_blocks": -1, "free_blocks": 5},
        {"cached_blocks": 5, "free_blocks": -1},
        {"used_blocks": -2, "free_blocks": 7, "stored_slots": -11},
        {"stored_slots": -1, "reserved_slots": 8},
        {"stored_slots": 8, "reserved_slots": -1},
        {"stored_slots": 7, "fragmented_slots": -1},
        {"used_host_blocks": -1},
    ],
)
def test_no_count_is_negative(fields: dict[str, int]) -> None:
    with pytest.raises(InvariantError, match="a count is negative"):
        ledger(**fields).check()


def test_no_more_host_blocks_are_used_than_there_are() -> None:
    with pytest.raises(InvariantError, match="more host blocks are used than exist"):
        ledger(used_host_blocks=3).check()


# ---- the indexes ----------------------------------------------------------------------------------------------------


def two_paths(index: HashChainIndex | RadixTreeIndex) -> list[PrefixEntry]:
    """root ── aa ── bb ── cc, and aa ── xx; every entry holds a block."""
    entries = []
    parent = index.root(b"")
    for key in (b"aa", b"bb", b"cc"):
        found = index.extend(parent, key)
        assert found is not None
        entries.append(found)
        parent = found
    other = index.extend(entries[0], b"xx")
    assert other is not None
    entries.append(other)
    for block_id, entry in enumerate(entries):
        entry.block_ids[0] = block_id
    index.check()
    return entries


def hash_index() -> HashChainIndex:
    return HashChainIndex(2, 1, BlockHasher())


def radix_index() -> RadixTreeIndex:
    return RadixTreeIndex(2, 1)


@pytest.mark.parametrize("make", [hash_index, radix_index])
@pytest.mark.parametrize("which", range(4))
def test_an_index_notices_a_dropped_entry(make: Callable[[], HashChainIndex | RadixTreeIndex], which: int) -> None:
    index = make()
    two_paths(index)[which].attached = False
    with pytest.raises(InvariantError, match=r"dropped|has no parent in the index"):
        index.check()


@pytest.mark.parametrize("make", [hash_index, radix_index])
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("off", [-1, 1])
def test_an_index_counts_children(make: Callable[[], HashChainIndex | RadixTreeIndex], which: int, off: int) -> None:
    index = make()
    [*two_paths(index), index.root(b"")][which].num_children += off
    with pytest.raises(InvariantError, match="children and has"):
        index.check()


@pytest.mark.parametrize("make", [hash_index, radix_index])
def test_an_index_keeps_nothing_of_what_was_discarded(make: Callable[[], HashChainIndex | RadixTreeIndex]) -> None:
    index = make()
    empty = {name: len(value) for name, value in vars(index).items() if isinstance(value, dict)}
    for entry in reversed(two_paths(index)):
        entry.block_ids[0] = NO_BLOCK
        index.discard(entry)
    index.check()
    assert (len(index), list(index), index.roots_beginning_with(b"aa")) == (0, [], [])
    assert {name: len(value) for name, value in vars(index).items() if isinstance(value, dict)} == empty
    assert index.match(b"", b"aabbcc") == []


@pytest.mark.parametrize("make", [hash_index, radix_index])
def test_an_index_knows_which_roots_begin_alike(make: Callable[[], HashChainIndex | RadixTreeIndex]) -> None:
    index = make()
    two_paths(index)
    for salt in (b"one", b"two"):
        entry = index.extend(index.root(salt), b"aa")
        assert entry is not None
        entry.block_ids[0] = 9
    assert index.roots_beginning_with(b"aa") == [b"", b"one", b"two"]
    assert index.roots_beginning_with(b"bb") == []
    index.clear()
    assert (index.roots_beginning_with(b"aa"), len(index)) == ([], 0)


@pytest.mark.parametrize("make", [hash_index, radix_index])
@pytest.mark.parametrize("off", [-1, 1])
def test_an_index_counts_its_entries(make: Callable[[], HashChainIndex | RadixTreeIndex], off: int) -> None:
    index = make()
    two_paths(index)
    index._length += off
    with pytest.raises(InvariantError, match=f"the index counts {4 + off} entries and has 4"):
        index.check()


def test_a_hash_index_notices_an_entry_under_another_hash() -> None:
    index = hash_index()
    two_paths(index)[2].key = b"dd"
    with pytest.raises(InvariantError, match="a hash that is not its own"):
        index.check()


def test_a_hash_index_notices_an_entry_without_a_parent() -> None:
    index = hash_index()
    two_paths(index)[2].parent = None
    with pytest.raises(InvariantError, match="has no parent in the index"):
        index.check()


def test_a_hash_index_notices_a_broken_chain() -> None:
    index = hash_index()
    entries = two_paths(index)
    stranger = hash_index()
    last = two_paths(stranger)[2]
    del index._entries[entries[2].digest]
    index._entries[entries[2].digest] = last  # type: ignore[assignment]
    entries[2].block_ids[0] = NO_BLOCK
    with pytest.raises(InvariantError, match="missing from the chain of its hash"):
        index.discard(entries[2])


def radix_entries() -> tuple[RadixTreeIndex, list[RadixEntry]]:
    index = radix_index()
    return index, [entry for entry in two_paths(index) if isinstance(entry, RadixEntry)]


def test_a_radix_index_refuses_the_parent_of_another_index() -> None:
    with pytest.raises(InvariantError, match="belongs to another index"):
        radix_index().extend(hash_index().root(b""), b"aa")


def test_a_radix_index_notices_a_span_of_other_tokens() -> None:
    index, entries = radix_entries()
    entries[1].node.span[0:1] = b"z"
    with pytest.raises(InvariantError, match="does not hold the tokens of its entries"):
        index.check()


def test_a_radix_index_notices_an_empty_node() -> None:
    index, entries = radix_entries()
    node = entries[3].node
    node.entries.clear()
    node.span.clear()
    with pytest.raises(InvariantError, match="a node without entries was kept"):
        index.check()


@pytest.mark.parametrize("which", range(4))
def test_a_radix_index_notices_a_wrong_place(which: int) -> None:
    index, entries = radix_entries()
    entries[which].place += 1
    with pytest.raises(InvariantError, match="remembers a wrong place"):
        index.check()
    entries[which].place -= 1
    entries[which].node = entries[3 if which < 3 else 0].node
    with pytest.raises(InvariantError, match="remembers a wrong place"):
        index.check()


def test_a_radix_index_notices_a_node_under_other_tokens() -> None:
    index, entries = radix_entries()
    above = entries[0].node
    above.children[b"yy"] = above.children.pop(b"xx")
    with pytest.raises(InvariantError, match="under tokens that are not its own"):
        index.check()


def test_a_radix_index_notices_a_node_that_names_another_parent() -> None:
    index, entries = radix_entries()
    entries[3].node.parent = entries[1].node
    with pytest.raises(InvariantError, match="under tokens that are not its own"):
        index.check()


# ---- the list of cached blocks --------------------------------------------------------------------------------------


def test_a_list_notices_broken_links_and_a_wrong_length() -> None:
    blocks = Memory().pool.blocks
    order = EvictionOrder()
    for block in blocks[5:8]:
        order.append(block)
    order.check()
    order._length += 1
    with pytest.raises(InvariantError, match="or its length is wrong"):
        order.check()
    order._length -= 1
    blocks[6].previous = blocks[7]
    with pytest.raises(InvariantError, match="the links of block 5 disagree"):
        order.check()
    blocks[6].previous, blocks[7].next = blocks[5], None
    order._length = 2
    with pytest.raises(InvariantError, match="does not end at its tail"):
        order.check()


def test_the_manager_asks_each_part() -> None:
    """A part that the audit forgets could break unseen."""
    memory = Memory()
    memory.manager.host.block(3).ref_count = 1
    refuse(memory, r"Block\(3, in use")
    memory = Memory()
    memory.manager.index._length += 1  # type: ignore[attr-defined]
    refuse(memory, "the index counts")
    memory = Memory()
    memory.manager.ledger = lambda: ledger(host_blocks=1)  # type: ignore[method-assign]
    refuse(memory, "more host blocks are used than exist")


def test_an_empty_eviction_order_yields_nothing() -> None:
    with pytest.raises(InvariantError, match="popleft of an empty list"):
        LRUEviction().pop()
