"""Preemption: a running request goes back to the queue.

By **recompute**: the blocks are freed, and the tokens known so far are computed again when the request resumes; full
blocks stay cached, and are often hit again. By **swap**: the blocks move to the host and back. Two rates decide which
is cheaper, and if the host tier is full, the request is recomputed, which always works. Beams are preempted together,
by recompute, and their search starts again from the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.core.config import SchedulerConfig
from quire.core.request import Request, RequestStatus
from quire.memory.manager import KVCacheManager
from quire.scheduler.commit import StepCommitter
from quire.scheduler.groups import close_group, is_beam, moving_together
from quire.scheduler.journal import RequestJournal
from quire.scheduler.policy import WaitingQueue
from quire.scheduler.running import RunningSet


class Preemption:
    """Takes rows and memory from requests."""

    def __init__(
        self,
        memory: KVCacheManager,
        config: SchedulerConfig,
        committer: StepCommitter,
        running: RunningSet,
        waiting: WaitingQueue,
    ) -> None:
        self._memory = memory
        self._config = config
        self._committer = committer
        self._running = running
        self._waiting = waiting
        self.num_preemptions = 0
        self.journal: RequestJournal | None = None

    def preempt(self, victim: Request) -> None:
        """Preempt a running request in favour of those ahead. Mutates."""
        num_computed = victim.num_planned  # including tokens that the steps in flight compute in vain
        waiting = self._go_back(victim, self._give_up_memory)
        if self.journal is not None:
            self.journal.note_preempted(waiting, num_computed)
        self.num_preemptions += 1

    def set_back(self, requests: Sequence[Request]) -> None:
        """Preempt the running ones of the requests, by recompute, even if no request needs their memory. Mutates."""
        for request in requests:
            if request.row >= 0:  # preempting a beam preempts the other beams of its search
                self._go_back(request, self.forget)

    def forget(self, request: Request) -> None:
        """Free the request's memory, for recompute, even if swapping would be cheaper. Mutates."""
        self._memory.free(request)
        request.forget_progress()
        request.become(RequestStatus.PREEMPTED)

    def _go_back(self, victim: Request, give_up_memory: Callable[[Request], None]) -> Request:
        """Take the rows and memory of the victim and of its other beams; return the request that waits now."""
        beams = moving_together(victim)
        num_late_results = max(self._committer.disturb(beam) for beam in beams)
        for beam in beams:
            self._running.leave(beam)
        if is_beam(victim):
            victim = close_group(beams, self._memory)
            self.forget(victim)
        else:
            give_up_memory(victim)
        victim.num_late_results = num_late_results
        victim.num_preemptions += 1
        self._waiting.add(victim)
        if self.journal is not None:
            self.journal.note_waiting(victim)
        return victim

    def _give_up_memory(self, request: Request) -> None:
        """Swap the request out, or free its memory for recompute."""
        if self._prefers_swap(request) and self._memory.swap_out(request):
            request.become(RequestStatus.SWAPPED)
            return
        self.forget(request)

    def _prefers_swap(self, request: Request) -> bool:
        """Return whether swapping the request out and in takes less time than computing it again."""
        if request.pooling is not None:
            return False  # its row holds a sum over computed tokens, which starts again with a new row
        if self._config.preemption != "auto":
            return self._config.preemption == "swap"
        num_blocks = self._memory.memories[request].num_held
        swap_s = 2 * num_blocks * self._memory.spec.bytes_per_block / self._config.swap_bytes_per_s
        return swap_s < request.num_planned / self._config.recompute_tokens_per_s
