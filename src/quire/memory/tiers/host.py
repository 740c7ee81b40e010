"""HostTier: blocks in the host's memory, of requests that were swapped out and of the prefix cache.

    in use   a swapped-out sequence holds it, or the plan being built reads or fills it
    cached   a copy of a published block; evicted when the host needs room, the one used longest ago first
    free     neither

A block is copied to the host when its last holder on the device frees it, so its eviction there costs nothing. A plan
moves blocks to the host first, and from the host last. So a plan cannot read a host block that it fills, nor fill a
host block that it reads: both stay in use until the plan is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from quire.core.step import NO_BLOCK, BlockMove
from quire.memory.block import Block
from quire.memory.block_pool import BlockPool
from quire.memory.changes import MemoryChanges
from quire.memory.eviction.lru import LRUEviction
from quire.memory.prefix.base import PrefixEntry
from quire.memory.quota import TenantQuota


class HostTier:
    """The host blocks, by their ids. With `on_evict`, which it calls with entries that lost a block, it is a cache.

    >>> tier = HostTier(2, MemoryChanges())
    >>> tier.allocate(2), tier.allocate(1)
    ([0, 1], None)
    >>> tier.free_after_plan([0]); tier.allocate(1)
    >>> tier.plan_made(); tier.allocate(1)
    [0]
    """

    def __init__(
        self,
        num_blocks: int,
        changes: MemoryChanges,
        *,
        on_evict: Callable[[PrefixEntry], None] | None = None,
        quota: TenantQuota | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.keeps = on_evict is not None and num_blocks > 0
        self.num_hit_tokens = 0
        self._changes = changes
        self._on_evict = on_evict or _ignore
        self._pool = BlockPool(num_blocks, LRUEviction(), on_evict=self._on_evict, quota=quota, places=_host_places)
        self._after_plan: list[int] = []
        self._used: list[int] = []  # copies that the plan being built reads or fills, the most recently used last
        self._filling: set[int] = set()  # blocks that the plan being built fills

    @property
    def num_in_use(self) -> int:
        """Blocks that cannot be taken now."""
        return self._pool.num_in_use

    @property
    def num_cached(self) -> int:
        """Blocks that hold a copy and may be taken."""
        return self._pool.num_cached

    def figures(self) -> dict[str, Any]:
        """Return the counters for monitoring, by their names in `EngineStats`. Does not mutate."""
        return {
            "num_host_blocks": self.num_blocks,
            "num_cached_host_blocks": self.num_cached,
            "host_hit_tokens_total": self.num_hit_tokens,
        }

    def block(self, block_id: int) -> Block:
        """Return a block of the host."""
        return self._pool.blocks[block_id]

    def place(self, entry: PrefixEntry, group: int) -> int:
        """Return the host block with an entry's content in a group; `NO_BLOCK` if none can be read now."""
        if entry.host_ids is None or entry.host_ids[group] in self._filling:
            return NO_BLOCK
        return entry.host_ids[group]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks, evicting cached copies if necessary; None, without changes, if there are too few. Mutates."""
        return self._pool.allocate(num_blocks)

    def free(self, block_ids: list[int]) -> None:
        """Free blocks whose content no plan reads any more; copies of published blocks stay cached. Mutates."""
        self._pool.free_all(reversed(block_ids))

    def free_after_plan(self, block_ids: list[int]) -> None:
        """Free blocks once the plan being built, which still reads them, is complete. Mutates."""
        self._after_plan.extend(block_ids)

    def plan_made(self) -> None:
        """Note that the plan being built is complete. Mutates."""
        self._filling.clear()
        if self._after_plan:
            self.free(self._after_plan)
            self._after_plan = []
        if self._used:
            self._pool.free_all(self._used)
            self._used = []

    # ---- the cache ------------------------------------------------------------------------------------------------

    def copy_down(self, block: Block) -> None:
        """Copy a published block of the device that lost its last holder, or mark its copy as used. Mutates."""
        entry, pool = block.entry, self._pool
        if entry is None:
            return
        host_id = NO_BLOCK if entry.host_ids is None else entry.host_ids[block.group]
        if host_id != NO_BLOCK:
            pool.share(host_id)
            pool.free(host_id)
            return
        taken = pool.allocate(1) or self._taken_back()
        if taken:
            self.fill(taken[0], block)
            self._changes.copies_down.append(BlockMove(block.block_id, taken[0]))
            self._used += taken

    def _taken_back(self) -> list[int]:
        """Cancel this plan's first copy and return its block: blocks freed later are nearer the root. Mutates."""
        pool, copies = self._pool, self._changes.copies_down
        if not copies or pool.blocks[copies[0].host_block].ref_count > 1:
            return []
        host_id = copies.popleft().host_block
        self._used.remove(host_id)
        entry = pool.unpublish(host_id)
        if entry is not None:
            self._on_evict(entry)
        return [host_id]

    def fill(self, host_id: int, block: Block) -> None:
        """Note that the plan being built moves a published block of the device here. Mutates."""
        self._pool.adopt(host_id, block)
        self.note_filled(host_id)

    def note_filled(self, host_id: int) -> None:
        """Note that the plan being built fills this block. Mutates."""
        self._filling.add(host_id)

    def is_filled_now(self, host_id: int) -> bool:
        """Return whether the plan being built fills this block, and so cannot read it."""
        return host_id in self._filling

    def share(self, host_ids: list[int]) -> None:
        """Keep copies from being evicted. Mutates."""
        for host_id in host_ids:
            self._pool.share(host_id)

    def read_by_plan(self, host_ids: list[int]) -> None:
        """Note that the plan being built moves these copies to the device, parents first. Mutates."""
        self.share(host_ids)
        self._used.extend(reversed(host_ids))

    @property
    def used_by_plan(self) -> list[int]:
        """The blocks that are in use until the plan being built is complete, once for each use."""
        return [*self._used, *self._after_plan]

    def forget(self, entry: PrefixEntry) -> None:
        """Drop the copies of an entry. Mutates."""
        for host_id in entry.host_ids or ():
            if host_id != NO_BLOCK:
                self._pool.unpublish(host_id)

    def ref_counts(self) -> dict[int, int]:
        """Return the reference count of each block in use. Does not mutate; O(num_blocks)."""
        return self._pool.ref_counts()

    def copies(self) -> Iterator[Block]:
        """Walk the blocks that hold a copy."""
        return (block for block in self._pool.blocks if block.entry is not None)

    def check(self) -> None:
        """Raise `InvariantError` unless every block is accounted for once."""
        self._pool.check()


def _host_places(entry: PrefixEntry) -> list[int]:
    if entry.host_ids is None:
        entry.host_ids = [NO_BLOCK] * len(entry.block_ids)
    return entry.host_ids


def _ignore(entry: PrefixEntry) -> None:
    """Do nothing: a tier that is not a cache publishes no blocks."""
