"""`quire bench disk`: the savings of a disk cache, and its cost for requests that do not hit it.

cold      nothing is cached                          page cache   the store, still in the system's page cache
device    an earlier request had the same prefix     disk         the store, after the system has dropped it
                                                     killed       the same, written by a process that was killed
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from quire.core.byte_sizes import format_bytes
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.core.kept_block import KeptBlock, num_slots_within
from quire.core.request import CacheScope
from quire.engine.factory import plan_engine
from quire.instruments.bench.asked_process import AskedProcess
from quire.instruments.bench.disk_probe import first_token_s, wait_stored
from quire.instruments.bench.disk_turns import run_turns
from quire.instruments.bench.disturbance import disturbed_run
from quire.instruments.bench.flags import add_count, add_model_options, add_size, count
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.shapes import measured_config
from quire.instruments.bench.startup import load_once
from quire.instruments.bench.workload_file import read_workload
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import percentile, ratios, summarize

TAIL: Final = 16
"""Tokens of each prompt after the shared prefix."""
PROBE: Final = "quire.instruments.bench.disk_probe"
TIERS: Final = ("cold", "device", "page cache", "disk", "killed")
MOST_TO_COLD: Final = {"device": 0.01, "page cache": 0.06, "disk": 0.10}
MOST_KILLED_TO_DISK: Final = 1.1
WRITES: Final = ("on_hit", "always")
SECTIONS: Final = ("tiers", "throughput", "loads", "start")
LEAST_THROUGHPUT: Final = {"on_hit": 0.98, "always": 0.95}
MOST_GAP: Final = 1.05
MOST_START_S: Final = 0.2
QUIET_STEPS: Final = 32

DESCRIPTION = (
    "Measure the time to first token with a shared prefix in each tier, and the cost of a disk cache: throughput, the "
    "time between tokens of other requests during loads, and the start with a full store."
)


class Answers(NamedTuple):
    """The times of one process for its prompts."""

    first_token_s: list[float]
    disk_tokens: list[int]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_count(parser, "repeat", 5, "runs of each kind")
    add_count(parser, "prefix", 4096, "tokens of the shared prefix")
    add_count(parser, "chats", 8, "chats that decode while a prefix is loaded")
    add_size(parser, "store-size", "10GiB", "size of the store that an engine starts with")
    parser.add_argument("--workload", metavar="FILE", help="requests to measure throughput with; default: not measured")
    parser.add_argument("--limit", metavar="N", type=count, default=0, help="only the first N requests of the workload")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="measure only these; default: all")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_config(options) as config, tempfile.TemporaryDirectory(prefix="quire-disk-") as name:
            own = replace(config, disk_cache=config.disk_cache or name, touch_kv_memory="start")
            wanted = options.only or SECTIONS
            if "tiers" in wanted:
                yield measure_tiers(own, options.prefix, options.repeat, tell)
            if "throughput" in wanted and options.workload:
                yield measure_throughput(own, options.workload, options.limit, options.repeat, tell)
            if "loads" in wanted:
                yield measure_loads(own, options.prefix, options.chats, options.repeat, tell)
            if "start" in wanted:
                yield measure_start(own, options.store_size, options.repeat, tell)

    return run_benchmark(options, "A cache on disk", measure)


def measure_tiers(config: EngineConfig, num_tokens: int, repeat: int, tell: Tell) -> Section:
    """Measure the first token with a prefix in each tier, in a new process for each state of the disk."""
    found: dict[str, list[float]] = {tier: [] for tier in TIERS}
    blueprint = plan_engine(replace(config, skip_tokenizer_init=True))
    spec = blueprint.backend.facts.kv_spec
    num_blocks = num_tokens // spec.block_size
    for index in range(repeat):
        tell(f"first token: run {index + 1} of {repeat}")
        own = replace(config, disk_cache=str(_folder(config, f"tiers-{index}")))
        prompts = _prompts(index, num_tokens, blueprint.vocab_size, 5)
        cold, device = _answers(own, prompts[:2], num_blocks, is_killed=True).first_token_s
        _drop(own)
        killed = _from_disk(own, prompts[2], num_tokens)
        _drop(own)
        dropped = _from_disk(own, prompts[3], num_tokens)
        held = _from_disk(own, prompts[4], num_tokens)
        for tier, seconds in zip(TIERS, (cold, device, held, dropped, killed), strict=True):
            found[tier].append(seconds)
    to_cold = {tier: summarize(ratios(found[tier], found["cold"])) for tier in TIERS[1:]}
    rows = [
        (tier, cell(summarize([1e3 * each for each in found[tier]])), cell(to_cold.get(tier), "×")) for tier in TIERS
    ]
    goals = [Goal(f"first token, {tier} to cold", to_cold[tier].median, most) for tier, most in MOST_TO_COLD.items()]
    again = summarize(ratios(found["killed"], found["disk"]))
    goals.append(Goal("first token, after kill -9 to disk", again.median, MOST_KILLED_TO_DISK))
    size = format_bytes(num_blocks * spec.bytes_per_block)
    text = (
        f"A prefix of {num_tokens:,} tokens, {size} of keys and values, and {TAIL} tokens after it. Each state of the "
        f"disk has its own process, whose KV memory was touched before. Median of {repeat} runs (min–max)."
    )
    return Section("First token by tier", text, ("from", "first token, ms", "to cold"), rows, {"s": found}, goals)


def measure_throughput(config: EngineConfig, path: str, limit: int, repeat: int, tell: Tell) -> Section:
    """Measure a workload without a disk, and with both rules for writing to the disk.

    For each rule, a pair of processes take turns, so that both see the same state of the machine.
    """
    workload = read_workload(path, limit)
    found: dict[str, dict[str, list[float]]] = {}
    stored = {}
    for write in WRITES:
        tell(f"{workload.name}: {repeat} turns without a disk and with {write}")
        folder = str(_folder(config, write))
        pair = {"off": replace(config, disk_cache=None), write: replace(config, disk_cache=folder, disk_write=write)}
        turns = run_turns(pair, path, limit, range(1, repeat + 1))
        found[write] = {name: [turn[name]["tokens_per_s"] for turn in turns] for name in pair}
        stored[write] = turns[-1][write]["stored"]
    shares = {write: summarize(ratios(found[write][write], found[write]["off"])) for write in WRITES}
    rows = [
        (
            write,
            cell(summarize(found[write][write])),
            cell(summarize(found[write]["off"])),
            cell(shares[write], "×"),
            f"{stored[write]:,}",
        )
        for write in WRITES
    ]
    goals = [
        Goal(f"{workload.name}: throughput with {write} to none", shares[write].median, least, at_least=True)
        for write, least in LEAST_THROUGHPUT.items()
    ]
    text = (
        f"{len(workload.requests)} requests of {workload.name}, {workload.num_prompt_tokens:,} tokens of prompts and "
        f"{workload.num_output_tokens:,} of outputs. An engine with a disk and one without, each in its own process, "
        f"take turns. Median of {repeat} turns (min–max)."
    )
    heads = ("--disk-write", "tok/s", "without a disk", "to that", "blocks stored")
    return Section("Throughput with a disk", text, heads, rows, {"tok/s": found, "stored": stored}, goals)


def measure_loads(config: EngineConfig, num_tokens: int, num_chats: int, repeat: int, tell: Tell) -> Section:
    """Measure the time between tokens of chats while a prefix is loaded from disk."""
    own = replace(config, disk_cache=str(_folder(config, "loads")), disk_write="always")
    with MeasuredEngine(own) as engine:
        block_size = engine.blueprint.backend.facts.kv_spec.block_size
        prefixes = [_prompts(100 + index, num_tokens, engine.vocab_size, 2) for index in range(repeat)]
        for index, (prompt, _) in enumerate(prefixes):
            tell(f"a prefix for the disk: {index + 1} of {repeat}")
            first_token_s(engine, prompt)
            wait_stored(engine, (index + 1) * (num_tokens // block_size))
    runs = []
    with MeasuredEngine(own) as engine:
        engine.warm_up()
        for index, (_, prompt) in enumerate(prefixes):
            tell(f"chats while a prefix is loaded: run {index + 1} of {repeat}")
            runs.append(disturbed_run(engine, (num_chats, len(prompt), QUIET_STEPS), _Draws(prompt, engine.vocab_size)))
        loaded = engine.client.stats().disk_hit_tokens_total
    quiet = [percentile(run.quiet_s, 0.99) for run in runs]
    # The last step computes the prompt's last tokens.
    meanwhile = [percentile(run.disturbed_s[:-num_chats] or run.disturbed_s, 0.99) for run in runs]
    ratio = summarize(ratios(meanwhile, quiet))
    rows = [
        ("between tokens, no load: p99, ms", cell(summarize([1e3 * each for each in quiet]))),
        ("between tokens, meanwhile: p99, ms", cell(summarize([1e3 * each for each in meanwhile]))),
        ("p99 meanwhile to no load", cell(ratio, "×")),
        ("first token of the prompt, ms", cell(summarize([1e3 * run.first_token_s for run in runs]))),
    ]
    text = (
        f"{num_chats} chats decode; a prompt whose first {num_tokens:,} tokens are on disk arrives. {loaded:,} tokens "
        f"came from disk in {repeat} runs; median of the runs (min–max). The step that computes the prompt's last "
        "tokens is left out."
    )
    goals = [Goal("between others' tokens during a load, p99", ratio.median, MOST_GAP)]
    return Section("Chats during a load", text, ("what", "value"), rows, {"runs": [asdict(run) for run in runs]}, goals)


def measure_start(config: EngineConfig, size: int, repeat: int, tell: Tell) -> Section:
    """Measure the extra time to load an engine with a full store, compared with an empty one."""
    found: dict[str, list[float]] = {"empty": [], "full": []}
    own = {
        kind: replace(config, disk_cache=str(_folder(config, kind)), disk_cache_size=size, touch_kv_memory="use")
        for kind in found
    }
    tell(f"filling a store of {format_bytes(size)}")
    num_blocks = fill(own["full"])
    for index in range(repeat):
        for kind, settings in own.items():
            tell(f"start with a store that is {kind}: run {index + 1} of {repeat}")
            found[kind].append(load_once(settings, 0.0).load_s)
    more = [full - empty for full, empty in zip(found["full"], found["empty"], strict=True)]
    rows = [(f"load with a store that is {kind}, s", cell(summarize(found[kind]))) for kind in found]
    rows.append(("difference, s", cell(summarize(more))))
    text = f"The full store has {format_bytes(size)}, {num_blocks:,} blocks. Median of {repeat} processes (min–max)."
    goals = [Goal("start with a full store: more seconds", summarize(more).median, MOST_START_S)]
    return Section("Start with a full store", text, ("what", "value"), rows, {"s": found}, goals)


def fill(config: EngineConfig) -> int:
    """Fill the store of an engine with one long text; returns the number of blocks."""
    blueprint = plan_engine(replace(config, skip_tokenizer_init=True))
    spec, store = blueprint.backend.facts.kv_spec, blueprint.open_store()
    if store is None:
        raise ExecutionError("the engine has no store")
    num_blocks = num_slots_within(int(config.disk_cache_size), store.block_bytes, spec.block_size) // len(spec.groups)
    data = memoryview(random.Random(0).randbytes(store.block_bytes))
    try:
        for index in range(num_blocks * len(spec.groups)):
            serial, group = index // len(spec.groups) + 1, index % len(spec.groups)
            tokens = serial.to_bytes(4, "little") * spec.block_size
            scope = CacheScope("", "", ()) if serial == 1 else None
            store.write(KeptBlock(index, serial, serial - 1, group, tokens, scope), data)
    finally:
        store.close()
    return num_blocks


class _Draws:
    """Draws random prompts for chats; the prompt to load is given."""

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self._random, self._vocab_size = random.Random(0), vocab_size
        self._prompt = tuple(prompt)

    def __call__(self, length: int) -> tuple[int, ...]:
        if length == len(self._prompt):
            return self._prompt
        return tuple(self._random.randrange(self._vocab_size) for _ in range(length))


def _folder(config: EngineConfig, name: str) -> Path:
    return Path(config.disk_cache or tempfile.gettempdir()) / name


def _prompts(seed: int, num_tokens: int, vocabulary: int, count: int) -> list[list[int]]:
    """Return prompts that share a prefix of `num_tokens`, each with different tokens after it."""
    draw = partial(random.Random(seed).randrange, vocabulary)
    prefix = [draw() for _ in range(num_tokens)]
    return [prefix + [draw() for _ in range(TAIL)] for _ in range(count)]


def _from_disk(config: EngineConfig, prompt: Sequence[int], num_tokens: int) -> float:
    found = _answers(config, [prompt], 0)
    if found.disk_tokens[0] < num_tokens:
        raise ExecutionError(f"only {found.disk_tokens[0]} of {num_tokens} tokens came from disk")
    return found.first_token_s[0]


def _answers(
    config: EngineConfig, prompts: Sequence[Sequence[int]], to_store: int, *, is_killed: bool = False
) -> Answers:
    """Answer prompts in a new process, which then ends normally or is killed."""
    with AskedProcess(PROBE) as process:
        answers = Answers(**process.ask({"settings": asdict(config), "prompts": prompts, "to_store": to_store}))
        if is_killed:
            process.kill()
    return answers


def _drop(config: EngineConfig) -> None:
    """Make the system write a store to disk and drop it from memory."""
    for path in Path(str(config.disk_cache)).glob("*/blocks.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
