"""LiveReader: one client of /live, with the data that it has received and the data that it is owed.

    LiveChange ──► blocks and requests owed ──► frame: their present state ──► client

A reader is owed the *present state*, not every past one: its debt is a set of blocks and requests, bounded by their
number, however slowly it reads. It has bounded lists of events, of latencies and of the requests that ended before it
was shown them, which drop the oldest. `num_ended` counts all ended requests.

An operator sees everything. A tenant sees only its own blocks and requests, numbered from 0: the engine's numbers
would reveal how much others have.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from quire.core.request import RequestStatus
from quire.engine.records.live import MOST_UNSEEN, NOBODY, STATUSES, LiveState
from quire.memory.journal import NOT_PUBLISHED
from quire.scheduler.journal import END_KINDS, EventKind
from quire.serve.live_mirror import BlockRow, EventRow, LiveChange, LiveMirror, RequestRow
from quire.serve.tenants import Tenant

MOST_EVENTS: Final = 512
MOST_SAMPLES: Final = 256
MOST_OWED: Final = 1 << 16
"""Blocks; a reader that is owed more gets the whole state again."""
ROWS_AT_ONCE: Final = 4096
KINDS: Final = tuple(kind.name.lower() for kind in EventKind)

Line = dict[str, Any]
Row = list[Any]


class Numbers:
    """Maps the engine's numbers to a reader's own: the smallest that is not in use.

    >>> numbers = Numbers()
    >>> numbers.of(70), numbers.of(12), numbers.of(70)
    (0, 1, 0)
    >>> numbers.release(70); numbers.of(99), 70 in numbers
    (0, False)
    """

    def __init__(self) -> None:
        self._own: dict[int, int] = {}
        self._released: list[int] = []

    def __contains__(self, number: int) -> bool:
        return number in self._own

    def of(self, number: int) -> int:
        """Return the reader's number for one of the engine's. Mutates if it is new."""
        own = self._own.get(number)
        if own is None:
            own = heappop(self._released) if self._released else len(self._own)
            self._own[number] = own
        return own

    def release(self, number: int) -> None:
        """Free the number of a block or request that is no longer shown. Mutates."""
        own = self._own.pop(number, None)
        if own is not None:
            heappush(self._released, own)


class Names:
    """A tenant's own numbers of blocks and requests."""

    def __init__(self) -> None:
        self.blocks = Numbers()
        self.requests = Numbers()


