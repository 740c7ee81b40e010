"""RealEngine: a real engine under simulated traffic. Requests arrive on a virtual clock; steps take their real time.

    Simulation ── add, step ──► EngineCore ── Worker, the model ──► seconds measured ──► the clock moves by them

The clock skips idle time, so an hour of light traffic takes only as long as its steps. The same code computes the
figures of this engine and of a simulation. Tokenizing and text are left out.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import replace

from quire.core.request import Request
from quire.core.step import StepPlan, column
from quire.engine.commands import Clear
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.memory.ledger import MemoryLedger
from quire.scheduler.commit import StepOutcome
from quire.simulate.cost.features import StepFeatures
from quire.simulate.cost.fitted import RecordedStep
from quire.simulate.replica import EngineSetup, ScheduledEngine


class RealEngine(ScheduledEngine):
    """A `SimulatedEngine` that really computes. Starts with an empty cache; `steps` has the measurements."""

    def __init__(self, measured: MeasuredEngine) -> None:
        super().__init__(measured.core.scheduler)
        self.steps: list[RecordedStep] = []
        self._measured = measured
        self._last = StepPlan(-1, column(), column(), column(), column())
        measured.core.send(Clear())
        self._hits = self._scheduler.memory.ledger()

    def setup(self) -> EngineSetup:
        """Return the same engine for a simulation, without its cost model."""
        return EngineSetup(self._scheduler.memory.spec, self._scheduler.memory.config, self._scheduler.config)

    @property
    def plan(self) -> StepPlan:
        """The plan of the last step."""
        return self._last

    def add(self, request: Request) -> None:
        """Add a request, with its tokens mapped into the vocabulary. Mutates."""
        size = self._measured.vocab_size
        request.tokens = array("i", [token % size for token in request.tokens])
        request.sampling = replace(request.sampling, temperature=0.0, seed=0)
        self._measured.core.add_request(request)

    def step(self) -> StepOutcome | None:
        """Compute a step, and advance the clock by its duration. Mutates."""
        began = time.perf_counter()
        outcome = self._measured.core.step()
        seconds = time.perf_counter() - began
        plan = self._measured.watch.last_plan
        if outcome is None or plan is None:
            return None
        self.clock.advance(seconds)
        self._last = plan
        self.steps.append(RecordedStep(StepFeatures.of(plan), seconds))
        return outcome

    def ledger(self) -> MemoryLedger:
        """Return the memory ledger, with the cache hits of this run. Does not mutate."""
        ledger, before = self._scheduler.memory.ledger(), self._hits
        return replace(
            ledger,
            queried_tokens=ledger.queried_tokens - before.queried_tokens,
            hit_tokens=ledger.hit_tokens - before.hit_tokens,
            resumed_queried_tokens=ledger.resumed_queried_tokens - before.resumed_queried_tokens,
            resumed_hit_tokens=ledger.resumed_hit_tokens - before.resumed_hit_tokens,
        )
