"""Requests from a step log of our own: what a real engine was asked, when, and how long the answers became.

The log is replayed, so each plan is compared on the way, and a request is handed on when it has ended and all before it
have: what is held is what was under way at once, not the log. Tokens, scopes and priorities are the logged ones; an
answer that was cut off is as long as it got, one that never began is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

from quire.core.request import Request
from quire.engine.step_log import ADDED, replayed
from quire.simulate.workload.offered import OfferedRequest


def logged_requests(file: BinaryIO) -> Iterator[OfferedRequest]:
    """Yield the requests of a log in their order, due as long after the first as they came."""
    under_way: deque[Request] = deque()
    first_s: float | None = None
    for kind, scheduler in replayed(file):
        if kind == ADDED:
            under_way.append(next(reversed(scheduler.requests.values())))
        while under_way and under_way[0].request_id not in scheduler.requests:
            request = under_way.popleft()
            first_s = request.arrival_s if first_s is None else first_s
            yield from _offered(request, first_s)
    for request in under_way:
        yield from _offered(request, request.arrival_s if first_s is None else first_s)


def _offered(request: Request, first_s: float) -> Iterator[OfferedRequest]:
    members = request.group.members if request.group else [request]
    longest = max(member.num_output_tokens for member in members)
    if longest:
        yield OfferedRequest(
            request.request_id,
            request.arrival_s - first_s,
            request.tokens[: request.num_prompt_tokens],
            longest,
            request.sampling.num_sequences,
            request.sampling.beam_search,
            request.scope,
            request.priority,
        )
