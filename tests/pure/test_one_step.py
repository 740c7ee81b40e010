"""Texts that are computed in one step: every plan has whole texts, whatever arrives, fails, is aborted or preempted."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import ExecutionError, OutOfMemoryError, RequestTooLargeError
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.pooling import Pooling
from quire.core.request import CacheScope, FinishReason, Request, RequestStatus
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan, StepResult, column
from quire.core.validate import RequestLimits
from quire.memory.manager import KVCacheManager
from quire.scheduler.scheduler import Scheduler

LONGEST = 40


def pooled(request_id: str, length: int, tenant: str = "") -> Request:
    request = Request(request_id, [1] * length, SamplingParams(max_tokens=1), scope=CacheScope(tenant=tenant))
    request.pooling = Pooling("mean")
    return request


def made(budget: int = LONGEST, num_blocks: int = 30, **settings: Any) -> Scheduler:
    config = SchedulerConfig(max_num_batched_tokens=budget, max_model_len=LONGEST, **{"max_num_seqs": 8, **settings})
    spec = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,), None),))
    memory = KVCacheManager(spec, MemoryConfig(num_blocks=num_blocks, prefix_index="none"))
    limits = RequestLimits(
        8, LONGEST, num_blocks * 4, config.max_num_seqs, vector_size=8, generates=False, one_step=True
    )
    return Scheduler(config, memory, limits)


def result_of(plan: StepPlan) -> StepResult:
    none = column(*[0] * len(plan.rows))
    return StepResult(plan.step_id, none, column(), vectors={row: bytes(32) for row in plan.rows})


@pytest.mark.parametrize("policy", ["fcfs", "fair_share"])
@pytest.mark.parametrize("seed", range(8))
def test_every_text_is_computed_in_one_step(seed: int, policy: str) -> None:
    draw = random.Random(seed)
    budget, steps = draw.choice([LONGEST, 64, 200]), draw.choice([1, 2])
    scheduler = made(budget, draw.choice([12, 30]), policy=policy, max_steps_under_way=steps)
    requests = [pooled(f"r{n}", draw.randint(1, LONGEST), draw.choice("ab")) for n in range(40)]
    coming, under_way = deque(requests), deque[StepPlan]()
    for _ in range(2000):
        for _ in range(draw.randint(0, 3)):
            if coming:
                scheduler.add(coming.popleft())
        if draw.random() < 0.02 and scheduler.requests:
            scheduler.abort(draw.choice(sorted(scheduler.requests)))
        plan = scheduler.schedule() if len(under_way) < steps else None
        if plan is not None:
            texts = {request.row: request for request in scheduler.running}
            for row, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True):
                assert (start, count, samples) == (0, len(texts[row].tokens), 0)
            assert plan.num_tokens <= budget
            under_way.append(plan)
        elif under_way and draw.random() < 0.05:
            under_way.clear()
            error = OutOfMemoryError("no memory") if draw.random() < 0.5 else ExecutionError("broken")
            scheduler.lose_steps(error)
        elif under_way:
            scheduler.update(result_of(under_way.popleft()))
        scheduler.check()
        if not coming and not scheduler.requests and not under_way:
            break
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    ends = {request.finish_reason for request in requests}
    assert FinishReason.STOP in ends and ends <= {FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR}
    assert (
        scheduler.memory.ledger().num_used_blocks == 0
        if hasattr(scheduler.memory.ledger(), "num_used_blocks")
        else True
    )


def test_a_long_text_waits_for_a_step_of_its_own_and_the_next_ones_go_together() -> None:
    scheduler = made(LONGEST)
    for name, length in (("short", 5), ("long", LONGEST), ("a", 20), ("b", 20), ("c", 1)):
        scheduler.add(pooled(name, length))
    sizes = []
    while (plan := scheduler.schedule()) is not None:
        sizes.append(list(plan.counts))
        scheduler.update(result_of(plan))
    assert sizes == [[5], [LONGEST], [20, 20], [1]]
    with pytest.raises(RequestTooLargeError, match=f"maximum context length is {LONGEST} tokens"):
        scheduler.add(pooled("longer", LONGEST + 1))


def test_after_a_lack_of_memory_a_text_larger_than_the_smaller_steps_still_runs() -> None:
    scheduler = made(2 * LONGEST)
    for name in ("one", "other"):
        scheduler.add(pooled(name, LONGEST))
    assert scheduler.schedule() is not None
    scheduler.lose_steps(OutOfMemoryError("no memory"))
    assert scheduler.isolation.max_step_tokens == LONGEST
    scheduler.isolation.max_step_tokens = LONGEST // 2
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None and list(plan.counts) == [LONGEST]
        scheduler.update(result_of(plan))
    assert not scheduler.requests
