"""LRU: the block that was freed longest ago is evicted first.

A sequence frees its blocks from the tail to the head, so within one sequence the tail, which fewest others can share,
is evicted first.
"""

from __future__ import annotations

from quire.memory.block import Block
from quire.memory.eviction.order import EvictionOrder


class LRUEviction(EvictionOrder):
    """Least recently used first; all operations O(1)."""

    __slots__ = ()

    def add(self, block: Block) -> None:
        """Add a block that became cached. Mutates; O(1)."""
        self.append(block)

    def pop(self) -> Block:
        """Remove and return the block that was freed longest ago. Mutates; O(1)."""
        return self.popleft()
