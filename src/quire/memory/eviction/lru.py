"""LRU: the block that was let go of longest ago goes first.

A sequence lets go of its blocks from the tail to the head, so within one sequence the tail, which fewest others can
share, goes first.
"""

from __future__ import annotations

from quire.memory.block import Block
from quire.memory.eviction.order import EvictionOrder


class LRUEviction(EvictionOrder):
    """Least recently used first; all operations O(1)."""

    __slots__ = ()

    def add(self, block: Block) -> None:
        """A block became cached. Mutates; O(1)."""
        self.append(block)

    def pop(self) -> Block:
        """Give up the block that was let go of longest ago. Mutates; O(1)."""
        return self.popleft()
