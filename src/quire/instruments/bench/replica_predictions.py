"""Predictions: a simulation of two engines behind a server, compared with measurements.

    closed loops of drawn requests ──► step logs of both engines ──► FittedCost ──┐
    a workload ──┬──► the server: HTTP, router, two engines ──► measured          │
                 └──► Simulation: the same router, two PagedEngines ◄─────────────┘ ──► predicted

The simulated engines get the settings in the step logs. Steps are recorded before and after the workload, because the
speed of a machine varies over time, and while both engines compute, as under the workload. The workload's own steps are
in the logs, too, but the fit does not use them.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count, islice
from pathlib import Path
from typing import Final

from quire.core.errors import ExecutionError
from quire.engine.commands import Add
from quire.engine.records.step_log import replayed
from quire.instruments.bench.load_run import LoadResult, Target, run_closed, run_open
from quire.instruments.bench.offered_load import DrawnShape, drawn_requests
from quire.instruments.bench.workload_file import Workload, WorkloadRequest
from quire.reporting.report import Goal, Section, cell
from quire.reporting.samples import percentile, summarize
from quire.routing.router import LEAST_WORK, Router
from quire.simulate.cost.features import StepFeatures
from quire.simulate.cost.fitted import FittedCost, RecordedStep
from quire.simulate.cost.unsteady import UnsteadyCost
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.simulation import Simulation
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.offered import OfferedRequest, OpenLoop

USERS: Final = (2, 6, 16, 48)
LOAD: Final = 0.7
MOST_ERROR: Final = 0.10
NAMES: Final = ("output tokens a second", "first token, p50, s", "first token, p95, s", "prompt tokens computed")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run that users notice, and the computed prompt tokens."""

    tokens_per_s: float
    first_p50_s: float
    first_p95_s: float
    computed_tokens: float

    @classmethod
    def measured(cls, result: LoadResult) -> Figures:
        """Return the figures of requests to a real server; raises `ExecutionError` if one has failed."""
        outcomes = result.outcomes
        result.require_done()
        first_s = [outcome.first_s for outcome in outcomes]
        return cls(
            sum(outcome.num_output_tokens for outcome in outcomes) / (result.wall_s - outcomes[0].due_s),
            statistics.median(first_s),
            percentile(first_s, 0.95),
            sum(outcome.num_prompt_tokens - outcome.num_cached_tokens for outcome in outcomes),
        )

    @classmethod
    def predicted(cls, setups: Sequence[EngineSetup], requests: Sequence[OfferedRequest]) -> Figures:
        """Return the figures of a simulation with one engine per setup behind the product's router."""
        memory = setups[0].memory
        router = Router(setups[0].spec.block_size, memory.hash_key, LEAST_WORK)
        result = Simulation([PagedEngine(setup) for setup in setups], OpenLoop(requests), router=router).run()
        first_s, computed = result.latencies["ttft_s"], result.prompt_tokens - result.hit_tokens
        return cls(result.output_tokens_per_s, first_s.p50, first_s.p95, computed)


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of the workload: its requests, when they were due, and the measured figures."""

    requests: Sequence[WorkloadRequest]
    arrivals: Sequence[float]
    figures: Figures

    def offered(self) -> list[OfferedRequest]:
        """Return the same requests for a simulation."""
        return [
            OfferedRequest(str(number), due_s, array("i", each.prompt_token_ids), each.max_tokens, each.n)
            for number, (due_s, each) in enumerate(zip(self.arrivals, self.requests, strict=True))
        ]


@dataclass(slots=True)
class ServedWorkload:
    """Serves a workload all at once and with arrivals over time, and records steps before and after. Mutable."""

    target: Target
    workload: Workload
    vocab_size: int
    turns: dict[str, list[Turn]] = field(default_factory=lambda: {"at once": [], "as they come": []})
    windows: list[tuple[float, float]] = field(default_factory=list)
    """When steps were recorded, by the clock of the step logs."""

    def record(self, duration_s: float) -> None:
        """Send requests with the workload's mean lengths, evenly spread. Mutates."""
        began_s, requests = time.monotonic(), len(self.workload.requests)
        lengths = self.workload.num_prompt_tokens // requests, self.workload.num_output_tokens // requests
        for users in USERS:
            drawn = drawn_requests(DrawnShape(*lengths, spread=1.0), self.vocab_size, seed=users + len(self.windows))
            run_closed(self.target, drawn, users, duration_s / len(USERS), float("inf"))
        self.windows.append((began_s, time.monotonic()))

    def serve(self, number: int) -> None:
        """Serve the workload once in each manner, each time with other tokens, so that none is cached. Mutates."""
        for name in self.turns:
            shift = 2 * number + 1 + (name != "at once")
            requests = self.workload.shifted(shift, self.vocab_size).requests
            arrivals = [0.0] * len(requests)
            if name != "at once":
                tokens_per_s = self.turns["at once"][0].figures.tokens_per_s
                rate = LOAD * tokens_per_s * len(requests) / self.workload.num_output_tokens
                arrivals = list(islice(Arrivals(rate).times(number), len(requests)))
            result = run_open(self.target, iter(requests), arrivals, 0.0, float("inf"))
            self.turns[name].append(Turn(requests, arrivals, Figures.measured(result)))

    def compared(self, logs: Sequence[Path], seed: int = 0) -> Section:
        """Simulate the same requests with step times from the logs, and return both results."""
        recorded = [read_log(path, self.windows) for path in logs]
        steps = [step for each in recorded for step in each[1]]
        cost = FittedCost.fit(steps)
        ratios = cost.ratios(steps)

        def setups(number: int) -> list[EngineSetup]:
            """Return the engines of a run; their steps vary from run to run."""
            seeds = count(seed + number * len(recorded))
            return [replace(setup, cost=UnsteadyCost(cost, ratios, next(seeds))) for setup, _ in recorded]

        rows, goals, samples = [], list[Goal](), dict[str, object]()
        for manner, turns in self.turns.items():
            measured = [turn.figures for turn in turns]
            predicted = [Figures.predicted(setups(number), turn.offered()) for number, turn in enumerate(turns)]
            samples[manner] = {"measured": list(map(asdict, measured)), "predicted": list(map(asdict, predicted))}
            for name, each in zip(NAMES, fields(Figures), strict=True):
                pair = [[float(getattr(run, each.name)) for run in runs] for runs in (measured, predicted)]
                ratio = summarize([theirs / ours for ours, theirs in zip(*pair, strict=True)])
                rows.append((manner, name, *(cell(summarize(runs)) for runs in pair), cell(ratio, "×")))
                goals.append(Goal(f"{manner}: {name}, predicted wrong by", abs(ratio.median - 1), MOST_ERROR))
        num_turns = len(self.turns["at once"])
        text = (
            f"{len(self.workload.requests)} requests of {self.workload.name} over HTTP on two engines with a thread "
            f"each, at once and as they come (Poisson, {LOAD:.0%} of what was served at once), and the same requests "
            f"in a simulation. Its step times are fitted to {len(steps):,} steps of {USERS[0]} to {USERS[-1]} users "
            f"with other requests, from the step logs of the engines. Median of {num_turns} (min–max)."
        )
        samples["weights"] = list(cost.weights)
        return Section("Predicted", text, ("requests", "what", "measured", "predicted", "ratio"), rows, samples, goals)


def read_log(path: Path, windows: Sequence[tuple[float, float]]) -> tuple[EngineSetup, list[RecordedStep]]:
    """Return the settings of an engine from its step log, and its steps within windows of its clock."""
    plans, steps, since_s, setup = deque[StepFeatures](), list[RecordedStep](), 0.0, None
    with path.open("rb") as file:
        for record in replayed(file):
            if setup is None:
                memory = record.scheduler.memory
                setup = EngineSetup(memory.spec, memory.config, record.scheduler.config)
            if isinstance(record.command, Add) and len(record.scheduler.requests) == 1:
                since_s = record.at_s  # the engine was idle
            elif record.plan is not None:
                plans.append(StepFeatures.of(record.plan))
            elif record.outcome is not None:
                features, seconds, since_s = plans.popleft(), record.at_s - since_s, record.at_s
                if seconds > 0 and any(begin_s <= since_s <= end_s for begin_s, end_s in windows):
                    steps.append(RecordedStep(features, seconds))
    if setup is None:
        raise ExecutionError(f"an engine has served nothing: {path} is empty")
    return setup, steps
