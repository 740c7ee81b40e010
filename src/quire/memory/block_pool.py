"""The block pool: the allocator. It owns all blocks, and it alone changes the state and the reference count of each.

    allocate ──► in use ──── free, published ────► cached ──── share (a hit) ────► in use
       ▲            │                                 │
       │            └── free, not published ──► free  └── evicted for an allocation, or over a quota
       └────────────────────────────────────────┘

Free blocks are taken before a cached one is evicted. The block freed last is taken first, because its bytes are the
likeliest to be in a processor cache. The eviction policy chooses the cached block to evict. A freed published block
keeps its content and its entry in the prefix index until it is allocated again.

If blocks run out, the result is None, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Protocol

from quire.core.errors import InvariantError
from quire.core.request import Request
from quire.core.step import NO_BLOCK
from quire.memory.block import Block, BlockState
from quire.memory.eviction.base import EvictionPolicy
from quire.memory.free_list import FreeList
from quire.memory.prefix.base import PrefixEntry
from quire.memory.quota import TenantQuota


class BlockJournal(Protocol):
    """Notes which blocks change, while a client watches."""

    touched: set[int]

    def note_eviction(self, block: Block) -> None:
        """Note that a block lost its content and is free now. Mutates."""
        ...


class EntryJournal(Protocol):
    """Notes which entries of the index got or lost a block, while a router subscribes."""

    touched: dict[PrefixEntry, None]


class BlockPool:
    """A fixed number of blocks; calls `on_evict` with each entry that lost its block to an eviction.

    >>> from quire.memory.eviction.lru import LRUEviction
    >>> pool = BlockPool(4, LRUEviction(), on_evict=print)
    >>> pool.allocate(3), pool.allocate(2), pool.num_available
    ([0, 1, 2], None, 1)
    >>> pool.share(1); pool.free(1); pool.free(1); pool.num_available
    2
    """

    def __init__(
        self,
        num_blocks: int,
        eviction: EvictionPolicy,
        *,
        on_evict: Callable[[PrefixEntry], None],
        quota: TenantQuota | None = None,
        places: Callable[[PrefixEntry], list[int]] = attrgetter("block_ids"),
    ) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free_list = FreeList(num_blocks)
        self._cached = eviction
        self._on_evict = on_evict
        self._quota = quota
        self._places = places
        self.on_cached: Callable[[Block], None] | None = None  # called when a published block loses its last holder
        self._num_published = 0
        self.num_evictions = 0
        self.num_extra_holders = 0  # sum over blocks of (ref_count - 1): blocks that sharing saves
        self.journal: BlockJournal | None = None
        self.cache_journal: EntryJournal | None = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks with nothing worth keeping."""
        return len(self._free_list)

    @property
    def num_cached(self) -> int:
        """Blocks that no table holds and whose content may be hit."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can take: free or cached. O(1)."""
        return len(self._free_list) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks that some table holds. O(1)."""
        return len(self.blocks) - self.num_available

    def cached_blocks(self) -> Iterator[Block]:
        """Walk the blocks that no table holds and whose content may be hit, in no particular order."""
        return iter(self._cached)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks, evicting cached ones if free ones do not suffice; None, without changes, if there are too few.

        Mutates; O(num_blocks).
        """
        num_missing = num_blocks - len(self._free_list)
        if num_missing > len(self._cached):
            return None
        for _ in range(num_missing):
            self._give_up(self._cached.pop())
        taken = self._free_list.take(num_blocks)
        blocks = self.blocks
        for block_id in taken:
            blocks[block_id].ref_count = 1
        if self.journal is not None:
            self.journal.touched.update(taken)
        return taken

    def share(self, block_id: int) -> None:
        """Add a holder; a cached block is in use again. Mutates; O(1)."""
        block = self.blocks[block_id]
        if block.ref_count:
            self.num_extra_holders += 1
        elif block.entry is None:
            raise InvariantError(f"block {block_id} is free; there is nothing in it to share")
        else:
            self._cached.remove(block)
            if self._quota is not None:
                self._quota.remove(block)
        block.ref_count += 1
        if self.journal is not None:
            self.journal.touched.add(block_id)

    def free(self, block_id: int) -> None:
        """Remove a holder; without holders the block is cached if published, else free. Mutates; O(1)."""
        block = self.blocks[block_id]
        if self.on_cached is not None and block.ref_count == 1 and block.entry is not None:
            self.on_cached(block)
        self.unshare(block_id)

    def unshare(self, block_id: int) -> None:
        """Remove a holder that has not used the block, without calling `on_cached`. Mutates; O(1)."""
        block = self.blocks[block_id]
        if block.ref_count > 1:
            block.ref_count -= 1
            self.num_extra_holders -= 1
        elif block.ref_count == 1:
            block.ref_count = 0
            if block.entry is None:
                self._free_list.put(block_id)
            else:
                self._keep(block)
        else:
            raise InvariantError(f"block {block_id} is freed more often than it was taken")
        if self.journal is not None:
            self.journal.touched.add(block_id)

    def unshare_all(self, block_ids: Iterable[int]) -> None:
        """Undo `share` for these blocks, in the order given."""
        for block_id in block_ids:
            self.unshare(block_id)

    def free_all(self, block_ids: Iterable[int]) -> None:
        """Free blocks in the order given."""
        for block_id in block_ids:
            self.free(block_id)

    def publish(self, block_id: int, entry: PrefixEntry, request: Request, *, group: int) -> None:
        """Note that a block in use holds the content of an entry, which the request computed. Mutates; O(1)."""
        block = self._attach(block_id, entry, group)
        block.request_id, block.tenant, block.priority = request.request_id, request.scope.tenant, request.priority

    def adopt(self, block_id: int, original: Block) -> None:
        """Note that a block in use becomes a copy of a published block of another pool. Mutates; O(1)."""
        block = self._attach(block_id, original.entry, original.group)
        block.request_id, block.tenant, block.priority = original.request_id, original.tenant, original.priority

    def _attach(self, block_id: int, entry: PrefixEntry | None, group: int) -> Block:
        """Put a block in use under an entry, and return it. Mutates; O(1)."""
        block = self.blocks[block_id]
        if entry is None or not block.ref_count or block.entry is not None:
            raise InvariantError(f"block {block_id} cannot be published: it is {block.state.value}, or published")
        self._num_published += 1
        block.entry, block.group, block.published_at = entry, group, self._num_published
        self._places(entry)[group] = block_id
        self._note_entry(block_id, entry)
        return block

    def _note_entry(self, block_id: int, entry: PrefixEntry) -> None:
        """Note in the journals that a block has changed, and whether its entry can be hit. Mutates them."""
        if self.cache_journal is not None:
            self.cache_journal.touched[entry] = None
        if self.journal is not None:
            self.journal.touched.add(block_id)

    def unpublish(self, block_id: int) -> PrefixEntry | None:
        """Note that the content of a block may no longer be hit; returns the entry that lost it. Mutates; O(1)."""
        block = self.blocks[block_id]
        entry = block.entry
        if entry is None:
            return None
        self._places(entry)[block.group] = NO_BLOCK
        block.entry = None
        if not block.ref_count:
            self._cached.remove(block)
            if self._quota is not None:
                self._quota.remove(block)
            self._free_list.put(block_id)
        self._note_entry(block_id, entry)
        return entry

    def _keep(self, block: Block) -> None:
        self._cached.add(block)
        if self._quota is not None:
            over = self._quota.add(block)
            if over is not None:
                self._cached.remove(over)
                self._give_up(over)

    def _give_up(self, block: Block) -> None:
        """Drop the content of a cached block that was chosen for eviction; the block becomes free."""
        if self._quota is not None:
            self._quota.remove(block)
        entry = block.entry
        if entry is None:
            raise InvariantError(f"block {block.block_id} was cached without an entry")
        self._places(entry)[block.group] = NO_BLOCK
        block.entry = None
        self._free_list.put(block.block_id)
        self.num_evictions += 1
        if self.cache_journal is not None:
            self.cache_journal.touched[entry] = None
        if self.journal is not None:
            self.journal.note_eviction(block)
        self._on_evict(entry)

    def ref_counts(self) -> dict[int, int]:
        """Return the reference count of each block in use. Does not mutate; O(num_blocks)."""
        return {block.block_id: block.ref_count for block in self.blocks if block.ref_count}

    def check(self) -> None:
        """Raise `InvariantError` unless in use, cached and free partition the pool. O(num_blocks)."""
        free, cached = set(self._free_list), {block.block_id for block in self._cached}
        if len(free) != len(self._free_list) or len(cached) != len(self._cached) or free & cached:
            raise InvariantError("a block is free twice, cached twice, or both")
        extra = 0
        for block in self.blocks:
            if block.ref_count > 0:
                extra += block.ref_count - 1
                is_listed = block.block_id not in free and block.block_id not in cached
            else:
                is_listed = block.ref_count == 0 and block.block_id in (free if block.entry is None else cached)
            if not is_listed:
                state = BlockState.FREE if block.block_id in free else BlockState.IN_USE
                state = BlockState.CACHED if block.block_id in cached else state
                raise InvariantError(f"{block!r} is listed as {state.value}")
            if block.entry is not None and self._places(block.entry)[block.group] != block.block_id:
                raise InvariantError(f"the entry of {block!r} points to another block")
        if extra != self.num_extra_holders:
            raise InvariantError(f"{self.num_extra_holders} extra holders are counted, but {extra} exist")
        if self._quota is not None:
            self._quota.check(self._cached)
