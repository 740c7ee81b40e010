"""`quire bench record`: measure the steps of an engine, fit a cost model to them, and see how well it foretells others.

    fitted on     closed loops of few and of many users, uniform lengths
    foretold      Poisson arrivals at a share of what the fit says that the engine serves, lengths of another kind

Both engines are driven by the same `Simulation`: the real one with the seconds that its steps took, the other with
those of the fit. So what differs is the cost model, and what users would notice of it is printed side by side.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from quire.cli.bench.measured_engine import MeasuredEngine
from quire.cli.bench.page import Tell, run_page
from quire.cli.bench.real_engine import RealEngine
from quire.cli.bench.report import Goal, Section
from quire.cli.bench.shapes import measured_config
from quire.cli.bench.throughput import describe_engine
from quire.simulate.cost.fitted import FittedCost, RecordedStep
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


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_config(options) as config, MeasuredEngine(config) as engine:
            engine.warm_up()
            tell("recording steps")
            steps, setup = record(engine, options.duration, options.load_seed)
            cost = FittedCost.fit(steps)
            if options.steps:
                lines = "".join(step.as_json() + "\n" for step in steps)
                Path(options.steps).write_text(lines, encoding="utf-8")
            yield describe_engine(engine)
            yield describe_fit(cost, steps)
            for load in LOADS:
                tell(f"foretelling a load of {load:.0%}")
                yield foretell(engine, setup, cost, load, options.duration, options.load_seed + 1)

    return run_page(options, "Recorded steps", measure)


def record(engine: MeasuredEngine, duration_s: float, seed: int) -> tuple[list[RecordedStep], EngineSetup]:
    """Return the steps of closed loops, and the engine as a simulation needs it. Runs for about `duration_s`."""
    longest = engine.core.scheduler.config.max_model_len
    prompts = DrawnPrompts(UniformLengths((1, longest // 4), (1, longest // 8)), longest)
    steps: list[RecordedStep] = []
    for users in USERS:
        real = RealEngine(engine)
        Simulation([real], ClosedLoop(users, prompts, duration_s=duration_s / len(USERS), seed=seed + users)).run()
        steps += real.steps
    return steps, real.setup()


def describe_fit(cost: FittedCost, steps: Sequence[RecordedStep]) -> Section:
    """Return what the fit says that each part of a step takes, and how far it is off on its own steps."""
    errors = [abs(cost.seconds_of(step.features) / step.seconds - 1) for step in steps]
    units = ("a step", "a token", "a token sampled after", "a token read", "a pair of attention", "a block moved")
    rows = [(name, f"{1e6 * weight:.4g} µs") for name, weight in zip(units, cost.weights, strict=True)]
    rows.append(("error of a step, median", f"{statistics.median(errors):.1%}"))
    text = f"Least squares over {len(steps):,} steps of closed loops with {', '.join(map(str, USERS))} users."
    samples: dict[str, object] = {"weights": list(cost.weights), "errors": errors}
    return Section("What a step takes", text, ("part", "fitted"), rows, samples)


def foretell(
    engine: MeasuredEngine, setup: EngineSetup, cost: FittedCost, load: float, duration_s: float, seed: int
) -> Section:
    """Serve requests that nothing was fitted to, for real and simulated, and compare what users notice."""
    setup = replace(setup, cost=cost)
    longest = setup.scheduler.max_model_len
    prompts = DrawnPrompts(LognormalLengths("", longest / 12, longest / 16), longest)
    rate = load * _most_served(setup, prompts, seed)

    def source() -> OpenLoop:
        return OpenLoop(drawn_requests(Arrivals(rate), prompts, duration_s=duration_s, seed=seed))

    real = RealEngine(engine)
    measured = Simulation([real], source()).run()
    simulated = Simulation([PagedEngine(setup)], source()).run()
    known_s, fitted_s = (sum(each) for each in zip(*_step_times(real.steps, cost), strict=True))
    rows = [("seconds of the real one's steps", _show(known_s), _show(fitted_s), f"{fitted_s / known_s - 1:+.1%}")]
    errors = {}
    for (name, ours), theirs in zip(_figures(measured), dict(_figures(simulated)).values(), strict=True):
        errors[name] = theirs / ours - 1 if ours else 0.0
        rows.append((name, _show(ours), _show(theirs), f"{errors[name]:+.1%}"))
    text = (
        f"{measured.num_requests:,} requests at {rate:.2f} a second ({load:.0%} of what the fit says is served), "
        f"Poisson, log-normal lengths with means {longest / 12:.0f} and {longest / 16:.0f}; none of them was fitted to."
    )
    goals = [
        Goal(f"throughput foretold, {load:.0%}", abs(errors[BUSY]), THROUGHPUT_ERROR),
        Goal(f"p95 of first tokens foretold, {load:.0%}", abs(errors["first token, p95"]), TTFT_ERROR),
    ]
    samples: dict[str, object] = {
        "steps_s": [known_s, fitted_s],
        "measured": measured.as_json(),
        "simulated": simulated.as_json(),
    }
    header = ("what", "measured", "simulated", "error")
    return Section(f"Foretold at {load:.0%}", text, header, rows, samples, goals)


def _step_times(steps: Sequence[RecordedStep], cost: FittedCost) -> Iterator[tuple[float, float]]:
    """Yield the seconds of each step, as measured and as the fit has them: the cost alone, without what queues make."""
    for step in steps:
        yield step.seconds, cost.seconds_of(step.features)


def _most_served(setup: EngineSetup, prompts: DrawnPrompts, seed: int) -> float:
    """Return how many requests a second the fit says are served where the queue never ends."""
    requests = drawn_requests(Arrivals(1e6), prompts, duration_s=1.0, seed=seed, limit=200)
    return Simulation([PagedEngine(setup)], OpenLoop(requests)).run().requests_per_s


def _figures(result: SimulationResult) -> Iterator[tuple[str, float]]:
    yield "output tokens a second", result.output_tokens_per_s
    yield BUSY, result.output_tokens / sum(replica.busy_s for replica in result.replicas)
    for name, kind, field in FIGURES:
        yield name, 1000 * float(getattr(result.latencies[kind], field))


def _show(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
