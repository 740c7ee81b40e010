"""EngineCore: the loop. Schedule, submit, collect, update.

    schedule ──► submit ──► …computing… ──► collect ──► update
        └── submits up to max_steps_under_way plans before it waits for the first result

EngineCore connects a scheduler to an executor and a clock, and knows nothing about tokens, text or devices. With a
log, it records every request, plan and result, so that a run can be replayed to the byte (see
`quire.engine.records.step_log`).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

from quire.core.adapters import AdapterLoading
from quire.core.clock import Clock
from quire.core.errors import ExecutionError, ExecutorLostError
from quire.core.executor import Executor, ImageEncoding
from quire.core.request import FinishReason, Request
from quire.core.step import StepPlan
from quire.engine.commands import (
    Add,
    AnyCommand,
    AwaitImages,
    DropAdapter,
    LimitPrompts,
    LoadAdapter,
    Survey,
    Watch,
    carry_out,
)
from quire.engine.images.ahead import ImagesAhead
from quire.engine.records.live import LiveFrame, LiveJournal
from quire.engine.records.stats import EngineStats
from quire.engine.records.step_log import StepLogWriter
from quire.memory.cache_journal import CacheNews
from quire.scheduler.commit import StepOutcome
from quire.scheduler.pace import StepPace
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger("quire.engine")


@dataclass(frozen=True, slots=True)
class EngineExtras:
    """What only some engines have: adapters, an encoder of images, and the folder of their disk cache."""

    adapters: AdapterLoading | None = None
    images: ImageEncoding | None = None
    disk_store: str = ""


NO_EXTRAS: Final = EngineExtras()


class EngineCore:
    """Runs requests to their end, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        *,
        log: StepLogWriter | None = None,
        extras: EngineExtras = NO_EXTRAS,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._log = log
        self._adapters = extras.adapters
        self._images = None if extras.images is None else ImagesAhead(extras.images, scheduler, clock)
        self._disk_store = extras.disk_store
        self._to_drop: set[str] = set()  # adapters to free once no request uses them
        self._depth = scheduler.config.max_steps_under_way
        self._pace = StepPace.of(scheduler.config)
        self._under_way: deque[tuple[StepPlan, float]] = deque()  # with the time when each was submitted
        self._num_steps = 0  # steps with a result
        self._num_corrupted = 0  # requests that failed in a step that succeeded
        self._busy_s = 0.0
        self._began_s = clock.now()
        self._live: LiveJournal | None = None  # while a client watches
        executor.start()
        if log is not None:
            log.begin(scheduler)
        if self._pace is not None:
            self.send(LimitPrompts(self._pace.limit))

    def add_request(self, request: Request) -> None:
        """Add a request; raises `InvalidRequestError` if it can never be served. Mutates."""
        request.arrival_s = self._clock.now()
        self.scheduler.add(request)
        if self._log is not None:
            self._log.commanded(Add.of(request))
        if request.images and self._images is not None:
            self._images.add(request, self.send)

    def send(self, command: AnyCommand) -> None:
        """Carry out a command; raises `InvalidRequestError` for a request that can never be served. Mutates."""
        match command:
            case Add():
                self.add_request(command.to_request())
                return
            case Watch(every_s):
                self._watch(every_s is not None)
                return
            case Survey():
                self.scheduler.memory.survey()
                return
            case LoadAdapter() | DropAdapter():
                self._change_adapters(command)
            case AwaitImages():
                carry_out(command, self.scheduler)
            case _:
                carry_out(command, self.scheduler)
                if self._images is not None:
                    self._images.tend(self.send)
        if self._log is not None:
            self._log.commanded(command)
        self._tell_disk()

    def step(self) -> StepOutcome | None:
        """Run one step and return its outcome; None if there is nothing to do. Mutates.

        If the executor loses its steps, their requests are retried separately until the one at fault is found. That
        one ends with an error; the others lose no token. Raises `ExecutorLostError` if the executor cannot go on, or
        fails for every request.
        """
        began_s = self._clock.now()
        try:
            if self._images is not None:
                self._images.go_on(self.send)
            return self._step(self._clock.now())
        finally:
            self._busy_s += self._clock.now() - began_s

    def _step(self, began_s: float) -> StepOutcome | None:
        scheduler, log = self.scheduler, self._log
        while scheduler.num_steps_under_way < self._depth:
            plan = scheduler.schedule()
            if plan is None:
                if log is not None and scheduler.requests:
                    log.idled()
                break
            if log is not None:
                log.planned(plan)
            if plan.row_starts:
                self._note_starts(plan)
            self._under_way.append((plan, began_s))
            self._executor.submit(plan)
        self._stamp()
        if not scheduler.num_steps_under_way:
            return None if self._images is None or not self._images.are_awaited else StepOutcome([])
        try:
            result = self._executor.collect()
        except ExecutorLostError:
            raise
        except ExecutionError as error:
            return self._lose_steps(error)
        if log is not None:
            log.computed(result)
        self._num_steps += 1
        plan, submitted_s = self._under_way.popleft()
        if self._pace is not None and self._pace.note_result(plan, submitted_s, self._clock.now()):
            self.send(LimitPrompts(self._pace.limit))
        outcome = scheduler.update(result)
        if result.failures:
            ended = {each.request_id for each in outcome.finished if each.finish_reason is FinishReason.ERROR}
            self._num_corrupted += len(ended)
        self._tell_disk()
        if self._to_drop:
            self._drop_adapters()
        self._stamp()
        return outcome

    def _change_adapters(self, command: LoadAdapter | DropAdapter) -> None:
        if self._adapters is None:
            return
        if isinstance(command, LoadAdapter):
            self._to_drop.discard(command.digest)
            self._adapters.load(command.digest, command.folder)
        else:
            self._to_drop.add(command.digest)
            self._drop_adapters()

    def _drop_adapters(self) -> None:
        """Free the dropped adapters that no request uses. Mutates; O(requests)."""
        if self._adapters is None:
            return
        in_use = {request.scope.adapter for request in self.scheduler.requests.values()}
        for digest in self._to_drop - in_use:
            self._adapters.drop(digest)
        self._to_drop &= in_use

    def _tell_disk(self) -> None:
        """If nothing is left to compute, submit the pending transfers now: there might be no later step. Mutates."""
        scheduler = self.scheduler
        if scheduler.requests or scheduler.num_steps_under_way or not scheduler.memory.has_transfers:
            return
        plan = scheduler.schedule()
        if plan is None:
            return
        if self._log is not None:
            self._log.planned(plan)
        self._executor.submit(plan)
        try:
            result = self._executor.collect()
        except ExecutorLostError:
            raise
        except ExecutionError as error:
            self._lose_steps(error)
            return
        if self._log is not None:
            self._log.computed(result)
        scheduler.update(result)

    def _note_starts(self, plan: StepPlan) -> None:
        """Record how long requests waited that are in a step for the first time. Mutates."""
        now = self._clock.now()
        for start in plan.row_starts:
            request = self.scheduler.requests[start.request_id]
            if request.waited_s is None:
                request.waited_s = now - request.arrival_s

    def _stamp(self) -> None:
        if self._live is not None:
            self._live.stamp(self._clock.now())

    def _lose_steps(self, error: ExecutionError) -> StepOutcome:
        isolation = self.scheduler.isolation
        if self._log is not None:
            self._log.lost(error)
        self._under_way.clear()
        ended = self.scheduler.lose_steps(error)
        names = ", ".join(dict.fromkeys(each.request_id for each in ended)) or "none"
        logger.warning("%s; requests to retry separately: %d; ended: %s", error, isolation.num_suspects, names)
        if isolation.is_hopeless:
            raise ExecutorLostError(f"every request fails, even alone; the last error: {error}") from error
        return StepOutcome(advanced=ended, finished=ended)

    def run(self) -> list[Request]:
        """Step until there is nothing to do; return the requests in the order in which they ended. Mutates."""
        finished: list[Request] = []
        while (outcome := self.step()) is not None:
            finished += outcome.finished
        return finished

    def stats(self) -> EngineStats:
        """Return the engine's counters and its present load. Does not mutate; O(running), with a small constant.

        Call it between steps, in the thread that steps the engine.
        """
        scheduler, pool, isolation = self.scheduler, self.scheduler.memory.pool, self.scheduler.isolation
        queried_tokens, hit_tokens = scheduler.memory.num_looked_up
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_in_use,
            num_cached_blocks=pool.num_cached,
            num_suspects=isolation.num_suspects,
            max_step_tokens=isolation.max_step_tokens,
            prompt_limit=scheduler.prompt_limit or 0,
            queried_tokens_total=queried_tokens,
            hit_tokens_total=hit_tokens,
            evictions_total=pool.num_evictions,
            preemptions_total=scheduler.num_preemptions,
            steps_total=self._num_steps,
            failed_steps_total=isolation.num_failed_steps,
            memory_failures_total=isolation.num_memory_failures,
            culprits_total=isolation.num_culprits,
            corrupted_requests_total=self._num_corrupted,
            busy_s_total=self._busy_s,
            drafts_total=scheduler.drafts.num_verified,
            verified_guesses={name: tuple(counts.verified) for name, counts in scheduler.drafts.counts.items()},
            right_guesses={name: tuple(counts.right) for name, counts in scheduler.drafts.counts.items()},
            adapters={} if self._adapters is None else dict(self._adapters.states()),
            jobs=dict(scheduler.memory.jobs.figures()),
            disk_store=self._disk_store,
            **scheduler.memory.host.figures(),
            **scheduler.memory.disk.figures(),
        )

    # ---- events, for clients that watch ----------------------------------------------------------------------------

    def _watch(self, is_watched: bool) -> None:
        """Start or stop recording the events of blocks and requests; a start records the present state first."""
        if self._live is not None:
            self._live.close()
        self._live = LiveJournal(self.scheduler, self._began_s) if is_watched else None

    @property
    def has_news(self) -> bool:
        """Whether a client watches and has not received everything."""
        return self._live is not None and self._live.has_news

    def take_live(self) -> LiveFrame | None:
        """Return the events since the last call; None while no client watches. Mutates; O(changes + running).

        Call it between steps, in the thread that steps the engine.
        """
        return None if self._live is None else self._live.take(self._clock.now(), self.stats())

    @property
    def has_cache_news(self) -> bool:
        """Whether a router surveys the cache and has not received everything."""
        journal = self.scheduler.memory.cache_journal
        return journal is not None and journal.has_news

    def take_cache_news(self) -> CacheNews | None:
        """Return the blocks that became or ceased to be cache hits; None: nothing changed. Mutates; O(changes).

        Call it between steps, in the thread that steps the engine.
        """
        journal = self.scheduler.memory.cache_journal
        return None if journal is None else journal.take()

    def close(self) -> None:
        """Shut the executor down, and close the adapters and the log."""
        self._executor.shutdown()
        if self._adapters is not None:
            self._adapters.close()
        if self._log is not None:
            self._log.close()
