"""SimDisk: the disk of a simulated engine. It stores no bytes; each ticket takes the time of its bytes.

    loads before stores, one at a time:   ├ load ┤├ load ┤├── store ──┤        done when the clock reaches its end

It serves the transfers in the plans of the product's memory manager (`quire.core.transfers`).
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final, NamedTuple

from quire.core.transfers import TransferOutcome, Transfers

ACCESS_S: Final = 0.0001
"""The time per block besides its bytes: a system call, and an access of an SSD."""
WAIT_S: Final = 0.02
"""The longest time that the worker waits in a plan that computes nothing."""


class _Asked(NamedTuple):
    ticket: int
    asked_s: float
    deadline_s: float


class SimDisk:
    """A disk with its pending loads and stores. `bandwidth` is in bytes per second, for both."""

    def __init__(self, bytes_per_block: int, bandwidth: float) -> None:
        self._block_s = ACCESS_S + bytes_per_block / bandwidth
        self._loads: deque[_Asked] = deque()
        self._stores: deque[_Asked] = deque()
        self._free_s = 0.0

    def ask(self, transfers: Transfers, now_s: float) -> None:
        """Start the transfers of a plan. Mutates."""
        dropped = set(transfers.drops)
        if dropped:
            self._loads = deque(each for each in self._loads if each.ticket not in dropped)
        deadline_s = now_s + transfers.patience_us / 1e6
        self._loads.extend(_Asked(load.ticket, now_s, deadline_s) for load in transfers.loads)
        self._stores.extend(_Asked(store.ticket, now_s, deadline_s) for store in transfers.stores)

    def waits_s(self, now_s: float) -> float:
        """Return how long a plan that computes nothing waits: until the first load ends, up to a limit."""
        if not self._loads:
            return 0.0
        return min(max(self._end_s(self._loads[0]) - now_s, 0.0), WAIT_S)

    def collect(self, now_s: float) -> TransferOutcome:
        """Return the tickets that have ended. Mutates."""
        done, num_loaded = array("i"), 0
        while (queue := self._loads or self._stores) and self._end_s(queue[0]) <= now_s:
            num_loaded += queue is self._loads
            self._free_s = self._end_s(queue[0])
            done.append(queue.popleft().ticket)
        late = [each.ticket for each in self._loads if each.deadline_s < now_s]
        self._loads = deque(each for each in self._loads if each.deadline_s >= now_s)
        return TransferOutcome(done, dict.fromkeys(late, "late"), round(1e6 * self._block_s * num_loaded))

    def _end_s(self, asked: _Asked) -> float:
        return max(self._free_s, asked.asked_s) + self._block_s
