"""LiveJournal: the events in an engine, as frames for readers such as the dashboard.

    MemoryJournal ── blocks ────┐
    RequestJournal ─ events ────┼──► stamp(now), twice per step ──► take, a few times a second ──► LiveFrame
    Scheduler ────── progress ──┘

A frame has the changes since the previous frame, and a few facts that every frame repeats. It costs
O(changes + running), between steps. The first frames describe the present state, in parts; `is_whole` marks the frame
that completes it. Numbers are sent as columns of bytes, as in `messages`.

Requests and tenants get short numbers, in the order of their first report.

A request that begins and ends between two frames is *unseen*: the next frame has its only row and its end. To bound
frames, only each tenant's newest are reported; their events count all.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import Final

from quire.core.request import Request, RequestStatus
from quire.engine.records.stats import EngineStats
from quire.memory.block import BlockState
from quire.memory.journal import BlockChange
from quire.scheduler.journal import END_KINDS, EventKind
from quire.scheduler.scheduler import Scheduler

NOBODY: Final = -1
UNCHANGED_S: Final = -1.0
"""The time of a block whose owner is unchanged: keep the time of the previous row."""

BLOCK_COLUMNS: Final = 6
"""Id, state, reference count, owner, parent, tenant."""
REQUEST_COLUMNS: Final = 10
"""Number, status, tenant, tokens of the prompt, computed, known, from the cache, preemptions, from disk, from host."""
GONE_COLUMNS: Final = 6
"""Number, then the final counts of tokens: computed, known, from the cache, from disk, from host."""
EVENT_COLUMNS: Final = 4
"""Kind, request, number, tenant."""
SLOT_COLUMNS: Final = 3
"""Tenant, reserved, fragmented."""
MOST_UNSEEN: Final = 12
"""Unseen requests of a tenant in a frame: as many ended requests as the dashboard remembers."""


class LiveState(IntEnum):
    """The states of a block, as numbers."""

    FREE = 0
    USED = 1
    CACHED = 2


STATES: Final = {
    BlockState.FREE: LiveState.FREE,
    BlockState.IN_USE: LiveState.USED,
    BlockState.CACHED: LiveState.CACHED,
}
STATUSES: Final = (
    RequestStatus.WAITING,
    RequestStatus.RUNNING,
    RequestStatus.PREEMPTED,
    RequestStatus.SWAPPED,
    RequestStatus.FINISHED,  # only of unseen requests
)

STATUS_NUMBERS: Final = {status: number for number, status in enumerate(STATUSES)}


@dataclass(frozen=True, slots=True)
class LiveFrame:
    """The changes since the previous frame, and the facts that every frame repeats.

    Times are seconds since the engine began. `tenants` are new names; they are numbered after the earlier ones. `ids`
    has an entry for each row of `requests`: the engine's id in the first row of a request, else an empty one.
    """

    at_s: float
    begins: bool  # forget everything from earlier frames
    is_whole: bool  # the reader now has the complete state
    num_blocks: int
    stats: EngineStats
    tenants: list[str]
    blocks: bytes
    block_times: bytes
    requests: bytes
    ids: list[str]
    gone: bytes
    slots: bytes
    events: bytes
    event_times: bytes


ShowLive = Callable[[LiveFrame], None]


def packed(rows: Iterable[Iterable[int]]) -> bytes:
    """Return rows of numbers, one after another, as 32-bit integers. Does not mutate."""
    return array("i", [number for row in rows for number in row]).tobytes()


def unpacked(data: bytes, num_columns: int) -> Iterator[tuple[int, ...]]:
    """Return the rows of `packed` data.

    >>> list(unpacked(packed([(1, 2), (3, 4)]), 2))
    [(1, 2), (3, 4)]
    """
    column = array("i")
    column.frombytes(data)
    return zip(*[iter(column)] * num_columns, strict=True)


def unpacked_times(data: bytes) -> array[float]:
    """Return a column of times."""
    column = array("d")
    column.frombytes(data)
    return column


class LiveJournal:
    """Records the events of an engine from the journal's creation to `close`."""

    def __init__(self, scheduler: Scheduler, began_s: float) -> None:
        self._scheduler = scheduler
        self._began_s = began_s
        self._memory = scheduler.memory.watch()
        self._requests = scheduler.watch()
        self._survey: Iterator[None] | None = self._memory.survey()
        self._begins = True
        self._tenants: dict[str, int] = {}
        self._num_tenants_told = 0
        self._numbers: dict[Request, int] = {}
        self._num_requests = 0
        self._moving: list[Request] = []  # may have progressed since the last report
        self._told: set[Request] = set()  # reported, but not yet as ended
        self._unseen: defaultdict[str, deque[Request]] = defaultdict(partial(deque, maxlen=MOST_UNSEEN))  # by tenant
        self._events: list[tuple[int, ...]] = []
        self._event_times = array("d")

    @property
    def has_news(self) -> bool:
        """Whether there is anything new to report."""
        is_moving = bool(self._survey or self._events or self._scheduler.requests)
        return is_moving or self._memory.has_news or self._requests.has_news

    @property
    def is_whole(self) -> bool:
        """Whether the initial state has been reported completely."""
        return self._survey is None

    def close(self) -> None:
        """Stop watching. Mutates the scheduler and its memory."""
        self._scheduler.unwatch()
        self._scheduler.memory.unwatch()

    def stamp(self, now_s: float) -> None:
        """Set the time of all changes since the last stamp. Mutates; O(changes)."""
        at_s = now_s - self._began_s
        self._memory.stamp(at_s)
        for tenant, num_blocks in self._memory.take_evicted():
            self._note(at_s, (EventKind.EVICTED, NOBODY, num_blocks, self._tenant(tenant)))
        for kind, request, number in self._requests.take_events():
            self._note(at_s, (kind, self._number(request), number, self._tenant(request.scope.tenant)))
            if kind in END_KINDS and request not in self._told:
                self._unseen[request.scope.tenant].append(request)

    def take(self, now_s: float, stats: EngineStats) -> LiveFrame:
        """Return the next frame. Mutates; O(changes + running), plus a few thousand blocks for the initial state."""
        self.stamp(now_s)
        if self._survey is not None and next(self._survey, self) is self:
            self._survey = None
        changes = self._memory.take()
        blocks = packed(map(self._block_row, changes))
        times = array("d", [UNCHANGED_S if change.changed_s is None else change.changed_s for change in changes])
        requests, ids, gone = self._request_rows()
        slots = self._scheduler.memory.slots_of_tenants()
        frame = LiveFrame(
            at_s=now_s - self._began_s,
            begins=self._begins,
            is_whole=self.is_whole and not self._memory.has_news,
            num_blocks=self._scheduler.memory.pool.num_blocks,
            stats=stats,
            tenants=[],
            blocks=blocks,
            block_times=times.tobytes(),
            requests=packed(requests),
            ids=ids,
            gone=packed(gone),
            slots=packed((self._tenant(tenant), *unfilled) for tenant, unfilled in slots.items()),
            events=packed(self._events),
            event_times=self._event_times.tobytes(),
        )
        frame.tenants.extend(list(self._tenants)[self._num_tenants_told :])  # all have their numbers now
        self._num_tenants_told, self._begins = len(self._tenants), False
        self._events, self._event_times = [], array("d")
        return frame

    def _note(self, at_s: float, event: tuple[int, ...]) -> None:
        self._events.append(event)
        self._event_times.append(at_s)

    def _block_row(self, change: BlockChange) -> tuple[int, ...]:
        state, owner = STATES[change.state], change.owner
        tenant = NOBODY if state is LiveState.FREE else self._tenant(change.tenant)
        number = NOBODY if owner is None else self._number(owner)
        return change.block_id, state, change.num_holders, number, change.parent, tenant

    def _request_rows(self) -> tuple[list[tuple[int, ...]], list[str], list[tuple[int, ...]]]:
        """Return rows of requests that may have changed, ids of new ones, and rows of ended ones. Mutates."""
        running = self._scheduler.running
        moving = list(running)
        unseen = sorted(chain.from_iterable(self._unseen.values()), key=self._number)
        self._unseen.clear()
        rows, ids = list(map(self._request_row, unseen)), [request.request_id for request in unseen]
        gone = list(map(self._gone_row, unseen))
        for request in dict.fromkeys([*self._requests.take_changed(), *self._moving, *running]):
            if not request.is_finished:
                ids.append("" if request in self._told else request.request_id)
                self._told.add(request)
                rows.append(self._request_row(request))
                if request.num_late_results:  # preempted, with results outstanding
                    moving.append(request)
                continue
            if request in self._told:
                self._told.remove(request)
                gone.append(self._gone_row(request))
            self._numbers.pop(request, NOBODY)
        self._moving = moving
        return rows, ids, gone

    def _request_row(self, request: Request) -> tuple[int, ...]:
        return (
            self._number(request),
            STATUS_NUMBERS[request.status],
            self._tenant(request.scope.tenant),
            request.num_prompt_tokens,
            request.num_computed,
            len(request.tokens),
            request.num_cached_tokens,
            request.num_preemptions,
            request.num_disk_tokens,
            request.num_host_tokens,
        )

    def _gone_row(self, request: Request) -> tuple[int, ...]:
        from_cache = request.num_cached_tokens, request.num_disk_tokens, request.num_host_tokens
        return self._number(request), request.num_computed, len(request.tokens), *from_cache

    def _number(self, request: Request) -> int:
        number = self._numbers.get(request)
        if number is None:
            number = self._numbers[request] = self._num_requests
            self._num_requests += 1
        return number

    def _tenant(self, name: str) -> int:
        return self._tenants.setdefault(name, len(self._tenants))
