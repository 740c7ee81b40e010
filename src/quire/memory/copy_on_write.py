"""Copy-on-write: a sequence never writes into a block that others may read; it writes into a copy.

Two cases need a copy. Either the block for the next token has other holders, as after a fork. Or a prefix match ends
within a block: the tail is hit in part, and the sequence continues to write there. A tail without another holder is
taken over instead of copied.

The books change here; the worker copies the bytes, by the `BlockCopy` in the next plan.
"""

from __future__ import annotations

from quire.core.request import Request
from quire.core.step import NO_BLOCK, BlockCopy
from quire.memory.block_pool import BlockPool
from quire.memory.bookkeeping import MemoryBooks
from quire.memory.changes import MemoryChanges
from quire.memory.prefix import PrefixEntry, PrefixIndex
from quire.memory.sequence import SequenceMemory


class CopyOnWrite:
    """Finds the blocks that must be copied before they are written, and notes the copies."""

    def __init__(
        self, block_size: int, index: PrefixIndex, pool: BlockPool, changes: MemoryChanges, books: MemoryBooks
    ) -> None:
        self._block_size = block_size
        self._index = index
        self._pool = pool
        self._changes = changes
        self._books = books

    def targets(self, request: Request, memory: SequenceMemory) -> list[tuple[int, int]]:
        """Return the entries (group, index) of the next token's blocks that others hold too. Does not mutate."""
        index, offset = divmod(request.num_planned, self._block_size)
        if not offset:
            return []
        blocks = self._pool.blocks
        return [
            (group, index) for group, table in enumerate(memory.tables) if blocks[table.block_ids[index]].ref_count > 1
        ]

    def copy(self, request: Request, memory: SequenceMemory, place: tuple[int, int], source: int, copy: int) -> None:
        """Put the new block `copy` in the table in place of `source`, with the same content. Mutates; O(1)."""
        self._changes.copies.append(BlockCopy(source, copy))
        self._changes.set_entry(request, memory, place, copy)
        self._books.copied_blocks += 1

    def take_over_tail(self, memory: SequenceMemory, tail: PrefixEntry) -> None:
        """Unpublish the last hit block if no other table has it: it will be written, so it must not be hit. Mutates."""
        for group, table in enumerate(memory.tables):
            if table.block_ids[-1] == tail.block_ids[group] != NO_BLOCK:
                self._pool.unpublish(tail.block_ids[group])
        self._index.discard(tail)
