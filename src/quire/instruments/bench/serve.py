"""`quire bench serve`: latency and throughput of a server under growing load.

    --rates auto       closed loop ──► capacity of the server ──► open loops at half, all and twice that load
    --rates 1 2 4      open loops at these rates
    --concurrency 8    a closed loop with 8 concurrent requests

Each request is sent when it is due, whatever the state of the server, and its times count from then on. Overload is
part of the measurement: rejections are counted and timed, as are the requests that are still served.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.core.errors import ExecutionError, InvalidValueError
from quire.instruments.bench.flags import (
    add_choices,
    add_count,
    add_model_options,
    add_seconds,
    count,
    share,
)
from quire.instruments.bench.http_cost import measure_http_cost
from quire.instruments.bench.live_cost import measure_live_cost
from quire.instruments.bench.load_figures import MEASURES, REJECTION, LoadFigures, read_objectives, summarize_load
from quire.instruments.bench.load_plot import draw_load
from quire.instruments.bench.load_run import LoadResult, run_closed, run_open
from quire.instruments.bench.measured_server import MeasuredServer, measured_server
from quire.instruments.bench.offered_load import DrawnShape, request_source, require_token_ids
from quire.instruments.bench.workload_file import WorkloadRequest, read_workload
from quire.reporting.report import Goal, Section
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import show
from quire.simulate.workload.arrivals import arrival_times

AUTO_SHARES = (0.5, 1.0, 2.0)
MIN_GOODPUT_SHARE = 0.95
MAX_REJECTION_MS = 50.0
DEFAULT_STREAMS = 64


@dataclass(frozen=True, slots=True)
class Level:
    """One level of load: an open loop at a rate, or a closed loop if `rate` is None."""

    name: str
    rate: float | None
    concurrency: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredLevel:
    """A level, its results, and the memory of a server that the benchmark started, before and after."""

    level: Level
    result: LoadResult
    figures: LoadFigures
    memory_bytes: tuple[int, int] | None


PARTS = ("load", "http", "live")
DESCRIPTION = (
    "Put load on a server, at given rates or with a fixed number of concurrent requests, and measure time to first "
    "token, time between tokens, goodput, rejections and errors. MODEL can be the URL of any OpenAI-compatible "
    "server; otherwise the benchmark starts a server for the model. Without --rates and --concurrency it measures the "
    "capacity of the server, and offers half, all and twice that load."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_choices(parser, "only", PARTS, PARTS, "measure only these parts")
    parser.add_argument("--rates", metavar="RATE", nargs="+", default=(), help="requests per second, or auto (default)")
    parser.add_argument(
        "--concurrency", metavar="N", type=count, nargs="+", default=(), help="closed loops with N concurrent requests"
    )
    parser.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson", help="default: poisson")
    add_seconds(parser, "duration", 30.0, "seconds per load level")
    add_seconds(parser, "patience", 30.0, "seconds that running requests have to finish after a level")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="the API to call")
    parser.add_argument(
        "--workload", metavar="FILE", help="workload file; default: generated requests with the lengths below"
    )
    parser.add_argument("--limit", metavar="N", type=count, default=0, help="only the first N requests of the file")
    add_count(parser, "prompt-tokens", 128, "tokens per generated prompt")
    add_count(parser, "output-tokens", 64, "tokens per output")
    parser.add_argument(
        "--length-spread", metavar="SHARE", type=share, default=0.0, help="generated lengths vary by at most this share"
    )
    parser.add_argument(
        "--goodput",
        metavar="NAME:MS",
        nargs="+",
        default=(),
        help="latency targets in ms that a good request meets, such as ttft:500 tpot:50",
    )
    parser.add_argument(
        "--load-seed", metavar="N", type=int, default=0, help="random seed of arrivals and prompts; default: 0"
    )
    parser.add_argument("--plot", metavar="FILE", help="write latency over offered load as SVG")
    add_count(parser, "streams", 64, "concurrent requests when measuring the cost of HTTP and of the dashboard")
    add_count(parser, "repeat", 5, "repetitions of the measurements of HTTP and of the dashboard")
    parser.add_argument("--name", metavar="NAME", default="", help="model name on the server; default: its first model")
    parser.add_argument("--api-key-env", metavar="NAME", default="", help="environment variable that holds the API key")
    parser.add_argument("--vocab-size", metavar="N", type=count, help="token ids of generated prompts are below this")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    bench = ServeBench(options)

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_server(options, tell) as server:
            if "load" in options.only:
                yield from bench.measure_load(server, tell)
            if "http" in options.only and server.process is not None:
                yield measure_http_cost(server, options, tell)
            if "live" in options.only and server.process is not None:
                yield measure_live_cost(server, options, tell)

    return run_benchmark(options, "Serving", measure)


def read_rates(texts: Sequence[str]) -> tuple[float, ...] | None:
    """Return the rates of `--rates`, requests per second; None for auto.

    >>> read_rates(["0.5", "2"]), read_rates(["auto"])
    ((0.5, 2.0), None)
    """
    if list(texts) == ["auto"]:
        return None
    try:
        rates = tuple(map(float, texts))
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate < float("inf") for rate in rates):
        raise InvalidValueError("rates", " ".join(texts), "auto, or requests per second, each more than 0")
    return rates


class ServeBench:
    """Offers the loads of the options; the constructor checks all of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._objectives = read_objectives(options.goodput)
        self._rates = read_rates(options.rates) if options.rates else () if options.concurrency else None
        self._workload = read_workload(options.workload, options.limit) if options.workload else None
        require_token_ids(self._workload, options.endpoint)
        self._shape = DrawnShape(options.prompt_tokens, options.output_tokens, options.length_spread)
        self._num_levels = 0

    def measure_load(self, server: MeasuredServer, tell: Tell) -> Iterator[Section]:
        """Offer every level, one after another, and return the tables; write the plot, if requested."""
        self._requests: Callable[[int], Iterator[WorkloadRequest]] = request_source(
            self._workload, self._shape, vocab_size=server.vocab_size, seed=self._options.load_seed
        )
        levels = [
            self._measure(Level(f"{count} at once", None, count), server, tell) for count in self._options.concurrency
        ]
        rates, capacity = self._rates, None
        if rates is None:
            count = DEFAULT_STREAMS if server.config is None else server.config.max_num_seqs
            levels.append(self._measure(Level(f"{count} at once", None, count), server, tell))
            capacity = request_rate(levels[-1].result, levels[-1].figures)
            tell(f"the server can serve {capacity:.2f} requests per second")
            rates = tuple(share * capacity for share in AUTO_SHARES)
        open_levels = [self._measure(Level(f"{rate:.3g}/s", rate), server, tell) for rate in rates]
        goals = [] if capacity is None else overload_goals(levels, open_levels)
        yield self._load_section([*levels, *open_levels], goals)
        yield _times_section([*levels, *open_levels])
        if self._options.plot:
            title = f"{server.target.model}: latency over offered load"
            drawn = draw_load(title, [level.figures for level in open_levels])
            Path(self._options.plot).write_text(drawn, encoding="utf-8")

    def _measure(self, level: Level, server: MeasuredServer, tell: Tell) -> MeasuredLevel:
        options, number = self._options, self._num_levels
        self._num_levels += 1
        tell(f"{level.name}, {options.duration:g} s")
        requests = self._requests(number)
        before = _memory(server)
        if level.rate is None:
            result = run_closed(server.target, requests, level.concurrency, options.duration, options.patience)
        else:
            arrivals = arrival_times(
                level.rate, options.duration, pattern=options.arrivals, seed=options.load_seed + number
            )
            result = run_open(server.target, requests, arrivals, options.duration, options.patience)
        after = _memory(server)
        figures = summarize_load(level.name, result, self._objectives)
        if figures.num_failed and figures.num_failed + figures.num_rejected == figures.num_requests:
            raise ExecutionError(f"no request was served: {figures.first_error}")
        tell(figures.summary)
        return MeasuredLevel(level, result, figures, None if before is None or after is None else (before, after))

    def _load_section(self, levels: Sequence[MeasuredLevel], goals: list[Goal]) -> Section:
        options = self._options
        lengths = (
            f"the requests of {self._workload.name}"
            if self._workload is not None
            else f"prompts of {options.prompt_tokens} and outputs of {options.output_tokens} tokens"
        )
        objectives = "".join(f", {MEASURES[name]} ≤ {limit:g} ms" for name, limit in self._objectives.items())
        text = (
            f"{options.endpoint}, {lengths}, {options.duration:g} s a level, {options.arrivals} arrivals; rates are "
            f"those of the last four fifths. Good: completed{objectives}. Cut off: not complete "
            f"{options.patience:g} s after the level. The last columns are of the benchmark's own process: the p99 of "
            "its delay in sending requests, and its processor time."
        )
        header = ("level", "offered/s", "completed/s", "good/s", "output tok/s", "requests", "rejected", "failed")
        more = ("cut off", "server's memory, MB", "late, ms", "% of a processor")
        samples: dict[str, object] = {
            level.figures.name: {
                "figures": asdict(level.figures),
                "memory_bytes": level.memory_bytes,
                "requests": [asdict(replace(outcome, pieces=[])) for outcome in level.result.outcomes],
            }
            for level in levels
        }
        return Section("Load", text, (*header, *more), [_load_row(level) for level in levels], samples, goals)


