"""FIFO: the block that was published longest ago is evicted first, however often it was hit since."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.memory.block import Block


class FIFOEviction:
    """Oldest publication first; O(log n).

    A block that is hit leaves `_cached` at once and the heap later: outdated entries of the heap are skipped when they
    are popped, and removed when they outnumber the others.
    """

    def __init__(self) -> None:
        self._cached: dict[int, Block] = {}
        self._heap: list[tuple[int, int]] = []  # (published_at, block_id)

    def add(self, block: Block) -> None:
        """Add a block that became cached. Mutates; O(log n)."""
        self._cached[block.block_id] = block
        heapq.heappush(self._heap, (block.published_at, block.block_id))

    def remove(self, block: Block) -> None:
        """Remove a block that is no longer cached. Mutates; O(1) amortised."""
        del self._cached[block.block_id]
        if len(self._heap) > 2 * len(self._cached) + 64:
            self._heap = [(cached.published_at, cached.block_id) for cached in self._cached.values()]
            heapq.heapify(self._heap)

    def pop(self) -> Block:
        """Remove and return the block that was published longest ago. Mutates; O(log n) amortised."""
        while True:
            published_at, block_id = heapq.heappop(self._heap)
            block = self._cached.get(block_id)
            if block is not None and block.published_at == published_at:
                self.remove(block)
                return block

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._cached)

    def __iter__(self) -> Iterator[Block]:
        """Walk the cached blocks."""
        return iter(self._cached.values())
