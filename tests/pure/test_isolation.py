"""Steps that fail: the one request at fault is found and ends alone, and nobody else's tokens change.

Over a cache that is read back through the block tables (`support.control`): what a failed step wrote is spoilt, so a
request that relied on any of it would be found out. `test_simulation` does the same at random.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quire.core.clock import ManualClock
from quire.core.errors import ExecutionError, ExecutorLostError, InvariantError, OutOfMemoryError
from quire.core.request import FinishReason, Request, RequestStatus
from quire.core.step import StepPlan, StepResult
from quire.engine.core import EngineCore
from quire.scheduler.isolation import MAX_CULPRITS_IN_A_ROW, FailedStep, Isolation
from support.control import Control
from support.shadow import Fault, expected_tokens
from support.step_faults import StepFaults


def prompt(length: int, first: int = 0) -> list[int]:
    """A prompt whose tokens say where it began."""
    return [(first + 3 * index) % 50 for index in range(length)]


def crowd(control: Control, num_requests: int, *, max_tokens: int = 12, length: int = 6) -> list[Request]:
    """Add requests with prompts of their own."""
    return [control.add(f"r{i}", prompt(length, 7 * i + 1), max_tokens=max_tokens) for i in range(num_requests)]


def poisoned(*names: str, position: int = 0) -> Fault:
    return StepFaults(dict.fromkeys(names, position)).fault()


def failing_on(*numbers: int, error: ExecutionError | None = None) -> Fault:
    """Fail the computed steps of these numbers, counted from 0."""
    left = iter(range(1 << 30))
    return lambda plan, requests: (error or ExecutionError("told to fail")) if next(left) in numbers else None


def names(requests: Sequence[Request]) -> list[str]:
    return sorted(request.request_id for request in requests)


def ended_with_error(control: Control) -> list[str]:
    found = [name for name in control.requests if control.members(name)[0].finish_reason is FinishReason.ERROR]
    return sorted(found)


def check_others(control: Control, *culprits: str) -> None:
    """The culprits have ended with an error, and everybody else as if there had been none."""
    assert ended_with_error(control) == sorted(culprits)
    for name in culprits:
        assert {member.finish_reason for member in control.members(name)} == {FinishReason.ERROR}
        assert control.outputs(name) == control.expected(name)  # as far as it came
        del control.requests[name]
    control.check_outputs()


def test_a_plan_without_requests_does_not_show_that_the_executor_works() -> None:
    isolation = Isolation(64)
    for number in range(MAX_CULPRITS_IN_A_ROW):
        assert not isolation.is_hopeless
        request = Request(f"r{number}", [1])
        for culprit in (None, request.request_id):
            assert isolation.note_failure(FailedStep({request: 1}, 1)) == culprit
            isolation.note_success([])
        request.become(RequestStatus.FINISHED)
        isolation.note_ended(request)
    assert isolation.is_hopeless


# ---- who is at fault -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_index", ["hash_chain", "none"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("culprit", ["r0", "r7", "r15"])
def test_one_among_sixteen_is_found_by_halving(culprit: str, depth: int, prefix_index: str) -> None:
    control = Control(num_blocks=128, max_steps_under_way=depth, prefix_index=prefix_index)
    crowd(control, 16)
    control.executor.fault = poisoned(culprit, position=9)
    control.run()
    isolation = control.scheduler.isolation
    assert isolation.num_culprits == 1
    assert isolation.num_failed_steps <= 5  # with 16, 8, 4, 2 and 1 in the step
    assert isolation.num_failed_steps == 5 or prefix_index == "none"  # long trials take their members one by one
    assert control.requests[culprit].error == f"{culprit} is poison"
    assert control.requests[culprit].num_output_tokens == 4  # positions 6 to 9; that of position 9 cannot be computed
    check_others(control, culprit)


def test_several_are_found_in_one_round() -> None:
    control = Control(num_blocks=128)
    crowd(control, 16)
    control.executor.fault = poisoned("r1", "r2", "r9", position=8)
    control.run()
    assert control.scheduler.isolation.num_failed_steps == 1 + 2 + 2 + 3 + 3
    check_others(control, "r1", "r2", "r9")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failure_that_does_not_come_again_costs_nobody_anything(depth: int) -> None:
    control = Control(max_steps_under_way=depth)
    crowd(control, 5)
    control.executor.fault = failing_on(4)
    control.run()
    assert control.scheduler.isolation.num_failed_steps == 1
    assert control.scheduler.num_preemptions == 0
    check_others(control)


def test_a_lone_request_is_tried_once_more() -> None:
    control = Control()
    crowd(control, 1)
    control.executor.fault = failing_on(3)
    control.run()
    check_others(control)
    control.add("again", prompt(9, 2), max_tokens=5)
    control.executor.fault = poisoned("again", position=10)
    control.run()
    assert control.scheduler.isolation.num_failed_steps == 1 + 2
    check_others(control, "again")


def test_a_prompt_that_fails_is_found_among_those_that_decode() -> None:
    control = Control()
    crowd(control, 4, max_tokens=20)
    for _ in range(6):
        control.step()
    control.add("bad", prompt(11, 3), max_tokens=4)
    control.executor.fault = poisoned("bad")
    control.run()
    check_others(control, "bad")


@pytest.mark.parametrize("depth", [2, 3])
def test_only_who_was_in_the_step_that_failed_is_suspected(depth: int) -> None:
    control = Control(max_steps_under_way=depth)
    crowd(control, 2)
    control.step()
    while control.scheduler.num_steps_under_way < depth - 1:
        control.plan()
    late = control.add("late", prompt(5, 40), max_tokens=4)
    control.plan()
    assert late.num_planned == 5
    control.executor.fail_next_collect = True
    control.collect()
    assert control.scheduler.isolation.num_suspects == 2
    assert late.status is RequestStatus.PREEMPTED  # its step is lost, too
    control.run()
    check_others(control)


def test_requests_that_fail_only_together_end_one_after_the_other() -> None:
    control = Control(num_blocks=128)
    crowd(control, 6, max_tokens=40)
    control.executor.fault = StepFaults(rivals=("r1", "r4")).fault()
    control.run()
    assert control.scheduler.isolation.num_failed_steps < 60
    assert control.scheduler.isolation.num_culprits == 0
    check_others(control)


def test_two_searches_that_fail_only_together_come_to_their_ends() -> None:
    control = Control(num_blocks=128)
    for name in ("left", "right"):
        control.add(name, prompt(5, len(name)), n=3, max_tokens=12, beam_search=True)
    control.executor.fault = StepFaults(rivals=("left", "right")).fault()
    control.run()
    check_others(control)


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("position", [3, 6, 9])
def test_sequences_of_a_request_stand_and_fall_together(beams: bool, position: int) -> None:
    control = Control(num_blocks=128)
    crowd(control, 3)
    control.add("good", prompt(5, 2), n=3, max_tokens=10, beam_search=beams)
    control.add("bad", prompt(6, 20), n=3, max_tokens=10, beam_search=beams)
    control.executor.fault = poisoned("bad", position=position)
    control.run()
    assert control.scheduler.isolation.num_culprits == 1
    check_others(control, "bad")


def test_samples_of_one_request_are_one_suspect() -> None:
    control = Control()
    control.add("samples", prompt(6), n=4, max_tokens=10)
    control.add("other", prompt(6, 9), max_tokens=10)
    for _ in range(4):
        control.step()
    control.executor.fail_next_collect = True
    control.step()
    assert control.scheduler.isolation.num_suspects == 2
    control.run()
    check_others(control)


@pytest.mark.parametrize("right", [True, False])
def test_drafts_are_tried_again_with_their_request(right: bool) -> None:
    def guess(request_id: str, known: array[int], most: int) -> list[int]:
        tokens = expected_tokens(known.tolist(), min(most, 3), 50)
        return tokens if right else [(token + 1) % 50 for token in tokens]

    control = Control(guess=guess)
    crowd(control, 4, max_tokens=20)
    control.executor.fault = poisoned("r2", position=15)
    control.run()
    check_others(control, "r2")


# ---- meanwhile -----------------------------------------------------------------------------------------------------


def in_isolation(control: Control, num_requests: int = 4, **options: Any) -> list[Request]:
    """Requests of which a step was lost just now."""
    requests = crowd(control, num_requests, **options)
    for _ in range(5):
        control.step()
    control.executor.fail_next_collect = True
    control.step()
    assert control.scheduler.isolation.num_suspects == num_requests
    return requests


def test_nobody_but_the_requests_on_trial_is_planned() -> None:
    control = Control()
    in_isolation(control)
    control.add("new", prompt(5, 30), max_tokens=3)
    planned: list[list[str]] = []

    def watch(plan: StepPlan, requests: dict[int, str]) -> None:
        planned.append(sorted(requests.values()))

    control.executor.fault = watch
    control.run()
    assert planned[:3] == [["r0", "r1"], ["r2", "r3"], ["new", "r0", "r1", "r2", "r3"]]
    check_others(control)


@pytest.mark.parametrize("depth", [2, 3])
def test_one_step_is_under_way_at_a_time(depth: int) -> None:
    control = Control(max_steps_under_way=depth)
    in_isolation(control)
    while control.plan() is not None:
        assert control.scheduler.num_steps_under_way == 1
    assert control.scheduler.isolation.is_under_way
    control.run()
    check_others(control)


@pytest.mark.parametrize("who", ["r0", "r3"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_suspect_may_be_aborted(who: str, num_steps: int) -> None:
    control = Control()
    in_isolation(control)
    for _ in range(num_steps):
        control.step()
    control.scheduler.abort(who)
    control.scheduler.check()
    control.run()
    assert control.requests.pop(who).finish_reason is FinishReason.ABORT
    check_others(control)


def test_all_suspects_may_be_aborted_and_the_name_used_again() -> None:
    control = Control()
    in_isolation(control)
    control.plan()
    for name in list(control.scheduler.requests):
        control.scheduler.abort(name)
        control.scheduler.check()
    assert not control.scheduler.isolation.is_under_way
    again = control.add("r0", prompt(4, 3), max_tokens=4)
    control.run()
    assert again.num_output_tokens == 4


def test_a_stop_string_may_end_a_suspect() -> None:
    control = Control()
    in_isolation(control)
    control.plan()
    control.scheduler.stop("r0")
    control.scheduler.stop("r3")
    control.run()
    assert ended_with_error(control) == []


def test_a_suspect_whose_own_numbers_go_wrong_ends() -> None:
    control = Control()
    in_isolation(control)

    def fail_row(plan: StepPlan, requests: dict[int, str]) -> None:
        control.executor.fail_rows = {row for row, name in requests.items() if name == "r1"}

    control.executor.fault = fail_row
    control.run()
    check_others(control, "r1")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_in_a_full_pool_suspects_come_one_after_the_other(preemption: str) -> None:
    control = Control(num_blocks=9, num_host_blocks=20, preemption=preemption)
    crowd(control, 5, max_tokens=20)
    control.executor.fault = poisoned("r3", position=14)
    control.run()
    check_others(control, "r3")


@pytest.mark.parametrize("depth", [2, 3])
def test_what_was_swapped_out_with_a_lost_step_is_forgotten(depth: int) -> None:
    """The blocks of a victim hold what steps under way were to compute; if those are lost, they hold nothing."""
    control = Control(num_blocks=8, num_host_blocks=20, preemption="swap", max_steps_under_way=depth)
    requests = crowd(control, 3, max_tokens=16)
    for _ in range(200):
        if control.plan() is None or control.scheduler.num_steps_under_way == depth:
            if any(each.status is RequestStatus.SWAPPED and each.num_late_results for each in requests):
                break
            control.collect()
    swapped = [each for each in requests if each.status is RequestStatus.SWAPPED and each.num_late_results]
    assert swapped
    control.executor.fail_next_collect = True
    control.collect()
    assert all(each.status is RequestStatus.PREEMPTED for each in swapped)
    control.run()
    check_others(control)


def test_nothing_that_a_culprit_computed_stays_cached() -> None:
    control = Control()
    control.add("bad", prompt(16), max_tokens=12)
    control.executor.fault = poisoned("bad", position=20)
    control.run()
    assert control.requests["bad"].finish_reason is FinishReason.ERROR
    assert control.memory.pool.num_cached == 0


def test_what_a_culprit_found_in_the_cache_stays_there() -> None:
    control = Control()
    control.add("good", prompt(16), max_tokens=12)
    control.step()
    bad = control.add("bad", [*prompt(16), 1, 2, 3], max_tokens=12)
    control.executor.fault = poisoned("bad", position=17)
    while not bad.is_finished:
        control.step()
    assert not control.memory.memories  # nobody but the culprit held it while it was on trial
    assert control.memory.match_prefix(Request("again", [*prompt(16), 1, 2])).num_tokens == 16
    control.run()
    check_others(control, "bad")


# ---- memory --------------------------------------------------------------------------------------------------------


def test_a_step_without_memory_is_halved_and_its_size_remembered() -> None:
    control = Control(num_blocks=200)
    crowd(control, 12, length=20)
    control.executor.fault = StepFaults(most_tokens=20).fault()
    control.run()
    isolation = control.scheduler.isolation
    assert (isolation.num_memory_failures, isolation.max_step_tokens) == (2, 16)  # 64 and 32 were too many
    control.add("later", prompt(60, 1), max_tokens=4)
    control.run()
    assert isolation.num_memory_failures == 2
    assert max(plan.num_tokens for plan in control.plans[-8:]) == 16
    check_others(control)


def test_as_many_sequences_run_as_a_step_may_compute_tokens() -> None:
    control = Control(num_blocks=200)
    crowd(control, 12, length=2)
    for _ in range(3):
        control.step()
    control.executor.fault = StepFaults(most_tokens=5).fault()
    control.run()
    assert control.scheduler.isolation.max_step_tokens == 3  # 12 and 6 were too many
    assert max(len(plan.rows) for plan in control.plans[5:]) == 3
    check_others(control)


def test_one_token_at_a_time_is_the_least() -> None:
    control = Control(num_blocks=200, max_num_seqs=6)
    crowd(control, 5, length=9)
    control.add("samples", prompt(5), n=4, max_tokens=6)
    control.executor.fault = StepFaults(most_tokens=1).fault()
    control.run()
    assert control.scheduler.isolation.max_step_tokens == 1
    check_others(control)


def test_samples_that_are_more_than_a_step_may_compute_run_one_after_the_other() -> None:
    control = Control(num_blocks=200, max_num_seqs=6)
    control.executor.fault = StepFaults(most_tokens=2).fault()
    crowd(control, 4)
    control.run()
    control.add("samples", prompt(5), n=5, max_tokens=6)
    control.add("other", prompt(5, 7), max_tokens=6)
    control.run()
    check_others(control)


def test_a_group_waits_until_all_its_sequences_fit_into_a_step() -> None:
    control = Control(num_blocks=200)
    control.executor.fault = StepFaults(most_tokens=4).fault()
    crowd(control, 4)
    control.run()
    isolation = control.scheduler.isolation
    assert (isolation.max_step_tokens, isolation.num_memory_failures) == (3, 3)  # 24, 12 and 6 were too many
    crowd(control, 2, max_tokens=20)
    control.add("samples", prompt(5), n=3, max_tokens=6)
    control.run()
    assert isolation.num_memory_failures == 3
    check_others(control)


def test_beams_that_are_too_many_for_the_memory_end_and_the_size_is_forgiven() -> None:
    control = Control(num_blocks=200, max_num_batched_tokens=64)
    crowd(control, 3, max_tokens=30)
    control.add("wide", prompt(5), n=6, max_tokens=6, beam_search=True)
    control.executor.fault = lambda plan, requests: (
        OutOfMemoryError("no more") if list(requests.values()).count("wide") == 6 else None
    )
    control.run()
    assert control.scheduler.isolation.max_step_tokens == 64
    check_others(control, "wide")


def test_one_request_that_never_has_memory_does_not_make_the_steps_of_others_smaller() -> None:
    control = Control(num_blocks=200)
    crowd(control, 16)
    control.executor.fault = lambda plan, requests: OutOfMemoryError("no") if "r5" in requests.values() else None
    control.run()
    isolation = control.scheduler.isolation
    assert isolation.max_step_tokens == 64
    assert isolation.num_memory_failures >= 5
    check_others(control, "r5")


def test_memory_that_falls_short_once_ends_nobody() -> None:
    control = Control(num_blocks=200)
    crowd(control, 8)
    control.executor.fault = failing_on(4, error=OutOfMemoryError("no more"))
    control.run()
    assert control.scheduler.isolation.max_step_tokens == 4  # the step had 8 tokens
    check_others(control)


# ---- the engine ----------------------------------------------------------------------------------------------------


def engine_of(control: Control) -> EngineCore:
    return EngineCore(control.scheduler, control.executor, ManualClock())


def test_an_executor_that_fails_for_everybody_ends_the_engine() -> None:
    control = Control(num_blocks=200)
    crowd(control, 16)
    control.executor.fault = lambda plan, requests: ExecutionError("always")
    engine = engine_of(control)
    with pytest.raises(ExecutorLostError, match="every request fails, even alone; the last error: always"):
        engine.run()
    assert engine.stats().culprits_total == MAX_CULPRITS_IN_A_ROW
    assert engine.stats().failed_steps_total < 40


def test_so_does_one_that_fails_for_one_request_after_the_other() -> None:
    control = Control()
    control.executor.fault = lambda plan, requests: ExecutionError("always")
    engine = engine_of(control)
    for number in range(MAX_CULPRITS_IN_A_ROW - 1):
        control.add(f"r{number}", prompt(4, number), max_tokens=3)
        assert names(engine.run()) == [f"r{number}"]
    control.add("last", prompt(4), max_tokens=3)
    with pytest.raises(ExecutorLostError):
        engine.run()


def test_many_culprits_are_no_fault_of_the_executor_while_others_succeed() -> None:
    control = Control(num_blocks=200)
    crowd(control, 16)
    bad = [f"r{number}" for number in range(MAX_CULPRITS_IN_A_ROW)]  # the other half passes before any is alone
    control.executor.fault = poisoned(*bad, position=7)
    engine_of(control).run()
    check_others(control, *bad)


def test_an_executor_that_is_lost_is_not_asked_again() -> None:
    class Lost:
        def start(self) -> None: ...
        def shutdown(self) -> None: ...
        def submit(self, plan: StepPlan) -> None: ...
        def collect(self) -> StepResult:
            raise ExecutorLostError("the device is gone")

    control = Control()
    crowd(control, 3)
    engine = EngineCore(control.scheduler, Lost(), ManualClock())
    with pytest.raises(ExecutorLostError, match="the device is gone"):
        engine.step()


def test_the_stats_tell_of_it() -> None:
    control = Control(num_blocks=200)
    crowd(control, 8)
    control.executor.fault = poisoned("r2", position=8)
    engine = engine_of(control)
    seen = 0
    while engine.step() is not None:
        seen = max(seen, engine.stats().num_suspects)
    stats = engine.stats()
    assert (stats.failed_steps_total, stats.culprits_total, stats.corrupted_requests_total) == (4, 1, 0)
    assert (seen, stats.num_suspects, stats.memory_failures_total, stats.max_step_tokens) == (8, 0, 0, 64)
    assert stats.preemptions_total == 0
    assert stats.num_used_blocks == 0
    assert stats.steps_total > 12


def test_the_stats_count_requests_whose_own_numbers_went_wrong() -> None:
    control = Control()
    requests = crowd(control, 3)
    engine = engine_of(control)
    engine.step()
    control.executor.fail_rows = {requests[1].row}
    engine.run()
    assert engine.stats().corrupted_requests_total == 1
    assert engine.stats().failed_steps_total == 0


# ---- the books -----------------------------------------------------------------------------------------------------


def suspects(*names: str) -> tuple[Isolation, list[Request]]:
    requests = [Request(name, [1, 2]) for name in names]
    isolation = Isolation(64)
    assert isolation.note_failure(FailedStep(dict.fromkeys(requests, 2), 2 * len(requests))) is None
    return isolation, requests


def lose_trial(isolation: Isolation) -> None:
    isolation._trial.clear()


def lose_subsets(isolation: Isolation) -> None:
    isolation._subsets.clear()


def put_in_two_subsets(isolation: Isolation) -> None:
    isolation._subsets.append(["a"])


def have_no_goal(isolation: Isolation) -> None:
    isolation._goals["a"].clear()


@pytest.mark.parametrize("mess", [lose_trial, lose_subsets, put_in_two_subsets, have_no_goal])
def test_the_audit_finds_books_that_do_not_agree(mess: Callable[[Isolation], None]) -> None:
    isolation, _ = suspects("a", "b", "c", "d")
    isolation.check([], ["a", "b", "c", "d"])
    mess(isolation)
    with pytest.raises(InvariantError):
        isolation.check([], ["a", "b", "c", "d"])


def test_the_audit_finds_suspects_that_are_gone_and_those_that_run_beside_the_trial() -> None:
    isolation, requests = suspects("a", "b")
    with pytest.raises(InvariantError, match="has ended"):
        isolation.check([], ["a"])
    with pytest.raises(InvariantError, match="'b' runs in the same step as requests on trial"):
        isolation.check([requests[1]], ["a", "b"])


def test_a_step_whose_requests_have_all_ended_accuses_nobody() -> None:
    isolation = Isolation(64)
    assert isolation.note_failure(FailedStep({}, 3)) is None
    assert not isolation.is_under_way
    assert isolation.num_failed_steps == 1


def test_a_step_under_way_whose_request_was_aborted_may_fail() -> None:
    control = Control(max_steps_under_way=2)
    crowd(control, 2)
    control.step()
    control.scheduler.abort("r0")
    control.executor.fail_next_collect = True
    control.collect()
    assert control.scheduler.isolation.num_suspects == 1
    control.run()
    assert ended_with_error(control) == []
