"""Fair share by tenant: whoever was served least is admitted next.

Each tenant has a counter of tokens computed for it. The tenant with the smallest counter is next, its requests in order
of arrival. A tenant that comes back after a pause starts at the smallest counter of those that wait, or, if nobody
does, at that of the tenant that waited last: idling earns no credit. When somebody must yield, it is the latest request
of the tenant served most; the earliest running request of all never yields, whoever it belongs to, so that everybody
finishes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from quire.core.request import Request
from quire.scheduler.policy.base import OrderKey, WaitingQueue
from quire.scheduler.queue import OrderedQueue


def _arrival(request: Request) -> OrderKey:
    return (0.0, request.serial, request.branch)


class FairShareQueue:
    """A queue per tenant; turns go to the tenant served least."""

    def __init__(self, served: dict[str, float]) -> None:
        self._served = served
        self._queues: dict[str, OrderedQueue] = {}
        self._last_to_leave = ""  # the tenant whose last request left the queue last
        self._length = 0

    def add(self, request: Request) -> None:
        """Put a request in; a tenant that was away is lifted to the least served of those present. Mutates."""
        queue = self._queues.get(request.scope.tenant)
        if queue is None:
            present = self._queues or (self._last_to_leave,)
            floor = min(self._served.get(tenant, 0.0) for tenant in present)
            self._served[request.scope.tenant] = max(self._served.get(request.scope.tenant, 0.0), floor)
            queue = self._queues[request.scope.tenant] = OrderedQueue(_arrival)
        queue.add(request)
        self._length += 1

    def remove(self, request: Request) -> None:
        """Take a request out. Mutates."""
        queue = self._queues[request.scope.tenant]
        queue.remove(request)
        self._length -= 1
        if not len(queue):
            del self._queues[request.scope.tenant]
            self._last_to_leave = request.scope.tenant

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
        self._served: dict[str, float] = {}

    def order_key(self, request: Request) -> OrderKey:
        """Return the order of arrival: the order of those running does not change with the counters."""
        return _arrival(request)

    def make_queue(self) -> WaitingQueue:
        """Return an empty queue with a line per tenant."""
        return FairShareQueue(self._served)

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Choose the latest request of the tenant served most."""
        return max(candidates, key=lambda request: (self._served.get(request.scope.tenant, 0.0), _arrival(request)))

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count tokens for the request's tenant. Mutates."""
        self._served[request.scope.tenant] = self._served.get(request.scope.tenant, 0.0) + num_tokens
