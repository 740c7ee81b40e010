"""MemoryBooks: the counters behind the ledger, the reasons of misses, and the audit of all books.

It changes only its own counters; `KVCacheManager` reports events to it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.core.errors import InvariantError
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import Request
from quire.core.step import NO_BLOCK
from quire.memory.block_hash import BlockHasher
from quire.memory.block_pool import BlockPool
from quire.memory.ledger import MemoryLedger
from quire.memory.prefix.base import PrefixEntry, PrefixIndex, digest_of
from quire.memory.sequence import MissReason, PrefixMatch, SequenceMemory

if TYPE_CHECKING:
    from quire.memory.tiers.disk import DiskTier
    from quire.memory.tiers.host import HostTier

MAX_REMEMBERED_EVICTIONS = 1 << 16
MAX_OTHER_ROOTS = 8


class MemoryBooks:
    """Counts events, and builds the ledger."""

    def __init__(self, hasher: BlockHasher, bytes_per_block: int) -> None:
        self._hasher = hasher
        self._bytes_per_block = bytes_per_block
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # hashes, the oldest first
        self._misses: Counter[MissReason] = Counter()
        self.queried_tokens = 0  # of prompts that were looked up, at first admissions
        self.hit_tokens = 0
        self._resumed_queried_tokens = 0
        self._resumed_hit_tokens = 0
        self.merged_blocks = 0
        self.copied_blocks = 0

    def note_eviction(self, entry: PrefixEntry) -> None:
        """Note that an entry lost a block because room was needed. Mutates; O(1) amortised."""
        self._evicted[digest_of(entry, self._hasher)] = None
        if len(self._evicted) > MAX_REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def note_admission(
        self, index: PrefixIndex, request: Request, memory: SequenceMemory, match: PrefixMatch, block_size: int
    ) -> None:
        """Count a request that was admitted with this match; resumed requests count separately. Mutates."""
        was_looked_up = index.keeps_entries and not request.reads_whole_prompt
        num_queried = len(request.tokens) if was_looked_up else 0
        if request.num_preemptions:
            self._resumed_queried_tokens += num_queried
            self._resumed_hit_tokens += match.num_tokens
            return
        self.queried_tokens += num_queried
        self.hit_tokens += match.num_tokens
        memory.miss_reason = self._explain(index, request, match, block_size)
        self._misses[memory.miss_reason] += 1

    def _explain(self, index: PrefixIndex, request: Request, match: PrefixMatch, block_size: int) -> MissReason:
        """Return why the first missed block was missed."""
        if match.num_tokens == len(request.tokens) - 1:
            return MissReason.NONE
        if request.reads_whole_prompt:
            return MissReason.NOT_ASKED
        if match.frontier is None:
            return MissReason.NOT_FULL
        if len(match.known) > len(match.entries):
            return MissReason.EVICTED
        after, tokens = match.frontier
        parent = self._hasher.root(after) if isinstance(after, bytes) else digest_of(after, self._hasher)
        if self._hasher.child(parent, tokens) in self._evicted:
            return MissReason.EVICTED
        missed = len(match.entries) + 1
        beginning = request.key(0, missed * block_size)
        for root in index.roots_beginning_with(beginning[: 4 * block_size])[:MAX_OTHER_ROOTS]:
            if len(index.match(root, beginning)) == missed:
                return MissReason.OTHER_SALT
        return MissReason.NEVER_CACHED

    def ledger(
        self,
        spec: KVCacheSpec,
        pool: BlockPool,
        host: HostTier,
        memories: dict[Request, SequenceMemory],
        disk: DiskTier,
    ) -> MemoryLedger:
        """Return the use of the memory. Does not mutate; O(requests)."""
        not_full = _fill_of_blocks(spec, memories)
        reserved = disk.landings.num_blocks * spec.block_size
        reserved += sum(planned - stored for stored, planned in not_full.values())
        unused = sum(spec.block_size - planned for _, planned in not_full.values())
        return MemoryLedger(
            block_size=spec.block_size,
            bytes_per_block=self._bytes_per_block,
            num_blocks=pool.num_blocks,
            used_blocks=pool.num_in_use,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free,
            stored_slots=pool.num_in_use * spec.block_size - reserved - unused,
            reserved_slots=reserved,
            fragmented_slots=unused,
            blocks_saved_by_sharing=pool.num_extra_holders,
            host_blocks=host.num_blocks,
            used_host_blocks=host.num_in_use,
            cached_host_blocks=host.num_cached,
            disk_slots=disk.slots.num_slots,
            used_disk_slots=disk.slots.num_held,
            queried_tokens=self.queried_tokens,
            hit_tokens=self.hit_tokens,
            resumed_queried_tokens=self._resumed_queried_tokens,
            resumed_hit_tokens=self._resumed_hit_tokens,
            evictions=pool.num_evictions,
            merged_blocks=self.merged_blocks,
            copied_blocks=self.copied_blocks,
            misses=dict(self._misses),
        )

    def slots_of_tenants(
        self, spec: KVCacheSpec, memories: dict[Request, SequenceMemory]
    ) -> dict[str, tuple[int, int]]:
        """Return the numbers of reserved and fragmented slots of each tenant. Does not mutate; O(requests)."""
        holders: dict[str, dict[Request, SequenceMemory]] = {}
        for request, memory in memories.items():
            holders.setdefault(request.scope.tenant, {})[request] = memory
        slots = {}
        for tenant, held in holders.items():
            fill = _fill_of_blocks(spec, held).values()
            slots[tenant] = (
                sum(planned - stored for stored, planned in fill),
                sum(spec.block_size - planned for _, planned in fill),
            )
        return slots

    def check(
        self,
        spec: KVCacheSpec,
        pool: BlockPool,
        index: PrefixIndex,
        host: HostTier,
        memories: dict[Request, SequenceMemory],
        landing: Sequence[int] = (),
    ) -> None:
        """Raise `InvariantError` unless tables, reference counts, entries and host blocks agree. Does not mutate.

        `landing`: the blocks that loads from a disk hold.
        """
        holders: Counter[int] = Counter(landing)
        for request, memory in memories.items():
            _check_sequence(spec, pool, request, memory)
            holders.update(block_id for table in memory.tables for block_id in table.held)
        if dict(holders) != pool.ref_counts():
            wrong = next(block for block in pool.blocks if block.ref_count != holders[block.block_id])
            raise InvariantError(f"{wrong!r} is in {holders[wrong.block_id]} tables")
        for block in pool.blocks:
            if block.entry is not None and not block.entry.attached:
                raise InvariantError(f"{block!r} is published under a dropped entry")
        for entry in index:
            for group, block_id in enumerate(entry.block_ids):
                block = pool.blocks[block_id]
                if block_id != NO_BLOCK and (block.entry is not entry or block.group != group):
                    raise InvariantError(f"an entry points to {block!r}, which does not point back")
            needed = entry.num_children or entry.holds_blocks
            if not needed and not any(memory.last_entry is entry for memory in memories.values()):
                raise InvariantError("the index kept an entry without blocks or children")
        swapped = Counter(
            block for memory in memories.values() for blocks in memory.host_blocks or () for block in blocks
        )
        swapped.update(host.used_by_plan)
        if dict(swapped) != host.ref_counts():
            blocks = map(host.block, range(host.num_blocks))
            wrong = next(block for block in blocks if block.ref_count != swapped[block.block_id])
            raise InvariantError(f"host {wrong!r} is held {swapped[wrong.block_id]} times")
        for block in host.copies():
            if block.entry is not None and not block.entry.attached:
                raise InvariantError(f"host {block!r} is published under a dropped entry")


def _fill_of_blocks(spec: KVCacheSpec, memories: dict[Request, SequenceMemory]) -> dict[int, tuple[int, int]]:
    """Return for each block in use that is not full: slots that hold a token, and slots that hold or await a token.

    A state takes a whole block after its first token.
    """
    block_size = spec.block_size
    fill: dict[int, tuple[int, int]] = {}
    for request, memory in memories.items():
        for group, table in zip(spec.groups, memory.tables, strict=True):
            for index in range(max(request.num_computed // block_size, table.num_given_back), len(table)):
                block_id, start = table.block_ids[index], index * block_size
                stored = min(max(request.num_computed - start, 0), block_size)
                planned = min(max(request.num_planned - start, stored), block_size)
                if group.recurrent:
                    stored, planned = (block_size if count else 0 for count in (stored, planned))
                known = fill.get(block_id, (0, 0))
                fill[block_id] = (max(known[0], stored), max(known[1], planned))
    return fill


def _check_sequence(spec: KVCacheSpec, pool: BlockPool, request: Request, memory: SequenceMemory) -> None:
    name, size = f"request {request.request_id!r}", spec.block_size
    for table in memory.tables:
        if any(block_id != NO_BLOCK for block_id in table.block_ids[: table.num_given_back]):
            raise InvariantError(f"{name} holds a block that it has freed")
        if NO_BLOCK in table.held or len(set(table.held)) != len(table.held):
            raise InvariantError(f"{name} has a hole in its table, or a block twice")
    if memory.host_blocks is not None:
        return
    if request.num_slots > memory.num_slots or request.num_planned > memory.num_slots:
        raise InvariantError(f"{name} may write beyond its table")
    entry, position = memory.last_entry, memory.num_published
    while entry is not None and entry.parent is not None and memory.can_publish:
        position -= 1
        if entry.key != request.key(position * size, (position + 1) * size):
            raise InvariantError(f"{name}: block {position} is published under other tokens")
        for group, table in enumerate(memory.tables):
            block_id = table.block_ids[position]
            if block_id != NO_BLOCK and entry.block_ids[group] != block_id:
                raise InvariantError(f"{name}: block {position} is not the published one")
        entry = entry.parent
    if memory.can_publish and position != 0:
        raise InvariantError(f"{name}: the published path has {position} blocks too few")
    index, offset = divmod(request.num_planned, size)
    if offset and request.num_slots > request.num_planned:
        for table in memory.tables:
            if pool.blocks[table.block_ids[index]].ref_count > 1:
                raise InvariantError(f"{name} may write into a block that others hold")
