"""Simulation: requests come, replicas step, until all requests have ended.

    source ──► router ──► replica 0: engine, clock ──┐
      ▲                   replica 1: engine, clock ──┼──► meter, timeline ──► SimulationResult
      └────────────────── what ended ────────────────┘

Each replica has a clock of its own, and the one that is furthest behind does the next step. A request that is due
before the next step begins is handed over first; one that is due while a step is under way waits for its end, as it
would at an engine. Time passes only in steps and in waiting for requests, so idle hours cost nothing.

Every run checks itself at its end: each request that was taken has ended with the tokens that it asked for, what was
computed is what was needed less what was hit, no memory is held, and all ledgers add up.

The collector of cycles rests while a run lasts: what comes and goes makes none, and every search for them walks the
whole pool again, which took a fifth of the time.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quire.core.errors import InvalidRequestError, InvariantError
from quire.core.request import Request
from quire.engine.routing import RoundRobin, Router
from quire.memory.ledger import MemoryLedger
from quire.scheduler.commit import StepOutcome
from quire.simulate.meter import Latencies, Meter
from quire.simulate.replica import SimulatedEngine
from quire.simulate.result import ReplicaResult, SimulationResult
from quire.simulate.timeline import Timeline, TimelinePoint
from quire.simulate.workload.offered import OfferedRequest, RequestSource

Watcher = Callable[[int, SimulatedEngine], None]
"""Is told of each step: which replica has done it, and its engine."""


class Replica:
    """An engine and its record."""

    def __init__(self, engine: SimulatedEngine, latencies: Latencies) -> None:
        self.engine = engine
        self.meter = Meter(latencies)
        self.timeline = Timeline()
        self.num_requests = 0

    def take(self, request: Request, due_s: float) -> None:
        """Hand a request to the engine; an engine that was idle has waited until then. Mutates."""
        clock = self.engine.clock
        if not self.is_busy:
            clock.advance(max(0.0, due_s - clock.now()))
        self.engine.add(request)
        self.meter.took(request, due_s)
        self.num_requests += 1

    @property
    def is_busy(self) -> bool:
        """Whether something runs or waits."""
        return self.meter.num_under_way > 0

    def step(self) -> StepOutcome:
        """Do a step and note it. Mutates."""
        engine = self.engine
        began_s = engine.clock.now()
        outcome = engine.step()
        if outcome is None:
            raise InvariantError(f"{self.meter.num_under_way} sequences wait, and nothing is done for them")
        now_s = engine.clock.now()
        self.meter.note(engine.plan, outcome, began_s, now_s)
        self.timeline.advance(now_s, now_s - began_s, self._look)
        return outcome

    def _look(self, now_s: float, busy_s: float) -> TimelinePoint:
        engine = self.engine
        counts = engine.num_running, engine.num_waiting, engine.num_preemptions
        return TimelinePoint.of(now_s, busy_s, counts, engine.ledger())

    def result(self, ledger: MemoryLedger) -> ReplicaResult:
        """Return the result. Does not mutate."""
        meter = self.meter
        return ReplicaResult(
            self.num_requests,
            meter.num_steps,
            meter.busy_s,
            self.engine.num_preemptions,
            meter.num_copied_blocks,
            meter.num_moved_blocks,
            tuple(self.timeline.points),
            ledger,
            self.engine.num_disk_tokens,
            self.engine.num_host_tokens,
        )


@contextmanager
def _without_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Simulation:
    """One run. Make another for another run. Watchers are called after each step; they must not change the engine."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        source: RequestSource,
        *,
        router: Router | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self._latencies = Latencies()
        self._replicas = [Replica(engine, self._latencies) for engine in engines]
        self._source = source
        self._router = RoundRobin() if router is None else router
        self._watchers = watchers
        self._loads = [0] * len(self._replicas)
        self._num_refused = 0
        self._num_sequences = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._first_due_s: float | None = None

    def run(self) -> SimulationResult:
        """Run to the end of the source and of all requests, and check the result. Mutates."""
        with _without_collector():
            self._run()
        return self._result()

    def _run(self) -> None:
        source, replicas = self._source, self._replicas
        while True:
            due_s = source.next_due_s()
            busy = [index for index, replica in enumerate(replicas) if replica.is_busy]
            if not busy:
                if due_s is None:
                    break
                self._hand_over(source.take())
                continue
            behind = min(busy, key=lambda index: replicas[index].engine.clock.now())
            if due_s is not None and due_s <= replicas[behind].engine.clock.now():
                self._hand_over(source.take())
            else:
                self._step(behind)

    def _hand_over(self, offered: OfferedRequest) -> None:
        index = self._router.choose(offered.prompt, self._loads)
        if self._first_due_s is None:
            self._first_due_s = offered.due_s
        try:
            self._replicas[index].take(offered.request(), offered.due_s)
        except InvalidRequestError:
            self._num_refused += 1
            self._source.ended(offered.request_id, array("i"), offered.due_s)
            return
        self._loads[index] += offered.num_sequences
        self._num_sequences += offered.num_sequences
        self._prompt_tokens += len(offered.prompt)
        self._output_tokens += offered.num_sequences * offered.num_output_tokens

    def _step(self, index: int) -> None:
        replica = self._replicas[index]
        for request in replica.step().finished:
            self._loads[index] -= 1
            if not request.branch:
                output = request.tokens[request.num_prompt_tokens :]
                self._source.ended(request.request_id, output, replica.engine.clock.now())
        for watch in self._watchers:
            watch(index, replica.engine)

    def _result(self) -> SimulationResult:
        meters = [replica.meter for replica in self._replicas]
        ledgers = [replica.engine.ledger() for replica in self._replicas]
        hits = sum(ledger.hit_tokens + ledger.resumed_hit_tokens for ledger in ledgers)
        computed = sum(meter.num_computed_tokens for meter in meters)
        self._check(computed + hits - sum(meter.num_needed_tokens for meter in meters))
        busy_s = sum(meter.busy_s for meter in meters)
        end_s = max(replica.engine.clock.now() for replica in self._replicas)
        return SimulationResult(
            duration_s=end_s - (self._first_due_s or 0.0),
            num_requests=sum(replica.num_requests for replica in self._replicas) + self._num_refused,
            num_refused=self._num_refused,
            num_sequences=self._num_sequences,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            computed_tokens=computed,
            hit_tokens=sum(ledger.hit_tokens for ledger in ledgers),
            recomputed_tokens=sum(meter.num_recomputed_tokens for meter in meters),
            mean_running=sum(meter.sequence_seconds for meter in meters) / busy_s if busy_s else 0.0,
            latencies={name: getattr(self._latencies, name).distribution() for name in Latencies.NAMES},
            replicas=tuple(replica.result(ledger) for replica, ledger in zip(self._replicas, ledgers, strict=True)),
        )

    def _check(self, beyond: int) -> None:
        """Raise `InvariantError` unless what went in has come out; `beyond`: tokens computed or hit beyond those."""
        for replica in self._replicas:
            replica.engine.check()
            replica.engine.ledger().check()
        ended = sum(replica.meter.num_ended for replica in self._replicas)
        tokens = sum(replica.meter.num_output_tokens for replica in self._replicas)
        if ended != self._num_sequences or any(self._loads):
            raise InvariantError(f"{self._num_sequences} sequences went in, {ended} came out")
        if tokens != self._output_tokens:
            raise InvariantError(f"{self._output_tokens} tokens were asked for, {tokens} came out")
        preempted = any(replica.engine.num_preemptions for replica in self._replicas)
        num_drafts = sum(replica.meter.num_drafts for replica in self._replicas)
        if beyond < 0 or (beyond > num_drafts and not preempted):
            raise InvariantError(f"{beyond} tokens were computed or hit beyond what was needed")
