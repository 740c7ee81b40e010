"""EvictionPolicy: the order in which cached blocks are evicted.

A policy holds exactly the cached blocks of the pool: no request uses them, but their content may still be hit. The pool
asks it for one when no free block is left. To write your own, see `examples/eviction_policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from quire.memory.block import Block


class EvictionPolicy(Protocol):
    """An order over the cached blocks."""

    def add(self, block: Block) -> None:
        """A block became cached: its last holder freed it. Mutates."""
        ...

    def remove(self, block: Block) -> None:
        """A cached block was hit, or its content was dropped. Mutates."""
        ...

    def pop(self) -> Block:
        """Give up the block whose turn it is; there is at least one. Mutates."""
        ...

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        ...

    def __iter__(self) -> Iterator[Block]:
        """Walk the cached blocks, in no particular order."""
        ...
