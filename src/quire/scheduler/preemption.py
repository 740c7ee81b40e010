"""Preemption: how a request yields its memory.

By **recompute**: the blocks are freed, and the tokens known so far are computed again when it resumes; full blocks stay
cached, so often much of it is hit. By **swap**: the blocks move to the host and back. Which is cheaper is a matter of
two rates, and a full host tier falls back to recompute, which always works.
"""

from __future__ import annotations

from quire.core.config import SchedulerConfig
from quire.core.request import Request, RequestStatus
from quire.memory.manager import KVCacheManager


class Preemption:
    """Takes the memory of a request away."""

    def __init__(self, memory: KVCacheManager, config: SchedulerConfig) -> None:
        self._memory = memory
        self._config = config

    def prefers_swap(self, request: Request) -> bool:
        """Whether swapping the request out and in costs less time than computing it again. Does not mutate."""
        if self._config.preemption != "auto":
            return self._config.preemption == "swap"
        blocks = self._memory.request_ledger(request).num_blocks
        swap_s = 2 * blocks * self._memory.spec.bytes_per_block / self._config.swap_bytes_per_s
        return swap_s < request.num_planned / self._config.recompute_tokens_per_s

    def preempt(self, request: Request) -> None:
        """Take the request's memory. It becomes swapped, or preempted with nothing computed. Mutates."""
        if self.prefers_swap(request) and self._memory.swap_out(request):
            request.become(RequestStatus.SWAPPED)
            return
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Take the request's memory by recompute, whatever would be cheaper. Mutates."""
        self._memory.free(request)
        request.forget_progress()
        request.become(RequestStatus.PREEMPTED)
