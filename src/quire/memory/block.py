"""Block: the unit of KV memory.

A block has room for the keys and values of `block_size` consecutive tokens, in every layer of one KV group. It is
always in one of three states, which partition the pool:

    in use   ref_count > 0                      at least one block table holds it
    cached   ref_count = 0, published           no table holds it, but its content may be hit; evicted to make room
    free     ref_count = 0, not published       nothing in it is worth keeping

A block in use may also be published: then other requests can share it. Its `entry` is the node of the prefix index
for its tokens and everything before them.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.memory.prefix.base import PrefixEntry


class BlockState(Enum):
    """In use, cached or free."""

    IN_USE = "in use"
    CACHED = "cached"
    FREE = "free"


class Block:
    """One block and its state. Only `BlockPool` writes it, except the links, which only `EvictionOrder` writes."""

    __slots__ = (
        "block_id",
        "ref_count",
        "entry",
        "group",
        "request_id",
        "tenant",
        "priority",
        "published_at",
        "previous",
        "next",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.entry: PrefixEntry | None = None
        self.group = 0  # the KV group it is published for
        self.request_id = ""  # the request that computed and published it
        self.tenant = ""  # of that request
        self.priority = 0  # of the request that published it; the highest number is evicted first
        self.published_at = 0  # counts publications, for policies that evict by age
        self.previous: Block | None = None  # links of the list that contains it, if any
        self.next: Block | None = None

    @property
    def state(self) -> BlockState:
        """In use, cached or free."""
        if self.ref_count:
            return BlockState.IN_USE
        return BlockState.FREE if self.entry is None else BlockState.CACHED

    def __repr__(self) -> str:
        return f"Block({self.block_id}, {self.state.value}, ref_count={self.ref_count})"
