"""The audit of the scheduler: each kind of broken book is noticed. The simulations rely on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.core.errors import ExecutionError, InvariantError, RequestStateError, UnknownRequestError
from quire.core.request import FinishReason, Request, RequestStatus
from support.control import Control


def busy() -> Control:
    """`runs` holds row 0, `yielded` was preempted, and `waits` has not begun."""
    control = Control(max_num_seqs=2)
    control.add("runs", [1, 2, 3, 4, 5], max_tokens=20)
    control.add("yielded", [6, 7, 8], max_tokens=20)
    control.step()
    control.add("waits", [9, 9], max_tokens=5)
    control.scheduler._preemption.preempt(control.requests["yielded"])
    control.scheduler.check()
    return control


def lose_a_request(control: Control) -> None:
    control.scheduler._waiting.remove(control.requests["waits"])


def run_what_waits(control: Control) -> None:
    control.scheduler._running.start(control.requests["waits"])


def forget_a_name(control: Control) -> None:
    del control.scheduler.requests["runs"]


def finish_without_leaving(control: Control) -> None:
    control.requests["waits"].status = RequestStatus.FINISHED


def hold_memory_while_waiting(control: Control) -> None:
    control.memory.allocate_slots(control.requests["waits"], 2)


def run_without_memory(control: Control) -> None:
    control.memory.free(control.requests["runs"])


def swap_without_memory(control: Control) -> None:
    control.requests["waits"].status = RequestStatus.SWAPPED


def compute_beyond_the_plan(control: Control) -> None:
    control.requests["waits"].num_computed = 1


def lose_a_row(control: Control) -> None:
    control.scheduler._running._free_rows.pop()


def suspect_a_stranger(control: Control) -> None:
    control.scheduler.isolation._goals["stranger"] = {0: 1}


def break_the_pool(control: Control) -> None:
    control.memory.pool.num_extra_holders += 1


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lose_a_request, "in two places, or in none"),
        (run_what_waits, "in two places, or in none"),
        (forget_a_name, "in two places, or in none"),
        (finish_without_leaving, "in two places, or in none"),
        (hold_memory_while_waiting, "holds memory but is neither running nor swapped out"),
        (run_without_memory, "holds memory but is neither running nor swapped out"),
        (swap_without_memory, "holds memory but is neither running nor swapped out|not true that"),
        (compute_beyond_the_plan, "'waits': not true that"),
        (lose_a_row, "a row is held twice, or lost"),
        (suspect_a_stranger, "a suspect"),
        (break_the_pool, "extra holders"),
    ],
)
def test_the_scheduler_notices(break_it: Callable[[Control], None], message: str) -> None:
    control = busy()
    break_it(control)
    with pytest.raises(InvariantError, match=message):
        control.scheduler.check()


def test_beams_run_together_or_wait_together() -> None:
    control = Control()
    control.add("search", [1, 2, 3], n=3, beam_search=True, max_tokens=9)
    control.step()
    control.step()
    control.scheduler.check()
    beam = control.members("search")[2]
    control.scheduler._running.leave(beam)
    control.scheduler._waiting.add(beam)
    beam.forget_progress()
    beam.status = RequestStatus.PREEMPTED
    with pytest.raises(InvariantError, match="some beams of request 'search' run and some wait"):
        control.scheduler.check()


def test_what_one_sees_of_a_scheduler() -> None:
    control = busy()
    scheduler = control.scheduler
    runs, yielded, waits = (control.requests[name] for name in ("runs", "yielded", "waits"))
    assert (scheduler.running, scheduler.num_waiting, scheduler.num_preemptions) == ([runs], 2, 1)
    assert scheduler.num_steps_under_way == 0
    assert (runs.status, yielded.status) == (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
    assert (runs.serial, yielded.serial, waits.serial) == (0, 1, 2)
    control.plan()
    assert scheduler.num_steps_under_way == 1
    scheduler.running.clear()
    assert scheduler.running == [runs, yielded], "a copy"
    control.run()
    control.check_outputs()


@pytest.mark.parametrize("name", ["runs", "yielded", "waits"])
@pytest.mark.parametrize("how", ["abort", "fail", "stop"])
def test_a_request_ends_wherever_it_is(name: str, how: str) -> None:
    control = busy()
    scheduler, request = control.scheduler, control.requests[name]
    if how == "fail":
        scheduler.fail(name, "it burns")
    else:
        getattr(scheduler, how)(name)
    scheduler.check()
    expected = {"abort": FinishReason.ABORT, "fail": FinishReason.ERROR, "stop": FinishReason.STOP}[how]
    assert (request.finish_reason, request.status) == (expected, RequestStatus.FINISHED)
    assert request.error == ("it burns" if how == "fail" else "")
    assert name not in scheduler.requests
    assert request not in control.memory.memories
    with pytest.raises(UnknownRequestError):
        scheduler.abort(name)
    control.run()
    for other in control.requests.values():
        assert other is request or other.num_output_tokens == other.sampling.max_tokens


def test_a_stop_ends_the_sequence_that_it_names() -> None:
    control = Control()
    control.add("samples", [1, 2, 3], n=3, max_tokens=9)
    control.step()
    control.step()
    control.scheduler.stop("samples", 2)
    assert [member.finish_reason for member in control.members("samples")] == [None, None, FinishReason.STOP]
    control.scheduler.stop("samples", 2)
    control.scheduler.stop("samples")
    assert [member.is_finished for member in control.members("samples")] == [True, False, True]
    assert "samples" in control.scheduler.requests
    control.scheduler.stop("samples", 1)
    assert "samples" not in control.scheduler.requests
    control.run()


def test_no_step_that_is_not_under_way_can_be_lost() -> None:
    with pytest.raises(InvariantError, match="no step is in flight"):
        busy().scheduler.lose_steps(ExecutionError("it burns"))


def test_a_request_is_taken_once() -> None:
    control = busy()
    running: Request = control.requests["runs"]
    del control.scheduler.requests["runs"]
    with pytest.raises(RequestStateError, match="has run already; make a new one"):
        control.scheduler.add(running)


def test_a_lost_step_costs_those_in_it_their_progress_and_nobody_a_preemption() -> None:
    control = busy()
    control.plan()
    names = {request.request_id for request in control.scheduler.running}
    assert names == {"runs", "yielded"}
    control.executor.fail_next_collect = True
    assert control.collect().finished == []
    for name in names:
        request = control.requests[name]
        assert (request.status, request.num_computed, request.num_planned) == (RequestStatus.PREEMPTED, 0, 0)
        assert request not in control.memory.memories
    assert control.scheduler.num_preemptions == 1
    assert control.scheduler.isolation.num_suspects == 2
    control.run()


def test_the_goal_of_a_suspect_is_what_the_lost_step_would_have_computed() -> None:
    """Of a chunk its end, of a decode all tokens known; drafts are no goal."""
    for num_steps, goal in ((0, 8), (1, 16), (2, 20), (3, 21), (4, 22)):
        control = Control(max_num_batched_tokens=8, max_num_seqs=4)
        control.add("r", [1] * 20, max_tokens=9)
        for _ in range(num_steps):
            control.step()
        control.executor.fail_next_collect = True
        control.step()
        assert control.scheduler.isolation._goals == {"r": {0: goal}}
        control.run()
        control.check_outputs()
