"""The oracle of the journal: what its changes add up to, against a scan of the pool, the tables and the index."""

from __future__ import annotations

from collections import Counter
from typing import Any

from quire.core.request import Request
from quire.core.step import NO_BLOCK
from quire.memory.block import BlockState
from quire.memory.journal import NOT_PUBLISHED, BlockChange
from quire.memory.manager import KVCacheManager

FREE = (BlockState.FREE, 0, NOT_PUBLISHED)


class BlockPicture:
    """Watches a manager, and knows it from the journal alone. Changes are taken after every so many stamps."""

    def __init__(self, manager: KVCacheManager, *, taken_every: int = 1, surveyed_at_once: int = 3) -> None:
        self.taken_every = taken_every
        self._manager = manager
        self._journal = manager.watch()
        self._survey = self._journal.survey(surveyed_at_once)
        self._is_whole = False
        self._num_stamps = 0
        self.num_checks = 0
        self._known: dict[int, BlockChange] = {}
        self._stamps: dict[int, tuple[Any, float]] = {}  # of each block: what it was at a stamp, and since when

    def follow(self) -> None:
        """Stamp what has happened and, when it is time, take it and compare."""
        self._num_stamps += 1
        self._journal.stamp(float(self._num_stamps))
        self._note_changes()
        if self._num_stamps % self.taken_every:
            return
        is_surveyed = next(self._survey, self) is self
        for change in self._journal.take(most=1 + self._num_stamps % 9):
            if change.changed_s is None and self._is_whole:
                before = self._known[change.block_id]
                assert before[:4] == change[:4], "something changed besides the parent, and has no time"
            self._known[change.block_id] = change
        if is_surveyed and not self._journal.has_news:
            self._is_whole = True
            self.num_checks += 1
            self.check()

    def check(self) -> None:
        """Compare with a scan of everything."""
        holders = self._scan_tables()
        parents = self._scan_index()
        loading = Counter(self._manager.disk.landings.held_blocks())
        for block in self._manager.pool.blocks:
            change = self._known.get(block.block_id)
            state, num_holders, parent = FREE if change is None else (change.state, change.num_holders, change.parent)
            assert (state, num_holders) == (block.state, block.ref_count)
            assert num_holders == len(holders.get(block.block_id, [])) + loading[block.block_id]
            assert parent == parents.get(block.block_id, NOT_PUBLISHED)
            if change is not None:
                self._check_owner(change, holders.get(block.block_id, []), block.tenant)
                since = self._stamps[block.block_id][1]
                assert change.changed_s is None or change.changed_s >= since, "a block changed after it is said to have"

    def _check_owner(self, change: BlockChange, holders: list[Request], publisher: str) -> None:
        if change.state is BlockState.IN_USE and not holders:
            assert change.owner is None, "only a load from disk holds the block"
        elif change.state is BlockState.IN_USE:
            assert change.owner in holders
            assert change.owner is not None and change.tenant == change.owner.scope.tenant
        else:
            assert change.owner is None
            assert change.tenant == (publisher if change.state is BlockState.CACHED else "")

    def _note_changes(self) -> None:
        for block in self._manager.pool.blocks:
            what = (block.ref_count, block.entry, block.group)
            if block.block_id not in self._stamps or self._stamps[block.block_id][0] != what:
                self._stamps[block.block_id] = (what, float(self._num_stamps))

    def _scan_tables(self) -> dict[int, list[Request]]:
        holders: dict[int, list[Request]] = {}
        for request, memory in self._manager.memories.items():
            for table in memory.tables:
                for block_id in table.held:
                    holders.setdefault(block_id, []).append(request)
        return holders

    def _scan_index(self) -> dict[int, int]:
        """The parent of each block that can be hit."""
        parents = {}
        for entry in self._manager.index:
            for group, block_id in enumerate(entry.block_ids):
                if block_id != NO_BLOCK:
                    assert entry.parent is not None
                    parents[block_id] = entry.parent.block_ids[group]
        return parents
