"""Requests from one of quire's step logs: a real engine's requests, with their times and answers.

The log is replayed, which also compares each plan, and a request is yielded when it and all requests before it have
ended: memory holds the concurrent requests, not the log. Tokens, scopes and priorities are the logged ones; an answer
that was cut off keeps its length, and a request whose answer never began is left out. The answers are included: a chat
repeats them in its next prompt, and hits them only if the simulated engine gave the same answer.

The log of a machine that crashed can end within a record. The part before is the log of a shorter run, so a report
reads up to there (`up_to_tear`), and states it.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from quire.core.errors import TornStepLogError
from quire.core.request import Request
from quire.engine.commands import Add
from quire.engine.records.step_log import Replayed
from quire.simulate.replica import VOCAB_SIZE
from quire.simulate.workload.offered import OfferedRequest


def up_to_tear(records: Iterator[Replayed], on_torn: Callable[[str], None]) -> Iterator[Replayed]:
    """Yield the records of a log up to a tear, and report the tear. A log without a complete record is refused."""
    yield from itertools.islice(records, 1)
    try:
        yield from records
    except TornStepLogError as error:
        on_torn(str(error))


def logged_requests(records: Iterable[Replayed]) -> Iterator[OfferedRequest]:
    """Yield the requests of a log in their order, with times relative to the first one."""
    requests = RequestsInLog()
    for record in records:
        yield from requests.after(record)
    yield from requests.left()


class RequestsInLog:
    """Finds the requests of a log while it is replayed."""

    def __init__(self) -> None:
        self._under_way: deque[Request] = deque()
        self._first_s: float | None = None

    def after(self, record: Replayed) -> Iterator[OfferedRequest]:
        """Yield the requests that have ended after a record, once all before them have. Mutates."""
        under_way, alive = self._under_way, record.scheduler.requests
        if isinstance(record.command, Add):
            under_way.append(next(reversed(alive.values())))
        while under_way and under_way[0].request_id not in alive:
            yield from self._offered(under_way.popleft())

    def left(self) -> Iterator[OfferedRequest]:
        """Yield the requests that had not ended at the end of the log. Mutates."""
        while self._under_way:
            yield from self._offered(self._under_way.popleft())

    def _offered(self, request: Request) -> Iterator[OfferedRequest]:
        if self._first_s is None:
            self._first_s = request.arrival_s
        members = request.group.members if request.group else [request]
        outputs = tuple(member.tokens[member.num_prompt_tokens :] for member in members)
        longest = max(map(len, outputs))
        if longest:
            yield OfferedRequest(
                request.request_id,
                request.arrival_s - self._first_s,
                _told_apart(request),
                longest,
                request.sampling.num_sequences,
                request.sampling.beam_search,
                request.scope,
                request.priority,
                () if request.sampling.beam_search else outputs,
            )


def _told_apart(request: Request) -> array[int]:
    """Return the tokens of a prompt, those of images by their names, so that other images are other tokens."""
    names = request.names
    if names is None:
        return request.tokens[: request.num_prompt_tokens]
    return array("i", [name if name >= 0 else name % VOCAB_SIZE for name in names])
