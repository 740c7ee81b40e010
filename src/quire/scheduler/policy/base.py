"""SchedulingPolicy: whose turn it is.

A policy orders; it moves nothing. The scheduler keeps the running requests in the order of `order_key` (which must
never change for a request): those in front get room first, those behind yield first, and the first never yields.
That is the proof of progress: the first in order always finishes, then the next is first.
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
        """Put a request in. Mutates."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Mutates."""
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
        """Return the place of a request among the running: smaller is served first. Fixed for a request's life."""
        ...

    def make_queue(self) -> WaitingQueue:
        """Return an empty queue of this policy's order."""
        ...

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Choose who yields; the candidates are in the order of `order_key`, at least one. Does not mutate."""
        ...

    def rows_for(self, newcomer: Request, num_rows: int, running: Sequence[Request]) -> Sequence[Request]:
        """Choose who of the running yields so that the next in turn gets the `num_rows` that it lacks, or nobody.

        Never the first of `running`, nor who moves with it. Does not mutate.
        """
        ...

    def token_shares(
        self, newcomer: Request | None, num_tokens: int, running: Sequence[Request]
    ) -> Counter[str] | None:
        """Split the tokens of a step that prompts may have among tenants; None: each prompt takes what it can.

        `newcomer`: the next in turn, if it can start in this step. Does not mutate.
        """
        ...

    def charge(self, step: StepRecord) -> None:
        """Note the tokens that a step computes; called once for each step. May mutate the policy."""
        ...
