"""MemoryJournal: records which blocks have changed, while a client watches.

    BlockPool ──── touched ────┐
    MemoryChanges ── holders ──┼──► stamp(now) ──► take() ──► a BlockChange for each block that changed
    BlockPool ──── evicted ────┘

Without a reader there is no journal, and the pool and the tables only test one attribute. With a reader, they add a
number to a set. The change itself is read from the blocks when the journal is taken, so a block that changed ten times
is reported once, in its last state. Both cost O(changes), whatever the size of the pool.

Two facts about a block are not in the block. Its **owner** is a request whose table holds it: requests are noted when
they put it into a table, and checked there again before they are reported, so releases need no note. Its **parent** is
the block of the entry before its own, as last reported; when that changes, the blocks after it are reported too.

A survey reports the state before the journal, a few thousand blocks at a time, so that it does not delay an engine with
a million blocks. Rejected: a scan for each frame (a million blocks, eight times a second), and a log of all events (it
grows with the events and not with the blocks, and a late reader must read them all).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from quire.core.request import Request
from quire.core.step import NO_BLOCK
from quire.memory.block import Block, BlockState
from quire.memory.block_pool import BlockPool
from quire.memory.prefix.base import PrefixEntry
from quire.memory.sequence import SequenceMemory

NOT_PUBLISHED: Final = -2
"""The parent of a block that cannot be hit."""

SURVEYED_AT_ONCE: Final = 4096
"""Blocks, or entries of tables, that a survey visits before the engine continues."""

MOST_TAKEN: Final = 8192
"""The most blocks to report at once."""

INDEX_BITS: Final = 32
GROUP_BITS: Final = 16

Place: TypeAlias = tuple[PrefixEntry, int]
"""An entry of the index, and the group of the block."""

Key = TypeVar("Key")


class Multimap(Generic[Key]):
    """Numbers by key, in the order of addition. Most keys have one number, which the garbage collector does not track.

    >>> numbers = Multimap[str]()
    >>> numbers.add("a", 7); numbers.add("a", 5); numbers.add("a", 7); numbers.add("b", 1)
    >>> numbers.discard("a", 7); numbers.discard("b", 1); numbers.of("a"), numbers.of("b")
    ([5], [])
    """

    def __init__(self) -> None:
        self._numbers: dict[Key, int | dict[int, None]] = {}

    def add(self, key: Key, number: int) -> None:
        """Append a number, unless the key already has it. Mutates; O(1)."""
        numbers = self._numbers.get(key)
        if numbers is None:
            self._numbers[key] = number
        elif not isinstance(numbers, int):
            numbers[number] = None
        elif numbers != number:
            self._numbers[key] = {numbers: None, number: None}

    def discard(self, key: Key, number: int) -> None:
        """Remove a number, if the key has it. Mutates; O(1)."""
        numbers = self._numbers.get(key)
        if isinstance(numbers, dict):
            numbers.pop(number, None)
        if numbers in (number, {}):
            del self._numbers[key]

    def drop(self, key: Key) -> None:
        """Remove all numbers of a key. Mutates; O(1)."""
        self._numbers.pop(key, None)

    def of(self, key: Key) -> list[int]:
        """Return the numbers of a key. Does not mutate; O(numbers)."""
        numbers = self._numbers.get(key)
        return [] if numbers is None else [numbers] if isinstance(numbers, int) else list(numbers)

    def first(self, key: Key) -> int | None:
        """Return the first number of a key. Does not mutate; O(1)."""
        numbers = self._numbers.get(key)
        return numbers if numbers is None or isinstance(numbers, int) else next(iter(numbers))

    def count(self, key: Key) -> int:
        """Return how many numbers a key has. Does not mutate; O(1)."""
        numbers = self._numbers.get(key)
        return 0 if numbers is None else 1 if isinstance(numbers, int) else len(numbers)


class BlockChange(NamedTuple):
    """A block as it is now. `changed_s`: when it changed; None if only its parent did, or before the journal began."""

    block_id: int
    state: BlockState
    num_holders: int
    owner: Request | None
    parent: int
    tenant: str
    changed_s: float | None


class MemoryJournal:
    """The blocks that have changed since the last `take`. A survey adds all blocks that exist already.

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
        self._stamped: dict[int, float | None] = {}  # when a block changed; None: reported without a change
        self._requests: dict[int, Request] = {}  # requests whose tables got blocks, by number
        self._numbers: dict[Request, int] = {}
        self._num_requests = 0
        self._holders = Multimap[int]()  # by block: request, group and index in one number; some are outdated
        self._places: dict[int, Place] = {}  # of published blocks, as last taken
        self._blocks: dict[Place, int] = {}  # the block of each place, likewise
        self._followers = Multimap[PrefixEntry]()  # published blocks, by the entry before theirs

    @property
    def has_news(self) -> bool:
        """Whether anything has changed since the last `take`."""
        return bool(self.touched or self._stamped)

    # ---- noting changes ---------------------------------------------------------------------------------------

    def note_eviction(self, block: Block) -> None:
        """Note that a cached block was evicted. Mutates; O(1)."""
        self.touched.add(block.block_id)
        self._evicted[block.tenant] += 1

    def note_holder(self, request: Request, place: tuple[int, int], block_id: int) -> None:
        """Note that a block was put into a table of a request, at `place` = (group, index). Mutates; O(1)."""
        if block_id == NO_BLOCK:
            return
        number = self._numbers.get(request)
        if number is None:
            number = self._numbers[request] = self._num_requests
            self._requests[number] = request
            self._num_requests += 1
        group, index = place
        self._holders.add(block_id, (number << GROUP_BITS | group) << INDEX_BITS | index)

    def note_gone(self, request: Request) -> None:
        """Note that a request has freed all its blocks. Mutates; O(1)."""
        number = self._numbers.pop(request, None)
        if number is not None:
            del self._requests[number]

    def stamp(self, now_s: float) -> None:
        """Give all changes since the last stamp the time `now_s`. Mutates; O(changes)."""
        if self.touched:
            self._stamped.update(dict.fromkeys(self.touched, now_s))
            self.touched.clear()

    def survey(self, at_once: int = SURVEYED_AT_ONCE) -> Iterator[None]:
        """Note the entire state, about `at_once` entries per step: first who holds which block, then the blocks."""
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

    # ---- reporting changes ------------------------------------------------------------------------------------

    def take_evicted(self) -> list[tuple[str, int]]:
        """Return how many blocks of each tenant were evicted since the last call. Mutates."""
        if not self._evicted:
            return []
        evicted = list(self._evicted.items())
        self._evicted.clear()
        return evicted

    def take(self, most: int = MOST_TAKEN) -> list[BlockChange]:
        """Return the blocks that have changed up to the last stamp, as they are now. Mutates; O(changes).

        If more than `most` have changed, the others are left for the next call.
        """
        taken, self._stamped = self._stamped, {}
        if len(taken) > most:
            self._stamped = dict(islice(taken.items(), most, None))
            taken = dict(islice(taken.items(), most))
        followers: set[int] = set()
        for block_id in taken:
            moved = self._move(block_id)
            if moved:
                followers.update(moved)
        reported = taken | dict.fromkeys(followers - taken.keys() - self._stamped.keys())
        return [self._change(self._pool.blocks[block_id], changed_s) for block_id, changed_s in reported.items()]

    def _change(self, block: Block, changed_s: float | None) -> BlockChange:
        owner = self._owner(block)
        tenant = block.tenant if block.entry is not None else ""
        return BlockChange(
            block_id=block.block_id,
            state=block.state,
            num_holders=block.ref_count,
            owner=owner,
            parent=self._parent(block),
            tenant=tenant if owner is None else owner.scope.tenant,
            changed_s=changed_s,
        )

    def _owner(self, block: Block) -> Request | None:
        """Return the first of the requests that still hold a block. Forgets those that no longer hold it."""
        block_id, holders = block.block_id, self._holders
        if not block.ref_count:
            holders.drop(block_id)
            return None
        if holders.count(block_id) > 2 * block.ref_count + 8:  # many came and went while one stayed
            for holder in holders.of(block_id):
                if self._request_that_holds(holder, block_id) is None:
                    holders.discard(block_id, holder)
        while (first := holders.first(block_id)) is not None:
            request = self._request_that_holds(first, block_id)
            if request is not None:
                return request
            holders.discard(block_id, first)
        return None

    def _request_that_holds(self, holder: int, block_id: int) -> Request | None:
        place, index = divmod(holder, 1 << INDEX_BITS)
        number, group = divmod(place, 1 << GROUP_BITS)
        request = self._requests.get(number)
        memory = None if request is None else self._memories.get(request)
        if memory is None:
            return None
        block_ids = memory.tables[group].block_ids
        return request if index < len(block_ids) and block_ids[index] == block_id else None

    def _parent(self, block: Block) -> int:
        """Return the block with the tokens before those of a published block; `NO_BLOCK`: there is none."""
        # The state as last taken, not the current one: only when the former changes are followers reported again.
        entry = block.entry
        return NOT_PUBLISHED if entry is None else self._blocks.get((_entry_before(entry), block.group), NO_BLOCK)

    def _move(self, block_id: int) -> list[int]:
        """Note the new place of a block in the index; return the blocks whose parent may change with it. Mutates."""
        block, known = self._pool.blocks[block_id], self._places.pop(block_id, None)
        place = None if block.entry is None else (block.entry, block.group)
        changed: list[int] = []
        if known is not None and (known != place or self._blocks.get(known) != block_id):
            self._followers.discard(_entry_before(known[0]), block_id)
            if self._blocks.get(known) == block_id:
                del self._blocks[known]
            changed += self._followers.of(known[0])
        if place is not None:
            self._places[block_id] = place
            if self._blocks.get(place) != block_id:
                self._followers.add(_entry_before(place[0]), block_id)
                self._blocks[place] = block_id
                changed += self._followers.of(place[0])
        return changed


def _entry_before(entry: PrefixEntry) -> PrefixEntry:
    """Return the parent of an entry; for a root, which holds no blocks, the root itself."""
    return entry if entry.parent is None else entry.parent
