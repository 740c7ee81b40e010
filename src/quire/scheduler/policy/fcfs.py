"""First come, first served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.core.request import Request
from quire.scheduler.plan_builder import StepRecord
from quire.scheduler.policy.base import OrderKey, WaitingQueue
from quire.scheduler.queue import OrderedQueue


class FCFSPolicy:
    """Serves in order of arrival; preempts the latest."""

    def order_key(self, request: Request) -> OrderKey:
        """Return the order of arrival."""
        return (0.0, request.serial, request.branch)

    def make_queue(self) -> WaitingQueue:
        """Return an empty queue in order of arrival."""
        return OrderedQueue(self.order_key)

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Choose the latest request."""
        return candidates[-1]

    def rows_for(self, newcomer: Request, num_rows: int, running: Sequence[Request]) -> Sequence[Request]:
        """Choose no request: those that came first keep their rows."""
        return ()

    def token_shares(
        self, newcomer: Request | None, num_tokens: int, running: Sequence[Request]
    ) -> Counter[str] | None:
        """Split nothing: the first prompt in order takes as many tokens as it can."""
        return None

    def charge(self, step: StepRecord) -> None:
        """Do nothing."""
