"""`quire bench throughput`: whole workloads, like the runners of other engines, with times for every token.

All requests are added at once, after loading and a warm-up. Wall time runs from there to the last token. The time to
first token also starts there, and includes the wait for a free row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from quire.core.byte_sizes import format_bytes
from quire.instruments.bench.flags import add_count, add_model_options, count
from quire.instruments.bench.measured_engine import MeasuredEngine, Run
from quire.instruments.bench.process_memory import process_memory
from quire.instruments.bench.shapes import measured_config
from quire.instruments.bench.workload_file import Workload, read_workload, single_request
from quire.reporting.report import Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import percentile, summarize

TEXT = (
    "{num_requests} requests, {num_prompt_tokens:,} tokens of prompts, {num_output_tokens:,} of outputs. Median of "
    "{repeat} runs (min–max)."
)


DESCRIPTION = (
    "Run workloads from files, one JSON request per line, and measure tokens per second, time to first token, "
    "time between tokens, cached tokens, preemptions, memory and load time."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    parser.add_argument("--workload", metavar="FILE", nargs="+", required=True, help="workloads, run one after another")
    parser.add_argument("--limit", metavar="N", type=count, default=0, help="only the first N requests of each")
    add_count(parser, "repeat", 5, "repetitions of each workload")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    workloads = [read_workload(path, options.limit) for path in options.workload]

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_config(options) as config:
            tell(f"loading {config.model}")
            with MeasuredEngine(config) as engine:
                engine.warm_up()
                sections = list(measure_workloads(engine, workloads, options.repeat, tell))
                yield describe_engine(engine)
                yield from sections

    return run_benchmark(options, "Throughput", measure)


def measure_workloads(
    engine: MeasuredEngine, workloads: Sequence[Workload], repeat: int, tell: Tell
) -> Iterator[Section]:
    """Run every workload `repeat` times; each run has different token ids."""
    number = 1
    for workload in workloads:
        runs = []
        for index in range(repeat):
            number += 1
            tell(f"{workload.name}: run {index + 1} of {repeat}")
            runs.append(engine.run(workload.shifted(number, engine.vocab_size).requests))
        yield _workload_section(workload, runs)


def describe_engine(engine: MeasuredEngine) -> Section:
    """Return the engine's settings, its time to load, and its present memory."""
    report = engine.blueprint.report
    plan, memory = report.plan, process_memory()
    rows = [
        *report.facts(),
        ("KV pool", f"{plan.num_blocks:,} blocks, {format_bytes(plan.num_blocks * plan.bytes_per_block)}"),
        ("load to ready", f"{engine.load_s:.2f} s"),
        ("peak memory", "not known" if memory is None else format_bytes(memory.peak)),
    ]
    samples: dict[str, object] = {
        "load_s": engine.load_s,
        "peak_bytes": None if memory is None else memory.peak,
        "num_blocks": plan.num_blocks,
        "kv_bytes": plan.num_blocks * plan.bytes_per_block,
    }
    return Section("Engine", "What ran, with the settings in use.", ("what", "value"), rows, samples)


def _workload_section(workload: Workload, runs: list[Run]) -> Section:
    prompt, output = workload.num_prompt_tokens, workload.num_output_tokens
    measures: dict[str, Callable[[Run], float]] = {
        "wall, s": lambda run: run.wall_s,
        "output, tok/s": lambda run: output / run.wall_s,
        "prompt and output, tok/s": lambda run: (prompt + output) / run.wall_s,
        "time to first token, median, ms": lambda run: 1e3 * _median(list(run.first_token_s.values())),
        "time to first token, p99, ms": lambda run: 1e3 * percentile(list(run.first_token_s.values()), 0.99),
    }
    if all(run.gaps_s for run in runs):
        measures["between tokens, median, ms"] = lambda run: 1e3 * _median(run.gaps_s)
        measures["between tokens, p99, ms"] = lambda run: 1e3 * percentile(run.gaps_s, 0.99)
    if single_request(workload) is not None:
        measures["decode, tok/s"] = lambda run: (output - 1) / (run.wall_s - run.first_token_s["0"])
    measures |= {
        "cached tokens": lambda run: sum(run.cached_tokens.values()),
        "cached, % of prompt": lambda run: 100 * sum(run.cached_tokens.values()) / prompt,
        "preemptions": lambda run: run.num_preemptions,
        "steps": lambda run: run.num_steps,
        "outside of the executor, % of wall": lambda run: 100 * (1 - run.executor_s / run.wall_s),
        "in the decoder, % of wall": lambda run: 100 * run.decoder_s / run.wall_s,
    }
    rows = [(name, cell(summarize([measure(run) for run in runs]))) for name, measure in measures.items()]
    sizes: dict[str, Any] = {
        "num_requests": len(workload.requests),
        "num_prompt_tokens": prompt,
        "num_output_tokens": output,
    }
    text = TEXT.format(**sizes, repeat=len(runs))
    return Section(
        f"Workload {workload.name}", text, ("what", "value"), rows, {**sizes, "runs": [asdict(run) for run in runs]}
    )


def _median(values: Sequence[float]) -> float:
    return summarize(values).median
