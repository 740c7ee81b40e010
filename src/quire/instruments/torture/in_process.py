"""Engines in this process, for faults that no request can cause: hashes that collide, allocations that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.compute.worker.worker import Worker
from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.core import EngineCore
from quire.engine.factory import plan_engine
from quire.memory.block_pool import BlockPool
from quire.memory.manager import KVCacheManager
from quire.scheduler.scheduler import Scheduler

NUM_TOKENS = 24
MAX_STEPS = 2000


@dataclass(slots=True)
class FailingAllocations:
    """Makes a pool whose allocations `first` to `first + count - 1` fail despite free blocks."""

    first: int
    count: int
    num_allocations: int = 0

    @property
    def has_struck(self) -> bool:
        """Whether an allocation has failed."""
        return self.num_allocations > self.first

    def make_pool(self, *arguments: Any, **options: Any) -> BlockPool:
        """Make the pool."""
        faults = self

        class FailingPool(BlockPool):
            def allocate(self, num_blocks: int) -> list[int] | None:
                if num_blocks:
                    faults.num_allocations += 1
                    if faults.first < faults.num_allocations <= faults.first + faults.count:
                        return None
                return super().allocate(num_blocks)

        return FailingPool(*arguments, **options)


def run_prompts(
    prompts: Sequence[Sequence[int]],
    memory: Mapping[str, Any],
    make_pool: Callable[..., BlockPool] = BlockPool,
) -> tuple[list[list[int]], int]:
    """Run prompts on the guide; returns the tokens of each, and the number of blocks still held afterwards.

    `memory`: settings of `MemoryConfig`. Raises `InvariantError` if the memory is inconsistent at the end.
    """
    settings = EngineConfig(model="guide", kv_memory="4MiB", num_threads=1, max_num_seqs=8, skip_tokenizer_init=True)
    blueprint = plan_engine(settings)
    config, plan = blueprint.config, blueprint.report.plan
    memory_config = replace(config.memory_config(plan.num_blocks, 0, b"torture"), **memory)
    manager = KVCacheManager(blueprint.backend.facts.kv_spec, memory_config, make_pool=make_pool)
    scheduler = Scheduler(config.scheduler_config(plan.max_model_len), manager, blueprint.limits)
    core = EngineCore(scheduler, Worker(blueprint.backend.load(memory_config.num_blocks, 0)), SystemClock())
    try:
        sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=NUM_TOKENS)
        requests = [Request(str(index), list(prompt), sampling) for index, prompt in enumerate(prompts)]
        for request in requests:
            core.add_request(request)
        for _ in range(MAX_STEPS):
            if not scheduler.requests:
                break
            core.step()
        scheduler.check()
        manager.check()
        return [list(request.output_token_ids) for request in requests], manager.pool.num_in_use
    finally:
        core.close()