class LiveReader:
    """One client of /live. Use it in one event loop."""

    def __init__(self, tenant: Tenant, calls: Mapping[str, str], replica: int = 0) -> None:
        self.tenant = tenant
        self.replica = replica  # the engine whose memory it sees
        self._calls = calls  # by the engine's id of a request: the id of its call, as in logs
        self.wake = asyncio.Event()
        self.num_frames = 0
        self.at_s = 0.0
        self.num_ended = 0  # visible requests, since it began to read
        self.num_rejected = 0  # as last sent
        self.states: tuple[str, ...] = ()  # as last sent
        self.name = None if tenant.is_operator else tenant.name  # the tenant whose requests it sees; None: all
        self.first_tokens_s: deque[float] = deque(maxlen=MOST_SAMPLES)
        self.gaps_s: deque[float] = deque(maxlen=MOST_SAMPLES)  # appended to for every token, so it must be fast
        self.begin()

    def begin(self) -> None:
        """Discard what was sent: the reader is owed everything. Mutates."""
        self._is_owed_all = True
        self._blocks: set[int] = set()
        self._requests: set[int] = set()
        self._gone: dict[int, RequestRow] = {}  # as they ended
        self._unseen: deque[RequestRow] = deque(maxlen=MOST_UNSEEN)  # as they ended, without an earlier row
        self._shown: set[int] = set()  # requests
        self._events: deque[EventRow] = deque(maxlen=MOST_EVENTS)
        self._names = Names()

    def owe(self, mirror: LiveMirror, change: LiveChange) -> bool:
        """Add a change to the debt; return whether the reader is owed anything. Mutates; O(changes).

        A tenant that is owed nothing is not woken: the pace of its frames would reveal when others are served.
        """
        mine = self._tenant_number(mirror)
        events = [event for event in change.events if mine is None or event.tenant == mine]
        self._events += events
        ends = {event.request for event in events if event.kind in END_KINDS}
        self.num_ended += len(ends)
        if len(self._blocks) > MOST_OWED:
            self.begin()
        if self._is_owed_all:
            return True
        if mine is None:
            self._blocks.update(change.blocks)
            self._requests.update(change.requests)
        else:
            known = self._names.blocks
            self._blocks.update(
                block_id for block_id in change.blocks if block_id in known or mirror.block(block_id).tenant == mine
            )
            self._requests.update(number for number in change.requests if mirror.requests[number].tenant == mine)
        self._requests.difference_update(row.number for row in change.gone)
        self._gone |= {row.number: row for row in change.gone if row.number in self._shown}
        self._unseen += [row for row in change.gone if row.number in ends and row.number not in self._shown]
        return mine is None or bool(self._events or self._blocks or self._requests or self._gone)

    def take(self, mirror: LiveMirror | None, at_s: float) -> tuple[Line, Iterator[list[Row]]]:
        """Return the debt: requests and events, and an iterator over parts of the blocks. Mutates; O(debt).

        A block's row is its state when its part is read. A block that changes meanwhile is owed again.
        """
        is_full, self.num_frames = self._is_owed_all, self.num_frames + 1
        self.at_s = at_s = at_s if is_full else max(at_s, self.at_s)  # a restarted engine counts from 0
        line: Line = {"seq": self.num_frames, "t": round(at_s, 3), "full": is_full}
        if mirror is None or not mirror.is_whole:
            return line | {"requests": [], "gone": [], "events": [], "num_ended": self.num_ended}, iter(())
        owed = mirror.blocks_not_free() if is_full else sorted(self._blocks)
        line["requests"] = self._request_rows(mirror)
        line["gone"] = list(map(self._gone_row, sorted([*self._gone.values(), *self._unseen])))
        line["num_ended"] = self.num_ended
        line["events"] = [self._event_row(event) for event in self._events]
        self._forget(mirror)
        return line, self._block_rows(mirror, owed, round(at_s, 3))

    def num_running_and_waiting(self, mirror: LiveMirror | None) -> tuple[int, int]:
        """Return how many of the visible requests run and how many wait. Does not mutate."""
        if mirror is None:
            return 0, 0
        if self.tenant.is_operator:
            return mirror.stats.num_running, mirror.stats.num_waiting
        mine = self._tenant_number(mirror)
        statuses = [STATUSES[row.status] for row in mirror.requests.values() if row.tenant == mine]
        num_running = statuses.count(RequestStatus.RUNNING)
        return num_running, len(statuses) - num_running

    def take_latencies(self) -> Line:
        """Return the latencies since the last call, in milliseconds. Mutates."""
        line = {
            name: [round(1000 * seconds, 1) for seconds in samples]
            for name, samples in (("ttft_ms", self.first_tokens_s), ("itl_ms", self.gaps_s))
        }
        self.first_tokens_s.clear()
        self.gaps_s.clear()
        return line

    def _tenant_number(self, mirror: LiveMirror) -> int | None:
        """Return the number of the tenant whose rows are visible; None: all rows."""
        if self.tenant.is_operator:
            return None
        number = mirror.tenant_number(self.tenant.name)
        return number if number != NOBODY else len(mirror.tenants)  # a number that no tenant has yet

    def _number(self, numbers: Numbers, number: int) -> int:
        return number if number < 0 or self.tenant.is_operator else numbers.of(number)

    def _block_rows(self, mirror: LiveMirror, owed: Sequence[int], at_s: float) -> Iterator[list[Row]]:
        """Yield the rows of blocks, some thousands at a time; blocks that are no longer visible come last."""
        mine, names, left = self._tenant_number(mirror), self._names, []
        for start in range(0, len(owed), ROWS_AT_ONCE):
            rows = []
            for row in map(mirror.block, owed[start : start + ROWS_AT_ONCE]):
                if mine is None or row.tenant == mine:
                    rows.append(self._block_row(mirror, row, mine, names))
                elif row.block_id in names.blocks:
                    left.append(row.block_id)
            if rows:
                yield rows
        if left:
            yield [[names.blocks.of(each), int(LiveState.FREE), 0, NOBODY, NOT_PUBLISHED, at_s] for each in left]
        for block_id in left:
            names.blocks.release(block_id)

    def _block_row(self, mirror: LiveMirror, row: BlockRow, mine: int | None, names: Names) -> Row:
        parent, owner = row.parent, row.owner if row.owner in mirror.requests else NOBODY
        if mine is not None and parent >= 0 and mirror.block(parent).tenant != mine:
            parent = NOBODY
        return [
            self._number(names.blocks, row.block_id),
            row.state,
            row.num_holders,
            self._number(names.requests, owner),
            self._number(names.blocks, parent),
            round(row.changed_s, 3),
        ]

    def _request_rows(self, mirror: LiveMirror) -> list[Row]:
        mine = self._tenant_number(mirror)
        owed = mirror.requests if self._is_owed_all else sorted(self._requests)
        rows = [mirror.requests[number] for number in owed]
        shown = [row for row in rows if mine is None or row.tenant == mine]
        self._shown.update(row.number for row in shown)
        return [self._request_row(mirror, row) for row in sorted([*shown, *self._unseen])]

    def _request_row(self, mirror: LiveMirror, row: RequestRow) -> Row:
        return [
            self._number(self._names.requests, row.number),
            STATUSES[row.status].value,
            mirror.tenants[row.tenant],
            row.num_prompt_tokens,
            row.num_computed,
            row.num_known,
            row.num_cached,
            row.num_preemptions,
            self._calls.get(row.engine_id, ""),
            row.num_from_disk,
            row.num_from_host,
        ]

    def _gone_row(self, row: RequestRow) -> Row:
        number = self._number(self._names.requests, row.number)
        return [number, row.num_computed, row.num_known, row.num_cached, row.num_from_disk, row.num_from_host]

    def _event_row(self, event: EventRow) -> Row:
        number = self._number(self._names.requests, event.request)
        return [round(event.at_s, 3), KINDS[event.kind], number, event.number]

    def _forget(self, mirror: LiveMirror) -> None:
        """Clear the debt, and free the numbers of ended requests. Mutates."""
        ended = [*self._gone, *(row.number for row in self._unseen)]
        for number in [*ended, *(event.request for event in self._events)]:
            if number not in mirror.requests:
                self._names.requests.release(number)
        self._shown -= self._gone.keys()
        self._blocks, self._requests, self._gone = set(), set(), {}
        self._events.clear()
        self._unseen.clear()
        self._is_owed_all = False
