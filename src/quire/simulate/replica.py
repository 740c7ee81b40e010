"""Replica: one simulated engine, with its own clock.

    SimulatedEngine   the protocol of a simulated engine: add a request, run a step, report the memory
    ScheduledEngine   the counters of any engine on the product's scheduler, with any executor
    PagedEngine       the product: EngineCore, Scheduler and KVCacheManager, on a SimExecutor and a ManualClock

The engines that quire is compared with (baselines/) are `SimulatedEngine`s too, driven, measured and checked by the
same code.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import InvariantError
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import Request
from quire.core.step import StepPlan
from quire.core.validate import RequestLimits
from quire.engine.core import EngineCore
from quire.engine.records.step_log import StepLogWriter
from quire.memory.cache_journal import CacheNews
from quire.memory.ledger import MemoryLedger
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_sequence_tokens
from quire.scheduler.commit import StepOutcome
from quire.scheduler.scheduler import Scheduler
from quire.simulate.cost.base import StepCost
from quire.simulate.cost.linear import LinearCost
from quire.simulate.disk import SimDisk
from quire.simulate.executor import NO_PLAN, Outputs, SimExecutor
from quire.simulate.holders import holders_of

VOCAB_SIZE = 1 << 20
"""More than any model has, so that the requests of every log are allowed. Drawn tokens are below 65,536."""


class SimulatedEngine(Protocol):
    """An engine under simulation."""

    clock: ManualClock

    @property
    def num_running(self) -> int:
        """The number of running sequences."""
        ...

    @property
    def num_waiting(self) -> int:
        """The number of waiting sequences."""
        ...

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions."""
        ...

    @property
    def num_disk_tokens(self) -> int:
        """Prompt tokens that were loaded from a disk."""
        ...

    @property
    def num_host_tokens(self) -> int:
        """Prompt tokens that were copied from the host."""
        ...

    @property
    def plan(self) -> StepPlan:
        """The plan of the last step."""
        ...

    def add(self, request: Request) -> None:
        """Add a request; raises `InvalidRequestError` if it can never be served. Mutates."""
        ...

    def step(self) -> StepOutcome | None:
        """Run a step, which moves the clock; None: there is nothing to do. Mutates."""
        ...

    def ledger(self) -> MemoryLedger:
        """Return the ledger of the memory. Does not mutate."""
        ...

    def holders(self) -> array[int]:
        """Return the holder of each block, see `holders`. Does not mutate; O(blocks)."""
        ...

    def survey(self) -> None:
        """Report the prefix cache from now on, first its present blocks. Mutates."""
        ...

    def take_cache_news(self) -> CacheNews | None:
        """Return the changes of the prefix cache since the last report; None: nothing changed. Mutates."""
        ...

    def check(self) -> None:
        """Raise `InvariantError` unless the state is consistent, and no memory is held once all requests have ended."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The parts of a simulated engine: the product's own settings, and a cost model.

    `acceptance`: the probability that a guess is right, with speculation. `draft_cost`: the cost model of the draft
    model, if there is one. `disk_bandwidth`: bytes per second of the disk, if there is one.
    """

    spec: KVCacheSpec
    memory: MemoryConfig
    scheduler: SchedulerConfig
    cost: StepCost = field(default_factory=LinearCost)
    acceptance: float = 0.0
    draft_cost: StepCost | None = None
    disk_bandwidth: float = 2e9

    def limits(self) -> RequestLimits:
        """Return the limits of requests."""
        longest = max_sequence_tokens(self.memory.num_blocks, self.spec)
        return RequestLimits(VOCAB_SIZE, self.scheduler.max_model_len, longest, self.scheduler.max_num_seqs)


class ScheduledEngine:
    """The counters of an engine whose steps the product's scheduler plans, from the creation of this object on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.clock = ManualClock()
        self._scheduler = scheduler
        self._num_preempted_before = scheduler.num_preemptions

    @property
    def num_running(self) -> int:
        """The number of sequences with a row."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """The number of sequences without a row."""
        return self._scheduler.num_waiting

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions."""
        return self._scheduler.num_preemptions - self._num_preempted_before

    @property
    def num_disk_tokens(self) -> int:
        """Prompt tokens that were loaded from a disk."""
        return self._scheduler.memory.disk.num_hit_tokens

    @property
    def num_host_tokens(self) -> int:
        """Prompt tokens that were copied from the host."""
        return self._scheduler.memory.host.num_hit_tokens

    def survey(self) -> None:
        """Report the prefix cache from now on. Mutates."""
        self._scheduler.memory.survey()

    def take_cache_news(self) -> CacheNews | None:
        """Return the changes of the prefix cache since the last report. Mutates."""
        journal = self._scheduler.memory.cache_journal
        return None if journal is None else journal.take()

    def holders(self) -> array[int]:
        """Return the holder of each block. Does not mutate; O(blocks)."""
        return holders_of(self._scheduler.memory, self._scheduler.running)

    def check(self) -> None:
        """Raise `InvariantError` unless scheduler and memory are consistent. O(requests + blocks)."""
        self._scheduler.check()
        if not self._scheduler.requests and self._scheduler.memory.pool.num_in_use:
            raise InvariantError("no sequence is running, but blocks are held")


class PagedEngine(ScheduledEngine):
    """The product's engine under simulation. With a log, its run can be replayed to the byte.

    `outputs`: known answers, by request.
    """

    def __init__(self, setup: EngineSetup, *, log: BinaryIO | None = None, outputs: Outputs | None = None) -> None:
        super().__init__(Scheduler(setup.scheduler, KVCacheManager(setup.spec, setup.memory), setup.limits()))
        acceptance = setup.acceptance if setup.scheduler.max_drafts else None
        self._executor = SimExecutor(
            VOCAB_SIZE,
            self.clock,
            setup.cost,
            outputs=outputs,
            acceptance=acceptance,
            draft_cost=setup.draft_cost,
        )
        if setup.memory.num_disk_slots:
            self._executor.disk = SimDisk(setup.spec.bytes_per_block, setup.disk_bandwidth)
        writer = None if log is None else StepLogWriter(log, self.clock)
        self.core = EngineCore(self._scheduler, self._executor, self.clock, log=writer)

    @property
    def plan(self) -> StepPlan:
        """The plan of the last step."""
        return self._executor.plan

    def add(self, request: Request) -> None:
        """Add a request. Mutates."""
        self.core.add_request(request)

    def step(self) -> StepOutcome | None:
        """Run a step. Mutates."""
        self._executor.plan = NO_PLAN  # for a step that only waits for the disk
        return self.core.step()

    def ledger(self) -> MemoryLedger:
        """Return the ledger of the memory. Does not mutate; O(running)."""
        return self._scheduler.memory.ledger()
