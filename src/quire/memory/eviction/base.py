"""EvictionPolicy: the order in which cached blocks are evicted.

A policy holds exactly the cached blocks of the pool: no request uses them, but their content may still be hit. The pool
takes a block from the policy when no free block is left. To write your own, see `examples/eviction_policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from quire.memory.block import Block


class EvictionPolicy(Protocol):
    """An order over the cached blocks."""

    def add(self, block: Block) -> None:
        """Add a block that became cached, because its last holder freed it. Mutates."""
        ...

    def remove(self, block: Block) -> None:
        """Remove a block that was hit, or whose content was dropped. Mutates."""
        ...

    def pop(self) -> Block:
        """Remove and return the next block to evict; there is at least one. Mutates."""
        ...

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        ...

    def __iter__(self) -> Iterator[Block]:
        """Walk the cached blocks, in no particular order."""
        ...
