"""MemoryJournal: which blocks have changed, while somebody watches.

    BlockPool ──── touched ────┐
    MemoryChanges ── holders ──┼──► stamp(now) ──► take() ──► a BlockChange for each block that changed
    BlockPool ──── evicted ────┘

While nobody watches there is no journal, and the pool and the tables test one attribute. While somebody does, they put
a number into a set; what the change *was* is read from the blocks themselves when it is taken, so a block that changed
ten times is told once, as it is then. Both cost O(changes), whatever the size of the pool.

Two things of a block stand elsewhere. Its **owner** is one of those whose tables hold it: takers are noted as they put
it into a table, and looked up there again before they are believed, so nobody needs to note who lets go. Its **parent**
is the block of the entry before its own; when that one changes, those after it are told as well.

What was there before the journal is told by a survey, a few thousand blocks at a time, so that an engine with a million
blocks is not held up. Rejected: a scan for each picture (a million blocks, eight times a second), and a log of all
events (it grows with what happens, not with what there is, and whoever reads it late must read it all).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from quire.core.request import Request
from quire.core.step import NO_BLOCK
from quire.memory.block import Block, BlockState
from quire.memory.block_pool import BlockPool
from quire.memory.prefix.base import PrefixEntry
from quire.memory.sequence import SequenceMemory

NOT_PUBLISHED: Final = -2
"""The parent of a block that nobody can hit."""

SURVEYED_AT_ONCE: Final = 8192
"""Blocks, or entries of tables, that a survey goes through before it lets the engine go on."""

Holder = tuple[Request, int, int]
"""Who has put a block into a table, and where: group, index."""
Place = tuple[PrefixEntry, int]
"""What a block is published under: the entry and the group."""


class BlockChange(NamedTuple):
    """A block as it is now. `changed_s`: when it changed; None where only its parent did, or before the journal."""

    block_id: int
    state: BlockState
    num_holders: int
    owner: Request | None
    parent: int
    tenant: str
    changed_s: float | None


class MemoryJournal:
    """What has changed since it was last taken. The survey makes it begin with all that is there.

    >>> from quire.memory.eviction.lru import LRUEviction
    >>> pool = BlockPool(4, LRUEviction(), on_evict=print)
    >>> pool.journal = journal = MemoryJournal(pool, {})
    >>> blocks = pool.allocate(2); pool.free(blocks[0]); journal.stamp(0.5)
    >>> [(change.block_id, change.state.value, change.changed_s) for change in journal.take()]
    [(0, 'free', 0.5), (1, 'in use', 0.5)]
    """

    def __init__(self, pool: BlockPool, memories: Mapping[Request, SequenceMemory]) -> None:
        self.touched: set[int] = set()  # by the pool, since the last stamp
        self._pool = pool
        self._memories = memories
        self._evicted: Counter[str] = Counter()  # blocks by tenant, since they were last taken
        self._stamped: dict[int, float | None] = {}  # when, or None: told again without having changed
        self._holders: dict[int, deque[Holder]] = {}
        self._places: dict[int, Place] = {}  # of published blocks, as last taken
        self._followers: dict[Place, set[int]] = {}  # published blocks, by the place before theirs

    @property
    def has_news(self) -> bool:
        """Whether anything has changed since it was last taken."""
        return bool(self.touched or self._stamped)

    # ---- what it is told --------------------------------------------------------------------------------------

    def note_eviction(self, block: Block) -> None:
        """A cached block was given up. Mutates; O(1)."""
        self.touched.add(block.block_id)
        self._evicted[block.tenant] += 1

    def note_holder(self, request: Request, place: tuple[int, int], block_id: int) -> None:
        """A block was put into a table of a request, at `place` = (group, index). Mutates; O(1)."""
        if block_id != NO_BLOCK:
            self._holders.setdefault(block_id, deque()).append((request, *place))

    def stamp(self, now_s: float) -> None:
        """What has changed since the last stamp, has changed now. Mutates; O(changes)."""
        self._stamped.update(dict.fromkeys(self.touched, now_s))
        self.touched.clear()

    def survey(self, at_once: int = SURVEYED_AT_ONCE) -> Iterator[None]:
        """Go through all there is, so much at a time, and have it told: first who holds what, then the blocks."""
        num_seen = 0
        for request in list(self._memories):
            memory = self._memories.get(request)
            for group, table in enumerate(() if memory is None else memory.tables):
                for index, block_id in enumerate(table.block_ids):
                    self.note_holder(request, (group, index), block_id)
                num_seen += len(table)
            if num_seen >= at_once:
                yield
                num_seen = 0
        blocks = self._pool.blocks
        for start in range(0, len(blocks), at_once):
            if start:
                yield
            for block in blocks[start : start + at_once]:
                if block.ref_count or block.entry is not None:
                    self._stamped.setdefault(block.block_id, None)

    # ---- what it tells ----------------------------------------------------------------------------------------

    def take_evicted(self) -> list[tuple[str, int]]:
        """Return how many blocks of each tenant were given up since the last call. Mutates."""
        evicted = list(self._evicted.items())
        self._evicted.clear()
        return evicted

    def take(self) -> list[BlockChange]:
        """Return the blocks that have changed up to the last stamp, as they are now. Mutates; O(changes)."""
        stamped, self._stamped = self._stamped, {}
        followers: set[int] = set()
        for block_id in stamped:
            followers |= self._move(block_id)
        told = stamped | dict.fromkeys(followers - stamped.keys())
        return [self._change(self._pool.blocks[block_id], changed_s) for block_id, changed_s in told.items()]

    def _change(self, block: Block, changed_s: float | None) -> BlockChange:
        owner = self._owner(block)
        tenant = block.tenant if block.entry is not None else ""
        return BlockChange(
            block_id=block.block_id,
            state=block.state,
            num_holders=block.ref_count,
            owner=owner,
            parent=parent_of(block),
            tenant=tenant if owner is None else owner.scope.tenant,
            changed_s=changed_s,
        )

    def _owner(self, block: Block) -> Request | None:
        """Return the one who took the block first, of those who hold it still."""
        holders = self._holders.get(block.block_id)
        if holders is None:
            return None
        if len(holders) > 2 * block.ref_count + 8:  # many came and went beside one who stays
            holders = self._holders[block.block_id] = deque(
                holder for holder in dict.fromkeys(holders) if self._holds(holder, block.block_id)
            )
        while holders and not self._holds(holders[0], block.block_id):
            holders.popleft()
        if holders:
            return holders[0][0]
        del self._holders[block.block_id]
        return None

    def _holds(self, holder: Holder, block_id: int) -> bool:
        request, group, index = holder
        memory = self._memories.get(request)
        if memory is None:
            return False
        block_ids = memory.tables[group].block_ids
        return index < len(block_ids) and block_ids[index] == block_id

    def _move(self, block_id: int) -> set[int]:
        """Follow a block to another place in the index; return the blocks whose parent that changes. Mutates."""
        block, known = self._pool.blocks[block_id], self._places.get(block_id)
        place = None if block.entry is None else (block.entry, block.group)
        if place == known:
            return set()
        changed: set[int] = set()
        if known is not None:
            before = _place_before(known)
            self._followers[before].discard(block_id)
            if not self._followers[before]:
                del self._followers[before]
            del self._places[block_id]
            changed |= self._followers.get(known, set())
        if place is not None:
            self._places[block_id] = place
            self._followers.setdefault(_place_before(place), set()).add(block_id)
            changed |= self._followers.get(place, set())
        return changed


def parent_of(block: Block) -> int:
    """Return the block that holds the tokens before those of a published one; `NO_BLOCK`: there is none."""
    if block.entry is None:
        return NOT_PUBLISHED
    entry, group = _place_before((block.entry, block.group))
    return entry.block_ids[group]


def _place_before(place: Place) -> Place:
    """Return the place of the tokens before; of a root, which holds no blocks, it is itself."""
    entry, group = place
    return (entry if entry.parent is None else entry.parent), group
