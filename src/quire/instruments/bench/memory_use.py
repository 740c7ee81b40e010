"""`quire bench memory`: memory use, planned and actual.

    start ──plan──► load ─────────────► ready ──workload──► done
                    peak, weights               peak, KV blocks written, waste by the ledger

The system grants KV memory when a block is first written. So the memory of the process grows with the number of blocks
that were ever used, up to the planned pool.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

from quire.core.byte_sizes import format_bytes
from quire.instruments.bench.flags import add_model_options, count
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.process_memory import ProcessMemory, process_memory, reset_peak
from quire.instruments.bench.shapes import measured_config
from quire.instruments.bench.workload_file import Workload, WorkloadRequest, read_workload
from quire.memory.ledger import MemoryLedger
from quire.reporting.report import Goal, Section
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import show

MAX_BESIDE_BYTES = 400_000_000
"""The memory limit in addition to weights and KV blocks."""


@dataclass(slots=True)
class KVWaste:
    """The ledger after each step: sums over steps, and the extremes."""

    num_steps: int = 0
    used_slots: int = 0
    stored_slots: int = 0
    reserved_slots: int = 0
    fragmented_slots: int = 0
    blocks_saved_by_sharing: int = 0
    most_used_blocks: int = 0
    most_fragmentation: float = 0.0
    hit_rate: float = 0.0

    def note(self, ledger: MemoryLedger) -> None:
        """Add a ledger. Mutates."""
        self.num_steps += 1
        self.used_slots += ledger.used_blocks * ledger.block_size
        self.stored_slots += ledger.stored_slots
        self.reserved_slots += ledger.reserved_slots
        self.fragmented_slots += ledger.fragmented_slots
        self.blocks_saved_by_sharing += ledger.blocks_saved_by_sharing
        self.most_used_blocks = max(self.most_used_blocks, ledger.used_blocks)
        self.most_fragmentation = max(self.most_fragmentation, ledger.fragmentation)
        self.hit_rate = ledger.hit_rate


@dataclass(slots=True)
class Stages:
    """The memory of the process, stage by stage; None if the system does not report it."""

    start: ProcessMemory | None = None
    ready: ProcessMemory | None = None
    done: ProcessMemory | None = None
    num_written_blocks: int = 0
    peaks_are_of_stages: bool = field(default=False)


DESCRIPTION = (
    "Compare planned memory with the memory of the process, at the peak of loading and in service, and measure the "
    "empty share of the KV memory in use."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    parser.add_argument("--workload", metavar="FILE", help="workload file; default: requests of mixed lengths")
    parser.add_argument("--limit", metavar="N", type=count, default=0, help="only the first N requests")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    read = read_workload(options.workload, options.limit) if options.workload else None

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_config(options) as config:
            tell(f"loading {config.model}")
            # Written blocks are counted, so the system must grant memory on use.
            engine = MeasuredEngine(replace(config, touch_kv_memory="use"))
            yield from measure_memory(engine, read, options.limit, tell)

    return run_benchmark(options, "Memory", measure)


def measure_memory(engine: MeasuredEngine, read: Workload | None, limit: int, tell: Tell) -> Iterator[Section]:
    """Load an engine and run a workload, or a default one. Mutates the engine."""
    stages, waste = Stages(), KVWaste()
    stages.start, stages.peaks_are_of_stages = process_memory(), reset_peak()
    engine.watch.blocks = written = set[int]()
    with engine:
        stages.ready = process_memory()
        reset_peak()
        workload = _default_workload(engine, limit) if read is None else read.shifted(2, engine.vocab_size)
        tell(f"running {len(workload.requests)} requests")
        engine.run(workload.requests, lambda: waste.note(engine.core.scheduler.memory.ledger()))
        stages.done, stages.num_written_blocks = process_memory(), len(written)
        yield _memory_section(engine, stages)
        yield _waste_section(engine, workload, waste)


def _default_workload(engine: MeasuredEngine, limit: int) -> Workload:
    """Return requests of mixed lengths that fit the context of the model."""
    generator, most = random.Random(0), engine.client.limits.max_model_len
    requests = []
    for _ in range(limit or 32):
        length = min(most // 2, max(8, round(generator.lognormvariate(5.0, 0.9))))
        output = min(most - length, max(8, round(generator.lognormvariate(3.5, 0.8))))
        prompt = tuple(generator.randrange(engine.vocab_size) for _ in range(max(length, 1)))
        requests.append(WorkloadRequest(prompt, max(output, 1)))
    return Workload("mixed lengths", tuple(requests))


def _memory_section(engine: MeasuredEngine, stages: Stages) -> Section:
    plan = engine.blueprint.report.plan
    parts = dict(plan.parts)
    written = stages.num_written_blocks * plan.bytes_per_block
    rest, weights, activations = parts["rest of the process"], parts["weights"], parts["activations"]
    start, ready, done = stages.start, stages.ready, stages.done

    def row(what: str, planned: int | None, held: int | None) -> tuple[str, ...]:
        return what, *("–" if size is None else format_bytes(size) for size in (planned, held))

    def of(stage: ProcessMemory | None, value: Callable[[ProcessMemory], int]) -> int | None:
        return None if stage is None else value(stage)

    rows = [
        row("before anything is loaded", rest, of(start, lambda memory: memory.resident)),
        row("ready: weights, activations not touched yet", rest + weights, of(ready, lambda memory: memory.resident)),
        row("… of which mapped files", None, of(ready, lambda memory: memory.of_files)),
        row("peak until ready", rest + weights, of(ready, lambda memory: memory.peak)),
        row("after the workload", rest + weights + activations + written, of(done, lambda memory: memory.resident)),
        row("peak of the workload", rest + weights + activations + written, of(done, lambda memory: memory.peak)),
        row("with all KV blocks and swap written", plan.total_bytes, None),
    ]
    text = (
        f"Planned from settings, and held by the process: weights {format_bytes(weights)}, activations "
        f"{format_bytes(activations)}, {plan.num_blocks:,} KV blocks of {format_bytes(plan.bytes_per_block)}, of which "
        f"{stages.num_written_blocks:,} have been written."
    )
    if not stages.peaks_are_of_stages:
        text += " The system cannot reset the peak, so peaks count from the start of the process."
    goals = []
    if ready is not None and done is not None:
        beside = max(ready.peak - weights, done.peak - weights - written)
        goals.append(Goal("peak without weights and written KV blocks, MB", beside / 1e6, MAX_BESIDE_BYTES / 1e6))
    samples: dict[str, object] = {"planned": parts, "written_kv_bytes": written, **asdict(stages)}
    return Section("Where the memory goes", text, ("when", "planned", "held"), rows, samples, goals)


def _waste_section(engine: MeasuredEngine, workload: Workload, waste: KVWaste) -> Section:
    steps, slots = max(waste.num_steps, 1), max(waste.used_slots, 1)
    block_size = engine.blueprint.config.block_size
    rows = [
        ("slots that hold a token, % of those used", show(100 * waste.stored_slots / slots)),
        ("reserved for tokens under way, %", show(100 * waste.reserved_slots / slots)),
        ("empty: the ends of blocks, %", show(100 * waste.fragmented_slots / slots)),
        ("empty at most, %", show(100 * waste.most_fragmentation)),
        ("blocks in use, mean", show(waste.used_slots / block_size / steps)),
        ("blocks in use, most", show(waste.most_used_blocks)),
        ("blocks saved by sharing, mean", show(waste.blocks_saved_by_sharing / steps)),
        ("prompt tokens found in the cache, %", show(100 * waste.hit_rate)),
    ]
    text = (
        f"Workload {workload.name}: {len(workload.requests)} requests, {workload.num_prompt_tokens:,} tokens of "
        f"prompts, {workload.num_output_tokens:,} of outputs, blocks of {block_size}. From the ledger, after each of "
        f"{waste.num_steps} steps with tokens."
    )
    return Section("KV waste", text, ("what", "value"), rows, asdict(waste))
