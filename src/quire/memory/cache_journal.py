"""CacheJournal: reports to routers which blocks of this memory can be hit.

    BlockPool ── touched entries ──► take(), once a step ──► CacheNews(seq, survey, begins, added, removed) ──► a router

A block is named by the first eight bytes of its chained hash. It can be hit once every KV group without a window has
it; if all groups have windows, once they all have it. Without a reader there is no journal, and the pool only tests
one attribute. With a reader, the pool adds entries to a dictionary, and `take` reads their last state, so an entry that
changed ten times is reported once.

A **survey** starts over: its first report tells the reader to forget all earlier reports. This report and the next ones
also list the blocks that were cached before, a few thousand at a time, so that no step waits for a million of them. A
reader that misses a report, as the numbers show, requests a survey.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.core.step import NO_BLOCK
from quire.memory.block_hash import BlockHasher
from quire.memory.block_pool import BlockPool
from quire.memory.prefix.base import PrefixEntry, digest_of

DIGEST_BYTES: Final = 8
"""In one of ten million pools, two of a million blocks share a name; then a request may go to a worse replica."""
SURVEYED_AT_ONCE: Final = 4096
"""Blocks that a survey visits in one call of `take`, before the engine continues."""


@dataclass(frozen=True, slots=True)
class CacheNews:
    """The changes since the previous report, as concatenated digests of blocks; apply `removed` first.

    `seq`: one more than in the previous report. `survey`: the number of the latest survey. `begins`: this is the first
    report of its survey, and the reader forgets all earlier ones.
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
    """Records which entries of the index can be hit, or no longer, since the last report.

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
        self._reported: set[PrefixEntry] = set()  # the reader believes that these can be hit
        self._num_reports = 0
        self._num_surveys = 0
        self._begins = False
        self._next_block = 0  # the first block that the survey has not visited
        self._at_once = SURVEYED_AT_ONCE

    def survey(self, at_once: int = SURVEYED_AT_ONCE) -> None:
        """Start over: report everything that can be hit. Mutates; `take` does the work, a part in each call."""
        self._num_surveys += 1
        self._begins, self._next_block, self._at_once = True, 0, at_once
        self._reported.clear()
        self.touched.clear()

    @property
    def has_news(self) -> bool:
        """Whether `take` would return a report, or continue a survey."""
        return self._begins or bool(self.touched) or self._next_block < self._pool.num_blocks

    def take(self) -> CacheNews | None:
        """Return the changes since the last call, or None. Mutates; O(changes), more during a survey."""
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
