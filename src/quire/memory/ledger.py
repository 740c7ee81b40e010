"""The ledger: the use of the KV memory, in numbers that add up.

    blocks    used + cached + free                              = num_blocks, and the same on the host
    slots     stored + reserved + fragmented                    = used × block_size
    sharing   blocks that would be used if nothing were shared  = used + saved by sharing

`stored` slots hold keys and values of a token; `reserved` slots are allocated for tokens of a plan in flight, for
drafts, or for blocks being loaded from disk; `fragmented` slots are the rest of blocks that are not full. The state of
a recurrent layer takes all slots of its block. All values here are frozen and computed on request, so that they add
nothing to the cost of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.errors import InvariantError
from quire.memory.sequence import MissReason


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """The use of the KV memory at one moment; see the module for the sums."""

    block_size: int
    bytes_per_block: int
    num_blocks: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    stored_slots: int
    reserved_slots: int
    fragmented_slots: int
    blocks_saved_by_sharing: int
    host_blocks: int
    used_host_blocks: int
    queried_tokens: int
    hit_tokens: int
    resumed_queried_tokens: int
    resumed_hit_tokens: int
    evictions: int
    merged_blocks: int
    copied_blocks: int
    misses: dict[MissReason, int] = field(default_factory=dict)
    cached_host_blocks: int = 0
    disk_slots: int = 0
    used_disk_slots: int = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that requests hold."""
        return self.used_blocks * self.bytes_per_block

    @property
    def cached_bytes(self) -> int:
        """Bytes of the blocks that no request holds and that may be hit."""
        return self.cached_blocks * self.bytes_per_block

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks with nothing worth keeping."""
        return self.free_blocks * self.bytes_per_block

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the cache served, of all that were looked up at first admissions."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def fragmentation(self) -> float:
        """Share of the slots in used blocks that are neither stored nor reserved."""
        slots = self.used_blocks * self.block_size
        return self.fragmented_slots / slots if slots else 0.0

    def check(self) -> None:
        """Raise `InvariantError` unless the sums add up."""
        if self.used_blocks + self.cached_blocks + self.free_blocks != self.num_blocks:
            raise InvariantError("used, cached and free blocks do not add up to the pool")
        slots = self.stored_slots + self.reserved_slots + self.fragmented_slots
        if slots != self.used_blocks * self.block_size:
            raise InvariantError(f"{slots} slots are accounted for, {self.used_blocks * self.block_size} are used")
        counts = (self.used_blocks, self.cached_blocks, self.free_blocks, self.used_host_blocks)
        if min(*counts, self.stored_slots, self.reserved_slots, self.fragmented_slots) < 0:
            raise InvariantError("a count is negative")
        if self.used_host_blocks + self.cached_host_blocks > self.host_blocks:
            raise InvariantError("more host blocks are used than exist")
        if not 0 <= self.used_disk_slots <= self.disk_slots:
            raise InvariantError("more slots of the disk are used than exist")
