"""KVCacheManager: the interface to the paged memory; `disk` and `host` are its lower tiers.

    match_prefix      which of these tokens are cached?                                does not mutate
    allocate_slots    room for the next tokens: hits, new blocks, copy-on-write        all or nothing: True or False
    commit            these tokens are computed: publish full blocks, merge duplicates
    fork              a second sequence on the same blocks
    swap_out, swap_in all blocks of a sequence to the host tier and back               all or nothing: True or False
    free, drop        the sequence frees all its blocks; full blocks stay cached, or do not
    take_changes      the changes that the plan must send to the workers
    ledger, check     the use of the memory; the audit of the books

A block that others may see is never written: if the block for the next token has another holder, it is copied first
(copy-on-write, also for a partial tail). If a whole prompt is cached, its last token is still computed, because
sampling needs its logits; its block is then taken over if no other request holds it, and copied otherwise.

Parts: block_pool (allocation), prefix/ (index of the content), publisher (which blocks others may hit), copy_on_write,
swap (tiers), bookkeeping (audit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.core.config import MemoryConfig
from quire.core.errors import InvariantError
from quire.core.kept_block import KeptBlock
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import CacheScope, Request
from quire.core.step import NO_BLOCK, BlockMove
from quire.core.transfers import TransferOutcome
from quire.memory.block_hash import BlockHasher, root_key
from quire.memory.block_pool import BlockPool
from quire.memory.block_table import BlockTable
from quire.memory.bookkeeping import MemoryBooks
from quire.memory.cache_journal import SURVEYED_AT_ONCE, CacheJournal
from quire.memory.changes import MemoryChanges
from quire.memory.copy_on_write import CopyOnWrite
from quire.memory.eviction import EvictionPolicy, create_eviction_policy
from quire.memory.hits import PrefixHits
from quire.memory.journal import MemoryJournal
from quire.memory.ledger import MemoryLedger
from quire.memory.prefix import PrefixEntry, create_prefix_index
from quire.memory.publisher import Publisher
from quire.memory.quota import TenantQuota
from quire.memory.sequence import Frontier, MissReason, PrefixMatch, SequenceMemory
from quire.memory.swap import Swap
from quire.memory.tiers.disk import DiskTier
from quire.memory.tiers.host import HostTier
from quire.memory.tiers.jobs import CacheJobs


class KVCacheManager:
    """Paged KV memory with prefix sharing, for any engine. Your own `eviction` policy replaces the configured one.

    `kept`: the blocks on disk from an earlier run.

    The caller maintains `num_computed` and `num_planned` of its requests: copy-on-write, windows, swap and the ledger
    depend on them.

    >>> spec = KVCacheSpec.from_layers([None], block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> manager = KVCacheManager(spec, MemoryConfig(num_blocks=8))
    >>> first = Request("first", [1, 2, 3, 4, 5, 6])
    >>> manager.allocate_slots(first, 6), manager.block_tables(first)
    (True, [[0, 1]])
    >>> manager.commit(first, 6)
    >>> second = Request("second", [1, 2, 3, 4, 9, 9])
    >>> match = manager.match_prefix(second); match.num_tokens
    4
    >>> manager.allocate_slots(second, 6, match), manager.block_tables(second)
    (True, [[0, 2]])
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        config: MemoryConfig,
        *,
        eviction: EvictionPolicy | None = None,
        make_pool: Callable[..., BlockPool] = BlockPool,
        kept: Sequence[KeptBlock] = (),
    ) -> None:
        self.spec = spec
        self.config = config
        self._block_size = spec.block_size
        self._groups = spec.groups
        self._hasher = hasher = BlockHasher(config.hash_key, config.hash_bits)
        self.index = create_prefix_index(
            config.prefix_index, block_bytes=4 * spec.block_size, num_groups=len(spec.groups), hasher=hasher
        )
        limit = config.max_cached_blocks_per_tenant
        self.pool = make_pool(
            config.num_blocks,
            create_eviction_policy(config.eviction) if eviction is None else eviction,
            on_evict=self._on_evict,
            quota=None if limit is None else TenantQuota(limit),
        )
        self.memories: dict[Request, SequenceMemory] = {}
        self._changes = MemoryChanges()
        keeps = config.keeps_on_host and self.index.keeps_entries
        self.host = HostTier(
            config.num_host_blocks,
            self._changes,
            on_evict=self._on_host_evict if keeps else None,
            quota=None if limit is None else TenantQuota(limit),
        )
        if self.host.keeps:
            self.pool.on_cached = self.host.copy_down
        self._hits = PrefixHits(spec, self.index, self.pool, self.host, self._changes)
        self._windows = self._hits.windows
        self._moved_in: list[tuple[PrefixEntry, CacheScope]] = []  # paths that the disk may store after this plan
        self._books = MemoryBooks(hasher, spec.bytes_per_block)
        self._publisher = Publisher(spec.block_size, self.index, self.pool, self._changes, self._books)
        self._copy_on_write = CopyOnWrite(spec.block_size, self.index, self.pool, self._changes, self._books)
        self._swap = Swap(spec.block_size, self.index, self.pool, self.host, self._changes)
        self.cache_journal: CacheJournal | None = None  # while a router subscribes to what can be hit
        self.kept = tuple(kept)
        num_disk_slots = config.num_disk_slots if self.index.keeps_entries else 0
        self.disk = DiskTier(spec, num_disk_slots, config.disk_write, self.index, self.pool)
        if self.disk.has_slots:
            self.disk.restore(kept)
        self.jobs = CacheJobs(spec.block_size, self.index, self.disk, self._hits)

    # ---- looking up -------------------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixMatch:
        """Return the cached prefix of the request's known tokens, at most all but the last. Does not mutate.

        The match is empty if every position of the prompt must be computed. O(blocks matched).
        """
        return self._hits.match(request)

    def is_being_computed(self, frontier: Frontier) -> bool:
        """Return whether this block will soon be published: a request computes it, or it is loaded from the disk.

        Does not mutate; O(1).
        """
        return self.disk.landings.awaits(frontier) or self._publisher.is_being_computed(frontier)

    # ---- the disk ---------------------------------------------------------------------------------------------

    def start_load(self, request: Request, match: PrefixMatch) -> bool:
        """Start loading blocks beyond a match from disk; False if it has none, or computing is faster. Mutates."""
        return self.disk.start_load(request, match, self._hits.usable)

    def note_hits(self, request: Request, num_tokens: int) -> tuple[int, int]:
        """Return how many of the leading tokens came from host and disk for this request, and count them. Mutates."""
        from_host = self.memories[request].num_host_tokens
        self.host.num_hit_tokens += from_host
        return from_host, min(self.disk.note_hits(request, num_tokens), num_tokens - from_host)

    def num_blocks_needed(self, request: Request, end: int, match: PrefixMatch | None = None) -> int:
        """Return how many available blocks a sequence takes to grow to `end` tokens. Does not mutate.

        For a new sequence this includes the hits of `match`; for one that is swapped out, the blocks to swap in.
        """
        return sum(at_once + fresh for _, at_once, fresh in self._needs(request, end, match))

    def num_blocks_to_grow(self, request: Request, end: int, match: PrefixMatch | None, *, longest_chunk: int) -> int:
        """Return how many blocks it takes to grow to `end` tokens in steps of at most `longest_chunk`. Does not mutate.

        Layers with windows need fewer, because blocks that have left the window are freed and used again.
        """
        needs = self._needs(request, end, match)
        if not self._windows:
            return sum(at_once + fresh for _, at_once, fresh in needs)
        most = [self.spec.most_blocks(kind, end, longest_chunk=longest_chunk) for kind in self._groups]
        return sum(
            at_once + min(fresh, max(0, most_held - held))
            for (held, at_once, fresh), most_held in zip(needs, most, strict=True)
        )

    def _needs(self, request: Request, end: int, match: PrefixMatch | None) -> list[tuple[int, int, int]]:
        """Return for each group the blocks held at first, those to copy, hit or move in, and the new ones up to `end`.

        The blocks held at first include those to hit or move in.
        """
        num_blocks, memory = -(-end // self._block_size), self.memories.get(request)
        if memory is not None and memory.host_blocks is not None:
            moved = list(map(len, memory.host_blocks))
            given_back = [table.num_given_back for table in memory.tables]
            return [(n, n, max(0, num_blocks - gone - n)) for n, gone in zip(moved, given_back, strict=True)]
        counts = [0] * len(self._groups)
        if memory is not None:
            for group, _ in self._copy_on_write.targets(request, memory):
                counts[group] += 1
            held = [len(table) - table.num_given_back for table in memory.tables]
            return list(zip(held, counts, self._missing(memory, end), strict=True))
        match = match or self.match_prefix(request)
        for hit in self._hits.of(match):
            counts[hit.group] += self._hits.num_new_blocks(hit)
        missing = max(0, num_blocks - len(match.entries))
        return [(count, count, missing) for count in counts]

    # ---- room -------------------------------------------------------------------------------------------------

    def allocate_slots(self, request: Request, end: int, match: PrefixMatch | None = None) -> bool:
        """Make room for the tokens up to position `end`; False, and nothing changed, if there is not enough.

        The first call for a request opens its memory with the blocks hit by `match`, whose tokens need not be
        computed; raises `StaleMatchError` if one of these blocks was evicted. Mutates; O(blocks added).
        """
        memory = self.memories.get(request)
        if memory is None:
            return self._open(request, end, match or self.match_prefix(request))
        if memory.host_blocks is not None:
            raise InvariantError(f"request {request.request_id!r} is swapped out; swap it in first")
        self._give_back(request, memory)
        targets, missing = self._copy_on_write.targets(request, memory), self._missing(memory, end)
        blocks = self._take(len(targets) + sum(missing))
        if blocks is None:
            return False
        for group, index in targets:
            source = memory.tables[group].block_ids[index]
            self._copy_on_write.copy(request, memory, (group, index), source, blocks.pop())
            self.pool.free(source)
        self._append(request, memory, missing, blocks)
        return True

    def num_slots(self, request: Request) -> int:
        """Return how many tokens the blocks of a running request have room for. Does not mutate."""
        return self.memories[request].num_slots

    def block_tables(self, request: Request) -> list[list[int]]:
        """Return the block ids of a request, one list per KV group. Does not mutate."""
        return [list(table.block_ids) for table in self.memories[request].tables]

    def _open(self, request: Request, end: int, match: PrefixMatch) -> bool:
        if self.num_blocks_needed(request, end, match) > self.pool.num_available:
            return False
        size, hits = self._block_size, len(match.entries)
        found = self._hits.of(match)
        shared = [hit.block_id for hit in found if hit.is_shared]
        on_host = [hit.host_id for hit in found if hit.block_id == NO_BLOCK]
        missing = [max(0, -(-end // size) - hits)] * len(self._groups)  # a tail hit in part may reach beyond `end`
        for block_id in shared:
            self.pool.share(block_id)
        blocks = self._take(len(found) - len(shared) + sum(missing))
        if blocks is None:
            self.pool.unshare_all(reversed(shared))
            return False
        self.host.read_by_plan(on_host)
        memory = SequenceMemory(root_key(request.scope), [BlockTable(size) for _ in self._groups])
        self.memories[request] = memory
        own = self._hits.bring(match, found, blocks)
        self._fill_with_hits(request, memory, match)
        for place, block_id in own.items():
            self._changes.set_entry(request, memory, place, block_id)
        for hit in found:
            if hit.is_copied:
                self._copy_on_write.copy(request, memory, (hit.group, hits - 1), hit.block_id, blocks.pop())
        num_published = hits - match.ends_within_block(size)
        memory.num_published = num_published
        memory.last_entry = match.entries[num_published - 1] if num_published else None
        memory.num_hit_tokens, memory.num_host_tokens = match.num_tokens, match.num_host_tokens
        self._books.note_admission(self.index, request, memory, match, size)
        if num_published < hits:
            self._copy_on_write.take_over_tail(memory, match.entries[-1])
        if match.frontier is not None:
            self._publisher.announce(request, memory, match.frontier)
        self._append(request, memory, missing, blocks)
        if self.disk.has_slots and memory.last_entry is not None:
            if self.moves_in:  # blocks that the plan fills from the host have no bytes for the disk before it runs
                self._moved_in.append((memory.last_entry, request.scope))
            else:
                self.disk.keep_path(memory.last_entry, request.scope)
        return True

    def _fill_with_hits(self, request: Request, memory: SequenceMemory, match: PrefixMatch) -> None:
        for group, kind in enumerate(self._groups):
            first = min(kind.first_needed(match.num_tokens) // self._block_size, len(match.entries))
            memory.tables[group].num_given_back = first
            for index, entry in enumerate(match.entries):
                block_id = entry.block_ids[group] if index >= first else NO_BLOCK
                self._changes.set_entry(request, memory, (group, index), block_id)

    def _missing(self, memory: SequenceMemory, end: int) -> list[int]:
        num_blocks = -(-end // self._block_size)
        return [max(0, num_blocks - len(table.block_ids)) for table in memory.tables]

    def _take(self, num_blocks: int) -> list[int] | None:
        """Take blocks from the pool, in reverse order, so that `pop` yields them in order."""
        blocks = self.pool.allocate(num_blocks)
        if blocks is not None:
            blocks.reverse()
        return blocks

    def _append(self, request: Request, memory: SequenceMemory, missing: list[int], blocks: list[int]) -> None:
        for group, num_missing in enumerate(missing):
            if num_missing:
                self._changes.append_entries(request, memory, group, blocks[-num_missing:][::-1])
                del blocks[-num_missing:]
        request.num_slots = memory.num_slots

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a sliding window, so that sequences free blocks as they grow."""
        return bool(self._windows)

    def give_back(self) -> bool:
        """Free the blocks of all sequences that have left their windows; return whether there were any. Mutates."""
        before = self.pool.num_available
        for request, memory in self.memories.items():
            self._give_back(request, memory)
        return self.pool.num_available > before

    def _give_back(self, request: Request, memory: SequenceMemory) -> None:
        """Free the blocks that have left the sliding windows, counted from the last token that is really computed."""
        for group in self._windows:
            table = memory.tables[group]
            first = self._groups[group].first_needed(request.num_computed) // self._block_size
            if memory.host_blocks is not None:
                self._swap.give_back(memory, group, first)
            for index in range(table.num_given_back, min(first, len(table))):
                self.pool.free(table.block_ids[index])
                self._changes.set_entry(request, memory, (group, index), NO_BLOCK)
                table.num_given_back += 1

    # ---- committing, sharing, freeing ---------------------------------------------------------------------------

    def commit(self, request: Request, num_computed: int) -> None:
        """Note that the first `num_computed` tokens are computed: publish the blocks that became full.

        Mutates; O(blocks that became full).
        """
        memory = self.memories[request]
        before = memory.num_published
        self._publisher.commit(request, memory, num_computed)
        if self.disk.stores_all and memory.num_published != before and memory.last_entry is not None:
            self.disk.keep_path(memory.last_entry, request.scope)

    def withdraw(self, request: Request) -> None:
        """Withdraw the announced next block of a request, because it will not be computed soon. Mutates; O(1)."""
        self._publisher.withdraw(self.memories[request])

    def fork(self, parent: Request, child: Request) -> None:
        """Give `child` the parent's blocks of all computed tokens, the partial tail included. Takes no new block.

        The next sequence to write into the shared tail copies it first. Mutates; O(blocks shared).
        """
        self.commit(parent, parent.num_computed)
        source = self.memories[parent]
        num_blocks = -(-parent.num_computed // self._block_size)
        memory = SequenceMemory(source.root_key, [table.fork(num_blocks) for table in source.tables])
        memory.last_entry = source.last_entry
        memory.num_published = source.num_published
        memory.can_publish = source.can_publish
        memory.num_hit_tokens = source.num_hit_tokens
        memory.miss_reason = source.miss_reason
        self.memories[child] = memory
        for group, table in enumerate(memory.tables):
            for block_id in table.held:
                self.pool.share(block_id)
            for index, block_id in enumerate(table.block_ids):
                self._changes.set_entry(child, memory, (group, index), block_id)
        parent.num_slots = child.num_slots = parent.num_computed

    def free(self, request: Request) -> None:
        """Free all blocks of the request, the tail first. Full blocks stay cached. Mutates."""
        memory = self.memories.pop(request)
        if self._changes.journal is not None:
            self._changes.journal.note_gone(request)
        self._publisher.withdraw(memory)
        for table in memory.tables:
            self._changes.forget_copies(table.held)
        self.pool.free_all(memory.held_from_tail())
        for host_blocks in memory.host_blocks or ():
            self.host.free(host_blocks)
        if memory.last_entry is not None:
            self.index.discard(memory.last_entry)
        request.num_slots = 0

    def drop(self, request: Request) -> None:
        """Free all blocks of the request, and drop all cached blocks that it computed: their content is in doubt.

        Blocks that other requests computed or hold stay. Mutates; O(cached blocks).
        """
        if request in self.memories:
            self.free(request)
        name, tenant = request.request_id, request.scope.tenant
        own = [block for block in self.host.copies() if block.request_id == name and block.tenant == tenant]
        entries = dict.fromkeys(block.entry for block in own)
        own = [block for block in self.pool.cached_blocks() if block.request_id == name and block.tenant == tenant]
        entries |= dict.fromkeys(self.pool.unpublish(block.block_id) for block in own)
        for entry in entries:
            if entry is None:
                continue
            self.host.forget(entry)
            self.disk.forget(entry)
            self.index.discard(entry)

    def reset(self) -> None:
        """Forget everything cached. Running requests continue, but their blocks can no longer be hit. Mutates.

        Those of a sequence that is swapped out can be hit again once it has come back.
        """
        self.disk.forget_all()
        for entry in self.index:
            for block_id in entry.block_ids:
                if block_id != NO_BLOCK:
                    self.pool.unpublish(block_id)
            self.host.forget(entry)
        self.index.clear()
        self._publisher.forget_all(self.memories)

    def _on_evict(self, entry: PrefixEntry) -> None:
        if entry.host_ids is None or max(entry.host_ids) < 0:
            self._books.note_eviction(entry)
        self.index.discard(entry)

    def _on_host_evict(self, entry: PrefixEntry) -> None:
        if max(entry.block_ids) < 0:
            self._books.note_eviction(entry)
        self.index.discard(entry)

    def swap_out(self, request: Request) -> bool:
        """Move all blocks of a request to the host tier; False, and nothing changed, if it has no room. Mutates."""
        memory = self.memories[request]
        self._give_back(request, memory)
        if not self._swap.move_out(request, memory):
            return False
        self._publisher.withdraw(memory)
        return True

    def swap_in(self, request: Request) -> bool:
        """Move a swapped request back to the device; False, and nothing changed, if there is no room. Mutates."""
        memory = self.memories[request]
        self._give_back(request, memory)
        return self._swap.move_in(request, memory)

    # ---- books ------------------------------------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether the plan being built has bytes to copy or move."""
        return self._changes.has_moves

    @property
    def moves_in(self) -> Sequence[BlockMove]:
        """The moves from the host in the plan being built."""
        return self._changes.moves_in

    @property
    def has_transfers(self) -> bool:
        """Whether copies to the host or transfers of the disk wait for the next plan."""
        return bool(self._changes.copies_down) or self.disk.has_news

    def note_step(self, num_tokens: int, duration_us: int, transfers: TransferOutcome) -> None:
        """Record how long a step took, and which transfers of the disk have ended. Mutates; O(tickets)."""
        if self.disk.has_slots:
            self.disk.rates.note_step(num_tokens, duration_us)
        if transfers:
            self.disk.note(transfers)

    @property
    def num_looked_up(self) -> tuple[int, int]:
        """How many tokens of prompts were looked up at first admissions, and how many of them were hit. O(1)."""
        return self._books.queried_tokens, self._books.hit_tokens

    def take_changes(self, is_waiting: bool = False) -> MemoryChanges:
        """Return the changes since the last call, for the plan being built, which is complete now. Mutates.

        `is_waiting`: the plan computes nothing, and its result may wait for the disk.
        """
        self.host.plan_made()
        changes = self._changes.take()
        if self.disk.has_slots:
            changes.transfers = self.disk.take(is_waiting)
            for entry, scope in self._moved_in:
                self.disk.keep_path(entry, scope)
            self._moved_in.clear()
        return changes

    def miss_reason(self, request: Request) -> MissReason:
        """Return why the first missed block was missed, for operators only: "other salt" tells about other tenants."""
        return self.memories[request].miss_reason

    def ledger(self) -> MemoryLedger:
        """Return the use of the memory. Does not mutate; O(requests)."""
        return self._books.ledger(self.spec, self.pool, self.host, self.memories, self.disk)

    def slots_of_tenants(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of reserved and fragmented slots of each tenant. Does not mutate; O(requests)."""
        return self._books.slots_of_tenants(self.spec, self.memories)

    def watch(self) -> MemoryJournal:
        """Start a new journal of the blocks that change; it replaces the previous one. Mutates."""
        journal = MemoryJournal(self.pool, self.memories)
        self.pool.journal = self._changes.journal = journal
        return journal

    def unwatch(self) -> None:
        """End the journal. Mutates."""
        self.pool.journal = self._changes.journal = None

    def survey(self, at_once: int = SURVEYED_AT_ONCE) -> None:
        """Report from now on which blocks can be hit, starting with those already cached. Mutates; O(1)."""
        if self.cache_journal is None:
            groups = tuple(self._hits.full_groups or self._windows)
            self.cache_journal = CacheJournal(self.pool, self._hasher, groups)
            self.pool.cache_journal = self.cache_journal
        self.cache_journal.survey(at_once)

    def check(self) -> None:
        """Raise `InvariantError` unless all books agree. O(everything)."""
        self.pool.check()
        self.index.check()
        self.host.check()
        landing = tuple(self.disk.landings.held_blocks())
        self._books.check(self.spec, self.pool, self.index, self.host, self.memories, landing)
        self.disk.check()
        self._publisher.check(self.memories)
        self.ledger().check()
