"""By priority, with ageing: a lower number is more urgent, and waiting makes a request more urgent.

After t seconds a request counts as priority - t / ageing. All waiting requests age at the same rate, so their relative
order never changes, and the key can be fixed once:

    priority - (now - arrival) / ageing   orders like   priority + arrival / ageing
"""

from __future__ import annotations

from quire.core.request import Request
from quire.scheduler.policy.base import OrderKey
from quire.scheduler.policy.fcfs import FCFSPolicy


class PriorityPolicy(FCFSPolicy):
    """Most urgent first; every `ageing_s` seconds of waiting make up for one level."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def order_key(self, request: Request) -> OrderKey:
        """Return the urgency, earlier arrivals first among equals."""
        return (request.priority + request.arrival_s / self._ageing_s, request.serial, request.branch)
