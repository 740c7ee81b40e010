"""Swap: moves all blocks of a sequence to the host tier and back.

It updates the books of both tiers; the compute plane moves the bytes, following the plan. On the way back, blocks whose
content is still cached on the device are shared, and only the others are moved.
"""

from __future__ import annotations

from itertools import chain

from quire.core.errors import InvariantError
from quire.core.request import Request
from quire.core.step import NO_BLOCK, BlockMove
from quire.memory.block_pool import BlockPool
from quire.memory.changes import MemoryChanges
from quire.memory.prefix import PrefixEntry, PrefixIndex
from quire.memory.sequence import SequenceMemory
from quire.memory.tiers.host import HostTier


class Swap:
    """Moves sequences between the pool and a tier."""

    def __init__(
        self, block_size: int, index: PrefixIndex, pool: BlockPool, tier: HostTier, changes: MemoryChanges
    ) -> None:
        self._block_size = block_size
        self._index = index
        self._pool = pool
        self._tier = tier
        self._changes = changes

    def move_out(self, request: Request, memory: SequenceMemory) -> bool:
        """Move all planned blocks to the tier; False, and nothing changed, if it has no room. Mutates."""
        num_blocks = -(-request.num_planned // self._block_size)
        saved = [table.block_ids[table.num_given_back : num_blocks] for table in memory.tables]
        copies = {
            block_id: host_id for blocks in saved for block_id in blocks if (host_id := self._copy(block_id)) >= 0
        }
        self._tier.share(list(copies.values()))
        hosts = self._tier.allocate(sum(map(len, saved)) - len(copies))
        if hosts is None:
            self._tier.free(list(copies.values()))
            return False
        hosts.reverse()
        memory.host_blocks = [
            [copies[block_id] if block_id in copies else hosts.pop() for block_id in blocks] for blocks in saved
        ]
        sources = self._changes.forget_copies(block_id for blocks in saved for block_id in blocks)
        for blocks, host_blocks in zip(saved, memory.host_blocks, strict=True):
            for block_id, host_id in zip(blocks, host_blocks, strict=True):
                if block_id not in copies:
                    self._changes.moves_out.append(BlockMove(sources.get(block_id, block_id), host_id))
                    self._tier.note_filled(host_id)
                    if self._tier.keeps and self._pool.blocks[block_id].entry is not None:
                        self._tier.fill(host_id, self._pool.blocks[block_id])
        self._pool.free_all(memory.held_from_tail())
        for table in memory.tables:
            del table.block_ids[table.num_given_back :]
        request.num_slots = 0
        return True

    def _copy(self, block_id: int) -> int:
        """Return the host block that already has the content of a published block, or `NO_BLOCK`."""
        block = self._pool.blocks[block_id]
        if block.entry is None or block.entry.host_ids is None:
            return NO_BLOCK
        return block.entry.host_ids[block.group]

    def give_back(self, memory: SequenceMemory, group: int, first: int) -> None:
        """Free the host blocks of a group before logical block `first`: they have left the window. Mutates."""
        table, hosts = memory.tables[group], (memory.host_blocks or [])[group]
        behind = min(max(0, first - table.num_given_back), len(hosts))
        self._tier.free(hosts[:behind])
        del hosts[:behind]
        table.block_ids.extend([NO_BLOCK] * behind)
        table.num_given_back += behind

    def move_in(self, request: Request, memory: SequenceMemory) -> bool:
        """Move a sequence back; False, and nothing changed, without room or if this plan moves it out. Mutates."""
        if memory.host_blocks is None:
            raise InvariantError(f"request {request.request_id!r} is not swapped out")
        if any(map(self._tier.is_filled_now, chain.from_iterable(memory.host_blocks))):
            return False
        full = request.num_computed // self._block_size * self._block_size
        known = self._index.match(memory.root_key, request.key(0, full))
        cached = [
            [
                known[index].block_ids[group] if index < len(known) else NO_BLOCK
                for index in range(len(table), len(table) + len(memory.host_blocks[group]))
            ]
            for group, table in enumerate(memory.tables)
        ]
        present = [block_id for blocks in cached for block_id in blocks if block_id != NO_BLOCK]
        revived = sum(not self._pool.blocks[block_id].ref_count for block_id in present)
        num_moved = sum(map(len, cached)) - len(present)
        if num_moved + revived > self._pool.num_available:
            return False
        for block_id in present:
            self._pool.share(block_id)
        blocks = self._pool.allocate(num_moved)
        if blocks is None:
            self._pool.unshare_all(reversed(present))
            return False
        self._fill_tables(request, memory, cached, blocks)
        _resume_publishing(memory, known)
        return True

    def _fill_tables(
        self, request: Request, memory: SequenceMemory, cached: list[list[int]], blocks: list[int]
    ) -> None:
        host_blocks, memory.host_blocks = memory.host_blocks or [], None
        blocks.reverse()
        for group, table in enumerate(memory.tables):
            for index in range(table.num_given_back):
                self._changes.set_entry(request, memory, (group, index), NO_BLOCK)
            for cached_id, host in zip(cached[group], host_blocks[group], strict=True):
                block_id = cached_id
                if cached_id == NO_BLOCK:
                    block_id = blocks.pop()
                    self._changes.moves_in.append(BlockMove(block_id, host))
                    self._tier.free_after_plan([host])
                else:
                    self._tier.free([host])
                self._changes.set_entry(request, memory, (group, len(table)), block_id)
        request.num_slots = memory.num_slots


def _resume_publishing(memory: SequenceMemory, known: list[PrefixEntry]) -> None:
    """Let the next commit publish again those blocks that lost their entry while they were swapped out."""
    published = 0
    for index, entry in enumerate(known):
        ours = (table.block_ids[index] for table in memory.tables)
        if any(block_id not in (NO_BLOCK, theirs) for block_id, theirs in zip(ours, entry.block_ids, strict=True)):
            break
        published = index + 1
    memory.num_published = published
    memory.last_entry = known[published - 1] if published else None
    memory.can_publish = True
