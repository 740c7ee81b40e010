"""LiveMirror: the server's copy of the engine's memory state while a client watches it.

    LiveFrame ──► take_in ──► columns by block id, requests by number, sums by tenant ──► a reader's rows

The engine sends changes, and the mirror adds them up. So a reader that joins later gets everything without a request
to the engine, and a reader that falls behind gets the present state, not every past one. A block costs 28 bytes,
however often it changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from quire.engine.records.live import (
    BLOCK_COLUMNS,
    EVENT_COLUMNS,
    GONE_COLUMNS,
    NOBODY,
    REQUEST_COLUMNS,
    SLOT_COLUMNS,
    UNCHANGED_S,
    LiveFrame,
    LiveState,
    unpacked,
    unpacked_times,
)
from quire.engine.records.stats import EngineStats
from quire.memory.journal import NOT_PUBLISHED
from quire.scheduler.journal import EventKind

FREE_ROW: Final = (int(LiveState.FREE), 0, NOBODY, NOT_PUBLISHED, NOBODY)


class BlockRow(NamedTuple):
    """A block: its state and its owner, as the engine reported them."""

    block_id: int
    state: int
    num_holders: int
    owner: int
    parent: int
    tenant: int
    changed_s: float


class RequestRow(NamedTuple):
    """A request: its status is an index into `quire.engine.records.live.STATUSES`."""

    number: int
    status: int
    tenant: int
    num_prompt_tokens: int
    num_computed: int
    num_known: int
    num_cached: int
    num_preemptions: int
    num_from_disk: int
    num_from_host: int
    engine_id: str = ""


class EventRow(NamedTuple):
    """An event: its kind, request, tenant and time."""

    kind: int
    request: int
    number: int
    tenant: int
    at_s: float


@dataclass(slots=True)
class Holdings:
    """One tenant's memory, in blocks and in slots."""

    used: int = 0
    cached: int = 0
    saved: int = 0
    reserved: int = 0
    fragmented: int = 0
    evictions: int = 0  # since the mirror began, like preemptions
    preemptions: int = 0


class LiveChange(NamedTuple):
    """A frame's changes: block ids, request numbers, the last rows of ended requests, and events."""

    blocks: list[int]
    requests: list[int]
    gone: list[RequestRow]
    events: list[EventRow]


class LiveMirror:
    """The sum of one engine's frames."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.is_whole = False
        self.at_s = 0.0
        self.stats = EngineStats()
        self.tenants: list[str] = []
        self.requests: dict[int, RequestRow] = {}
        self._holdings: list[Holdings] = []  # by tenant
        self._columns = [array("i", [value]) * num_blocks for value in FREE_ROW]
        self._changed_s = array("d", bytes(8 * num_blocks))

    def take_in(self, frame: LiveFrame) -> LiveChange:
        """Add a frame; return its changes. Mutates; O(changes)."""
        self.at_s, self.stats = frame.at_s, frame.stats
        self.is_whole |= frame.is_whole  # once whole, the mirror stays whole
        self.tenants += frame.tenants
        self._holdings += [Holdings() for _ in frame.tenants]
        blocks = self._set_blocks(frame)
        changed = self._set_requests(zip(unpacked(frame.requests, REQUEST_COLUMNS), frame.ids, strict=True))
        gone = [
            self.requests.pop(number)._replace(
                num_computed=computed, num_known=known, num_cached=cached, num_from_disk=disk, num_from_host=host
            )
            for number, computed, known, cached, disk, host in unpacked(frame.gone, GONE_COLUMNS)
            if number in self.requests
        ]
        requests = [number for number in changed if number in self.requests]  # without those that ended unseen
        for held in self._holdings:
            held.reserved = held.fragmented = 0
        for tenant, reserved, fragmented in unpacked(frame.slots, SLOT_COLUMNS):
            self._holdings[tenant].reserved, self._holdings[tenant].fragmented = reserved, fragmented
        rows = zip(unpacked(frame.events, EVENT_COLUMNS), unpacked_times(frame.event_times), strict=True)
        events = [EventRow(kind, request, number, tenant, at_s) for (kind, request, number, tenant), at_s in rows]
        for event in events:
            self._count_event(event)
        return LiveChange(blocks, requests, gone, events)

    def block(self, block_id: int) -> BlockRow:
        """Return a block's row. Does not mutate."""
        state, holders, owner, parent, tenant = (column[block_id] for column in self._columns)
        return BlockRow(block_id, state, holders, owner, parent, tenant, self._changed_s[block_id])

    def blocks_not_free(self) -> list[int]:
        """Return the ids of all blocks that are not free. Does not mutate; O(num_blocks)."""
        return [block_id for block_id, state in enumerate(self._columns[0]) if state]

    def holdings(self, name: str | None) -> Holdings:
        """Return one tenant's holdings, or with None the sum of all. Does not mutate."""
        if name is not None:
            number = self.tenant_number(name)
            return Holdings() if number == NOBODY else self._holdings[number]
        total = Holdings()
        for held in self._holdings:
            for each in fields(Holdings):
                setattr(total, each.name, getattr(total, each.name) + getattr(held, each.name))
        return total

    def tenant_number(self, name: str) -> int:
        """Return the number of a tenant; `NOBODY` if the engine does not know it. Does not mutate."""
        return self.tenants.index(name) if name in self.tenants else NOBODY

    def _set_blocks(self, frame: LiveFrame) -> list[int]:
        """Add a frame's blocks; return their ids. Mutates. Most of the work is here, so the loop is written out."""
        states, holders, owners, parents, tenants = self._columns
        rows = unpacked(frame.blocks, BLOCK_COLUMNS)
        block_ids = []
        for (block_id, state, num_holders, owner, parent, tenant), changed_s in zip(
            rows, unpacked_times(frame.block_times), strict=True
        ):
            if states[block_id]:
                self._count(states[block_id], holders[block_id], tenants[block_id], -1)
            if state:
                self._count(state, num_holders, tenant, 1)
            states[block_id], holders[block_id], owners[block_id] = state, num_holders, owner
            parents[block_id], tenants[block_id] = parent, tenant
            if changed_s != UNCHANGED_S:
                self._changed_s[block_id] = changed_s
            block_ids.append(block_id)
        return block_ids

    def _count(self, state: int, num_holders: int, tenant: int, sign: int) -> None:
        if state == LiveState.USED:
            self._holdings[tenant].used += sign
            self._holdings[tenant].saved += sign * (num_holders - 1)
        elif state == LiveState.CACHED:
            self._holdings[tenant].cached += sign

    def _count_event(self, event: EventRow) -> None:
        if event.kind == EventKind.EVICTED:
            self._holdings[event.tenant].evictions += event.number
        elif event.kind == EventKind.PREEMPTED:
            self._holdings[event.tenant].preemptions += 1

    def _set_requests(self, rows: Iterable[tuple[tuple[int, ...], str]]) -> list[int]:
        """Add requests; return the numbers of those that have changed. Mutates."""
        changed = []
        for columns, engine_id in rows:
            known = self.requests.get(columns[0])
            row = RequestRow._make((*columns, engine_id if known is None else known.engine_id))
            if known != row:
                self.requests[row.number] = row
                changed.append(row.number)
        return changed
