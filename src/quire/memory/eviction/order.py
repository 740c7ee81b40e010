"""EvictionOrder: cached blocks, the next to be evicted first, in a list that runs through the blocks themselves.

A hit takes a cached block out of the *middle* of the order. A deque would have to be searched, a heap rebuilt. This is
a doubly linked list whose links are in the blocks, so every operation is O(1) and allocates no objects.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.core.errors import InvariantError
from quire.memory.block import Block


class EvictionOrder:
    """Blocks in an order; a block is in at most one such list.

    >>> blocks = [Block(i) for i in range(3)]
    >>> order = EvictionOrder()
    >>> for block in blocks: order.append(block)
    >>> order.remove(blocks[1])
    >>> [block.block_id for block in order], order.popleft().block_id, len(order)
    ([0, 2], 0, 1)
    """

    __slots__ = ("_head", "_tail", "_length")

    def __init__(self) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next = self._tail
        self._tail.previous = self._head
        self._length = 0

    def __len__(self) -> int:
        """Return the number of blocks. O(1)."""
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Walk from the first to the last block. O(n)."""
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Append a block. Mutates; O(1)."""
        last = self._tail.previous
        if last is None or block.next is not None:
            raise InvariantError(f"block {block.block_id} is already in a list")
        last.next = block
        block.previous = last
        block.next = self._tail
        self._tail.previous = block
        self._length += 1

    def remove(self, block: Block) -> None:
        """Remove a block from any place. Mutates; O(1)."""
        before, after = block.previous, block.next
        if before is None or after is None:
            raise InvariantError(f"block {block.block_id} is in no list")
        before.next = after
        after.previous = before
        block.previous = block.next = None
        self._length -= 1

    def popleft(self) -> Block:
        """Remove and return the first block. Mutates; O(1). The list must not be empty."""
        first = self._head.next
        if first is None or first is self._tail:
            raise InvariantError("popleft of an empty list")
        self.remove(first)
        return first

    def check(self) -> None:
        """Raise `InvariantError` unless the links agree in both directions."""
        length = 0
        block = self._head
        while block.next is not None:
            if block.next.previous is not block:
                raise InvariantError(f"the links of block {block.block_id} disagree")
            block = block.next
            length += 1
        if block is not self._tail or length - 1 != self._length:
            raise InvariantError("the list does not end at its tail, or its length is wrong")
