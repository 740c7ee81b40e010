"""RequestJournal: events of requests, while a client watches.

The scheduler notes when a request arrives, begins to run, is preempted or ends: a few calls per request, none per step.
Progress of running requests is read on demand. Events have no time: their reader (`quire.engine.records.live`) adds it,
because the control plane reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from quire.core.request import FinishReason, Request


class EventKind(IntEnum):
    """What happened. The comments say what the `number` of an event counts."""

    ADMITTED = 0  # known tokens
    FINISHED = 1  # generated tokens, as for the next two
    ABORTED = 2
    FAILED = 3
    PREEMPTED = 4  # computed tokens
    EVICTED = 5  # blocks


ENDS = {
    FinishReason.STOP: EventKind.FINISHED,
    FinishReason.LENGTH: EventKind.FINISHED,
    FinishReason.ABORT: EventKind.ABORTED,
    FinishReason.ERROR: EventKind.FAILED,
}
END_KINDS = frozenset(ENDS.values())


class RequestEvent(NamedTuple):
    """Something that happened to a request."""

    kind: EventKind
    request: Request
    number: int


class RequestJournal:
    """Collects events and changed requests until they are taken. Begins with the requests that are alive.

    >>> request = Request("r", [5, 6, 7])
    >>> journal = RequestJournal([request]); journal.note_admitted(request)
    >>> [(event.kind.name, event.number) for event in journal.take_events()], journal.take_changed() == [request]
    ([('ADMITTED', 3)], True)
    """

    def __init__(self, alive: Iterable[Request]) -> None:
        self._changed = dict.fromkeys(alive)
        self._events: list[RequestEvent] = []

    @property
    def has_news(self) -> bool:
        """Whether anything waits to be taken."""
        return bool(self._changed or self._events)

    def note_waiting(self, request: Request) -> None:
        """Note that a request has arrived, or was preempted. Mutates."""
        self._changed[request] = None

    def note_admitted(self, request: Request) -> None:
        """Note that a request begins to run, or resumes. Mutates."""
        self._note(EventKind.ADMITTED, request, len(request.tokens))

    def note_preempted(self, request: Request, num_computed: int) -> None:
        """Note that a running request was preempted with this many tokens computed. Mutates."""
        self._note(EventKind.PREEMPTED, request, num_computed)

    def note_ended(self, request: Request, reason: FinishReason) -> None:
        """Note that a request has ended. Mutates."""
        self._note(ENDS[reason], request, request.num_output_tokens)

    def take_events(self) -> list[RequestEvent]:
        """Return the events since the last call, in order. Mutates."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def take_changed(self) -> list[Request]:
        """Return the requests that have changed since the last call. Mutates."""
        changed, self._changed = list(self._changed), {}
        return changed

    def _note(self, kind: EventKind, request: Request, number: int) -> None:
        self._events.append(RequestEvent(kind, request, number))
        self._changed[request] = None
