"""Simulation: requests arrive and replicas run steps, until all requests have ended.

    source ──► Front: router ──► replica 0: engine, clock ──┐
      ▲          ▲               replica 1: engine, clock ──┼──► meter, timeline ──► SimulationResult
      │          └────────────── cached blocks ─────────────┤
      └───────────────────────── ended requests ────────────┘

Each replica has its own clock, and the replica that is furthest behind runs the next step. A request that is due before
the next step begins is added first; one that is due during a step waits for its end, as in a real engine. Time passes
only in steps and in waiting for requests, so idle hours take no time to simulate. Replicas can fail (`faults`); their
requests then continue in others.

Every run checks itself at its end: each accepted request has ended with the requested number of tokens, the computed
tokens are the needed ones without the cache hits, plus the lost ones, no memory is held, and all ledgers add up.

Garbage collection is off during a run: a run creates no cycles, and each collection would scan the whole pool, which
took a fifth of the time.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from quire.core.errors import InvalidConfigError, InvalidRequestError, InvariantError
from quire.core.request import Request
from quire.routing.router import ROUND_ROBIN, Router
from quire.routing.scaling import Scaling
from quire.scheduler.commit import StepOutcome
from quire.simulate.faults import (
    BACK_S,
    DRAIN,
    NO_FAULTS,
    NOTICED_S,
    QUIET_S,
    SILENT,
    Agenda,
    FaultPlan,
    ReplicaFault,
    continued,
)
from quire.simulate.front import Front, Reports
from quire.simulate.meter import Latencies, Meter, Track
from quire.simulate.replica import SimulatedEngine
from quire.simulate.result import ReplicaResult, SimulationResult
from quire.simulate.scaled import LOOK_S, ScalingPlan
from quire.simulate.split import Links, Split
from quire.simulate.timeline import Timeline, TimelinePoint
from quire.simulate.workload.offered import OfferedRequest, RequestSource

Watcher = Callable[[int, SimulatedEngine], None]
"""Called after each step with the number of the replica, and its engine."""


class Replica:
    """An engine and its measurements. If the engine is lost, another one replaces it."""

    def __init__(self, engine: SimulatedEngine, latencies: Latencies) -> None:
        self.engine = engine
        self.meter = Meter(latencies)
        self.timeline = Timeline()
        self.num_requests = 0
        self.is_up = True  # runs steps
        self.is_draining = False
        self._before: list[SimulatedEngine] = []  # lost engines

    def take(
        self, request: Request, times_s: tuple[float, float], track: Track | None = None, *, leaves: bool = False
    ) -> None:
        """Add a request to the engine, and record when it was due; the clock of an idle engine moves to now.

        `times_s`: when it was due, and now. `leaves`: it continues in another replica. Mutates.
        """
        due_s, now_s = times_s
        clock = self.engine.clock
        if not self.is_busy:
            clock.advance(max(0.0, now_s - clock.now()))
        self.engine.add(request)
        self.meter.took(request, due_s, track, leaves=leaves)
        self.num_requests += 1

    @property
    def is_busy(self) -> bool:
        """Whether a sequence runs or waits."""
        return self.meter.num_under_way > 0

    def step(self) -> StepOutcome:
        """Run a step and record it. Mutates."""
        engine = self.engine
        began_s = engine.clock.now()
        outcome = engine.step()
        if outcome is None:
            raise InvariantError(f"{self.meter.num_under_way} sequences wait, but the engine has no step for them")
        now_s = engine.clock.now()
        self.meter.note(engine.plan, outcome, began_s, now_s)
        self.timeline.advance(now_s, now_s - began_s, self._look)
        return outcome

    def _look(self, now_s: float, busy_s: float) -> TimelinePoint:
        engine = self.engine
        counts = engine.num_running, engine.num_waiting, engine.num_preemptions
        return TimelinePoint.of(now_s, busy_s, counts, engine.ledger())

    def replace(self, engine: SimulatedEngine) -> dict[str, Track]:
        """Replace the engine by an empty one, which is not up yet; return the times of its requests. Mutates."""
        before = self.engine
        before.check()
        self._before.append(before)
        engine.clock.advance(before.clock.now())
        self.engine, self.is_up, self.is_draining = engine, False, False
        return self.meter.give_up()

    @property
    def engines(self) -> list[SimulatedEngine]:
        """The engine and the lost ones before it."""
        return [*self._before, self.engine]

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions."""
        return sum(engine.num_preemptions for engine in self.engines)

    def result(self) -> ReplicaResult:
        """Return the result; the ledger is that of the last engine. Does not mutate."""
        meter = self.meter
        return ReplicaResult(
            self.num_requests,
            meter.num_steps,
            meter.busy_s,
            self.num_preemptions,
            meter.num_copied_blocks,
            meter.num_moved_blocks,
            tuple(self.timeline.points),
            self.engine.ledger(),
            sum(engine.num_disk_tokens for engine in self.engines),
            sum(engine.num_host_tokens for engine in self.engines),
        )


