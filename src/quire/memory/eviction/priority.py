"""Priority: blocks of the least urgent requests are evicted first, and among these the least recently used.

As in the scheduler, a lower number is more urgent, so blocks with the highest number are evicted first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from quire.memory.block import Block
from quire.memory.eviction.order import EvictionOrder


class PriorityEviction:
    """Least urgent first, LRU within a level; O(1), or O(levels) when a level of priority is added or removed."""

    def __init__(self) -> None:
        self._levels: dict[int, EvictionOrder] = {}
        self._order: list[int] = []  # the levels in use, ascending
        self._length = 0

    def add(self, block: Block) -> None:
        """Add a block that became cached. Mutates."""
        level = self._levels.get(block.priority)
        if level is None:
            level = self._levels[block.priority] = EvictionOrder()
            insort(self._order, block.priority)
        level.append(block)
        self._length += 1

    def remove(self, block: Block) -> None:
        """Remove a block that is no longer cached. Mutates."""
        level = self._levels[block.priority]
        level.remove(block)
        self._length -= 1
        if not level:
            del self._levels[block.priority]
            self._order.remove(block.priority)

    def pop(self) -> Block:
        """Remove and return the least recently used block of the least urgent level. Mutates."""
        block = next(iter(self._levels[self._order[-1]]))
        self.remove(block)
        return block

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Walk the cached blocks."""
        for level in self._levels.values():
            yield from level
