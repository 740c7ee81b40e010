"""RunningSet: the requests that hold a row, in the order of the policy, and the rows themselves.

A row is the worker's name for a running request. It is free as soon as its request leaves: plans take effect in order,
so another request can take it in the next plan.
"""

from __future__ import annotations

from array import array

from quire.core.errors import InvariantError
from quire.core.request import Request
from quire.scheduler.policy.base import SchedulingPolicy
from quire.scheduler.queue import OrderedQueue


class RunningSet:
    """The rows and their requests."""

    def __init__(self, max_num_seqs: int, policy: SchedulingPolicy) -> None:
        self._queue = OrderedQueue(policy.order_key)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._promised_rows = 0  # reserved for the sequences that running prompts will open
        self._starting: list[Request] = []  # requests with a row that no plan contains yet
        self._released = array("i")

    @property
    def requests(self) -> list[Request]:
        """The running requests, in order. Do not change the list."""
        return self._queue.requests

    def num_rows_short(self, request: Request, most: int) -> int:
        """Return how many rows are missing for a request and the sequences that it opens, if at most `most` may run.

        Does not mutate. If no request runs, the request may take more than `most`.
        """
        wanted, taken = num_rows_of(request), len(self.requests) + self._promised_rows
        free = len(self._free_rows) - self._promised_rows
        return max(0, wanted - (min(free, most - taken) if taken else free))

    def start(self, request: Request) -> None:
        """Give the request a row. Mutates."""
        self._take_row(request)
        self._promised_rows += num_rows_of(request) - 1

    def start_opened(self, sibling: Request) -> None:
        """Give a sequence that a prompt opened one of the reserved rows. Mutates."""
        self._take_row(sibling)
        self._promised_rows -= 1

    def _take_row(self, request: Request) -> None:
        request.row = self._free_rows.pop()
        self._starting.append(request)
        self._queue.add(request)

    def leave(self, request: Request) -> None:
        """Release the request's row. Mutates."""
        self._queue.remove(request)
        self._release(request)
        self._free_rows.append(request.row)
        self._promised_rows -= num_rows_of(request) - 1
        request.row = -1

    def replace(self, old: Request, new: Request) -> None:
        """Let `new` continue in the place and on the row of `old`. Mutates."""
        self._queue.replace(old, new)
        self._release(old)
        new.row, old.row = old.row, -1
        self._starting.append(new)

    def _release(self, request: Request) -> None:
        if request in self._starting:
            self._starting.remove(request)
        else:
            self._released.append(request.row)

    def take_differences(self) -> tuple[list[Request], array[int]]:
        """Return the requests that took a row since the last call, and the rows released since then. Mutates."""
        starting, self._starting = self._starting, []
        released, self._released = self._released, array("i")
        return starting, released

    def check(self, max_num_seqs: int) -> None:
        """Raise `InvariantError` unless every row is held once or free once."""
        self._queue.check()
        rows = [request.row for request in self.requests]
        if sorted(rows + self._free_rows) != list(range(max_num_seqs)):
            raise InvariantError("a row is held twice, or lost")
        if self._promised_rows + len(rows) != sum(map(num_rows_of, self.requests)):
            raise InvariantError("rows are reserved for no request")
        if self._promised_rows > len(self._free_rows):
            raise InvariantError("more rows are reserved than are free")


def num_rows_of(request: Request) -> int:
    """Return how many rows a sequence takes: its own, and those of the sequences that it will open."""
    group = request.group
    return 1 if group is None or group.opened else group.num_sequences
