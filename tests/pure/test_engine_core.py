"""The loop: schedule, submit, collect, update, with several plans out at once, and when the executor fails."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import ExecutionError, ExecutorLostError, RequestTooLargeError
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import FinishReason, Request
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.commands import Abort, Add, Fail, Stop, Survey, Watch
from quire.engine.core import EngineCore
from quire.memory.manager import KVCacheManager
from quire.scheduler.scheduler import Scheduler
from quire.simulate.cost.linear import LinearCost
from quire.simulate.executor import SimExecutor
from support.shadow import ShadowExecutor, expected_tokens

VOCAB = 1000
SPEC = KVCacheSpec.from_layers([None], block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")


def make_scheduler(**settings) -> Scheduler:
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | settings)
    limits = RequestLimits(VOCAB, 64, 64 * 4, 4)
    return Scheduler(config, KVCacheManager(SPEC, MemoryConfig(num_blocks=64)), limits)


def make_request(name: str, length: int, max_tokens: int) -> Request:
    return Request(name, range(length), SamplingParams(max_tokens=max_tokens))


class CountingExecutor(ShadowExecutor):
    """Remembers how many plans were out at once, and whether it was started and shut down."""

    def __init__(self) -> None:
        super().__init__(SPEC, VOCAB)
        self.out, self.most_out, self.events = 0, 0, []

    def start(self) -> None:
        self.events.append("start")

    def shutdown(self) -> None:
        self.events.append("shutdown")

    def submit(self, plan):
        self.out += 1
        self.most_out = max(self.most_out, self.out)
        super().submit(plan)

    def collect(self):
        self.out -= 1
        return super().collect()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_plans_are_out_as_the_setting_says(depth):
    executor = CountingExecutor()
    engine = EngineCore(make_scheduler(max_steps_under_way=depth), executor, ManualClock())
    request = make_request("r", 5, 20)
    engine.add_request(request)
    assert engine.run() == [request]
    assert executor.most_out == depth
    assert request.output_token_ids == expected_tokens(list(range(5)), 20, VOCAB)


def test_the_executor_is_started_once_and_shut_down():
    executor = CountingExecutor()
    engine = EngineCore(make_scheduler(), executor, ManualClock())
    engine.close()
    assert executor.events == ["start", "shutdown"]


def test_an_engine_with_nothing_to_do_does_nothing():
    engine = EngineCore(make_scheduler(), CountingExecutor(), ManualClock())
    assert engine.step() is None


def test_requests_are_stamped_with_the_injected_time():
    clock = ManualClock(12.5)
    engine = EngineCore(make_scheduler(), CountingExecutor(), clock)
    request = make_request("r", 3, 1)
    engine.add_request(request)
    assert request.arrival_s == 12.5


def test_simulated_time_is_what_the_cost_model_says():
    clock = ManualClock()
    engine = EngineCore(make_scheduler(), SimExecutor(VOCAB, clock, LinearCost(1.0, 0.25)), clock)
    engine.add_request(make_request("r", 8, 3))
    engine.run()
    assert clock.now() == (1 + 8 * 0.25) + 2 * (1 + 0.25)


def test_a_lost_step_is_done_again_and_nobody_can_tell():
    executor = CountingExecutor()
    engine = EngineCore(make_scheduler(max_num_seqs=2, max_steps_under_way=2), executor, ManualClock())
    requests = [make_request(f"r{i}", 5 + i, 9) for i in range(3)]
    for request in requests:
        engine.add_request(request)
    engine.step()
    executor.fail_next_collect = True
    outcome = engine.step()
    assert outcome is not None
    assert not outcome.finished
    engine.scheduler.check()
    engine.run()
    for request in requests:
        assert request.output_token_ids == expected_tokens(list(range(request.num_prompt_tokens)), 9, VOCAB)
    assert engine.scheduler.memory.pool.num_in_use == 0


def test_what_a_lost_step_computed_is_not_cached():
    executor = CountingExecutor()
    engine = EngineCore(make_scheduler(), executor, ManualClock())
    engine.add_request(make_request("lost", 12, 9))
    executor.fail_next_collect = True
    engine.step()
    engine.send(Abort("lost"))
    again = make_request("again", 12, 2)
    engine.add_request(again)
    engine.run()
    assert again.num_cached_tokens == 0


def test_a_refused_request_leaves_no_trace():
    engine = EngineCore(make_scheduler(), CountingExecutor(), ManualClock())
    with pytest.raises(RequestTooLargeError):
        engine.add_request(make_request("long", 65, 1))
    assert engine.step() is None
    engine.scheduler.check()


def test_aborting_between_steps_frees_at_once():
    engine = EngineCore(make_scheduler(max_steps_under_way=2), CountingExecutor(), ManualClock())
    engine.add_request(make_request("r", 9, 20))
    engine.step()
    engine.send(Abort("r"))
    assert engine.scheduler.memory.pool.num_in_use == 0
    while engine.step() is not None:
        pass
    engine.scheduler.check()


def test_a_stop_string_ends_a_sequence_with_what_it_has():
    engine = EngineCore(make_scheduler(), CountingExecutor(), ManualClock())
    request = make_request("r", 3, 20)
    engine.add_request(request)
    engine.step()
    engine.send(Stop("r"))
    assert (request.finish_reason, request.num_output_tokens) == (FinishReason.STOP, 1)


def test_the_simulated_executor_has_nothing_to_collect_before_a_plan():
    with pytest.raises(ExecutionError):
        SimExecutor(VOCAB, ManualClock()).collect()


def test_an_engine_says_what_it_has_done():
    clock = ManualClock()
    engine = EngineCore(make_scheduler(), SimExecutor(VOCAB, clock, LinearCost(1.0, 0.25)), clock)
    engine.add_request(make_request("r", 8, 3))
    engine.add_request(make_request("again", 8, 3))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_blocks) == (1, 1, 2, 64)
    assert stats.kv_usage == 2 / 64
    engine.run()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert (stats.queried_tokens_total, stats.hit_tokens_total) == (16, 7)
    assert (stats.steps_total, stats.busy_s_total) == (4, clock.now())
    assert stats.max_step_tokens == 16


def test_a_request_whose_numbers_go_wrong_is_counted_once_whatever_it_has_opened():
    class Sick(CountingExecutor):
        def collect(self):
            result = super().collect()
            return replace(result, failures={row: "the logits are not finite" for row in self.sick})

    executor = Sick()
    executor.sick = []
    engine = EngineCore(make_scheduler(), executor, ManualClock())
    for name, count in (("pair", 2), ("well", 1)):
        engine.add_request(Request(name, [1, 2, 3], SamplingParams(n=count, max_tokens=9)))
    engine.step()
    rows = {request.request_id: [] for request in engine.scheduler.running}
    for request in engine.scheduler.running:
        rows[request.request_id].append(request.row)
    assert len(rows["pair"]) == 2
    executor.sick = rows["pair"]
    finished = engine.step().finished
    assert [(each.request_id, each.finish_reason) for each in finished] == [("pair", FinishReason.ERROR)] * 2
    stats = engine.stats()
    assert (stats.corrupted_requests_total, stats.culprits_total, stats.failed_steps_total) == (1, 0, 0)
    executor.sick = []
    assert [each.request_id for each in engine.run()] == ["well"]


def test_time_is_busy_where_steps_fail_too():
    clock = ManualClock()

    class Slow(CountingExecutor):
        def collect(self):
            clock.advance(2.0)
            raise ExecutorLostError("it is gone")

    engine = EngineCore(make_scheduler(), Slow(), clock)
    engine.add_request(make_request("r", 3, 1))
    with pytest.raises(ExecutorLostError, match=r"^it is gone$"):
        engine.step()
    stats = engine.stats()
    assert (stats.busy_s_total, stats.steps_total) == (2.0, 0)


def test_commands_do_what_they_say_and_a_watch_only_watches():
    clock = ManualClock(5.0)
    engine = EngineCore(make_scheduler(), CountingExecutor(), clock)
    assert (engine.take_live(), engine.has_news) == (None, False)
    clock.advance(1.0)
    engine.send(Add("a", array("i", [1, 2, 3]), SamplingParams(max_tokens=50)))
    engine.send(Add("b", array("i", [1, 2, 3]), SamplingParams(max_tokens=50)))
    assert sorted(engine.scheduler.requests) == ["a", "b"]
    engine.step()
    assert [request.arrival_s for request in engine.scheduler.running] == [6.0, 6.0]
    engine.send(Watch(0.5))
    assert engine.has_news, "what is there already"
    assert engine.take_live() is not None
    engine.step()
    assert engine.has_news
    engine.send(Watch(None))
    assert (engine.take_live(), engine.has_news) == (None, False)
    assert (engine.take_cache_news(), engine.has_cache_news) == (None, False)
    engine.send(Survey())
    assert engine.has_cache_news
    news = engine.take_cache_news()
    assert news is not None
    assert news.begins
    assert (engine.take_cache_news(), engine.has_cache_news) == (None, False)
    engine.send(Fail("a", "enough"))
    engine.send(Abort("b"))
    assert (len(engine.scheduler.requests), engine.step()) == (0, None)


def test_an_executor_that_fails_for_everybody_is_lost():
    executor = CountingExecutor()
    executor.collect = lambda: (_ for _ in ()).throw(ExecutionError("it broke"))
    engine = EngineCore(make_scheduler(), executor, ManualClock())
    for number in range(8):
        engine.add_request(make_request(str(number), 3, 1))
    ended = []
    with pytest.raises(ExecutorLostError, match=r"^every request fails, even alone; the last error: it broke$"):
        for _ in range(40):
            ended += engine.step().finished
    stats = engine.stats()
    assert (stats.steps_total, stats.culprits_total) == (0, len(ended) + 1)
    assert stats.failed_steps_total > len(ended)
