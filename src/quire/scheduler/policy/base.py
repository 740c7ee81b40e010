"""SchedulingPolicy: the order in which requests are served.

A policy orders requests; it moves nothing. The scheduler keeps the running requests in the order of `order_key` (which
must never change for a request): earlier ones get room first, later ones are preempted first, and the first is never
preempted. That is the proof of progress: the first in order always finishes, then the next is first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from quire.core.request import Request
from quire.scheduler.plan_builder import StepRecord

OrderKey = tuple[float, int, int]


class WaitingQueue(Protocol):
    """Requests that wait for admission."""

    def add(self, request: Request) -> None:
        """Add a request. Mutates."""
        ...

    def remove(self, request: Request) -> None:
        """Remove a request from any place. Mutates."""
        ...

    def in_turn(self) -> Iterator[Request]:
        """Walk the requests in the order of their turn; the queue must not change meanwhile."""
        ...

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        ...


class SchedulingPolicy(Protocol):
    """Orders requests."""

    def order_key(self, request: Request) -> OrderKey:
        """Return the place of a request among the running ones: smaller is served first. Never changes."""
        ...

    def make_queue(self) -> WaitingQueue:
        """Return an empty queue of this policy's order."""
        ...

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Choose the request to preempt; `candidates` is not empty, in the order of `order_key`. Does not mutate."""
        ...

    def rows_for(self, newcomer: Request, num_rows: int, running: Sequence[Request]) -> Sequence[Request]:
        """Choose the running requests to preempt so that `newcomer` gets the `num_rows` that it lacks, or none.

        Never choose the first of `running`, nor another beam of its search. Does not mutate.
        """
        ...

    def token_shares(
        self, newcomer: Request | None, num_tokens: int, running: Sequence[Request]
    ) -> Counter[str] | None:
        """Split the prompt tokens of a step among tenants; None: no split, each prompt takes as many as it can.

        `newcomer`: the next waiting request, if it can start in this step. Does not mutate.
        """
        ...

    def charge(self, step: StepRecord) -> None:
        """Account for the tokens that a step computes; called once for each step. May mutate the policy."""
        ...
