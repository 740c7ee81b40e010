"""The pace: prompts are cut so that nobody who generates waits longer than the operator allows."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import ExecutionError
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan, column
from quire.core.validate import RequestLimits
from quire.engine.core import EngineCore
from quire.engine.records.step_log import StepLogWriter, replay
from quire.memory.manager import KVCacheManager
from quire.scheduler.pace import FIRST_LIMIT, LEAST_BESIDE, UNIT, StepPace
from quire.scheduler.scheduler import Scheduler
from quire.simulate.cost.base import StepCost
from quire.simulate.cost.linear import LinearCost
from quire.simulate.executor import SimExecutor

VOCAB = 1000
SPEC = KVCacheSpec.from_layers([None], block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
LINEAR = LinearCost(0.02, 0.001)


class GrowingCost:
    """A token costs more the more text is before it, and steps vary by a fifth."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def step_s(self, plan: StepPlan) -> float:
        tokens = sum(
            count * (0.001 + 2e-7 * start) for start, count in zip(plan.starts, plan.counts, strict=True) if count > 1
        )
        return (0.02 + 0.0005 * len(plan.rows) + tokens) * self._random.uniform(0.93, 1.07)


class FirstFree:
    """Steps wait for memory: the first 40 tokens of a step cost nothing."""

    def step_s(self, plan: StepPlan) -> float:
        return 0.03 + 0.001 * max(0, plan.num_tokens - 40)


def run_chats(
    cost: StepCost,
    allowed_ms: float | None,
    *,
    slowdown: float = 0.0,
    prompt: int = 4000,
    chats: int = 8,
    depth: int = 1,
):
    """Let chats generate, then a prompt come; return the seconds of the steps in which it was computed, and the log."""
    config = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=8192,
        itl_slo_ms=allowed_ms,
        max_slowdown=slowdown,
        max_steps_under_way=depth,
    )
    limits = RequestLimits(VOCAB, 8192, 8192, 16)
    scheduler = Scheduler(config, KVCacheManager(SPEC, MemoryConfig(num_blocks=2048)), limits)
    clock, file = ManualClock(), io.BytesIO()
    engine = EngineCore(scheduler, SimExecutor(VOCAB, clock, cost), clock, log=StepLogWriter(file, clock))
    for index in range(chats):
        engine.add_request(Request(f"chat {index}", range(index, index + 20), SamplingParams(max_tokens=2000)))
    for _ in range(20):
        engine.step()
    engine.add_request(Request("prompt", [7] * prompt, SamplingParams(max_tokens=1)))
    step_s: list[float] = []
    while True:
        before = clock.now()
        outcome = engine.step()
        assert outcome is not None
        step_s.append(clock.now() - before)
        if any(request.request_id == "prompt" for request in outcome.finished):
            break
    file.seek(0)
    return step_s, file


def test_without_a_limit_a_prompt_takes_the_whole_budget_of_a_step():
    step_s, _ = run_chats(LINEAR, None)
    assert max(step_s) == pytest.approx(0.02 + 0.512)


@pytest.mark.parametrize("allowed_ms", [50, 100, 250])
@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_with_a_prompt_takes_longer_than_allowed(allowed_ms, depth):
    step_s, file = run_chats(LINEAR, allowed_ms, depth=depth)
    assert max(step_s) <= max(allowed_ms, 20 + FIRST_LIMIT + 8) / 1e3 + 1e-9  # the first step measures
    later = step_s[depth + 1 :]
    assert max(later) <= allowed_ms / 1e3
    assert sum(later) / len(later) >= 0.6 * allowed_ms / 1e3, "the time that is allowed is used"
    assert replay(file) > 0


@pytest.mark.parametrize("cost", [GrowingCost(), FirstFree()], ids=["growing", "waits for memory"])
def test_the_limit_follows_what_steps_cost(cost):
    step_s, file = run_chats(cost, 200)
    late = sum(seconds > 0.2 for seconds in step_s)
    assert late <= len(step_s) // 50, "p99 of the steps is within the time allowed"
    assert replay(file) > 0


def test_a_prompt_goes_on_though_the_time_allowed_is_too_short_for_a_step():
    step_s, _ = run_chats(LINEAR, 10, prompt=640)
    assert max(step_s[1:]) <= 0.02 + 0.001 * (UNIT + 9) + 1e-9
    assert len(step_s) <= 1 + 640 / UNIT


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_takes_at_most_some_times_as_long_as_one_of_decodes(depth):
    decodes_s = 0.1 + 8 * 0.001
    step_s, file = run_chats(LinearCost(0.1, 0.001), None, slowdown=4.0, depth=depth)
    assert max(step_s) <= 4 * decodes_s
    assert sum(step_s[depth + 2 : -1]) / len(step_s[depth + 2 : -1]) >= 3.5 * decodes_s, "the time is used"
    assert replay(file) > 0


