"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.request import Request
from quire.scheduler.plan_builder import StepRecord
from quire.scheduler.policy.base import OrderKey, WaitingQueue
from quire.scheduler.queue import OrderedQueue


class FCFSPolicy:
    """In order of arrival; the latest yields."""

    def order_key(self, request: Request) -> OrderKey:
        """Return the order of arrival."""
        return (0.0, request.serial, request.branch)

    def make_queue(self) -> WaitingQueue:
        """Return an empty queue in order of arrival."""
        return OrderedQueue(self.order_key)

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Choose the latest."""
        return candidates[-1]

    def charge(self, step: StepRecord) -> None:
        """Keep no account."""
