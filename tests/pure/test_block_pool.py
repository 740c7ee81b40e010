"""BlockPool: which block comes next, and which cached one goes first."""

from __future__ import annotations

import pytest

from quire.core.errors import InvalidConfigError, InvariantError
from quire.core.request import CacheScope, Request
from quire.core.step import NO_BLOCK
from quire.memory.block import Block, BlockState
from quire.memory.block_pool import BlockPool
from quire.memory.eviction import create_eviction_policy
from quire.memory.prefix import PrefixEntry
from quire.memory.quota import TenantQuota


class Pool:
    """A pool whose evictions are recorded."""

    def __init__(self, num_blocks: int, policy: str = "lru", quota: int | None = None) -> None:
        self.evicted: list[bytes] = []
        self.pool = BlockPool(
            num_blocks,
            create_eviction_policy(policy),
            on_evict=lambda entry: self.evicted.append(entry.key),
            quota=None if quota is None else TenantQuota(quota),
        )

    def publish(self, block_id: int, key: str = "", *, tenant: str = "", priority: int = 0) -> PrefixEntry:
        entry = PrefixEntry(None, key.encode(), 1)
        request = Request("r", [1], scope=CacheScope(tenant), priority=priority)
        self.pool.publish(block_id, entry, request, group=0)
        self.pool.check()
        return entry

    def cache(self, keys: str, *, tenant: str = "", priority: int = 0) -> list[int]:
        """Leave one cached block for each letter, in that order; return the blocks."""
        blocks = self.pool.allocate(len(keys))
        assert blocks is not None
        for block_id, key in zip(blocks, keys, strict=True):
            self.publish(block_id, key, tenant=tenant, priority=priority)
        self.pool.free_all(blocks)
        self.pool.check()
        return blocks

    def hit(self, *block_ids: int) -> None:
        """Take cached blocks into use and let them go again."""
        for block_id in block_ids:
            self.pool.share(block_id)
            self.pool.free(block_id)
        self.pool.check()

    def evict(self, num_blocks: int) -> str:
        """Allocate so many blocks; return the letters of those evicted, in their order."""
        self.evicted.clear()
        assert self.pool.allocate(num_blocks) is not None
        self.pool.check()
        return b"".join(self.evicted).decode()


def states(pool: BlockPool) -> list[str]:
    return [block.state.value for block in pool.blocks]


# ---- which block comes next -----------------------------------------------------------------------------------------


def test_a_new_pool_hands_out_blocks_in_order() -> None:
    pool = Pool(5).pool
    assert (pool.allocate(3), pool.allocate(1), pool.num_available, pool.num_in_use) == ([0, 1, 2], [3], 1, 4)


def test_the_block_freed_last_is_taken_first() -> None:
    pool = Pool(4).pool
    pool.allocate(4)
    pool.free_all([3, 0, 2])
    assert pool.allocate(3) == [2, 0, 3]


def test_a_table_freed_from_its_tail_is_taken_from_its_head() -> None:
    pool = Pool(6).pool
    table = pool.allocate(4)
    assert table == [0, 1, 2, 3]
    pool.free_all(reversed(table))
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_too_few_blocks_is_none_and_changes_nothing() -> None:
    subject = Pool(4)
    pool = subject.pool
    subject.cache("ab")
    pool.allocate(1)
    before = states(pool)
    assert pool.allocate(4) is None
    assert (states(pool), subject.evicted) == (before, [])
    assert pool.allocate(3) is not None


def test_no_blocks_can_always_be_had() -> None:
    pool = Pool(1).pool
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_free_blocks_are_taken_before_a_cached_one_is_evicted() -> None:
    subject = Pool(4)
    subject.cache("ab")
    assert subject.evict(2) == ""
    assert subject.evict(1) == "a"


# ---- which cached block goes first ----------------------------------------------------------------------------------


def test_lru_evicts_what_was_let_go_of_longest_ago() -> None:
    subject = Pool(4)
    subject.cache("abcd")
    subject.hit(0, 2)
    assert subject.evict(4) == "bdac"


def test_fifo_evicts_what_was_published_first_however_often_it_was_hit() -> None:
    subject = Pool(4, "fifo")
    subject.cache("abcd")
    for _ in range(200):
        subject.hit(0, 2, 1)
    assert subject.evict(4) == "abcd"


def test_fifo_goes_by_the_latest_publication() -> None:
    subject = Pool(3, "fifo")
    subject.cache("abc")
    assert subject.evict(1) == "a"
    subject.publish(0, "d")
    subject.pool.free(0)
    assert subject.evict(3) == "bcd"


def test_priority_evicts_the_least_urgent_first_and_the_least_recently_used_of_them() -> None:
    subject = Pool(6, "priority")
    subject.cache("ab", priority=0)
    subject.cache("cd", priority=5)
    subject.cache("ef", priority=-5)
    subject.hit(2)
    assert subject.evict(6) == "dcabef"


@pytest.mark.parametrize("policy", ["lru", "fifo", "priority"])
def test_what_is_in_use_is_never_evicted(policy: str) -> None:
    subject = Pool(3, policy)
    subject.cache("abc")
    subject.pool.share(0)
    assert subject.evict(2) == "bc"
    assert subject.pool.allocate(1) is None


