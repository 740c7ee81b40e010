"""The cost of prefix caching without hits: the same traffic with and without an index.

Prompts are random, so every lookup misses, and every full block is hashed or compared, published, and evicted without
any use. A request arrives when another ends, so each step mixes decodes with some prefill.
"""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Callable, Iterator
from itertools import islice

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.instruments.bench.workload import Sizes, make_scheduler, random_tokens, timed_step
from quire.reporting.report import Goal, Section, cell
from quire.reporting.samples import summarize
from quire.scheduler.scheduler import Scheduler

MAX_PERCENT = 1.0
STEP_US = 20_000.0  # a model's step, for comparison

NUM_RUNNING = 32
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 64
NUM_WARM_UP = 96  # requests that end before the clock starts: enough to fill the small pool
NUM_TIMED = 512
NUM_PROMPTS = NUM_WARM_UP + NUM_TIMED + 2 * NUM_RUNNING  # another request always waits
POOLS = {"no eviction": 100_000, "cache full, every block evicted": 2_048}
INDEXES = ("none", "hash_chain", "radix_tree")


def measure_caching(repeat: int, tell: Callable[[str], None]) -> Section:
    """Measure each index and pool in turn, run by run."""
    prompts = [random_tokens(random.Random(index), PROMPT_TOKENS) for index in range(NUM_PROMPTS)]
    step_us: dict[tuple[str, str], list[float]] = {(pool, index): [] for pool in POOLS for index in INDEXES}
    for number in range(repeat):
        tell(f"caching: run {number + 1} of {repeat}")
        for (pool, index), values in step_us.items():
            sizes = Sizes(NUM_RUNNING, POOLS[pool], index, batched_tokens=2048, model_len=4096)
            values.append(1e6 * _mean_step_s(sizes, prompts))
    rows: list[tuple[str, ...]] = []
    goals: list[Goal] = []
    for (pool, index), values in step_us.items():
        name = f"{index}, {pool}"
        if index == "none":
            rows.append((name, cell(summarize(values)), "", ""))
            continue
        extra = summarize([more - less for more, less in zip(values, step_us[pool, "none"], strict=True)])
        percent = extra.median / STEP_US * 100
        rows.append((name, cell(summarize(values)), cell(extra), f"{percent:.2f} %"))
        goals.append(Goal(f"caching at 0 % hits, {name}: % of a 20 ms step", percent, MAX_PERCENT))
    text = (
        f"{NUM_RUNNING} running requests, random prompts of {PROMPT_TOKENS} tokens, outputs of {OUTPUT_TOKENS}, at "
        f"most 2,048 tokens a step. A request arrives when one ends, so a step has about {NUM_RUNNING} decodes and "
        f"{NUM_RUNNING * PROMPT_TOKENS // OUTPUT_TOKENS} tokens of prefill. Mean time of a step in the control plane "
        f"until {NUM_TIMED} requests have ended, after {NUM_WARM_UP} warm-up requests. Median of {repeat} "
        "runs (min–max); the extra time is taken within each run."
    )
    header = ("prefix index", "µs per step", "extra µs per step", "of a 20 ms step")
    samples = {f"{index}, {pool}": values for (pool, index), values in step_us.items()}
    return Section("Prefix caching that never hits", text, header, rows, {"mean_step_us": samples}, goals)


def _mean_step_s(sizes: Sizes, prompts: list[array[int]]) -> float:
    scheduler = make_scheduler(sizes)
    waiting = _requests(prompts)
    for request in islice(waiting, NUM_RUNNING):
        scheduler.add(request)
    gc.collect()
    _run_until(scheduler, waiting, NUM_WARM_UP)
    step_s = _run_until(scheduler, waiting, NUM_TIMED)
    return sum(step_s) / len(step_s)


def _requests(prompts: list[array[int]]) -> Iterator[Request]:
    """Yield the requests; the first have outputs of increasing length, so that they do not all end at once."""
    for index, prompt in enumerate(prompts):
        num_tokens = min(OUTPUT_TOKENS, (index + 1) * OUTPUT_TOKENS // NUM_RUNNING)
        yield Request(str(index), prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True))


def _run_until(scheduler: Scheduler, waiting: Iterator[Request], num_finished: int) -> list[float]:
    """Step until this many requests have ended, adding a new one for each; returns the seconds of each step."""
    step_s = []
    while num_finished > 0:
        seconds, outcome = timed_step(scheduler)
        step_s.append(seconds)
        num_finished -= len(outcome.finished)
        for request in islice(waiting, len(outcome.finished)):
            scheduler.add(request)
    return step_s
