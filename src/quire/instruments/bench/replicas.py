"""`quire bench replicas`: losses and gains with several engines behind one server.

    loss           streams from three engines while one is killed, then while all are restarted one after another:
                   streams lost, texts changed, and the longest pause of each stream
    speed          a workload on two engines with a thread each, and on one engine with two threads, in turn
    predictions    the same workload on two engines and in a simulation of them
    routing        in simulation: computed tokens and first tokens, with the router and in turns

The texts are compared with those of the same requests on undisturbed engines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.engine.factory import plan_engine
from quire.instruments.bench.flags import SHAPES, add_choices, add_count, add_seconds, add_size, count
from quire.instruments.bench.load_run import LoadResult, LoadRun, Target, run_batch
from quire.instruments.bench.measured_server import first_model
from quire.instruments.bench.offered_load import COMPLETIONS
from quire.instruments.bench.replica_predictions import ServedWorkload
from quire.instruments.bench.replica_routing import measure_routing
from quire.instruments.bench.shapes import write_byte_tokenizer, write_random_checkpoint
from quire.instruments.bench.workload_file import Workload, WorkloadRequest, read_workload
from quire.instruments.http.plain import ask
from quire.instruments.http.server_process import ServerProcess
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import percentile, ratios, summarize

PARTS: Final = ("loss", "speed", "predictions", "routing")
NUM_ENGINES: Final = 3
MAX_PAUSE_S: Final = 1.0
"""The limit for the p99 of pauses while an engine is lost, beyond that of the calm run."""
MIN_SPEED: Final = 0.95
MAX_FRONT: Final = 5.0
"""The limit for the processor time of the front process, in percent of one processor."""
ROWS: Final = 32
"""Sequences that each of two engines computes at once."""
ANY_QUEUE: Final = ("--max-queued-sequences", "10000", "--max-queued-tokens", "10000000", "--max-wait-s", "3600")
"""All requests arrive at once, and none must be refused."""

DESCRIPTION = (
    "Measure several engines behind one server: losses when one engine fails, speed, predictions by simulation, and "
    "savings by the router."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_choices(parser, "only", PARTS, PARTS, "measure only these")
    add_count(parser, "streams", 300, "streams at once while an engine is lost")
    add_count(parser, "output-tokens", 150, "tokens per stream")
    parser.add_argument("--workload", metavar="FILE", help="requests for speed and predictions, which need it")
    parser.add_argument("--limit", metavar="N", type=count, default=0, help="only the first N requests")
    parser.add_argument(
        "--shape", metavar="NAME", choices=SHAPES, default="qwen3-0.6b", help="model shape; default: qwen3-0.6b"
    )
    add_size(parser, "kv-memory", "2GiB", "KV memory for speed and predictions")
    add_seconds(parser, "record", 60.0, "seconds of traffic to record steps for predictions, before and after")
    add_seconds(parser, "duration", 120.0, "simulated seconds of traffic for routing")
    add_count(parser, "repeat", 5, "repetitions")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        if "loss" in options.only:
            yield measure_loss(options, tell)
        if "speed" in options.only:
            yield measure_speed(options, tell)
        if "predictions" in options.only:
            yield measure_predictions(options, tell)
        if "routing" in options.only:
            yield measure_routing(options.duration, tell)

    return run_benchmark(options, "Replicas", measure, timed=set(options.only) != {"routing"})


# ---- an engine is lost ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Streams with a disturbance: their texts by request, and the longest pause of each after it."""

    texts: list[str]
    pauses_s: list[float]
    num_lost: int
    num_changed: int
    wall_s: float


def measure_loss(options: argparse.Namespace, tell: Tell) -> Section:
    """Kill one of three engines, then restart all, each time during streams; compare texts with a calm run."""
    config = EngineConfig(model="guide", kv_memory="48MiB", num_threads=1, max_num_seqs=128)
    found: dict[str, list[Disturbed]] = {"calm": [], "killed": [], "restarted": []}
    with ServerProcess(config, options=("--replicas", str(NUM_ENGINES), *ANY_QUEUE)) as server:
        happenings: dict[str, Callable[[], object]] = {
            "calm": lambda: None,
            "killed": lambda: os.kill(server.engines()[1], signal.SIGKILL),
            "restarted": lambda: _restart_all(server),
        }
        target = Target(server.url, first_model(server.url), COMPLETIONS)
        for number in range(options.repeat):
            requests = _questions(number, options)
            for name, happening in happenings.items():
                tell(f"loss: {name}, run {number + 1} of {options.repeat}")
                server.wait_for(lambda: server.metric("quire_replica_ready") == NUM_ENGINES, "complete", 60.0)
                calm = found["calm"][number].texts if name != "calm" else None
                found[name].append(asyncio.run(_disturbed(target, requests, happening, calm)))
    return _loss_section(found, options)


