"""HostTier: blocks in the host's memory, for requests that were swapped out.

Moves to the host come first in a plan, moves back last. A host block that a plan moves back therefore must not be
the target of a move of the same plan: it is given back when the plan is complete.
"""

from __future__ import annotations

from quire.core.errors import InvariantError
from quire.memory.free_list import FreeList


class HostTier:
    """The host blocks, by their ids.

    >>> tier = HostTier(2)
    >>> tier.allocate(2), tier.allocate(1)
    ([0, 1], None)
    >>> tier.free_after_plan([0]); tier.allocate(1)
    >>> tier.plan_made(); tier.allocate(1)
    [0]
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free_list = FreeList(num_blocks)
        self._after_plan: list[int] = []

    @property
    def num_blocks(self) -> int:
        """All blocks of the tier."""
        return self._num_blocks

    @property
    def num_in_use(self) -> int:
        """Blocks that cannot be taken now."""
        return self._num_blocks - len(self._free_list)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks; None, and no change, if there are too few. Mutates."""
        if num_blocks > len(self._free_list):
            return None
        return self._free_list.take(num_blocks)

    def free(self, block_ids: list[int]) -> None:
        """Give blocks back whose content no plan reads any more. Mutates."""
        for block_id in reversed(block_ids):
            self._free_list.put(block_id)

    def free_after_plan(self, block_ids: list[int]) -> None:
        """Give blocks back that the plan in the making still reads. Mutates."""
        self._after_plan.extend(block_ids)

    def plan_made(self) -> None:
        """The plan in the making is complete. Mutates."""
        if self._after_plan:
            self.free(self._after_plan)
            self._after_plan = []

    def check(self) -> None:
        """Raise `InvariantError` unless every block is accounted for once."""
        known = [*self._free_list, *self._after_plan]
        if len(set(known)) != len(known) or any(not 0 <= block < self._num_blocks for block in known):
            raise InvariantError("a host block was given back twice, or is none")