@pytest.mark.parametrize("policy", ["lru", "fifo", "priority"])
def test_what_is_not_published_any_more_is_free_and_not_evicted(policy: str) -> None:
    subject = Pool(3, policy)
    subject.cache("abc")
    subject.pool.unpublish(1)
    assert states(subject.pool) == ["cached", "free", "cached"]
    assert subject.evict(3) == "ac"


def test_an_evicted_block_is_forgotten_by_its_entry() -> None:
    subject = Pool(1)
    subject.pool.allocate(1)
    entry = subject.publish(0, "a")
    subject.pool.free(0)
    assert entry.block_ids == [0]
    assert subject.pool.allocate(1) == [0]
    assert entry.block_ids == [NO_BLOCK]
    assert subject.pool.num_evictions == 1


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="eviction is 'mru'; allowed: lru, fifo or priority"):
        create_eviction_policy("mru")


# ---- quotas ---------------------------------------------------------------------------------------------------------


def test_over_its_quota_a_tenant_gives_up_what_it_let_go_of_longest_ago() -> None:
    subject = Pool(8, quota=2)
    subject.cache("ab", tenant="x")
    subject.cache("c", tenant="y")
    subject.cache("d", tenant="x")
    assert subject.evicted == [b"a"]
    assert states(subject.pool)[:4] == ["free", "cached", "cached", "cached"]


def test_a_hit_makes_room_under_the_quota_and_refreshes() -> None:
    subject = Pool(8, quota=2)
    subject.cache("ab", tenant="x")
    subject.hit(0)
    subject.cache("c", tenant="x")
    assert subject.evicted == [b"b"]


def test_a_quota_of_zero_gives_up_every_block_at_once() -> None:
    subject = Pool(2, quota=0)
    subject.cache("ab")
    assert (subject.evicted, states(subject.pool)) == ([b"a", b"b"], ["free", "free"])


def test_evicted_and_unpublished_blocks_are_charged_to_nobody() -> None:
    subject = Pool(3, quota=2)
    subject.cache("ab", tenant="x")
    assert subject.evict(2) == "a"
    subject.pool.unpublish(1)
    subject.pool.free_all([0, 2])
    subject.cache("cd", tenant="x")
    assert subject.evicted == [b"a"]


# ---- holders --------------------------------------------------------------------------------------------------------


def test_a_published_block_is_cached_when_its_last_holder_lets_go() -> None:
    subject = Pool(2)
    pool = subject.pool
    pool.allocate(2)
    subject.publish(0, "a")
    pool.share(0)
    assert pool.num_extra_holders == 1
    pool.free(0)
    assert (states(pool), pool.num_extra_holders) == (["in use", "in use"], 0)
    pool.free_all([0, 1])
    assert states(pool) == ["cached", "free"]


def test_a_block_that_is_not_published_may_have_several_holders() -> None:
    pool = Pool(1).pool
    pool.allocate(1)
    pool.share(0)
    pool.free(0)
    assert states(pool) == ["in use"]
    pool.free(0)
    assert states(pool) == ["free"]


def test_a_free_block_cannot_be_shared() -> None:
    pool = Pool(1).pool
    with pytest.raises(InvariantError, match="nothing in it to share"):
        pool.share(0)


@pytest.mark.parametrize("published", [False, True])
def test_a_block_cannot_be_freed_more_often_than_it_is_held(published: bool) -> None:
    subject = Pool(1)
    subject.pool.allocate(1)
    if published:
        subject.publish(0, "a")
    subject.pool.free(0)
    with pytest.raises(InvariantError, match="more often than it was taken"):
        subject.pool.free(0)


def test_only_a_block_in_use_that_is_not_published_can_be_published() -> None:
    subject = Pool(2)
    with pytest.raises(InvariantError, match="cannot be published"):
        subject.publish(0, "a")
    subject.pool.allocate(1)
    subject.publish(0, "a")
    with pytest.raises(InvariantError, match="cannot be published"):
        subject.publish(0, "b")


def test_unpublish_returns_the_entry_once() -> None:
    subject = Pool(1)
    subject.pool.allocate(1)
    entry = subject.publish(0, "a")
    assert subject.pool.unpublish(0) is entry
    assert entry.block_ids == [NO_BLOCK]
    assert subject.pool.unpublish(0) is None
    subject.pool.free(0)
    assert states(subject.pool) == ["free"]


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool: setattr(pool.blocks[0], "ref_count", 0),
        lambda pool: setattr(pool.blocks[0], "ref_count", -1),
        lambda pool: setattr(pool.blocks[2], "ref_count", 1),
        lambda pool: setattr(pool.blocks[1], "entry", None),
        lambda pool: pool.blocks[1].entry.block_ids.__setitem__(0, 0),
        lambda pool: setattr(pool, "num_extra_holders", 1),
    ],
    ids=["lost", "negative", "free and held", "cached without content", "entry elsewhere", "extra holders"],
)
def test_check_finds_what_does_not_fit(corrupt: object) -> None:
    subject = Pool(3)
    first = subject.pool.allocate(1)
    subject.cache("b")
    assert first == [0] and states(subject.pool) == ["in use", "cached", "free"]
    assert callable(corrupt)
    corrupt(subject.pool)
    with pytest.raises(InvariantError):
        subject.pool.check()


def test_a_block_shows_its_state() -> None:
    block = Block(7)
    assert (block.state, repr(block)) == (BlockState.FREE, "Block(7, free, ref_count=0)")
