"""RecordedRun: figures about the requests and the memory in a step log.

    step log ──► replayed ──► RunReader.note ──► RecordedRun
                 scheduler        │   RequestJournal: admitted, preempted, ended
                 and memory ◄─────┘   MemoryLedger, Timeline: use of the memory

The product's scheduler and memory manager replay the log, and the reader inspects their state after each record: it
does not interpret recorded decisions, because they are made again. Times are those of the records, by the engine's
clock. A token counts as arrived with the result of its step; the network's delay is not in the log. The reader keeps
running requests, histograms and a timeline of fixed length, so a log can have any length.

A step lasts from the end of the previous step, or from when the engine got work, to its own end: the time between two
steps is included.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from quire.core.request import Request, RequestStatus
from quire.core.step import StepPlan
from quire.engine.commands import Add
from quire.engine.records.step_log import LOST, OUT_OF_MEMORY, Replayed
from quire.memory.sequence import MissReason
from quire.scheduler.commit import StepOutcome
from quire.scheduler.journal import EventKind, RequestEvent
from quire.scheduler.scheduler import Scheduler
from quire.simulate.cost.features import StepFeatures
from quire.simulate.cost.fitted import FittedCost, RecordedStep
from quire.simulate.histogram import Histogram
from quire.simulate.meter import Latencies
from quire.simulate.timeline import Timeline, TimelinePoint, mean_over_time

FIRST_INTERVAL_S: Final = 1e-3
"""The first interval between points of the timeline; it grows with the log, and some logs last one second."""

MOST_STEPS: Final = 1 << 14
"""The number of steps, at the end of a log, to which step times are fitted."""


@dataclass(slots=True)
class TenantFigures:
    """The requests of one tenant, and how they were served. A block that several of them share counts once.

    `block_seconds` are summed over the time of steps: divided by `RecordedRun.busy_s` they give the mean.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    most_blocks: int = 0
    block_seconds: float = 0.0
    wait_s: Histogram = field(default_factory=Histogram)

    @property
    def hit_rate(self) -> float:
        """The share of the tenant's prompt tokens that the cache served."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class RecordedRun:
    """The figures of a log, which a `RunReader` fills in.

    `wait_s`: from arrival to the first step. `num_steps_without_rows`: steps in which a request waited because
    `max_num_seqs` were running; `num_steps_without_room`: steps in which one waited although rows were free, for blocks
    or for a turn in the step. `most_lost_blocks`: the most blocks missing at one time from sequences that were
    preempted by recompute and had not resumed; beams, which never swap, are left out. `torn`: why the log could not be
    read to its end.
    """

    scheduler: Scheduler
    num_requests: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_records: int = 0
    num_plans: int = 0
    num_lost_steps: int = 0
    num_swapped: int = 0
    recomputed_tokens: int = 0
    most_used_blocks: int = 0
    most_lost_blocks: int = 0
    most_running: int = 0
    most_waiting: int = 0
    num_steps_without_rows: int = 0
    num_steps_without_room: int = 0
    duration_s: float = 0.0
    busy_s: float = 0.0
    torn: str = ""
    wait_s: Histogram = field(default_factory=Histogram)
    latencies: Latencies = field(default_factory=Latencies)
    timeline: Timeline = field(default_factory=lambda: Timeline(FIRST_INTERVAL_S))
    missed_requests: Counter[MissReason] = field(default_factory=Counter)
    missed_tokens: Counter[MissReason] = field(default_factory=Counter)
    tenants: dict[str, TenantFigures] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        """Return the mean of a count in the timeline, weighted by the time of the steps."""
        return mean_over_time(self.timeline.points, attrgetter(name))

    def most(self, name: str) -> float:
        """Return the largest value of a count in the timeline."""
        return max((getattr(point, name) for point in self.timeline.points), default=0.0)

    @property
    def waste(self) -> float:
        """The share of slots in used blocks that were neither filled nor reserved, averaged over time."""
        used_slots = self.mean("used_blocks") * self.scheduler.memory.spec.block_size
        return self.mean("fragmented_slots") / used_slots if used_slots else 0.0


@dataclass(slots=True)
class _Track:
    """A sequence that has not ended."""

    due_s: float
    is_admitted: bool = False
    first_s: float | None = None
    last_s: float = 0.0
    num_output: int = 0
    num_computed: int = 0
    num_lost_blocks: int = 0


class RunReader:
    """Reads the records of one log, in order, into a `RecordedRun`."""

    def __init__(self, first: Replayed) -> None:
        self.run = RecordedRun(first.scheduler)
        self._scheduler = first.scheduler
        self._journal = first.scheduler.watch()
        self._began_s = self._now_s = self._since_s = first.at_s
        self._tracks: dict[str, dict[int, _Track]] = {}
        self._plans: deque[StepPlan] = deque()
        self._steps: deque[RecordedStep] = deque(maxlen=MOST_STEPS)

    def note(self, record: Replayed) -> None:
        """Add a record that has just been replayed. Mutates; O(sequences in the step)."""
        self._now_s = record.at_s
        self.run.duration_s = self._now_s - self._began_s
        self.run.num_records += 1
        if isinstance(record.command, Add):
            self._note_added(next(reversed(self._scheduler.requests.values())))
        elif record.plan is not None:
            self._note_plan(record.plan)
        elif record.outcome is not None:
            self._note_outcome(self._plans.popleft(), record.outcome)
        elif record.kind in (LOST, OUT_OF_MEMORY):
            self.run.num_lost_steps += 1
            self._plans.clear()
            self._since_s = self._now_s
        events = self._journal.take_events()
        for event in events:
            self._note_event(event)
        for event in events:
            if event.request.request_id not in self._scheduler.requests:
                self._tracks.pop(event.request.request_id, None)
        self._journal.take_changed()

    def _note_added(self, request: Request) -> None:
        if len(self._scheduler.requests) == 1:
            self._since_s = self._now_s  # the engine was idle
        self._tracks[request.request_id] = {0: _Track(request.arrival_s)}
        self.run.num_requests += 1
        self._tenant(request).num_requests += 1

    def _note_plan(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        run, scheduler = self.run, self._scheduler
        num_running, num_waiting = len(scheduler.running), scheduler.num_waiting
        run.num_plans += 1
        run.most_used_blocks = max(run.most_used_blocks, scheduler.memory.pool.num_in_use)
        run.most_running = max(run.most_running, num_running)
        run.most_waiting = max(run.most_waiting, num_waiting)
        if num_waiting and num_running < scheduler.config.max_num_seqs:
            run.num_steps_without_room += 1
        elif num_waiting:
            run.num_steps_without_rows += 1

    def _note_outcome(self, plan: StepPlan, outcome: StepOutcome) -> None:
        seconds, self._since_s = self._now_s - self._since_s, self._now_s
        self.run.busy_s += seconds
        if seconds > 0:
            self._steps.append(RecordedStep(StepFeatures.of(plan), seconds))
        gaps: Counter[float] = Counter()  # by the time of the previous token
        for request in [*outcome.advanced, *outcome.opened]:
            self._note_progress(request, gaps)
        for since_s, count in gaps.items():
            self.run.latencies.itl_s.add(self._now_s - since_s, count)
        self.run.timeline.advance(self._now_s - self._began_s, seconds, self._look)

    def _note_progress(self, request: Request, gaps: Counter[float]) -> None:
        tracks = self._tracks.get(request.request_id, {})
        if not tracks or tracks[0].due_s != request.arrival_s:
            return  # it ended during the step; another request may have its id now
        track = tracks.get(request.branch)
        if track is None:  # its times start with those of the request's first sequence
            leader = tracks[0]
            track = tracks[request.branch] = _Track(leader.due_s, True, leader.first_s or self._now_s, self._now_s)
        if request.row >= 0:
            track.num_computed = request.num_computed
        num_new = request.num_output_tokens - track.num_output
        if num_new < 1:
            return
        self._tenant(request).output_tokens += num_new
        if track.first_s is None:
            track.first_s = self._now_s
            self.run.latencies.ttft_s.add(self._now_s - track.due_s)
        elif track.num_output:
            gaps[track.last_s] += 1
        track.last_s, track.num_output = self._now_s, request.num_output_tokens

    def _note_event(self, event: RequestEvent) -> None:
        run, request = self.run, event.request
        track = self._tracks.get(request.request_id, {}).get(request.branch)
        if track is None:
            return
        if event.kind is not EventKind.PREEMPTED:
            track.num_lost_blocks = 0
        if event.kind is EventKind.ADMITTED and track.is_admitted:
            run.recomputed_tokens += max(0, track.num_computed - request.num_computed)
        elif event.kind is EventKind.ADMITTED:
            track.is_admitted = True
            self._note_first_step(request, self._now_s - track.due_s)
        elif event.kind is EventKind.PREEMPTED:
            run.num_swapped += request.status is RequestStatus.SWAPPED
            self._tenant(request).num_preemptions += 1
            track.num_computed = event.number
            if request.status is not RequestStatus.SWAPPED and not request.sampling.beam_search:
                self._note_lost(track)
        elif event.kind is EventKind.FINISHED:
            self._note_finished(track, event.number)
        run.num_aborted += event.kind is EventKind.ABORTED
        run.num_failed += event.kind is EventKind.FAILED

    def _note_lost(self, track: _Track) -> None:
        track.num_lost_blocks = self._scheduler.memory.spec.num_blocks_for(track.num_computed)
        tracks = itertools.chain.from_iterable(known.values() for known in self._tracks.values())
        self.run.most_lost_blocks = max(self.run.most_lost_blocks, sum(each.num_lost_blocks for each in tracks))

    def _note_first_step(self, request: Request, wait_s: float) -> None:
        run, tenant = self.run, self._tenant(request)
        run.wait_s.add(wait_s)
        tenant.wait_s.add(wait_s)
        tenant.prompt_tokens += request.num_prompt_tokens
        tenant.hit_tokens += request.num_cached_tokens
        reason = self._scheduler.memory.miss_reason(request)
        run.missed_requests[reason] += 1
        run.missed_tokens[reason] += request.num_prompt_tokens - request.num_cached_tokens

    def _note_finished(self, track: _Track, num_tokens: int) -> None:
        latencies, latency_s = self.run.latencies, self._now_s - track.due_s
        if track.first_s is None or num_tokens < 1:
            return
        latencies.latency_s.add(latency_s)
        latencies.normalised_latency_s.add(latency_s / num_tokens)
        if num_tokens > 1:
            latencies.tpot_s.add((track.last_s - track.first_s) / (num_tokens - 1))

    def _tenant(self, request: Request) -> TenantFigures:
        return self.run.tenants.setdefault(request.scope.tenant, TenantFigures())

    def _look(self, at_s: float, busy_s: float) -> TimelinePoint:
        scheduler = self._scheduler
        held: dict[str, set[int]] = {}
        for request, memory in scheduler.memory.memories.items():
            for table in memory.tables:
                held.setdefault(request.scope.tenant, set()).update(table.held)
        for name, blocks in held.items():
            tenant = self.run.tenants[name]
            tenant.block_seconds += len(blocks) * busy_s
            tenant.most_blocks = max(tenant.most_blocks, len(blocks))
        counts = len(scheduler.running), scheduler.num_waiting, scheduler.num_preemptions
        return TimelinePoint.of(at_s, busy_s, counts, scheduler.memory.ledger())

    def cost(self) -> FittedCost:
        """Fit step times to the last steps of the log; raises `InvalidValueError` if there are too few."""
        return FittedCost.fit(self._steps)
