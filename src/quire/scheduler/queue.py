"""OrderedQueue: requests in the order of a fixed key, for waiting and for running requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from quire.core.errors import InvariantError
from quire.core.request import Request
from quire.scheduler.policy.base import OrderKey


class OrderedQueue:
    """Requests in the order of a fixed key; finding a place is O(log n), inserting there is a memory move.

    >>> queue = OrderedQueue(lambda request: (float(request.priority), request.serial, 0))
    >>> for name, priority in (("b", 2), ("a", 1)): queue.add(Request(name, [1], priority=priority))
    >>> [request.request_id for request in queue.in_turn()]
    ['a', 'b']
    """

    def __init__(self, key: Callable[[Request], OrderKey]) -> None:
        self._key = key
        self._keys: list[OrderKey] = []
        self.requests: list[Request] = []  # in order; callers may read it, only the methods change it

    def add(self, request: Request) -> None:
        """Insert a request at its place. Mutates."""
        key = self._key(request)
        place = bisect_left(self._keys, key)
        if place < len(self._keys) and self._keys[place] == key:
            raise InvariantError(f"two requests have the order key {key}")
        self._keys.insert(place, key)
        self.requests.insert(place, request)

    def remove(self, request: Request) -> None:
        """Remove a request. Mutates."""
        place = bisect_left(self._keys, self._key(request))
        if place == len(self.requests) or self.requests[place] is not request:
            raise InvariantError(f"request {request.request_id!r} is not in the queue")
        del self._keys[place], self.requests[place]

    def replace(self, old: Request, new: Request) -> None:
        """Replace `old` by `new`, which has the same key. Mutates."""
        place = bisect_left(self._keys, self._key(old))
        if place == len(self.requests) or self.requests[place] is not old or self._key(new) != self._keys[place]:
            raise InvariantError(f"request {new.request_id!r} cannot take that place")
        self.requests[place] = new

    def in_turn(self) -> Iterator[Request]:
        """Walk the requests in order; the queue must not change meanwhile."""
        return iter(self.requests)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.requests)

    def check(self) -> None:
        """Raise `InvariantError` unless the order holds."""
        if self._keys != sorted(set(self._keys)) or self._keys != [self._key(request) for request in self.requests]:
            raise InvariantError("a queue is out of order")
