"""SequenceMemory: the memory manager's state of one sequence.

    positions   0 ────────────────────────────────────────────────────────────► tokens
    table       [ freed      │ published, maybe shared │ own, not full yet │ own, room ahead ]
                0        num_given_back           num_published        num_computed      num_slots
                         (window groups only)     (in blocks)

Blocks left of `num_published` may be in the tables of others and are never written. The block for the next token is
written only while this sequence is its only holder; otherwise it is copied first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from quire.memory.block_table import BlockTable
from quire.memory.prefix.base import PrefixEntry

Frontier = tuple[PrefixEntry | bytes, bytes]
"""A full block of tokens and its predecessor: an entry, or the key of a root."""


class MissReason(Enum):
    """Why the first block without a cache hit was not hit."""

    NONE = "none"  # everything that may come from the cache came from it
    NEVER_CACHED = "never cached"
    EVICTED = "evicted"
    OTHER_SALT = "other salt"  # for operators only: a tenant sees "never cached"
    NOT_ASKED = "not asked"  # the request needs every position computed: for prompt_logprobs, or for mean pooling
    NOT_FULL = "not full"  # the rest of the tokens does not fill a block, and only full blocks are cached


class PrefixMatch:
    """The tokens of a request that are cached. Valid only until the next change of the memory."""

    __slots__ = ("entries", "num_tokens", "frontier", "known", "num_host_tokens")

    def __init__(
        self,
        entries: list[PrefixEntry],
        num_tokens: int,
        frontier: Frontier | None,
        known: Sequence[PrefixEntry] = (),
    ) -> None:
        self.entries = entries  # of the blocks that are hit; of the last one perhaps only the first tokens
        self.num_tokens = num_tokens
        self.frontier = frontier  # the first full block that is not hit, if there is one
        self.known = known  # all entries along the tokens, also without blocks: a disk may have those that are not hit
        self.num_host_tokens = 0  # how many of num_tokens were moved from the host; set when the request is admitted

    def ends_within_block(self, block_size: int) -> bool:
        """Return whether the last block is hit only in part: the next token is written into it."""
        return self.num_tokens < len(self.entries) * block_size


class SequenceMemory:
    """The tables of one sequence, and which of its blocks are published."""

    __slots__ = (
        "root_key",
        "tables",
        "last_entry",
        "num_published",
        "can_publish",
        "frontier",
        "host_blocks",
        "num_hit_tokens",
        "num_host_tokens",
        "miss_reason",
    )

    def __init__(self, root_key: bytes, tables: list[BlockTable]) -> None:
        self.root_key = root_key
        self.tables = tables  # one per KV group
        self.last_entry: PrefixEntry | None = None  # of the last published block; None: the root
        self.num_published = 0  # leading blocks that have an entry
        self.can_publish = True  # False once the path to its last entry was dropped from the index
        self.frontier: Frontier | None = None  # the block that this sequence computes and others may wait for
        self.host_blocks: list[list[int]] | None = None  # while swapped out: per group, for the blocks once held
        self.num_hit_tokens = 0  # of the latest admission
        self.num_host_tokens = 0  # how many of these were moved from the host
        self.miss_reason = MissReason.NONE

    @property
    def num_held(self) -> int:
        """Blocks in its tables, shared ones included."""
        return sum(len(table) - table.num_given_back for table in self.tables)

    def held_from_tail(self) -> Iterator[int]:
        """Walk the blocks in its tables from the last place to the first, those of one place together.

        If they are cached and evicted in this order, those that are left can be hit: a hit needs blocks of all groups.
        """
        for place in range(max(map(len, self.tables)) - 1, -1, -1):
            for table in self.tables:
                if table.num_given_back <= place < len(table):
                    yield table.block_ids[place]

    @property
    def num_slots(self) -> int:
        """Positions that its tables cover in every group."""
        if len(self.tables) == 1:  # the usual case; called at every block border
            return self.tables[0].num_slots
        return min(table.num_slots for table in self.tables)
