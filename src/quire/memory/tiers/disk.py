"""DiskTier: cached blocks that outlive the device's memory, and the process.

    store   a block that is hit, or committed, is copied to a slot; the block stays where it is
    load    blocks that the disk has beyond a request's match are loaded; the request waits for them, then hits them

The tier decides; the compute plane moves the bytes and reports tickets (`quire.core.transfers`). Rules that keep it
correct:

- A block is stored once it is published, and after its parent. It counts as kept when its ticket is done. If too many
  bytes are waiting to be written, a block is stored later, if the device still has it then.
- A load fills blocks that the tier holds. They are published as they arrive, and become cached with the last arrival,
  together with the match's blocks on the device. No request writes to them, and other requests wait for them as they
  wait for a commit.
- Loads are abandoned when a running request needs room, when their request ends, and when they take longer than
  computing. So no request waits for loads for long, and no running request waits for them at all.
- Every failure is a miss. After three failures in a row the tier is off, and the engine continues without it.

A request loads each part of its prompt at most once, so the wait for loads ends.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from quire.core.errors import InvariantError
from quire.core.kept_block import KeptBlock, may_be_kept
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import CacheScope, Request
from quire.core.step import NO_BLOCK
from quire.core.transfers import NO_TRANSFERS, BlockLoad, BlockStore, TransferOutcome, Transfers
from quire.memory.block_hash import root_key
from quire.memory.block_pool import BlockPool
from quire.memory.prefix import PrefixEntry, PrefixIndex
from quire.memory.sequence import PrefixMatch
from quire.memory.tiers.landings import Landings, frontier_of
from quire.memory.tiers.rates import LoadRates
from quire.memory.tiers.slots import SlotBooks

MOST_LANDING: Final = 0.25
"""The share of the pool that loads may hold."""
STORE_BYTES: Final = 32 << 20
"""Bytes that may wait to be written."""
MOST_BACKLOG: Final = 64
"""The most texts whose blocks wait to be stored; the blocks of further texts are stored at a later hit."""
RETRY_EVERY: Final = 64
"""One in this many loads that seem too slow is done anyway, so that one slow read does not decide forever."""
MOST_FAILURES: Final = 3
MAX_TICKET: Final = 2**31 - 1
"""Plans name tickets by 32-bit integers. After this one they begin with 1 again, which ended long ago."""

Usable = Callable[[Sequence[Sequence[int]], int], int]
"""Returns how many leading entries can be hit, from the blocks of each and the number of known tokens."""


class _Store(NamedTuple):
    entry: PrefixEntry
    group: int
    slot: int


class DiskTier:
    """The books of the disk: slots, tickets, and loads (`landings`). Without slots, off from the start."""

    def __init__(self, spec: KVCacheSpec, num_slots: int, write: str, index: PrefixIndex, pool: BlockPool) -> None:
        self.slots = SlotBooks(num_slots, len(spec.groups))
        self.landings = Landings(self.slots, pool)
        self.rates = LoadRates()
        self.has_slots = self.is_on = num_slots > 0
        self.stores_all = write == "always"
        self.counts: Counter[str] = Counter()
        self._spec = spec
        self._index = index
        self._pool = pool
        self._max_stores = max(4, STORE_BYTES // spec.bytes_per_block)
        self._max_landing = max(1, int(MOST_LANDING * pool.num_blocks))
        self._last_ticket = 0
        self.num_hit_tokens = 0
        self._num_failures = 0  # in a row
        self._stores: dict[int, _Store] = {}
        self._backlog: dict[PrefixEntry, CacheScope] = {}  # the last blocks of texts that wait to be stored
        self._is_asked = False
        self.num_asked = 0
        """Plans in a row that asked for ended tickets and got none."""
        self._next_loads: list[BlockLoad] = []
        self._next_stores: list[BlockStore] = []
        self._next_voids = array("i")
        self._next_drops = array("i")
        self._next_patience_us = 0

    def restore(self, kept: Sequence[KeptBlock]) -> None:
        """Register the blocks of an existing store, parents first. Mutates; O(blocks)."""
        entries: dict[int, PrefixEntry] = {}
        for block in kept:
            parent = entries.get(block.parent)
            if block.scope is not None:
                parent = self._index.root(root_key(block.scope))
            entry = None if parent is None else self._index.extend(parent, block.tokens)
            if entry is None or block.slot >= self.slots.num_slots:
                continue
            entries[block.serial] = entry
            if self.slots.slot(entry, block.group) != NO_BLOCK:
                continue
            self.slots.last_serial = max(self.slots.last_serial, block.serial - 1)
            self.slots.hold(entry, block.group, block.slot)
        self.slots.last_serial = max([self.slots.last_serial, *(block.serial for block in kept)])
        self.slots.open_all(min(self.slots.num_slots, 1 + max((block.slot for block in kept), default=-1)))

    # ---- down: stores -----------------------------------------------------------------------------------------

    def keep_path(self, entry: PrefixEntry, scope: CacheScope, *, is_asked_for: bool = False) -> None:
        """Store the blocks from the root to an entry that are not on disk yet, and mark all of them as used.

        `is_asked_for`: an operator waits for the stores. Mutates; O(blocks of the path).
        """
        if not self.is_on or not may_be_kept(scope):
            return
        if not self._keep(entry, scope) and (is_asked_for or len(self._backlog) < MOST_BACKLOG):
            self._backlog[entry] = scope

    def bring(self, entry: PrefixEntry, group: int, scope: CacheScope, bundle: str, place: int) -> bool:
        """Store a block of a bundle if its parent is on disk, evicting an older block if necessary. Mutates.

        Return whether it is being stored.
        """
        parent = entry.parent
        if not self.is_on or parent is None or not may_be_kept(scope):
            return False
        if parent.parent is not None and (parent.kept is None or max(parent.kept.slots) < 0):
            return False
        return self._store(entry, group, place, scope, bundle)

    def written_slots(self, entries: Sequence[PrefixEntry]) -> list[list[int]]:
        """Return for each entry the slots of its groups, `NO_BLOCK` for a slot that is missing or not written yet."""
        writing = {store.slot for store in self._stores.values()}
        nowhere = [NO_BLOCK] * len(self._spec.groups)
        return [
            nowhere if entry.kept is None else [NO_BLOCK if slot in writing else slot for slot in entry.kept.slots]
            for entry in entries
        ]

    def num_storing(self, entries: Collection[PrefixEntry]) -> int:
        """Return how many stores of entries are in flight or queued. Does not mutate; O(stores)."""
        waiting = sum(entry in entries for entry in self._backlog) if self.is_on else 0
        return waiting + sum(store.entry in entries for store in self._stores.values())

    def _keep(self, entry: PrefixEntry, scope: CacheScope) -> bool:
        """Store the blocks of a path that there is room for; False if some are left for later. Mutates; O(blocks)."""
        path = []
        step: PrefixEntry | None = entry
        while step is not None and step.parent is not None:
            path.append(step)
            step = step.parent
        if self._backlog:
            for step in path:
                self._backlog.pop(step, None)
        can_store = True
        for step in reversed(path):
            self.slots.touch(step)
            slots = [self.slots.slot(step, group) for group in range(len(step.block_ids))]
            # Without this block, the blocks after it would never be hit.
            can_store = can_store and any(place != NO_BLOCK for place in (*slots, *step.block_ids))
            for group, block_id in enumerate(step.block_ids):
                if can_store and block_id != NO_BLOCK and slots[group] == NO_BLOCK:
                    if len(self._stores) >= self._max_stores:
                        return False
                    can_store = self._store(step, group, block_id, scope)
        return True

    def _store_more(self) -> None:
        """Store blocks that had no room before. Mutates."""
        while self._backlog and self.is_on and len(self._stores) < self._max_stores:
            entry = next(iter(self._backlog))
            scope = self._backlog.pop(entry)
            if entry.attached and not self._keep(entry, scope):
                self._backlog = {entry: scope, **self._backlog}

    def _store(self, entry: PrefixEntry, group: int, block_id: int, scope: CacheScope, bundle: str = "") -> bool:
        parent = entry.parent
        if parent is None:
            return False
        evicted: list[PrefixEntry] = []
        slot = self.slots.take((entry, parent), evicted)
        if slot is None:
            return False
        self.slots.hold(entry, group, slot)
        for each in evicted:  # only now: without its slot, the entry could go with the last one after it
            self.counts["evicted"] += 1
            self._index.discard(each)
        self.slots.pin(entry)
        ticket = self._new_ticket()
        self._stores[ticket] = _Store(entry, group, slot)
        is_first = parent.parent is None
        kept = KeptBlock(
            slot, self.slots.serial(entry), self.slots.serial(parent), group, entry.key, scope if is_first else None
        )
        self._next_stores.append(BlockStore(ticket, block_id, kept, bundle))
        return True

    def forget(self, entry: PrefixEntry) -> None:
        """Forget the slots of an entry: its content is in doubt, or no request may hit it any more. Mutates.

        A store in flight is carried out, and a later plan voids its slot. Loads in flight are abandoned.
        """
        for landing in self.landings:
            for ticket in [ticket for ticket, arriving in landing.arriving.items() if arriving[0] is entry]:
                self._next_drops.append(ticket)
                self.landings.end_ticket(landing, ticket, has_arrived=False)
            if not landing.arriving:
                self.landings.end(landing)
        for ticket, store in list(self._stores.items()):
            if store.entry is entry:
                del self._stores[ticket]
                self._next_stores = [each for each in self._next_stores if each.ticket != ticket]
                self.slots.unpin(entry)
        for group in range(len(self._spec.groups)):
            slot = self.slots.release(entry, group)
            if slot != NO_BLOCK:
                self._next_voids.append(slot)

    def forget_all(self) -> None:
        """Forget everything on disk, and abandon all loads: the index is about to be cleared. Mutates."""
        self.give_up_loads()
        self._backlog.clear()
        for entry in self.slots.entries():
            self.forget(entry)
        # An evicted entry of several groups has left records in the slots that no other block has taken.
        self._next_voids = array("i", sorted({*self._next_voids, *self.slots.free_slots}))

    # ---- up: loads --------------------------------------------------------------------------------------------

    def start_load(self, request: Request, match: PrefixMatch, usable: Usable) -> bool:
        """Start loading blocks beyond a match; False if the disk has none, or if loading does not pay. Mutates."""
        first, num_groups = len(match.entries), len(self._spec.groups)
        if not self.is_on or len(match.known) <= first or first < self.landings.num_attempted(request):
            return False
        room = self._max_landing - self.landings.num_blocks
        known = match.known[: first + room // num_groups]
        writing = {store.slot for store in self._stores.values()}
        reach = usable([_places(entry, writing) for entry in known], len(request.tokens))
        if reach <= first:
            return False
        end = min(reach * self._spec.block_size, len(request.tokens) - 1)
        needed = [
            (entry, group)
            for group, kind in enumerate(self._spec.groups)
            for entry in known[kind.first_needed(end) // self._spec.block_size : reach]
        ]
        wanted = [(entry, group) for entry, group in needed if _in_memory(entry, group) == NO_BLOCK]
        # Another request may be loading some of these, if the host has evicted an earlier block: load no block twice.
        if not wanted or any(self.landings.awaits(frontier_of(entry)) for entry, _ in wanted):
            return False
        if not self.rates.pays(len(wanted), end - match.num_tokens):
            self.counts["not worth loading"] += 1
            if self.counts["not worth loading"] % RETRY_EVERY:
                return False
        present = [entry.block_ids[group] for entry, group in needed if entry.block_ids[group] != NO_BLOCK]
        for block_id in present:
            self._pool.share(block_id)
        blocks = self._pool.allocate(len(wanted))
        if blocks is None:
            self._pool.unshare_all(reversed(present))
            return False
        landing = self.landings.begin(request, first, reach, present)
        for (entry, group), block_id in zip(wanted, blocks, strict=True):
            ticket = self._new_ticket()
            self.landings.add(landing, ticket, entry, group, block_id)
            self._next_loads.append(BlockLoad(ticket, self.slots.slot(entry, group), block_id, group))
        self._next_patience_us = max(self._next_patience_us, self.rates.patience_us(end - match.num_tokens))
        return True

    def give_up_loads(self, request: Request | None = None) -> bool:
        """Abandon the loads of a request, or all loads; return whether there were any. Mutates."""
        landings = list(self.landings) if request is None else [self.landings.of(request)]
        for landing in landings:
            if landing is None:
                continue
            for ticket in list(landing.arriving):
                self._next_drops.append(ticket)
                self.landings.end_ticket(landing, ticket, has_arrived=False)
            self.counts["given up"] += 1
            self.landings.end(landing)
        return any(landing is not None for landing in landings)

    def end_loads(self, request: Request) -> None:
        """End the loads of a request, because it runs or has ended. Mutates."""
        self.give_up_loads(request)
        self.landings.forget(request)

    def note_hits(self, request: Request, num_tokens: int) -> int:
        """Return how many of the leading tokens were loaded from disk for this request, and count them. Mutates."""
        first, last = self.landings.arrived(request)
        size = self._spec.block_size
        num_hit = max(0, min(num_tokens, last * size) - first * size)
        self.num_hit_tokens += num_hit
        return num_hit

    # ---- tickets ----------------------------------------------------------------------------------------------

    def _new_ticket(self) -> int:
        self._last_ticket = self._last_ticket % MAX_TICKET + 1
        return self._last_ticket

    def note(self, outcome: TransferOutcome) -> None:
        """Process tickets that ended; abandoned ones are ignored. Mutates; O(tickets)."""
        num_loaded = 0
        for ticket in outcome.done:
            self._num_failures = 0
            landing = self.landings.with_ticket(ticket)
            if landing is not None:
                num_loaded += 1
                self.landings.end_ticket(landing, ticket, has_arrived=True)
            elif ticket in self._stores:
                self.counts["stored"] += 1
                self.slots.unpin(self._stores.pop(ticket).entry)
        self.counts["loaded"] += num_loaded
        self.rates.note_loads(num_loaded, outcome.load_us)
        for ticket, reason in outcome.undone.items():
            self._note_undone(ticket, reason)
        for landing in self.landings:
            if not landing.arriving:
                self.landings.end(landing)
        if outcome.done or outcome.undone:
            self.num_asked = 0
        self._store_more()

    def _note_undone(self, ticket: int, reason: str) -> None:
        self.counts[reason] += 1
        landing = self.landings.with_ticket(ticket)
        if landing is not None:
            entry, group, _ = landing.arriving[ticket]
            self.landings.end_ticket(landing, ticket, has_arrived=False)
            if reason == "damaged":
                slot = self.slots.release(entry, group)
                if slot != NO_BLOCK:
                    self._next_voids.append(slot)
                self._index.discard(entry)
        elif ticket in self._stores:
            store = self._stores.pop(ticket)
            self.slots.unpin(store.entry)
            self.slots.release(store.entry, store.group, is_bad=reason in ("full", "failed"))
            self._index.discard(store.entry)
        if reason == "full":
            self.slots.freeze()
        if reason in ("failed", "late") or (reason == "damaged" and landing is not None):  # bundles do not count
            self._num_failures += 1
            if self._num_failures >= MOST_FAILURES:
                self.is_on = False
                self._backlog.clear()
                self.give_up_loads()

    @property
    def is_storing(self) -> bool:
        """Whether blocks are being written to disk, or wait for that."""
        return bool(self._stores or self._backlog) and self.is_on

    def ask(self) -> None:
        """Make the next plan ask which tickets have ended, even if it computes nothing. Mutates."""
        self._is_asked = True
        self.num_asked += 1

    @property
    def has_news(self) -> bool:
        """Whether there are transfers, or a question, that no plan has yet."""
        return self._is_asked or bool(self._next_loads or self._next_stores or self._next_voids or self._next_drops)

    def take(self, is_waiting: bool = False) -> Transfers:
        """Return the transfers of the plan being built. Mutates."""
        if not (is_waiting or self.has_news):
            return NO_TRANSFERS
        drops = set(self._next_drops)
        taken = Transfers(
            tuple(load for load in self._next_loads if load.ticket not in drops),
            tuple(self._next_stores),
            self._next_voids,
            self._next_drops,
            self._next_patience_us,
            is_waiting,
        )
        self._next_loads, self._next_stores, self._next_patience_us = [], [], 0
        self._next_voids, self._next_drops = array("i"), array("i")
        self._is_asked = False
        return taken

    # ---- books ------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return the counters for monitoring, by their names in `EngineStats`. Does not mutate."""
        return {
            "num_disk_slots": self.slots.num_slots,
            "num_kept_blocks": self.slots.num_held,
            "num_landing_blocks": self.landings.num_blocks,
            "disk_is_off": self.has_slots and not self.is_on,
            "disk_hit_tokens_total": self.num_hit_tokens,
            "disk_blocks": dict(self.counts),
            "token_us": self.rates.token_us or 0.0,
            "load_us": self.rates.block_us or 0.0,
        }

    def check(self) -> None:
        """Raise `InvariantError` unless slots, tickets and entries agree."""
        self.slots.check()
        pins = self.landings.check()
        for store in self._stores.values():
            pins[store.entry] += 1
            if self.slots.slot(store.entry, store.group) != store.slot:
                raise InvariantError("a block is written to a slot that its entry lost")
        for entry in self.slots.entries():
            if entry.kept is not None and entry.kept.num_pins != pins[entry]:
                raise InvariantError("an entry is pinned by no transfer, or a transfer does not pin its entry")


def _places(entry: PrefixEntry, writing: Collection[int]) -> list[int]:
    """Return for each group the block of an entry in memory, or else its written slot on disk."""
    groups = range(len(entry.block_ids))
    if entry.kept is None:
        return [_in_memory(entry, group) for group in groups]
    return [
        place if (place := _in_memory(entry, group)) != NO_BLOCK or slot in writing else slot
        for group, slot in zip(groups, entry.kept.slots, strict=True)
    ]


def _in_memory(entry: PrefixEntry, group: int) -> int:
    """Return the block of an entry on the device, or else on the host."""
    block_id = entry.block_ids[group]
    return block_id if block_id != NO_BLOCK or entry.host_ids is None else entry.host_ids[group]