def _questions(number: int, options: argparse.Namespace) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(
            (0,),
            options.output_tokens,
            fields={
                "prompt": f"Question {number}.{stream}: what is a block table?",
                "seed": stream,
                "temperature": 0.8,
            },
        )
        for stream in range(options.streams)
    ]


def _restart_all(server: ServerProcess) -> None:
    answer = ask(f"{server.url}/restart_engines", b"")
    if answer.status // 100 != 2:
        raise ExecutionError(f"/restart_engines answered {answer.status}: {answer.body[:200].decode(errors='replace')}")


async def _disturbed(
    target: Target, requests: Sequence[WorkloadRequest], happening: Callable[[], object], calm: Sequence[str] | None
) -> Disturbed:
    """Send all requests, disturb the engines once every stream has text, and wait for all to end."""
    load = LoadRun(target, iter(requests), 0.0)
    running = asyncio.create_task(load.run([0.0] * len(requests), 0, float("inf")))
    while not running.done() and not _have_begun(load, len(requests)):
        await asyncio.sleep(0.005)
    if running.done():
        refused = next((outcome.error for outcome in load.outcomes if outcome.error), "")
        why = refused or "use longer streams (--output-tokens), or fewer"
        raise ExecutionError(f"streams ended before all had started: {why}")
    happened_s = load.now()
    await asyncio.to_thread(happening)
    result = await running
    pauses_s = []
    for outcome in result.outcomes:
        times = [happened_s, *(at for at in outcome.events_s if at > happened_s)]
        pauses_s.append(max((after - before for before, after in pairwise(times)), default=0.0))
    texts = ["".join(outcome.pieces) for outcome in result.outcomes]
    num_lost = sum(not outcome.is_done for outcome in result.outcomes)
    num_changed = sum(text != before for text, before in zip(texts, calm or texts, strict=True))
    return Disturbed(texts, pauses_s, num_lost, num_changed, result.wall_s)


def _have_begun(load: LoadRun, num_requests: int) -> bool:
    return len(load.outcomes) == num_requests and all(outcome.events_s for outcome in load.outcomes)


def _loss_section(found: dict[str, list[Disturbed]], options: argparse.Namespace) -> Section:
    p99 = {name: [percentile(turn.pauses_s, 0.99) for turn in turns] for name, turns in found.items()}
    rows = [
        (
            name,
            str(sum(turn.num_lost for turn in turns)),
            "–" if name == "calm" else str(sum(turn.num_changed for turn in turns)),
            cell(summarize([1e3 * percentile(turn.pauses_s, 0.5) for turn in turns])),
            cell(summarize([1e3 * each for each in p99[name]])),
            cell(summarize([1e3 * max(turn.pauses_s) for turn in turns])),
            cell(summarize([turn.wall_s for turn in turns])),
        )
        for name, turns in found.items()
    ]
    more_s = summarize([lost - calm for lost, calm in zip(p99["killed"], p99["calm"], strict=True)]).median
    disturbed = found["killed"] + found["restarted"]
    goals = [
        Goal("streams lost by a kill or a restart", sum(turn.num_lost for turn in disturbed), 0),
        Goal("texts changed by a kill or a restart", sum(turn.num_changed for turn in disturbed), 0),
        Goal("an engine killed: pause, p99, more than calm, s", more_s, MAX_PAUSE_S),
    ]
    text = (
        f"{options.streams} streams of the guide at once, {options.output_tokens} tokens each at temperature 0.8, on "
        f"{NUM_ENGINES} engines with one thread each. When all have started, one engine is killed "
        "(kill -9), or all are restarted one after another. A pause is the longest of a stream after that, including "
        f"the time to recompute its tokens. Median of {options.repeat} runs (min–max)."
    )
    header = ("", "streams lost", "texts changed", "pause, median, ms", "pause, p99, ms", "longest, ms", "all, s")
    samples: dict[str, object] = {
        name: [asdict(replace(turn, texts=[])) for turn in turns] for name, turns in found.items()
    }
    return Section("When an engine is lost", text, header, rows, samples, goals)


# ---- speed ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of the workload: seconds, and processor time of the front process."""

    wall_s: float
    front_s: float
    first_token_s: float


