"""TierManager: a second place for blocks.

A tier keeps the books only: it says which of its blocks are taken. The bytes are moved by the compute plane, as the
plan tells it.
"""

from __future__ import annotations

from typing import Protocol


class TierManager(Protocol):
    """The books of a tier."""

    @property
    def num_blocks(self) -> int:
        """All blocks of the tier."""
        ...

    @property
    def num_in_use(self) -> int:
        """Blocks that cannot be taken now."""
        ...

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks; None, and no change, if there are too few. Mutates."""
        ...

    def free(self, block_ids: list[int]) -> None:
        """Give blocks back whose content no plan reads any more. Mutates."""
        ...

    def free_after_plan(self, block_ids: list[int]) -> None:
        """Give blocks back that the plan in the making still reads. Mutates."""
        ...

    def plan_made(self) -> None:
        """The plan in the making is complete: what it reads may be taken by the next one. Mutates."""
        ...

    def check(self) -> None:
        """Raise `InvariantError` unless every block is accounted for once."""
        ...
