"""Fair share by tenant: the tenant served least is next.

Each tenant has a counter of the tokens computed for it, and the tenant with the smallest counter is next, its requests
in order of arrival. A step charges what it computes, when it is handed out: prompt tokens and decodes, drafts that are
refused, tokens computed again after a preemption, tokens of a request that has ended meanwhile. Tokens that come from
the prefix cache are not computed, so they are free. Nothing else is charged, so a counter cannot be wrong at any of the
many ways in which requests end. (Charging at the end of a request was rejected: each way to end must remember it.)

Who computes again pays again, even where another tenant's need for memory was the cause: the share is one of the
machine's time, the tenant served most is the one that yields, and free work could be had by holding more than fits.

A tenant with nothing waiting earns no credit: when it comes back, it is behind those that wait by no more than it was
when its last request left the queue. When somebody must yield, it is the latest request of the tenant served most; the
earliest running request never yields, so that every request finishes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from quire.core.request import Request
from quire.scheduler.plan_builder import StepRecord
from quire.scheduler.policy.base import OrderKey, WaitingQueue
from quire.scheduler.queue import OrderedQueue


def _arrival(request: Request) -> OrderKey:
    return (0.0, request.serial, request.branch)


class FairShareQueue:
    """A queue per tenant; turns go to the tenant served least."""

    def __init__(self, served: Counter[str]) -> None:
        self._served = served
        self._queues: dict[str, OrderedQueue] = {}
        self._last_to_leave = ""  # the tenant whose last request left the queue last
        self._behind: dict[str, int] = {}  # by how much a tenant was served less than all others when it left
        self._length = 0

    def add(self, request: Request) -> None:
        """Put a request in; a tenant that was away is no further behind than when it left. Mutates."""
        tenant, served = request.scope.tenant, self._served
        queue = self._queues.get(tenant)
        if queue is None:
            floor = self._least_served() - self._behind.pop(tenant, 0)
            served[tenant] = max(served[tenant], floor)
            queue = self._queues[tenant] = OrderedQueue(_arrival)
        queue.add(request)
        self._length += 1

    def remove(self, request: Request) -> None:
        """Take a request out. Mutates."""
        tenant = request.scope.tenant
        queue = self._queues[tenant]
        queue.remove(request)
        self._length -= 1
        if not len(queue):
            del self._queues[tenant]
            self._last_to_leave = tenant
            behind = self._least_served() - self._served[tenant]
            if behind > 0:
                self._behind[tenant] = behind

    def _least_served(self) -> int:
        """The smallest counter of those that wait; if nobody does, that of the tenant that waited last."""
        return min(self._served[tenant] for tenant in self._queues or (self._last_to_leave,))

    def in_turn(self) -> Iterator[Request]:
        """Walk as if each request walked past were served at once."""
        heads = [(self._served[tenant], tenant, 0) for tenant in self._queues]
        heapq.heapify(heads)
        while heads:
            served, tenant, place = heapq.heappop(heads)
            requests = self._queues[tenant].requests
            yield requests[place]
            if place + 1 < len(requests):
                heapq.heappush(heads, (served + len(requests[place].tokens), tenant, place + 1))

    def __len__(self) -> int:
        """Return the number of requests."""
        return self._length


class FairSharePolicy:
    """Least served tenant first."""

    def __init__(self) -> None:
        self._served = Counter[str]()

    def order_key(self, request: Request) -> OrderKey:
        """Return the order of arrival: the order of those running does not change with the counters."""
        return _arrival(request)

    def make_queue(self) -> WaitingQueue:
        """Return an empty queue with a line per tenant."""
        return FairShareQueue(self._served)

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Choose the latest request of the tenant served most."""
        return max(candidates, key=lambda request: (self._served[request.scope.tenant], _arrival(request)))

    def charge(self, step: StepRecord) -> None:
        """Count the tokens of a step for their tenants. Mutates; O(sequences in the step)."""
        self._served.update([request.scope.tenant for request in step.decodes])
        for chunk in step.chunks:
            self._served[chunk.request.scope.tenant] += chunk.num_tokens
