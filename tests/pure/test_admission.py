"""Admission: as many sequences run at once as the start-up table says, and none of them ever yields."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.core.clock import ManualClock
from quire.core.config import EngineConfig, MemoryConfig, SchedulerConfig
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.memory_needs import MemoryNeeds
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.core import EngineCore
from quire.engine.memory_plan import plan_memory
from quire.memory.manager import KVCacheManager
from quire.scheduler.scheduler import Scheduler
from quire.simulate.executor import SimExecutor
from support.control import Control

GEMMA = [None if layer % 6 == 5 else 512 for layer in range(26)]


def promised(spec: KVCacheSpec, num_blocks: int, max_model_len: int, depth: int) -> int:
    """How many sequences of the longest context run at once, as the start-up table prints it."""
    config = EngineConfig(
        kv_memory=num_blocks * spec.bytes_per_block, max_model_len=max_model_len, max_steps_under_way=depth
    )
    return plan_memory(config.resolved(), spec, max_model_len, MemoryNeeds(0, 0)).num_full_sequences


def test_three_fit_into_the_pool_of_the_guide_to_sizes() -> None:
    """docs/how-to/size-a-pool.md: 2,340 blocks, seven groups of layers, six of them with a window of 512 tokens."""
    spec = KVCacheSpec.from_layers(GEMMA, block_size=16, num_kv_heads=1, head_dim=256, dtype="bfloat16")
    assert promised(spec, 2340, 8192, 1) == 3
    memory = KVCacheManager(spec, MemoryConfig(num_blocks=2340))
    limits = RequestLimits(10_000, 8192, 8192, 8)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=8192)
    scheduler, clock = Scheduler(config, memory, limits), ManualClock()
    engine = EngineCore(scheduler, SimExecutor(10_000, clock), clock)
    for number in range(4):
        prompt = [number, *range(8100)]
        engine.add_request(Request(f"r{number}", prompt, SamplingParams(max_tokens=8192 - len(prompt))))
    most = 0
    while engine.step() is not None:
        most = max(most, len(scheduler.running))
    assert (most, scheduler.num_preemptions) == (3, 0)


def test_room_is_kept_for_the_next_tokens_of_each_and_not_for_a_whole_block() -> None:
    control = Control(
        block_size=128, num_blocks=100, max_num_seqs=100, max_num_batched_tokens=100, max_model_len=2048, headroom=0.0
    )
    for number in range(100):
        control.add(f"r{number}", [number % 50], max_tokens=2000)
    control.step()
    assert len(control.scheduler.running) == 89  # 89 blocks, and 89 × 16 tokens take the other 11 and a bit


SEEDS = [*range(60), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(60, 150))]


def draw(seed: int) -> tuple[Control, int, int, random.Random]:
    """Return an engine of drawn layers and sizes, its longest context, and what the start-up table prints."""
    rng = random.Random(seed)
    windows = [rng.choice([None, 1, 2, 5, 8, 17, 40]) for _ in range(rng.randint(1, 3))]
    block_size, depth, length = rng.choice([1, 2, 4, 16]), rng.choice([1, 2, 3]), rng.choice([31, 48, 64, 65])
    spec = KVCacheSpec(block_size, 1, 8, "float32", tuple(KVGroup((i,), window) for i, window in enumerate(windows)))
    one = spec.num_blocks_for(length - 1, longest_chunk=1 + depth)
    num_blocks = one * rng.randint(1, 5) + rng.choice([0, 0, 1, rng.randrange(one)])
    settings: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice([32, 100, 1000]),
        "max_model_len": length,
        "headroom": rng.choice([0.0, 0.02, 0.3]),
        "policy": rng.choice(["fcfs", "fair_share"]),
    }
    control = Control(
        block_size=block_size, windows=windows, num_blocks=num_blocks, max_steps_under_way=depth, **settings
    )
    return control, length, promised(spec, num_blocks, length, depth), rng


def most_at_once(control: Control) -> int:
    """Run to the end; return how many sequences ran at once at the most."""
    most = 0
    while control.scheduler.requests:
        control.step()
        most = max(most, len(control.scheduler.running))
    control.check_nothing_held()
    control.check_outputs()
    return most


@pytest.mark.parametrize("seed", SEEDS)
def test_so_many_as_the_table_says_run_at_once_and_never_yield(seed: int) -> None:
    control, length, count, rng = draw(seed)
    for number in range(count):
        num_prompt_tokens = rng.randint(1, length // 2)
        prompt = [number, *(rng.randrange(50) for _ in range(num_prompt_tokens - 1))]
        control.add(f"r{number}", prompt, max_tokens=length - num_prompt_tokens)
    assert most_at_once(control) == count
    assert control.scheduler.num_preemptions == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_not_one_more_than_the_table_says_runs_at_once(seed: int) -> None:
    control, length, count, rng = draw(seed)
    for number in range(count + 2):
        prompt = [number, *(rng.randrange(50) for _ in range(length - 3))]
        control.add(f"r{number}", prompt, max_tokens=2)
    assert most_at_once(control) <= count
    assert control.scheduler.num_preemptions == 0
