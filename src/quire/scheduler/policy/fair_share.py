"""Fair share by tenant: the tenant served least is next.

Each tenant has a counter of the tokens computed for it, and the tenant with the smallest counter is next, its requests
in order of arrival. When a step is submitted, all tokens that it computes are charged: prompt tokens and decodes,
rejected drafts, tokens computed again after a preemption, tokens of a request that has ended meanwhile. Tokens from the
prefix cache are not computed, so they are free. Nothing else is charged, so no way in which a request ends can make a
counter wrong. (Charging at the end of a request was rejected: each way to end would have to do it.)

A tenant pays again for tokens computed again, even if another tenant's need for memory was the cause: the share is a
share of the machine's time, the tenant served most is preempted, and otherwise a tenant could get free work by holding
too much memory.

A tenant with nothing waiting earns no credit: when it returns, its counter is behind those of the waiting tenants by no
more than when its last request left the queue. If a request must be preempted, it is the latest request of the tenant
served most; the earliest running request is never preempted, so that every request finishes.

No request waits long because of another tenant. Rows: if the next request finds no row, and its tenant has none (or
less than half as many as another), the other tenant's latest requests are preempted. Tokens: prompts of several tenants
share the tokens of a step evenly, the first chunk of the next request included. None of this applies to a single
tenant.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from quire.core.request import Request
from quire.scheduler.groups import moving_together
from quire.scheduler.plan_builder import StepRecord
from quire.scheduler.policy.base import OrderKey, WaitingQueue
from quire.scheduler.queue import OrderedQueue
from quire.scheduler.running import num_rows_of


def _arrival(request: Request) -> OrderKey:
    return (0.0, request.serial, request.branch)


class FairShareQueue:
    """A queue per tenant; turns go to the tenant served least."""

    def __init__(self, served: Counter[str]) -> None:
        self._served = served
        self._queues: dict[str, OrderedQueue] = {}
        self._last_to_leave = ""  # the latest tenant whose last request left the queue
        self._behind: dict[str, int] = {}  # how much less a tenant was served than all others when it left
        self._length = 0

    def add(self, request: Request) -> None:
        """Add a request; a returning tenant's counter is no further behind than when it left. Mutates."""
        tenant, served = request.scope.tenant, self._served
        queue = self._queues.get(tenant)
        if queue is None:
            floor = self._least_served() - self._behind.pop(tenant, 0)
            served[tenant] = max(served[tenant], floor)
            queue = self._queues[tenant] = OrderedQueue(_arrival)
        queue.add(request)
        self._length += 1

    def remove(self, request: Request) -> None:
        """Remove a request. Mutates."""
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
        """Return the smallest counter of waiting tenants; if none waits, the counter of the last one that did."""
        return min(self._served[tenant] for tenant in self._queues or (self._last_to_leave,))

    def in_turn(self) -> Iterator[Request]:
        """Walk the requests as if each were served at once."""
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
    """Serves the least served tenant first."""

    def __init__(self) -> None:
        self._served = Counter[str]()

    def order_key(self, request: Request) -> OrderKey:
        """Return the order of arrival: the counters do not change the order of running requests."""
        return _arrival(request)

    def make_queue(self) -> WaitingQueue:
        """Return an empty queue with one queue per tenant."""
        return FairShareQueue(self._served)

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Choose the latest request of the tenant served most."""
        return max(candidates, key=self._by_service)

    def _by_service(self, request: Request) -> tuple[int, OrderKey]:
        return self._served[request.scope.tenant], _arrival(request)

    def rows_for(self, newcomer: Request, num_rows: int, running: Sequence[Request]) -> Sequence[Request]:
        """Choose the latest requests of tenants that were served more and hold more than twice as many rows.

        If the newcomer's tenant holds no row, it is enough if they hold more rows. So two requests never preempt each
        other in turns.
        """
        tenant, held = newcomer.scope.tenant, Counter[str]()
        for request in running:
            held[request.scope.tenant] += num_rows_of(request)
        least = (held[tenant] + num_rows_of(newcomer)) * (2 if held[tenant] else 1)
        generous = {other for other in held if held[other] > least and self._served[other] >= self._served[tenant]}
        chosen: list[Request] = []
        never = moving_together(running[0]) if generous else []
        for request in sorted(running, key=self._by_service, reverse=True) if generous else ():
            together = moving_together(request)
            other, rows = request.scope.tenant, len(together) - 1 + num_rows_of(request)
            if other in generous and request is together[0] and request not in never and held[other] - rows >= least:
                held[other] -= rows
                num_rows -= rows
                chosen.append(request)
            if num_rows <= 0:
                return chosen
        return ()

    def token_shares(
        self, newcomer: Request | None, num_tokens: int, running: Sequence[Request]
    ) -> Counter[str] | None:
        """Split the tokens evenly among tenants with prompts; the others get what a tenant does not need."""
        wanted = Counter[str]()
        for request in running:
            if request.backlog > 1:
                wanted[request.scope.tenant] += request.backlog - 1
        if newcomer is not None:
            wanted[newcomer.scope.tenant] += len(newcomer.tokens)
        if len(wanted) < 2:
            return None
        shares = Counter[str]()
        for place, (tenant, tokens) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
            shares[tenant] = min(tokens, num_tokens // (len(wanted) - place))
            num_tokens -= shares[tenant]
        return shares

    def charge(self, step: StepRecord) -> None:
        """Count the tokens of a step for their tenants. Mutates; O(sequences in the step)."""
        self._served.update([request.scope.tenant for request in step.decodes])
        for chunk in step.chunks:
            self._served[chunk.request.scope.tenant] += chunk.num_tokens
