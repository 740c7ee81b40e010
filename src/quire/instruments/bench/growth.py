"""The cost of a decoded token with growing contexts and growing pools: it should not grow."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator

from quire.instruments.bench.workload import (
    BLOCK_SIZE,
    Sizes,
    make_scheduler,
    prompt_lengths,
    random_tokens,
    run_decode,
)
from quire.reporting.report import Section, cell
from quire.reporting.samples import mean_of_last_periods, ratios, summarize

CONTEXTS = (1_024, 8_192, 32_768, 131_072)
POOLS = (1_000, 10_000, 100_000, 1_000_000)
NUM_RUNNING = 32
NUM_STEPS = 21 * BLOCK_SIZE  # the first period is left out
POOL_PROMPT = 128  # 32 of these and their outputs just fit into the smallest pool
POOL_FOR_CONTEXTS = NUM_RUNNING * max(CONTEXTS) // BLOCK_SIZE * 17 // 16  # a little more than the longest contexts need


def measure_growth(repeat: int, tell: Callable[[str], None]) -> Section:
    """Measure a decoded token at each size; each run measures all sizes."""
    by_context: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    by_pool: dict[int, list[float]] = {pool: [] for pool in POOLS}
    for index in range(repeat):
        tell(f"growth: run {index + 1} of {repeat}")
        for context, values in by_context.items():
            sizes = Sizes(NUM_RUNNING, POOL_FOR_CONTEXTS, model_len=max(CONTEXTS) + 8192)
            values.append(_token_us(sizes, context))
        for pool, values in by_pool.items():
            values.append(_token_us(Sizes(NUM_RUNNING, pool), POOL_PROMPT))
    text = (
        f"Mean over {NUM_STEPS - BLOCK_SIZE} steps with {NUM_RUNNING} running requests, staggered, per decoded "
        f"token. All contexts have the same pool ({POOL_FOR_CONTEXTS:,} blocks), all pools prompts of {POOL_PROMPT}. "
        f"Median of {repeat} runs (min–max); ratios to the smallest are taken within each run."
    )
    return Section(
        "A decoded token at growing contexts and pools",
        text,
        ("what", "µs per decoded token", "ratio to the smallest"),
        [*_rows(by_context, "context of {:,} tokens"), *_rows(by_pool, "pool of {:,} blocks")],
        {"token_us_by_context": by_context, "token_us_by_pool": by_pool},
    )


def _token_us(sizes: Sizes, num_prompt_tokens: int) -> float:
    scheduler = make_scheduler(sizes)
    gc.collect()
    rng = random.Random(0)
    lengths = prompt_lengths(sizes.num_running, num_prompt_tokens, staggered=True)
    run = run_decode(scheduler, (random_tokens(rng, length) for length in lengths), NUM_STEPS)
    return 1e6 * mean_of_last_periods(run.step_s, BLOCK_SIZE) / sizes.num_running


def _rows(by_size: dict[int, list[float]], name: str) -> Iterator[tuple[str, ...]]:
    smallest = by_size[min(by_size)]
    for size, values in by_size.items():
        yield name.format(size), cell(summarize(values)), cell(summarize(ratios(values, smallest)), "×")
