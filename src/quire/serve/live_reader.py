"""LiveReader: one client that watches, what it has received, and what is still to be sent.

    LiveChange ──► blocks and requests that it is owed ──► frame: as they are now ──► shown

A reader is owed *what there is*, not all that was: its debt is a set of blocks and requests, bounded by how many there
are, however slowly it reads. Events and latencies are kept for it up to a number; the oldest go first.

An operator is shown everything. A tenant is shown what is its own, and under numbers that count its own: the real ones
would tell how much others have.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from quire.core.request import RequestStatus
from quire.engine.records.live import STATUSES, LiveState
from quire.memory.journal import NOT_PUBLISHED
from quire.scheduler.journal import EventKind
from quire.serve.live_mirror import NOBODY, BlockRow, EventRow, LiveChange, LiveMirror, RequestRow
from quire.serve.tenants import Tenant

MOST_EVENTS: Final = 512
MOST_SAMPLES: Final = 256
MOST_OWED: Final = 1 << 16
"""Blocks; a reader that is owed more is shown everything again."""
ROWS_AT_ONCE: Final = 4096
KINDS: Final = tuple(kind.name.lower() for kind in EventKind)

Line = dict[str, Any]
Row = list[Any]


class Numbers:
    """Numbers of a reader's own for those of the engine: the smallest that is not in use.

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
        """Return the own number of one of the engine's. Mutates where it has none yet."""
        own = self._own.get(number)
        if own is None:
            own = heappop(self._released) if self._released else len(self._own)
            self._own[number] = own
        return own

    def release(self, number: int) -> None:
        """What had the number is not shown any more. Mutates."""
        own = self._own.pop(number, None)
        if own is not None:
            heappush(self._released, own)


class Names:
    """What a reader calls blocks and requests, unless it is an operator."""

    def __init__(self) -> None:
        self.blocks = Numbers()
        self.requests = Numbers()


class LiveReader:
    """One client that watches. Use it in one event loop."""

    def __init__(self, tenant: Tenant, calls: Mapping[str, str], replica: int = 0) -> None:
        self.tenant = tenant
        self.replica = replica  # the engine whose memory it is shown
        self._calls = calls  # by the engine's id of a request: the id of its call, as in logs
        self.wake = asyncio.Event()
        self.num_frames = 0
        self.at_s = 0.0
        self.num_rejected = 0  # as last shown
        self.states: tuple[str, ...] = ()  # as last shown
        self.name = None if tenant.is_operator else tenant.name  # whose requests are shown; None: everybody's
        self.first_tokens_s: deque[float] = deque(
            maxlen=MOST_SAMPLES
        )  # with every token one is noted: it must be quick
        self.gaps_s: deque[float] = deque(maxlen=MOST_SAMPLES)
        self.begin()

    def begin(self) -> None:
        """What was shown is void: it is owed everything. Mutates."""
        self._is_owed_all = True
        self._blocks: set[int] = set()
        self._requests: set[int] = set()
        self._gone: dict[int, RequestRow] = {}  # as they ended
        self._shown: set[int] = set()  # requests
        self._events: deque[EventRow] = deque(maxlen=MOST_EVENTS)
        self._names = Names()

    def owe(self, mirror: LiveMirror, change: LiveChange) -> bool:
        """Something has changed; return whether the reader is owed anything. Mutates; O(changes).

        A tenant that is owed nothing is not woken: the pace of its frames would tell when others are served.
        """
        mine = self._tenant_number(mirror)
        self._events += [event for event in change.events if mine is None or event.tenant == mine]
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
        return mine is None or bool(self._events or self._blocks or self._requests or self._gone)

    def take(self, mirror: LiveMirror | None, at_s: float) -> tuple[Line, Iterator[list[Row]]]:
        """Return what it is owed: requests and events, and its blocks a part at a time. Mutates; O(debt).

        Blocks are told as they are when their part is asked for. What changes meanwhile is owed again.
        """
        is_full, self.num_frames = self._is_owed_all, self.num_frames + 1
        self.at_s = at_s = at_s if is_full else max(at_s, self.at_s)  # an engine that began again counts from 0
        line: Line = {"seq": self.num_frames, "t": round(at_s, 3), "full": is_full}
        if mirror is None or not mirror.is_whole:
            return line | {"requests": [], "gone": [], "events": []}, iter(())
        owed = mirror.blocks_not_free() if is_full else sorted(self._blocks)
        line["requests"] = self._request_rows(mirror)
        line["gone"] = sorted(map(self._gone_row, self._gone.values()))
        line["events"] = [self._event_row(event) for event in self._events]
        self._forget(mirror)
        return line, self._block_rows(mirror, owed, round(at_s, 3))

    def num_running_and_waiting(self, mirror: LiveMirror | None) -> tuple[int, int]:
        """Return how many run and how many wait, of those that it is shown. Does not mutate."""
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
        """Return the number of the tenant whose rows are shown; None: all rows are."""
        if self.tenant.is_operator:
            return None
        number = mirror.tenant_number(self.tenant.name)
        return number if number != NOBODY else len(mirror.tenants)  # nobody's yet

    def _number(self, numbers: Numbers, number: int) -> int:
        return number if number < 0 or self.tenant.is_operator else numbers.of(number)

    def _block_rows(self, mirror: LiveMirror, owed: Sequence[int], at_s: float) -> Iterator[list[Row]]:
        """Yield the rows of blocks, some thousands at a time; those that are not shown any more last."""
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
        return [self._request_row(mirror, row) for row in shown]

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
        """All is shown; who has gone has no number any more. Mutates."""
        for number in [*self._gone, *(event.request for event in self._events)]:
            if number not in mirror.requests:
                self._names.requests.release(number)
        self._shown -= self._gone.keys()
        self._blocks, self._requests, self._gone = set(), set(), {}
        self._events.clear()
        self._is_owed_all = False