def test_a_prompt_advances_by_enough_tokens_to_pay_for_the_weights():
    step_s, _ = run_chats(LINEAR, None, slowdown=2.0, prompt=1280)
    assert len(step_s) == 10
    assert max(step_s) == pytest.approx(0.02 + 0.009 + 0.001 * LEAST_BESIDE)


def test_prompts_are_not_held_up_before_any_step_of_decodes_was_measured():
    """If prompts come without a pause, there is nothing to compare with: a small limit would make the pause longer."""
    pace = StepPace(None, 4.0)
    for now in range(5):
        note(pace, pace.limit, now, now + 0.5)
    assert pace.limit == LEAST_BESIDE << 5
    assert note(pace, 0, 6.0, 6.1)
    assert pace.limit == LEAST_BESIDE
    note(pace, 512, 7.0, 8.1)  # 1 s more than a step of decodes, which allows 0.3 s
    assert pace.limit == 512 * 3 // 10 // UNIT * UNIT


def test_a_prompt_alone_is_not_limited():
    step_s, _ = run_chats(LINEAR, 50, prompt=2048, chats=0)
    assert step_s[:3] == pytest.approx([0.02 + 0.512] * 3)


@settings(deadline=None, max_examples=60)
@given(
    fixed=st.floats(0.0, 0.2),
    per_token=st.floats(0.0, 0.01),
    allowed_ms=st.floats(1.0, 2000.0),
    prompt=st.integers(1, 3000),
    depth=st.integers(1, 3),
)
def test_every_prompt_ends_whatever_steps_cost(fixed, per_token, allowed_ms, prompt, depth):
    step_s, file = run_chats(LinearCost(fixed, per_token), allowed_ms, prompt=prompt, chats=3, depth=depth)
    assert len(step_s) <= prompt / UNIT + 8
    assert replay(file) > 0


def plan_of(prompt_tokens: int, decodes: int = 2) -> StepPlan:
    rows = range(decodes + bool(prompt_tokens))
    counts = [1] * decodes + ([1 + prompt_tokens] if prompt_tokens else [])
    return StepPlan(0, column(*rows), column(*([5] * len(rows))), column(*counts), column(*([1] * len(rows))), decodes)


def note(pace: StepPace, prompt_tokens: int, submitted_s: float, ended_s: float) -> bool:
    return pace.note_result(plan_of(prompt_tokens), submitted_s, ended_s)


def test_the_end_of_a_prompt_says_little_and_changes_nothing():
    pace = StepPace(100)
    assert not note(pace, 10, 0.0, 0.01)
    assert pace.limit == FIRST_LIMIT


def test_a_slow_step_counts_however_few_its_tokens_are():
    pace = StepPace(100)
    assert note(pace, 20, 0.0, 0.5)
    assert pace.limit == UNIT


def test_a_limit_at_most_doubles():
    pace = StepPace(1000)
    assert note(pace, FIRST_LIMIT, 0.0, 0.001)
    assert pace.limit == 2 * FIRST_LIMIT


def test_steps_that_overlap_are_timed_from_the_end_of_the_one_before():
    pace = StepPace(100)
    assert not note(pace, 0, 0.0, 0.02)
    assert note(pace, FIRST_LIMIT, 0.001, 0.02 + 0.139)  # 119 ms more than a step of decodes; 60 ms are planned
    assert pace.limit == FIRST_LIMIT // 2


class Losing(SimExecutor):
    """Loses its first step with a prompt."""

    lost = False

    def collect(self):
        result = super().collect()
        if not self.lost and self.plan is not None and self.plan.num_tokens > 30:
            self.lost = True
            self._under_way.clear()
            raise ExecutionError("lost")
        return result


def test_steps_that_are_lost_are_not_measured():
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, itl_slo_ms=100.0)
    scheduler = Scheduler(config, KVCacheManager(SPEC, MemoryConfig(num_blocks=64)), RequestLimits(VOCAB, 256, 256, 4))
    clock = ManualClock()
    engine = EngineCore(scheduler, Losing(VOCAB, clock, LINEAR), clock)
    engine.add_request(Request("a", range(10), SamplingParams(max_tokens=50)))
    engine.step()
    engine.add_request(Request("b", range(20, 120), SamplingParams(max_tokens=5)))
    assert {request.request_id for request in engine.run()} == {"a", "b"}


def test_a_plan_that_computes_nothing_is_no_step_of_decodes() -> None:
    pace = StepPace(None, 4.0)
    note(pace, 0, 0.0, 0.1)
    assert not pace.note_result(plan_of(0, decodes=0), 0.1, 0.1)
    note(pace, 512, 0.1, 1.2)  # 1 s more than a step of decodes, which allows 0.3 s
    assert pace.limit == 512 * 3 // 10 // UNIT * UNIT