def measure_speed(options: argparse.Namespace, tell: Tell) -> Section:
    """Run a workload on two engines with a thread each, and on one with two threads, in turn."""
    turns: dict[str, list[Turn]] = {"one engine": [], "two engines": []}
    with _offered(options) as (config, workload, vocab_size), ExitStack() as stack:
        servers = {
            "one engine": stack.enter_context(ServerProcess(config, options=ANY_QUEUE)),
            "two engines": stack.enter_context(_two_engines(config)),
        }
        for number in range(-1, options.repeat):  # the first run does not count
            tell(f"speed: run {number + 1} of {options.repeat}")
            requests = workload.shifted(number + 2, vocab_size).requests
            for name in sorted(servers, reverse=bool(number % 2)):
                turns[name].append(_speed(servers[name], requests))
    return _speed_section({name: found[1:] for name, found in turns.items()}, len(workload.requests), options)


@contextmanager
def _offered(options: argparse.Namespace) -> Iterator[tuple[EngineConfig, Workload, int]]:
    """Return the settings of one engine with two threads, a workload for it, and the size of its vocabulary."""
    if options.workload is None:
        raise InvalidConfigError("workload", "", "a file of requests for speed and predictions; or --only loss routing")
    workload = read_workload(options.workload, options.limit)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as parent:
        folder = Path(parent) / options.shape
        write_random_checkpoint(folder, options.shape)
        config = EngineConfig(
            model=str(folder),
            kv_memory=options.kv_memory,
            touch_kv_memory="start",
            max_num_seqs=2 * ROWS,
            num_threads=2,
        )
        vocab_size = plan_engine(replace(config, skip_tokenizer_init=True)).vocab_size
        write_byte_tokenizer(folder, vocab_size)
        yield config, workload, vocab_size


def _two_engines(config: EngineConfig) -> ServerProcess:
    """Return a server of two engines that share the threads, memory and rows of one."""
    return ServerProcess(replace(config, max_num_seqs=ROWS), options=("--replicas", "2", *ANY_QUEUE))


def _speed(server: ServerProcess, requests: Sequence[WorkloadRequest]) -> Turn:
    before_s = server.processor_s() or 0.0
    result: LoadResult = run_batch(Target(server.url, first_model(server.url), COMPLETIONS), requests)
    result.require_done()
    first_s = [outcome.first_s for outcome in result.outcomes]
    return Turn(result.wall_s, (server.processor_s() or 0.0) - before_s, summarize(first_s).median)


def _speed_section(turns: dict[str, list[Turn]], num_requests: int, options: argparse.Namespace) -> Section:
    one, two = turns["one engine"], turns["two engines"]
    gain = ratios([turn.wall_s for turn in one], [turn.wall_s for turn in two])
    shares = {name: [100 * turn.front_s / turn.wall_s for turn in found] for name, found in turns.items()}
    rows = [
        ("all requests, s", *(cell(summarize([turn.wall_s for turn in found])) for found in (one, two))),
        ("first token, median, s", *(cell(summarize([turn.first_token_s for turn in found])) for found in (one, two))),
        ("the process that listens, % of a processor", *(cell(summarize(each)) for each in shares.values())),
        ("speed", "", cell(summarize(gain), "×")),
    ]
    goals = [
        Goal("two engines with a thread each, to one with two", summarize(gain).median, MIN_SPEED, at_least=True),
        Goal("the process that listens, % of a processor", summarize(shares["two engines"]).median, MAX_FRONT),
    ]
    text = (
        f"{num_requests} requests of {Path(options.workload).name} at once over HTTP, streamed, in the shape of "
        f"{options.shape}. One engine with two threads, and two with one thread and half of the memory each, in "
        f"turn, median of {len(one)} (min–max)."
    )
    samples: dict[str, object] = {name: [asdict(turn) for turn in found] for name, found in turns.items()}
    return Section("Two engines", text, ("", "one engine, 2 threads", "2 engines, 1 thread"), rows, samples, goals)


# ---- predictions ----------------------------------------------------------------------------------------------------


def measure_predictions(options: argparse.Namespace, tell: Tell) -> Section:
    """Run a workload on two engines with a thread each, record steps of other requests, and simulate the workload."""
    with _offered(options) as (config, workload, vocab_size):
        log = Path(str(config.model)).parent / "steps"
        with _two_engines(replace(config, step_log=str(log))) as server:
            server.wait_for(lambda: server.metric("quire_replica_ready") == 2, "complete", 300.0)
            target = Target(server.url, first_model(server.url), COMPLETIONS)
            served = ServedWorkload(target, workload, vocab_size)
            tell("predictions: recording steps")
            served.record(options.record)
            for number in range(options.repeat):
                tell(f"predictions: run {number + 1} of {options.repeat}")
                served.serve(number)
            tell("predictions: recording steps again")
            served.record(options.record)
        tell("predictions: simulating")
        return served.compared([log, log.with_name("steps.1")])
