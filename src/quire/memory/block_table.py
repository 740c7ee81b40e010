"""The block table: from a token's position to where its keys and values are.

    logical block = position // block_size          which entry of the table
    offset        = position %  block_size          which place in the block
    slot          = block_ids[logical block] * block_size + offset

    block_size 16, table [5, 12, 3]:    position 0 → slot 80, 16 → 192, 34 → 50

The blocks of a sequence are consecutive logically and anywhere physically. Entries behind a sliding window hold
`NO_BLOCK`: their blocks have been freed.
"""

from __future__ import annotations

from quire.core.errors import InvariantError
from quire.core.step import NO_BLOCK


class BlockTable:
    """The blocks of one sequence in one KV group.

    >>> table = BlockTable(16, [5, 12, 3])
    >>> [table.slot(position) for position in (0, 15, 16, 31, 32, 34)]
    [80, 95, 192, 207, 48, 50]
    >>> table.slots(30, 34)
    [206, 207, 48, 49]
    """

    __slots__ = ("block_size", "block_ids", "num_given_back")

    def __init__(self, block_size: int, block_ids: list[int] | None = None) -> None:
        self.block_size = block_size
        self.block_ids = block_ids if block_ids is not None else []
        self.num_given_back = 0  # leading entries that hold NO_BLOCK

    def __len__(self) -> int:
        """Return the number of logical blocks, including freed ones."""
        return len(self.block_ids)

    @property
    def num_slots(self) -> int:
        """The number of positions that the table covers."""
        return len(self.block_ids) * self.block_size

    @property
    def held(self) -> list[int]:
        """The blocks that the sequence holds, in logical order."""
        return self.block_ids[self.num_given_back :]

    def slot(self, position: int) -> int:
        """Return the slot of a position. O(1)."""
        block_id = self.block_ids[position // self.block_size]
        if block_id == NO_BLOCK:
            raise InvariantError(f"position {position} is behind the sliding window and its block has been freed")
        return block_id * self.block_size + position % self.block_size

    def slots(self, start: int, end: int) -> list[int]:
        """Return the slots of positions start … end - 1 (the slot mapping of a step)."""
        return [self.slot(position) for position in range(start, end)]

    def fork(self, num_blocks: int) -> BlockTable:
        """Return a table of the first `num_blocks` blocks. The caller adjusts the reference counts."""
        table = BlockTable(self.block_size, self.block_ids[:num_blocks])
        table.num_given_back = min(self.num_given_back, num_blocks)
        return table
