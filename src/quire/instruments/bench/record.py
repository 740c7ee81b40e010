"""`quire bench record`: measures the steps of an engine, fits a cost model to them, and tests its predictions.

    fitted on     closed loops of few and of many users, uniform lengths
    predicted     Poisson arrivals at a share of the fitted capacity, with another distribution of lengths

    ── record ── serve at 40 % ── serve at 70 % ── record ──► fit ──► simulate both

The same `Simulation` drives both engines: the real engine with measured step times, the simulated one with fitted step
times. So only the cost model differs, and the report compares the effects that users would notice. Steps are recorded
before and after the predicted traffic, because the speed of a machine varies over time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.instruments.bench.flags import add_model_options, add_seconds
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.real_engine import RealEngine
from quire.instruments.bench.shapes import measured_config
from quire.instruments.bench.throughput import describe_engine
from quire.reporting.report import Goal, Section
from quire.reporting.results import Tell, run_benchmark
from quire.simulate.cost.base import StepCost
from quire.simulate.cost.fitted import FittedCost, RecordedStep
from quire.simulate.cost.unsteady import UnsteadyCost
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.simulation import Simulation
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.closed_loop import ClosedLoop
from quire.simulate.workload.drawn import DrawnPrompts, drawn_requests
from quire.simulate.workload.lengths import LognormalLengths, UniformLengths
from quire.simulate.workload.offered import OpenLoop

BUSY = "output tokens a busy second"
USERS = (1, 3, 8, 24)
LOADS = (0.4, 0.7)
THROUGHPUT_ERROR, TTFT_ERROR = 0.10, 0.15
FIGURES = (
    ("first token, p50", "ttft_s", "p50"),
    ("first token, p95", "ttft_s", "p95"),
    ("between tokens, p50", "itl_s", "p50"),
    ("between tokens, p95", "itl_s", "p95"),
    ("latency, mean", "latency_s", "mean"),
)


DESCRIPTION = (
    "Record the steps of an engine under simulated traffic, fit a cost model to them for `quire simulate "
    "--steps`, and compare its predictions for other traffic with measurements. Latencies are in milliseconds."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_seconds(parser, "duration", 40.0, "seconds of traffic for the fit, and for the prediction at each load")
    parser.add_argument(
        "--load-seed", metavar="N", type=int, default=0, help="random seed of arrivals and prompts; default: 0"
    )
    parser.add_argument("--steps", metavar="FILE", help="write the recorded steps, one JSON object per line")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_config(options) as config, MeasuredEngine(config) as engine:
            engine.warm_up()
            seed = options.load_seed
            tell("recording steps")
            steps = record(engine, options.duration / 2, seed)
            traffics = []
            for load in LOADS:
                tell(f"serving a load of {load:.0%}")
                traffic = Traffic.at(load, engine, FittedCost.fit(steps), options.duration, seed + 1)
                traffics.append((traffic, traffic.measured(engine)))
            tell("recording steps again")
            steps += record(engine, options.duration / 2, seed + len(USERS) + 1)
            if options.steps:
                lines = "".join(step.as_json() + "\n" for step in steps)
                Path(options.steps).write_text(lines, encoding="utf-8")
            cost = FittedCost.fit(steps)
            yield describe_engine(engine)
            yield describe_fit(cost, steps)
            unsteady = UnsteadyCost(cost, cost.ratios(steps), seed)
            for traffic, measured in traffics:
                yield traffic.compared(measured, cost, traffic.simulated(unsteady))

    return run_benchmark(options, "Recorded steps", measure)


def record(engine: MeasuredEngine, duration_s: float, seed: int) -> list[RecordedStep]:
    """Return the steps of closed loops. Runs for about `duration_s`."""
    longest = engine.core.scheduler.config.max_model_len
    prompts = DrawnPrompts(UniformLengths((1, longest // 4), (1, longest // 8)), longest)
    steps: list[RecordedStep] = []
    for users in USERS:
        real = RealEngine(engine)
        Simulation([real], ClosedLoop(users, prompts, duration_s=duration_s / len(USERS), seed=seed + users)).run()
        steps += real.steps
    return steps


def describe_fit(cost: FittedCost, steps: Sequence[RecordedStep]) -> Section:
    """Return the fitted time of each part of a step, and the error on the fitted steps."""
    errors = [abs(cost.seconds_of(step.features) / step.seconds - 1) for step in steps]
    units = ("a step", "a token", "a token sampled after", "a token read", "a pair of attention", "a block moved")
    rows = [(name, f"{1e6 * weight:.4g} µs") for name, weight in zip(units, cost.weights, strict=True)]
    rows.append(("error of a step, median", f"{statistics.median(errors):.1%}"))
    text = f"Least squares over {len(steps):,} steps of closed loops with {', '.join(map(str, USERS))} users."
    samples: dict[str, object] = {"weights": list(cost.weights), "errors": errors}
    return Section("What a step takes", text, ("part", "fitted"), rows, samples)


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of traffic on the real engine, and its steps."""

    result: SimulationResult
    steps: Sequence[RecordedStep]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that the fit has not seen, for a real engine and a simulated one."""

    load: float
    rate: float
    prompts: DrawnPrompts
    setup: EngineSetup
    duration_s: float
    seed: int

    @classmethod
    def at(cls, load: float, engine: MeasuredEngine, cost: FittedCost, duration_s: float, seed: int) -> Traffic:
        """Return traffic at a share of the engine's capacity, by the cost model with an endless queue."""
        setup = replace(RealEngine(engine).setup(), cost=cost)
        longest = setup.scheduler.max_model_len
        prompts = DrawnPrompts(LognormalLengths("", longest / 12, longest / 16), longest)
        requests = drawn_requests(Arrivals(1e6), prompts, duration_s=1.0, seed=seed, limit=200)
        most = Simulation([PagedEngine(setup)], OpenLoop(requests)).run().requests_per_s
        return cls(load, load * most, prompts, setup, duration_s, seed)

    def _source(self) -> OpenLoop:
        return OpenLoop(drawn_requests(Arrivals(self.rate), self.prompts, duration_s=self.duration_s, seed=self.seed))

    def measured(self, engine: MeasuredEngine) -> Measured:
        """Serve the requests with the real engine."""
        real = RealEngine(engine)
        return Measured(Simulation([real], self._source()).run(), real.steps)

    def simulated(self, cost: StepCost) -> SimulationResult:
        """Return the result of simulating the requests with a cost model."""
        return Simulation([PagedEngine(replace(self.setup, cost=cost))], self._source()).run()

    def compared(self, measured: Measured, cost: FittedCost, simulated: SimulationResult) -> Section:
        """Return a comparison of the figures that users notice."""
        known_s = sum(step.seconds for step in measured.steps)
        fitted_s = sum(cost.seconds_of(step.features) for step in measured.steps)
        rows = [("seconds of the real one's steps", _show(known_s), _show(fitted_s), f"{fitted_s / known_s - 1:+.1%}")]
        errors = {}
        both = zip(_figures(measured.result), dict(_figures(simulated)).values(), strict=True)
        for (name, ours), theirs in both:
            errors[name] = theirs / ours - 1 if ours else 0.0
            rows.append((name, _show(ours), _show(theirs), f"{errors[name]:+.1%}"))
        lengths, load = self.prompts.longest, f"{self.load:.0%}"
        text = (
            f"{measured.result.num_requests:,} requests at {self.rate:.2f} a second ({load} of the fitted capacity), "
            f"Poisson, log-normal lengths with means {lengths / 12:.0f} and {lengths / 16:.0f}; the fit has not seen "
            f"them. The engine computed {measured.result.replicas[0].busy_s / measured.result.duration_s:.0%} "
            "of the time."
        )
        goals = [
            Goal(f"throughput foretold, {load}", abs(errors[BUSY]), THROUGHPUT_ERROR),
            Goal(f"p95 of first tokens foretold, {load}", abs(errors["first token, p95"]), TTFT_ERROR),
        ]
        samples: dict[str, object] = {
            "steps_s": [known_s, fitted_s],
            "measured": measured.result.as_json(),
            "simulated": simulated.as_json(),
        }
        return Section(f"Foretold at {load}", text, ("what", "measured", "simulated", "error"), rows, samples, goals)


def _figures(result: SimulationResult) -> Iterator[tuple[str, float]]:
    yield "output tokens a second", result.output_tokens_per_s
    yield BUSY, result.output_tokens / sum(replica.busy_s for replica in result.replicas)
    for name, kind, field in FIGURES:
        yield name, 1000 * float(getattr(result.latencies[kind], field))


def _show(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
