"""The free list: the blocks of a pool or tier with nothing in them worth keeping. The one freed last is taken first."""

from __future__ import annotations

from collections.abc import Iterator


class FreeList:
    """A stack of block ids; block 0 is the first to be taken.

    >>> free = FreeList(4)
    >>> free.take(3); free.put(1); free.take(2), len(free)
    [0, 1, 2]
    ([1, 3], 0)
    """

    __slots__ = ("_stack",)

    def __init__(self, num_blocks: int) -> None:
        self._stack = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        """Return the number of free blocks. O(1)."""
        return len(self._stack)

    def __iter__(self) -> Iterator[int]:
        """Walk the free blocks, the next to be taken first."""
        return reversed(self._stack)

    def put(self, block_id: int) -> None:
        """Add a block that became free. Mutates; O(1)."""
        self._stack.append(block_id)

    def take(self, num_blocks: int) -> list[int]:
        """Take blocks, the one freed last first; there must be enough. Mutates; O(num_blocks)."""
        first = len(self._stack) - num_blocks
        taken = self._stack[first:]
        del self._stack[first:]
        taken.reverse()
        return taken