def request_rate(result: LoadResult, figures: LoadFigures) -> float:
    """Return the requests per second that a server can serve: its tokens per second over the tokens per request."""
    lengths = [outcome.num_output_tokens for outcome in result.outcomes if outcome.is_done]
    if not lengths or not sum(lengths) or not figures.output_tokens:
        raise ExecutionError(f"no request was completed: {figures.first_error or 'see --duration'}")
    return figures.output_tokens * len(lengths) / sum(lengths)


def overload_goals(closed: Sequence[MeasuredLevel], open_levels: Sequence[MeasuredLevel]) -> list[Goal]:
    """Return the limits for the effects of overload; the last level is at twice the server's capacity."""
    overload = open_levels[-1].figures
    peak = max(level.figures.good for level in (*closed, *open_levels))
    goals = [Goal("goodput at 2×, to the peak", overload.good / max(peak, 1e-9), MIN_GOODPUT_SHARE, at_least=True)]
    if REJECTION in overload.times_ms:
        goals.append(Goal("rejection at 2×, p99, ms", overload.times_ms[REJECTION].p99, MAX_REJECTION_MS))
    return goals


def _memory(server: MeasuredServer) -> int | None:
    return None if server.process is None else server.process.resident_bytes()


def _load_row(measured: MeasuredLevel) -> tuple[str, ...]:
    figures, memory = measured.figures, measured.memory_bytes
    return (
        figures.name,
        "–" if measured.level.rate is None else show(figures.offered),
        show(figures.completed),
        show(figures.good),
        show(figures.output_tokens),
        str(figures.num_requests),
        str(figures.num_rejected),
        str(figures.num_failed),
        str(figures.num_cut_off),
        "–" if memory is None else f"{memory[0] / 1e6:,.1f} → {memory[1] / 1e6:,.1f}",
        f"{figures.lateness_ms:.1f}",
        f"{100 * figures.processor_share:.1f}",
    )


def _times_section(levels: Sequence[MeasuredLevel]) -> Section:
    rows = [
        (level.figures.name, what, show(times.p50), show(times.p90), show(times.p99))
        for level in levels
        for what, times in level.figures.times_ms.items()
    ]
    text = "Milliseconds from when a request was due, for requests that were due in the last four fifths of a level."
    return Section("Times", text, ("level", "what", "p50, ms", "p90, ms", "p99, ms"), rows, {})
