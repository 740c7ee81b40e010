"""CacheJournal: which blocks can be hit, as news for those who send requests to this memory.

    BlockPool ── touched entries ──► take(), once a step ──► CacheNews(seq, survey, begins, added, removed) ──► a router

A block is named by the first eight bytes of its chained hash. It can be hit once every KV group without a window has
it; where all groups have windows, once they all have it. Without a reader there is no journal, and the pool only tests
one attribute. With one, the pool adds entries to a dictionary, and `take` reads their last state, so an entry that
changed ten times is reported once.

A **survey** begins the news again: its first report tells the reader to forget what it knew, and that report and the
next ones also have the blocks that were there before, a few thousand at a time, so that a step does not wait for a
million. A reader that misses a number asks for a survey.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.core.step import NO_BLOCK
from quire.memory.block_hash import BlockHasher
from quire.memory.block_pool import BlockPool
from quire.memory.prefix.base import PrefixEntry, digest_of

DIGEST_BYTES: Final = 8
"""Two of a million blocks have the same name once in ten million pools, and then a request goes to a worse place."""
SURVEYED_AT_ONCE: Final = 4096
"""Blocks that a survey visits before the engine goes on."""


@dataclass(frozen=True, slots=True)
class CacheNews:
    """What changed since the report before: digests of blocks, one after another; `removed` are applied first.

    `seq`: one more than that of the report before. `survey`: the number of the survey that the report follows.
    `begins`: it is the first after its survey; the reader forgets what it knew.
    """

    seq: int
    survey: int
    begins: bool
    added: bytes
    removed: bytes


def split_digests(column: bytes) -> list[bytes]:
    """Return the digests of a column.

    >>> split_digests(b"12345678abcdefgh")
    [b'12345678', b'abcdefgh']
    """
    return [column[at : at + DIGEST_BYTES] for at in range(0, len(column), DIGEST_BYTES)]


class CacheJournal:
    """Notes of which entries of the index can be hit, since the last report.

    >>> from quire.memory.eviction.lru import LRUEviction
    >>> journal = CacheJournal(BlockPool(4, LRUEviction(), on_evict=print), BlockHasher(), groups=(0,))
    >>> journal.survey(); journal.take(), journal.take()
    (CacheNews(seq=1, survey=1, begins=True, added=b'', removed=b''), None)
    """

    def __init__(self, pool: BlockPool, hasher: BlockHasher, groups: tuple[int, ...]) -> None:
        self.touched: dict[PrefixEntry, None] = {}  # by the pool, since the last report
        self._pool = pool
        self._hasher = hasher
        self._groups = groups  # which must all have the block
        self._reported: set[PrefixEntry] = set()  # the reader takes these for hits
        self._num_reports = 0
        self._num_surveys = 0
        self._begins = False
        self._next_block = 0  # of those that the survey has not visited
        self._at_once = SURVEYED_AT_ONCE

    def survey(self, at_once: int = SURVEYED_AT_ONCE) -> None:
        """Begin again: report everything that can be hit. Mutates; the work is left to `take`, a part each time."""
        self._num_surveys += 1
        self._begins, self._next_block, self._at_once = True, 0, at_once
        self._reported.clear()
        self.touched.clear()

    @property
    def has_news(self) -> bool:
        """Whether `take` would return a report, or go on with a survey."""
        return self._begins or bool(self.touched) or self._next_block < self._pool.num_blocks

    def take(self) -> CacheNews | None:
        """Return what changed since the last call; None if nothing did. Mutates; O(changes), more in a survey."""
        if self._next_block < self._pool.num_blocks:
            end = self._next_block + self._at_once
            blocks = self._pool.blocks[self._next_block : end]
            self.touched.update((block.entry, None) for block in blocks if block.entry is not None)
            self._next_block = end
        added, removed = [], []
        for entry in self.touched:
            can_be_hit, is_reported = self._can_be_hit(entry), entry in self._reported
            if can_be_hit and not is_reported:
                self._reported.add(entry)
                added.append(digest_of(entry, self._hasher)[:DIGEST_BYTES])
            elif is_reported and not can_be_hit:
                self._reported.remove(entry)
                removed.append(entry.digest[:DIGEST_BYTES])
        self.touched.clear()
        if not (added or removed or self._begins):
            return None
        self._num_reports += 1
        begins, self._begins = self._begins, False
        return CacheNews(self._num_reports, self._num_surveys, begins, b"".join(added), b"".join(removed))

    def _can_be_hit(self, entry: PrefixEntry) -> bool:
        return all(entry.block_ids[group] != NO_BLOCK for group in self._groups)
