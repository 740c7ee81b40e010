"""The oracle of frames: what a mirror makes of them, against a scan of the engine; and what events must add up to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from quire.core.request import FinishReason, Request, RequestStatus
from quire.engine.records.live import GONE_COLUMNS, STATES, STATUSES, LiveFrame, unpacked
from quire.memory.block import Block
from quire.memory.journal import NOT_PUBLISHED
from quire.scheduler.journal import END_KINDS, EventKind
from quire.scheduler.scheduler import Scheduler
from quire.serve.live_mirror import EventRow, LiveMirror, RequestRow


def parent_of(block: Block) -> int:
    """The block that holds the tokens before those of a published one."""
    if block.entry is None:
        return NOT_PUBLISHED
    return (block.entry.parent or block.entry).block_ids[block.group]


@dataclass
class LivePicture:
    """An engine as its frames tell it."""

    scheduler: Scheduler
    mirror: LiveMirror | None = None
    events: list[EventRow] = field(default_factory=list)
    ended: list[RequestRow] = field(default_factory=list)

    def take_in(self, frame: LiveFrame) -> None:
        """Add a frame."""
        if frame.begins:
            self.mirror = LiveMirror(frame.num_blocks)
        assert self.mirror is not None
        assert not frame.gone or max(Counter(row[0] for row in unpacked(frame.gone, GONE_COLUMNS)).values()) == 1
        change = self.mirror.take_in(frame)
        assert not {row.number for row in change.gone} & set(self.mirror.requests)
        assert set(change.requests) <= set(self.mirror.requests)
        self.events += change.events
        ends = {event.request for event in change.events if event.kind in END_KINDS}
        self.ended += [row for row in change.gone if row.number in ends]  # the others are beams that were replaced

    def check(self) -> None:
        """Compare with a scan of everything, once the picture is whole."""
        mirror = self.mirror
        if mirror is None or not mirror.is_whole:
            return
        requests = self._scan_requests()
        assert sorted(row[1:10] for row in mirror.requests.values()) == sorted(requests.values())
        memory = self.scheduler.memory
        for block in memory.pool.blocks:
            row = mirror.block(block.block_id)
            assert row[:3] == (block.block_id, STATES[block.state], block.ref_count)
            assert row.parent == parent_of(block)
            assert (row.owner in mirror.requests) == bool(block.ref_count)
        ledger, held = memory.ledger(), mirror.holdings(None)
        assert (held.used, held.cached, held.saved) == (
            ledger.used_blocks,
            ledger.cached_blocks,
            ledger.blocks_saved_by_sharing,
        )
        assert (held.reserved, held.fragmented) == (ledger.reserved_slots, ledger.fragmented_slots)
        for name in mirror.tenants:
            self._check_tenant(mirror, name)

    def _check_tenant(self, mirror: LiveMirror, name: str) -> None:
        """The sums of a tenant are those of its rows."""
        number, held = mirror.tenant_number(name), mirror.holdings(name)
        rows = [row for row in map(mirror.block, range(mirror.num_blocks)) if row.tenant == number]
        used = [row.num_holders for row in rows if row.num_holders]
        assert (held.used, held.cached, held.saved) == (len(used), len(rows) - len(used), sum(used) - len(used))

    def _scan_requests(self) -> dict[Request, tuple[int, ...]]:
        assert self.mirror is not None
        alive = [
            member
            for leader in self.scheduler.requests.values()
            for member in (leader.group.members if leader.group else [leader])
            if not member.is_finished
        ]
        return {
            request: (
                STATUSES.index(request.status),
                self.mirror.tenant_number(request.scope.tenant),
                request.num_prompt_tokens,
                request.num_computed,
                len(request.tokens),
                request.num_cached_tokens,
                request.num_preemptions,
                request.num_disk_tokens,
                request.num_host_tokens,
            )
            for request in alive
        }

    def check_events(self, requests: list[Request], num_preemptions: int, num_evictions: int) -> None:
        """Compare all events with what has become of all requests; the watch began before the first of them."""
        counts = Counter(EventKind(event.kind) for event in self.events)
        members = [member for request in requests for member in (request.group.members if request.group else [request])]
        ends = Counter(member.finish_reason for member in members)
        assert counts[EventKind.FINISHED] == ends[FinishReason.STOP] + ends[FinishReason.LENGTH]
        assert sorted((row.engine_id, row.num_computed, row.num_known) for row in self.ended) == sorted(
            (member.request_id, member.num_computed, len(member.tokens)) for member in members
        )
        assert (counts[EventKind.ABORTED], counts[EventKind.FAILED]) == (
            ends[FinishReason.ABORT],
            ends[FinishReason.ERROR],
        )
        assert counts[EventKind.PREEMPTED] == num_preemptions
        assert sum(event.number for event in self.events if event.kind == EventKind.EVICTED) == num_evictions
        assert counts[EventKind.ADMITTED] >= sum(request.num_computed > 0 for request in requests)
        assert [event.at_s for event in self.events] == sorted(event.at_s for event in self.events)
        assert all(member.status is RequestStatus.FINISHED for member in members)