@dataclass(slots=True)
class UnderWay:
    """A request that has arrived and not ended."""

    offered: OfferedRequest
    request: Request
    num_left: int  # sequences that have not ended
    index: int | None = None  # its replica; None: no replica takes requests
    track: Track | None = None  # its times from a lost replica


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
    """A single run. Watchers are called after each step; they must not change the engine.

    `router`: for several replicas; None: round robin. `plan`: the faults of replicas, the split between prompt and
    token replicas, or the scaling of their number.
    """

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        source: RequestSource,
        *,
        router: Router | None = None,
        watchers: Sequence[Watcher] = (),
        reports: Reports | None = None,
        plan: FaultPlan | Split | ScalingPlan = NO_FAULTS,
    ) -> None:
        plan.require_for(len(engines))
        split = plan if isinstance(plan, Split) else None
        scaled = plan if isinstance(plan, ScalingPlan) else None
        faults = plan if isinstance(plan, FaultPlan) else NO_FAULTS
        self._links = None if split is None else Links(split)
        self._prompt_replicas = range(0 if split is None else split.num_prompt_replicas)
        self._token_replicas = range(len(self._prompt_replicas), len(engines))
        self._latencies = Latencies()
        self._replicas = [Replica(engine, self._latencies) for engine in engines]
        self._source = source
        self._front: Front | None = None  # a single permanent replica needs none
        if len(engines) > 1 or faults.faults or scaled:
            self._front = Front(engines, router or Router(1, b"", ROUND_ROBIN), reports or Reports())
        self._make_engine = faults.make_engine if scaled is None else scaled.make_engine
        self._agenda = Agenda()
        self._scaled = scaled
        self._scaling = Scaling(1 if scaled is None else scaled.least, len(engines))
        self._num_changing = self._num_looks = self._num_seen = 0
        if scaled is not None and self._front is not None:
            for index in range(scaled.least, len(engines)):
                self._replicas[index].is_up = False
                self._front.lose(index, 0.0)
            self._agenda.put(0.0, self._look)
        for fault in faults.faults:
            self._agenda.put(fault.at_s, partial(self._begin_fault, fault))
        self._watchers = watchers
        self._under_way: dict[str, UnderWay] = {}
        self._num_requests = 0
        self._num_refused = 0
        self._num_moved = 0
        self._num_lost_tokens = 0  # computed or hit for requests that moved
        self._num_sequences = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._first_due_s: float | None = None

    def run(self) -> SimulationResult:
        """Run until the source and all requests have ended, check the result, and return it. Mutates."""
        with _without_collector():
            self._run()
        return self._result()

    def _run(self) -> None:
        source, replicas, agenda = self._source, self._replicas, self._agenda
        while True:
            due_s, event_s = source.next_due_s(), agenda.next_s()
            next_s = min((time_s for time_s in (due_s, event_s) if time_s is not None), default=None)
            busy = [index for index, replica in enumerate(replicas) if replica.is_up and replica.is_busy]
            if busy:
                behind = min(busy, key=lambda index: replicas[index].engine.clock.now())
                if next_s is None or next_s > replicas[behind].engine.clock.now():
                    self._step(behind)
                    continue
            elif next_s is None or (due_s is None and not self._under_way):
                break
            if event_s is not None and next_s == event_s:
                agenda.run_next()
            else:
                self._hand_over(source.take())

    def _hand_over(self, offered: OfferedRequest) -> None:
        if self._first_due_s is None:
            self._first_due_s = offered.due_s
        self._num_requests += 1
        entry = UnderWay(offered, offered.request(), offered.num_sequences)
        self._under_way[offered.request_id] = entry
        self._num_sequences += offered.num_sequences
        self._prompt_tokens += len(offered.prompt)
        self._output_tokens += offered.num_sequences * offered.num_output_tokens
        self._begin(entry, offered.due_s)

    def _begin(self, entry: UnderWay, now_s: float) -> None:
        """Send a request to its first replica: a prompt replica, if there are any, for one token. Mutates."""
        offered = entry.offered
        if self._front is None or self._links is None or offered.num_output_tokens == 1:
            self._place(entry, now_s, self._prompt_replicas or None)
            return
        if offered.num_sequences > 1:
            raise InvalidConfigError("prompt replicas", offered.request_id, "requests of one sequence")
        prompt = replace(offered, num_output_tokens=1).request()
        entry.index = self._front.choose(prompt, now_s, self._prompt_replicas)
        try:
            self._replicas[entry.index or 0].take(prompt, (offered.due_s, now_s), leaves=True)
        except InvalidRequestError:
            self._refuse(offered)

    def _hand_on(self, entry: UnderWay, prompt: Request, track: Track, now_s: float) -> None:
        """Send the keys and values of a computed prompt to a token replica. Mutates."""
        if self._front is None or self._links is None or entry.index is None:
            raise InvariantError("a request left its replica, but there is no other replica")
        self._front.request_ended(prompt.request_id, now_s)
        self._num_moved += 1
        self._num_lost_tokens += prompt.num_computed
        entry.track, entry.request = track, continued(prompt, entry.offered.request())
        arrives_s = self._links.send(entry.index, prompt, now_s)
        self._agenda.put(arrives_s, lambda at_s: self._place(entry, at_s, self._token_replicas))

    def _place(self, entry: UnderWay, now_s: float, among: range | None = None) -> None:
        """Send a request to a replica, if there is one; a failed one that is not noticed yet ignores it. Mutates."""
        entry.index = 0 if self._front is None else self._front.choose(entry.request, now_s, among)
        if entry.index is None or not self._replicas[entry.index].is_up:
            return
        try:
            self._replicas[entry.index].take(entry.request, (entry.offered.due_s, now_s), entry.track)
        except InvalidRequestError:
            self._refuse(entry.offered)

    def _refuse(self, offered: OfferedRequest) -> None:
        del self._under_way[offered.request_id]
        self._num_refused += 1
        self._num_sequences -= offered.num_sequences
        self._prompt_tokens -= len(offered.prompt)
        self._output_tokens -= offered.num_sequences * offered.num_output_tokens
        if self._front is not None:
            self._front.refused(offered.request_id)
        self._source.ended(offered.request_id, array("i"), offered.due_s)

    def _step(self, index: int) -> None:
        replica, front = self._replicas[index], self._front
        outcome = replica.step()
        now_s = replica.engine.clock.now()
        if front is not None:
            front.step_ended(index, outcome, now_s)
        for request in outcome.finished:
            entry = self._under_way[request.request_id]
            left = replica.meter.take_left(request.request_id)
            if left is not None:
                self._hand_on(entry, request, left, now_s)
                continue
            entry.num_left -= 1
            if not entry.num_left:
                del self._under_way[request.request_id]
                if front is not None:
                    front.request_ended(request.request_id, now_s)
            if not request.branch:
                output = request.tokens[request.num_prompt_tokens :]
                self._source.ended(request.request_id, output, now_s)
        for watch in self._watchers:
            watch(index, replica.engine)

    # ---- scaling ----------------------------------------------------------------------------------------------

    def _look(self, at_s: float) -> None:
        """Add or remove a replica if the product's rule requires it; check again a second later. Mutates."""
        if self._scaled is None or self._front is None:
            return
        ready = [index for index, each in enumerate(self._replicas) if each.is_up and not each.is_draining]
        num_engines = len(ready) + self._num_changing
        self._num_looks, self._num_seen = self._num_looks + 1, self._num_seen + num_engines
        change = self._scaling.look(at_s, self._front.load(num_engines, len(ready), at_s))
        self._num_changing += abs(change)
        if change > 0:
            index = next(index for index, each in enumerate(self._replicas) if not each.is_up)
            self._agenda.put(at_s + self._scaled.start_s, partial(self._return, index))
        elif change < 0:
            self._begin_fault(ReplicaFault(at_s, ready[-1], DRAIN), at_s)
        self._agenda.put(at_s + LOOK_S, self._look)

    # ---- faults -----------------------------------------------------------------------------------------------

    def _begin_fault(self, fault: ReplicaFault, at_s: float) -> None:
        replica, front = self._replicas[fault.index], self._front
        if front is None or not replica.is_up or replica.is_draining:
            return
        began_s = max(at_s, replica.engine.clock.now()) if replica.is_busy else at_s
        if fault.kind == DRAIN:
            replica.is_draining = True
            front.pause(fault.index)
        else:
            replica.is_up = False
        if fault.kind == SILENT:
            self._agenda.put(began_s + QUIET_S, lambda _: front.pause(fault.index))
        self._agenda.put(began_s + NOTICED_S[fault.kind], partial(self._lose, fault.index))

    def _lose(self, index: int, at_s: float) -> None:
        """Replace a lost replica's engine, and send its requests to others. Mutates."""
        replica, front = self._replicas[index], self._front
        if front is None or self._make_engine is None:
            raise InvariantError("a replica was lost, but there is no engine to replace it")
        now_s = max(at_s, replica.engine.clock.now()) if replica.is_busy else at_s
        front.lose(index, now_s)
        tracks = replica.replace(self._make_engine())
        if self._scaled is None:
            self._agenda.put(now_s + BACK_S, partial(self._return, index))
        else:
            self._num_changing -= 1
        for entry in [entry for entry in self._under_way.values() if entry.index == index]:
            self._num_moved += 1
            self._num_lost_tokens += entry.request.num_computed
            entry.track = tracks.get(entry.offered.request_id, entry.track)
            entry.request = continued(entry.request, entry.offered.request())
            self._place(entry, now_s)

    def _return(self, index: int, at_s: float) -> None:
        replica = self._replicas[index]
        replica.is_up = True
        self._num_changing -= self._scaled is not None
        if self._front is not None:
            self._front.add(index, replica.engine)
        for entry in [entry for entry in self._under_way.values() if entry.index is None]:
            self._place(entry, at_s)

    # ---- the result -------------------------------------------------------------------------------------------

    def _result(self) -> SimulationResult:
        meters = [replica.meter for replica in self._replicas]
        ledgers = [engine.ledger() for replica in self._replicas for engine in replica.engines]
        hits = sum(ledger.hit_tokens + ledger.resumed_hit_tokens for ledger in ledgers)
        computed = sum(meter.num_computed_tokens for meter in meters)
        where_prompts_are = self._replicas if self._links is None else self._replicas[: len(self._prompt_replicas)]
        received = sum(meter.num_received_tokens for meter in meters)
        self._check(computed + hits - sum(meter.num_needed_tokens for meter in meters))
        busy_s = sum(meter.busy_s for meter in meters)
        end_s = max(replica.engine.clock.now() for replica in self._replicas)
        return SimulationResult(
            duration_s=end_s - (self._first_due_s or 0.0),
            num_requests=self._num_requests,
            num_refused=self._num_refused,
            num_sequences=self._num_sequences,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            computed_tokens=computed - received,
            hit_tokens=sum(engine.ledger().hit_tokens for each in where_prompts_are for engine in each.engines),
            recomputed_tokens=sum(meter.num_recomputed_tokens for meter in meters),
            mean_running=sum(meter.sequence_seconds for meter in meters) / busy_s if busy_s else 0.0,
            latencies={name: getattr(self._latencies, name).distribution() for name in Latencies.NAMES},
            replicas=tuple(replica.result() for replica in self._replicas),
            num_moved_requests=self._num_moved,
            mean_replicas=self._num_seen / self._num_looks if self._num_looks else float(len(self._replicas)),
        )

    def _check(self, beyond: int) -> None:
        """Raise `InvariantError` unless requests and tokens add up; `beyond`: tokens computed or hit but not needed."""
        for replica in self._replicas:
            replica.engine.check()
            replica.engine.ledger().check()
        ended = sum(replica.meter.num_ended for replica in self._replicas)
        tokens = sum(replica.meter.num_output_tokens for replica in self._replicas)
        if ended != self._num_sequences or self._under_way:
            raise InvariantError(f"{self._num_sequences} sequences were added, but {ended} ended")
        if tokens != self._output_tokens:
            raise InvariantError(f"{self._output_tokens} tokens were requested, but {tokens} were generated")
        beyond -= self._num_lost_tokens
        preempted = any(replica.num_preemptions for replica in self._replicas)
        num_drafts = sum(replica.meter.num_drafts for replica in self._replicas)
        if beyond < 0 or (beyond > num_drafts and not preempted):
            raise InvariantError(f"{beyond} more tokens were computed or hit than needed")
