"""The load of the control-plane benchmark: schedulers driven without a model.

Times cover `schedule()` and `update()`, as in the peer's script. The result of a step, which an executor would return,
is made between the two and does not count. All sampled tokens are equal; prompts are random, so that blocks are shared
only where sharing is measured.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepResult
from quire.core.validate import RequestLimits
from quire.memory.block_hash import BlockHasher
from quire.memory.manager import KVCacheManager
from quire.scheduler.commit import StepOutcome
from quire.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 151_936
SAMPLED_TOKEN = 7
MAX_DRAWN_TOKEN = 150_000  # as in the peer's script

# The shape of Qwen3-0.6B, as for the peer. The control plane's speed does not depend on it.
SPEC = KVCacheSpec.from_layers([None] * 28, block_size=BLOCK_SIZE, num_kv_heads=8, head_dim=128, dtype="bfloat16")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a scheduler. `batched_tokens` and `model_len` are those of the peer's script."""

    num_running: int = 256
    num_blocks: int = 100_000
    prefix_index: str = "hash_chain"
    batched_tokens: int = 65_536
    model_len: int = 40_960


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """One run: seconds to add all requests, to admit and prefill them, and of each later decode step."""

    add_s: float
    admit_s: float
    step_s: list[float]


def make_scheduler(sizes: Sizes) -> Scheduler:
    """Return a scheduler with an empty memory."""
    memory = KVCacheManager(SPEC, MemoryConfig(num_blocks=sizes.num_blocks, prefix_index=sizes.prefix_index))
    config = SchedulerConfig(
        max_num_seqs=sizes.num_running, max_num_batched_tokens=sizes.batched_tokens, max_model_len=sizes.model_len
    )
    limits = RequestLimits(VOCAB_SIZE, sizes.model_len, sizes.num_blocks * BLOCK_SIZE, sizes.num_running)
    return Scheduler(config, memory, limits)


def prompt_lengths(num_prompts: int, num_tokens: int, *, staggered: bool = False) -> list[int]:
    """Return the lengths of prompts: equal, so that all reach block borders in the same step, or staggered.

    >>> prompt_lengths(3, 512), prompt_lengths(3, 512, staggered=True)
    ([512, 512, 512], [512, 513, 514])
    """
    return [num_tokens + (index % BLOCK_SIZE if staggered else 0) for index in range(num_prompts)]


def draw_prompts(lengths: Iterable[int]) -> Iterator[list[int]]:
    """Draw prompts one at a time, as slowly as the peer's script."""
    rng = random.Random(0)
    for length in lengths:
        yield [rng.randrange(MAX_DRAWN_TOKEN) for _ in range(length)]


def random_tokens(rng: random.Random, num_tokens: int) -> array[int]:
    """Draw many tokens quickly (from the first 65,536 of the vocabulary)."""
    return array("i", array("H", rng.randbytes(2 * num_tokens)))


def run_decode(scheduler: Scheduler, prompts: Iterable[Sequence[int]], num_steps: int) -> DecodeRun:
    """Add requests, prefill them, then time decode steps. Mutates the scheduler.

    If iterating over the prompts draws them, `add_s` includes that, as in the peer's script.
    """
    sampling = SamplingParams(max_tokens=4096, ignore_eos=True)
    num_requests = 0
    started = time.perf_counter()
    for prompt in prompts:
        scheduler.add(Request(str(num_requests), prompt, sampling))
        num_requests += 1
    add_s = time.perf_counter() - started
    admit_s, num_entries = 0.0, 0
    while num_entries < num_requests:
        seconds, outcome = timed_step(scheduler)
        admit_s += seconds
        num_entries = len(outcome.advanced)
    return DecodeRun(add_s, admit_s, [timed_step(scheduler)[0] for _ in range(num_steps)])


def hash_prompts(prompts: Iterable[Sequence[int]]) -> float:
    """Return the seconds to hash the full blocks of prompts, as for lookup and publication."""
    hasher, size = BlockHasher(), 4 * BLOCK_SIZE
    packed = [array("i", prompt).tobytes() for prompt in prompts]
    started = time.perf_counter()
    for tokens in packed:
        digest = hasher.root(b"")
        for at in range(0, len(tokens) - size + 1, size):
            digest = hasher.child(digest, tokens[at : at + size])
    return time.perf_counter() - started


def timed_step(scheduler: Scheduler) -> tuple[float, StepOutcome]:
    """Run one step; returns the seconds of `schedule` and `update`, and the outcome. Mutates the scheduler."""
    started = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    if plan is None:
        raise RuntimeError("the benchmark ran out of requests")
    num_tokens = sum(plan.samples)
    result = StepResult(plan.step_id, plan.samples, array("i", [SAMPLED_TOKEN]) * num_tokens)
    computed = time.perf_counter()
    outcome = scheduler.update(result)
    return planned - started + time.perf_counter() - computed, outcome
