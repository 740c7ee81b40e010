"""Publisher: makes computed blocks visible to other requests.

A block is published when it is full and committed, never before its keys and values exist. If the index already has a
block with the same content (two sequences computed it at the same time), the second sequence drops its own block and
takes the first: duplicates are merged.

The first full block that a running sequence is about to compute is announced as its *frontier*. A request that needs
the same block can wait for the commit instead of computing it again.
"""

from __future__ import annotations

from quire.core.errors import InvariantError
from quire.core.request import Request
from quire.core.step import NO_BLOCK
from quire.memory.block_pool import BlockPool
from quire.memory.bookkeeping import MemoryBooks
from quire.memory.changes import MemoryChanges
from quire.memory.prefix import PrefixIndex
from quire.memory.sequence import Frontier, SequenceMemory


class Publisher:
    """Publishes blocks, and knows which ones are being computed."""

    def __init__(
        self, block_size: int, index: PrefixIndex, pool: BlockPool, changes: MemoryChanges, books: MemoryBooks
    ) -> None:
        self._block_size = block_size
        self._index = index
        self._pool = pool
        self._changes = changes
        self._books = books
        self._computing: dict[Frontier, Request] = {}

    def commit(self, request: Request, memory: SequenceMemory, num_computed: int) -> None:
        """Publish the blocks that became full. Mutates; O(blocks that became full)."""
        size = self._block_size
        num_full = num_computed // size
        if num_full <= memory.num_published or not memory.can_publish:
            return
        self.withdraw(memory)
        while memory.num_published < num_full and self._publish(request, memory):
            memory.num_published += 1
        start = memory.num_published * size
        if memory.can_publish and start + size <= len(request.tokens):
            key = request.key(start, start + size)
            self.announce(request, memory, (memory.last_entry or memory.root_key, key))

    def _publish(self, request: Request, memory: SequenceMemory) -> bool:
        """Publish the next block in every group; False if the path to it was dropped from the index."""
        index, size = memory.num_published, self._block_size
        parent = memory.last_entry or self._index.root(memory.root_key)
        entry = self._index.extend(parent, request.key(index * size, (index + 1) * size))
        if entry is None:
            memory.can_publish = False
            return False
        for group, table in enumerate(memory.tables):
            block_id, known = table.block_ids[index], entry.block_ids[group]
            if block_id in (NO_BLOCK, known):
                continue
            if known == NO_BLOCK:
                self._pool.publish(block_id, entry, request, group=group)
            else:
                self._pool.share(known)
                self._pool.free(block_id)
                self._changes.set_entry(request, memory, (group, index), known)
                self._books.merged_blocks += 1
        memory.last_entry = entry
        return True

    def announce(self, request: Request, memory: SequenceMemory, frontier: Frontier) -> None:
        """Note that a request is about to compute this block, unless another request is. Mutates."""
        if self._index.keeps_entries and frontier not in self._computing:
            self._computing[frontier] = request
            memory.frontier = frontier

    def withdraw(self, memory: SequenceMemory) -> None:
        """Withdraw what a sequence announced, because it is committed or will not be computed. Mutates."""
        if memory.frontier is not None:
            del self._computing[memory.frontier]
            memory.frontier = None

    def is_being_computed(self, frontier: Frontier) -> bool:
        """Whether a request computes this block and is about to commit it. Does not mutate; O(1)."""
        return frontier in self._computing

    def forget_all(self, memories: dict[Request, SequenceMemory]) -> None:
        """Forget all announcements, and publish no more on lost paths, because the index was cleared. Mutates."""
        self._computing.clear()
        for memory in memories.values():
            memory.frontier = None
            memory.can_publish = memory.num_published == 0

    def check(self, memories: dict[Request, SequenceMemory]) -> None:
        """Raise `InvariantError` unless the announced blocks are those that the sequences remember."""
        announced = {frontier: request for request, memory in memories.items() if (frontier := memory.frontier)}
        if announced != self._computing:
            raise InvariantError("the tokens being computed differ from the announced ones")
