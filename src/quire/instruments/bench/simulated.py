"""`quire bench simulator`: the speed of simulations, and their memory, which must not grow with the trace.

    256 users at once    ShareGPT-like requests in a closed loop; and prompts of one block with long answers, to
                         measure decodes alone
    an hour              10 requests per second with `quire simulate`, in a separate process; and a quarter of an hour

A simulated token is a token of a prompt or an answer that a step scheduled, stored and computed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Iterator

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.kv_spec import KVCacheSpec
from quire.core.python_process import start_python
from quire.instruments.bench.flags import add_count, add_seconds
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import summarize
from quire.simulate.cost.linear import LinearCost
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.simulation import Simulation
from quire.simulate.workload.closed_loop import ClosedLoop
from quire.simulate.workload.drawn import DrawnPrompts
from quire.simulate.workload.lengths import SHAREGPT, FixedLengths, Lengths

NUM_USERS = 256
LONGEST = 2048
LOADS: dict[str, tuple[Lengths, str]] = {
    "ShareGPT-like requests": (SHAREGPT, "hash_chain"),
    "the same, no prefix cache": (SHAREGPT, "none"),
    "16 tokens in, 1,024 out": (FixedLengths(16, 1024), "hash_chain"),
}
LEAST_TOKENS_PER_S = 1e6
TRAFFIC = ("llama-3.1-8b", "--hardware", "nvidia-h100", "--rate", "10")
MOST_WALL_S = 60.0
MOST_GROWTH = 1.1


DESCRIPTION = (
    "Measure simulated tokens per second with 256 running requests, and the time and memory of an hour of traffic. "
    "Needs an idle machine."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_seconds(parser, "duration", 120.0, "simulated seconds of the users")
    add_count(parser, "hour", 3600, "simulated seconds of the longer traffic, 4 or more")
    add_count(parser, "repeat", 5, "repetitions of each measurement")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        yield measure_speed(options.repeat, options.duration, tell)
        yield measure_hour(options.repeat, options.hour, tell)

    return run_benchmark(options, "Simulator", measure)


def measure_speed(repeat: int, duration_s: float, tell: Tell) -> Section:
    """Measure whole simulations of many users, and count their tokens."""
    speeds: dict[str, list[float]] = {name: [] for name in LOADS}
    running: dict[str, float] = {}
    for index in range(repeat):
        tell(f"users: run {index + 1} of {repeat}")
        for name, (lengths, prefix_index) in LOADS.items():
            began = time.perf_counter()
            result = _simulate(lengths, prefix_index, duration_s)
            speeds[name].append((result.prompt_tokens + result.output_tokens) / (time.perf_counter() - began))
            running[name] = result.mean_running
    rows = [
        (name, f"{running[name]:.0f}", cell(summarize([speed / 1e6 for speed in values])))
        for name, values in speeds.items()
    ]
    goals = [
        Goal(f"simulated tokens a second, {name}", summarize(values).median, LEAST_TOKENS_PER_S, at_least=True)
        for name, values in speeds.items()
    ]
    text = (
        f"{NUM_USERS} users in a closed loop for {duration_s:g} simulated seconds and until the last request ends, "
        f"with all checks, in one process. Tokens of prompts and answers. Median of {repeat} runs (min–max)."
    )
    header = ("load", "running, mean", "million tokens a second")
    return Section("Simulated tokens a second", text, header, rows, {"tokens_per_s": speeds}, goals)


def _simulate(lengths: Lengths, prefix_index: str, duration_s: float) -> SimulationResult:
    spec = KVCacheSpec.from_layers([None] * 32, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    memory = MemoryConfig(num_blocks=40_000, prefix_index=prefix_index)
    scheduler = SchedulerConfig(max_num_seqs=NUM_USERS, max_num_batched_tokens=2048, max_model_len=LONGEST)
    setup = EngineSetup(spec, memory, scheduler, LinearCost(0.01, 0.00002))
    users = ClosedLoop(NUM_USERS, DrawnPrompts(lengths, LONGEST), duration_s=duration_s, seed=0)
    return Simulation([PagedEngine(setup)], users).run()


def measure_hour(repeat: int, hour_s: int, tell: Tell) -> Section:
    """Measure `quire simulate` as a process: the time and the memory of an hour and of a quarter of an hour."""
    wall_s: dict[int, list[float]] = {hour_s // 4: [], hour_s: []}
    peak_bytes: dict[int, list[int]] = {duration_s: [] for duration_s in wall_s}
    for index in range(repeat):
        for duration_s, values in wall_s.items():
            tell(f"{duration_s} s of traffic: run {index + 1} of {repeat}")
            seconds, peak = _process(duration_s)
            values.append(seconds)
            peak_bytes[duration_s].append(peak)
    memory = {duration_s: summarize([peak / 2**20 for peak in peaks]) for duration_s, peaks in peak_bytes.items()}
    rows = [
        (f"{duration_s:,} s", cell(summarize(values)), cell(memory[duration_s]))
        for duration_s, values in wall_s.items()
    ]
    text = (
        f"`quire simulate {' '.join(TRAFFIC)}`, Poisson, ShareGPT-like, including the start of the process. Median of "
        f"{repeat} runs (min–max)."
    )
    goals = [
        Goal(f"seconds for {hour_s:,} s of traffic", summarize(wall_s[hour_s]).median, MOST_WALL_S),
        Goal("memory, four times the trace over once", memory[hour_s].median / memory[hour_s // 4].median, MOST_GROWTH),
    ]
    samples: dict[str, object] = {"wall_s": wall_s, "peak_bytes": peak_bytes}
    return Section("Hours of traffic", text, ("traffic", "seconds", "peak memory, MiB"), rows, samples, goals)


def _process(duration_s: int) -> tuple[float, int]:
    """Run a simulation in a separate process; return its seconds and its peak bytes."""
    arguments = ("-m", "quire", "simulate", *TRAFFIC, "--duration", str(duration_s))
    began = time.perf_counter()
    process = start_python(*arguments, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} ended with {process.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024
