"""Several sequences from one prompt: samples that part, and beams that move together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.core.errors import RequestStateError, RequestTooLargeError
from quire.core.request import FinishReason, Request, RequestStatus
from support.control import VOCAB_SIZE, Control
from support.covering import covering
from support.shadow import expected_tokens


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 3 * index) % VOCAB_SIZE for index in range(length)]


def check_ended(control: Control, request_id: str, reason: FinishReason) -> None:
    """All sequences of a request ended for this reason, with tokens that are their own."""
    members = control.members(request_id)
    assert {member.finish_reason for member in members} == {reason}
    assert control.outputs(request_id) == control.expected(request_id)
    control.requests.pop(request_id)


# ---- opening -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_the_prompt_of_a_group_is_computed_and_held_once(length: int, beams: bool) -> None:
    control = Control()
    control.add("group", prompt(length), n=4, max_tokens=2, beam_search=beams)
    control.step()
    assert control.executor.num_tokens_computed == length
    assert control.memory.pool.num_in_use == -(-length // 4)
    assert len(control.members("group")) == 4
    plan = control.step()
    assert plan is not None
    shared_tail = length % 4 != 0
    assert len(plan.copies) == (3 if shared_tail else 0), "the last one to write into the tail has it for itself"
    control.run()
    control.check_outputs()
    assert control.executor.num_tokens_computed == length + 4


def test_the_best_of_are_generated_and_those_are_what_the_group_has() -> None:
    control = Control()
    control.add("group", prompt(5), n=2, best_of=5, max_tokens=3)
    control.run()
    assert len(control.outputs("group")) == 5


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_group_of_one_token_ends_as_it_opens(depth: int) -> None:
    control = Control(max_steps_under_way=depth)
    control.add("samples", prompt(5), n=3, max_tokens=1)
    control.add("beams", prompt(6), n=3, max_tokens=1, beam_search=True)
    control.run()
    control.check_outputs()


def test_samples_stop_one_by_one() -> None:
    control = Control()
    streams = [expected_tokens(prompt(5), 20, VOCAB_SIZE, branch=branch) for branch in range(3)]
    control.add("samples", prompt(5), n=3, max_tokens=20, stop_token_ids=(streams[1][0], streams[2][4]))
    control.run()
    stops = {streams[1][0], streams[2][4]}
    for stream, output in zip(streams, control.outputs("samples"), strict=True):
        length = next((at for at, token in enumerate(stream, 1) if token in stops), 20)
        assert output == stream[:length]


def test_a_stop_string_ends_one_sample() -> None:
    control = Control()
    control.add("samples", prompt(5), n=3, max_tokens=10)
    for _ in range(4):
        control.step()
    control.scheduler.stop("samples", 1)
    assert [member.is_finished for member in control.members("samples")] == [False, True, False]
    control.scheduler.stop("samples", 1)  # once more is too late, and no harm
    control.run()
    assert [len(output) for output in control.outputs("samples")] == [10, 4, 10]
    assert control.outputs("samples") == control.expected("samples")


def test_rows_are_kept_for_what_a_prompt_will_open() -> None:
    control = Control(max_num_seqs=4, max_steps_under_way=2)
    control.add("group", prompt(30), n=3, max_tokens=4)
    control.plan()
    for number in range(3):
        control.add(f"r{number}", prompt(3, number), max_tokens=30)
    control.plan()
    assert [request.request_id for request in control.scheduler.running] == ["group", "r0"]
    control.run()
    control.check_outputs()


# ---- aborts --------------------------------------------------------------------------------------------------------


def beside_a_growing_one(*, beams: bool, depth: int = 1, preemption: str = "recompute") -> Control:
    """A group behind a request that will need its blocks."""
    control = Control(num_blocks=14, num_host_blocks=40, preemption=preemption, max_steps_under_way=depth)
    control.add("front", prompt(28), max_tokens=26)
    control.add("group", prompt(4, 9), n=3, max_tokens=16, beam_search=beams)
    return control


def until(control: Control, what: Callable[[list[Request]], bool]) -> Control:
    for _ in range(200):
        if what(control.members("group")):
            return control
        control.step()
    raise AssertionError("it never came to that")


def waiting(beams: bool) -> Control:
    control = Control(max_num_seqs=3)
    control.add("front", prompt(5), max_tokens=9)
    control.step()
    control.add("group", prompt(9), n=3, max_tokens=9, beam_search=beams)
    control.step()
    assert control.requests["group"].status is RequestStatus.WAITING
    return control


def running_unopened(beams: bool) -> Control:
    control = Control(max_num_batched_tokens=16)
    control.add("front", prompt(5), max_tokens=9)
    control.add("group", prompt(40, 3), n=3, max_tokens=9, beam_search=beams)
    control.step()
    assert control.requests["group"].num_computed
    return control


def opening_under_way(beams: bool) -> Control:
    control = Control(max_steps_under_way=2)
    control.add("front", prompt(5), max_tokens=9)
    control.add("group", prompt(9, 3), n=3, max_tokens=9, beam_search=beams)
    control.plan()
    return control


def opened(beams: bool) -> Control:
    return until(beside_a_growing_one(beams=beams), lambda members: len(members) == 3)


def decode_under_way(beams: bool) -> Control:
    control = until(beside_a_growing_one(beams=beams, depth=3), lambda members: len(members[0].tokens) >= 7)
    control.plan()
    assert control.scheduler.num_steps_under_way >= 2
    return control


def preempted(beams: bool) -> Control:
    control = beside_a_growing_one(beams=beams)
    return until(control, lambda members: any(member.status is RequestStatus.PREEMPTED for member in members))


def preempted_under_way(beams: bool) -> Control:
    """Preempted, with a step under way that it is in."""
    control = beside_a_growing_one(beams=beams, depth=3)
    for _ in range(200):
        while control.scheduler.num_steps_under_way < 3 and control.plan() is not None:
            if any(member.num_late_results for member in control.members("group")):
                return control
        if control.scheduler.num_steps_under_way:
            control.collect()
    raise AssertionError("it never came to that")


def swapped(beams: bool) -> Control:
    """Beams are not swapped: their search begins again. Samples are."""
    control = beside_a_growing_one(beams=beams, preemption="swap")
    status = RequestStatus.PREEMPTED if beams else RequestStatus.SWAPPED
    return until(control, lambda members: any(member.status is status for member in members))


def one_sample_ended(beams: bool) -> Control:
    control = opened(beams)
    if not beams:
        control.scheduler.stop("group", 0)
    return control


STATES = [
    waiting,
    running_unopened,
    opening_under_way,
    opened,
    decode_under_way,
    preempted,
    preempted_under_way,
    swapped,
    one_sample_ended,
]


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_an_abort_ends_all_of_a_group_in_any_state(state: Callable[[bool], Control], beams: bool) -> None:
    control = state(beams)
    ended = [member for member in control.members("group") if member.is_finished]
    control.scheduler.abort("group")
    control.scheduler.check()
    assert "group" not in control.scheduler.requests
    for member in control.members("group"):
        assert member.finish_reason is (FinishReason.STOP if member in ended else FinishReason.ABORT)
        assert member not in control.memory.memories
    control.run()
    assert control.outputs("group") == control.expected("group")
    control.requests.pop("group")
    control.check_outputs()


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("state", STATES[:-1])
def test_from_any_state_a_group_goes_on_to_its_end(state: Callable[[bool], Control], beams: bool) -> None:
    control = state(beams)
    control.run()
    control.check_outputs()


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("state", STATES[2:-1])
def test_a_lost_step_costs_a_group_nothing(state: Callable[[bool], Control], beams: bool) -> None:
    control = state(beams)
    if not control.scheduler.num_steps_under_way:
        control.plan()
    control.executor.fail_next_collect = True
    outcome = control.collect()
    assert not outcome.finished
    control.run()
    control.check_outputs()


# ---- beams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preemption", "prefix_index", "depth", "block_size"),
    covering(("recompute", "swap"), ("hash_chain", "radix_tree", "none"), (1, 2), (1, 2, 4)),
)
def test_preempted_beams_find_the_same_again(preemption: str, prefix_index: str, depth: int, block_size: int) -> None:
    control = Control(
        num_blocks=48 // block_size + 2,
        num_host_blocks=100,
        block_size=block_size,
        preemption=preemption,
        prefix_index=prefix_index,
        max_steps_under_way=depth,
    )
    control.add("front", prompt(4), max_tokens=40)
    control.add("beams", prompt(6, 9), n=3, max_tokens=11, beam_search=True)
    control.add("other beams", prompt(5, 30), n=2, max_tokens=15, beam_search=True)
    control.run()
    assert control.scheduler.num_preemptions
    control.check_outputs()


def test_two_searches_that_were_preempted_do_not_wait_for_each_other() -> None:
    """Neither rows nor blocks are held by half a search that waits for its other half."""
    for seqs in (4, 5, 6):
        control = Control(num_blocks=16, max_num_seqs=seqs, policy="priority", priority_ageing_s=1e6)
        for number in range(2):
            control.add(f"beams {number}", prompt(12, number), n=4, max_tokens=4, beam_search=True, priority=1)
            control.step()
        for number in range(3):
            control.step()
            control.add(f"urgent {number}", prompt(20, 20 + number), max_tokens=20)
        control.run()
        control.check_outputs()


@pytest.mark.parametrize(
    ("spare", "depth", "windows", "block_size", "beams"),
    covering((0, 1), (1, 2, 3), ((None,), (None, 5), (5,), (1, 2), (None, None)), (1, 4), (False, True), strength=3),
)
def test_groups_end_when_the_pool_holds_just_one(
    spare: int, depth: int, windows: tuple[int | None, ...], block_size: int, beams: bool
) -> None:
    """Three samples may go one after another, so the room of one will do; beams need room for all three."""
    spec = Control(windows=windows, block_size=block_size).spec
    needed = spec.num_blocks_for(10 + 13 - 1)
    if beams:
        shared = sum(window is None for window in windows) * (10 // block_size)
        needed = shared + 3 * (needed - shared)
    settings = {"windows": windows, "block_size": block_size, "max_steps_under_way": depth, "check_every": 5}
    control = Control(num_blocks=needed + spare, headroom=0.3, **settings)
    for number in range(2):
        control.add(f"group {number}", prompt(10, number), n=3, max_tokens=13, beam_search=beams)
        control.add(f"single {number}", prompt(9, 20 + number), max_tokens=9)
    control.run()
    control.check_outputs()
    if beams:
        control = Control(num_blocks=needed - 1, **settings)
        with pytest.raises(RequestTooLargeError):
            control.add("beams", prompt(10), n=3, max_tokens=13, beam_search=True)


def test_beams_without_max_tokens_grow_as_far_as_all_of_them_fit() -> None:
    control = Control(num_blocks=11, max_model_len=1000)
    control.add("beams", prompt(8), n=3, beam_search=True)
    control.add("other", prompt(9, 4), max_tokens=20)
    control.run()
    # 2 blocks of the prompt are shared, each beam may have 3 more; the last token is not stored.
    assert [len(output) for output in control.outputs("beams")] == [13] * 3
    control.check_outputs()


@pytest.mark.parametrize("branch", [0, 1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_beam_that_fails_fails_its_search(branch: int, depth: int) -> None:
    control = Control(max_steps_under_way=depth)
    control.add("beams", prompt(5), n=3, max_tokens=12, beam_search=True)
    control.add("other", prompt(5, 20), max_tokens=12)
    for _ in range(5):
        control.step()
    control.executor.fail_rows = {control.members("beams")[branch].row}
    control.run()
    assert all(member.error == "told to fail" for member in control.members("beams"))
    check_ended(control, "beams", FinishReason.ERROR)
    control.check_outputs()


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_sample_that_fails_fails_alone(branch: int) -> None:
    control = Control()
    control.add("samples", prompt(5), n=3, max_tokens=12)
    for _ in range(5):
        control.step()
    control.executor.fail_rows = {control.members("samples")[branch].row}
    control.run()
    reasons = [member.finish_reason for member in control.members("samples")]
    assert reasons.pop(branch) is FinishReason.ERROR
    assert reasons == [FinishReason.LENGTH] * 2
    assert control.outputs("samples") == control.expected("samples")


def test_a_beam_cannot_be_stopped_alone() -> None:
    control = Control()
    control.add("beams", prompt(5), n=2, max_tokens=6, beam_search=True)
    control.step()
    with pytest.raises(RequestStateError, match="beam search"):
        control.scheduler.stop("beams", 1)
    control.run()
    control.check_outputs()


def test_tokens_that_stop_others_do_not_stop_beams() -> None:
    control = Control(eos=range(VOCAB_SIZE - 2))
    control.add("beams", prompt(5), n=2, max_tokens=6, beam_search=True, stop_token_ids=tuple(range(VOCAB_SIZE - 2)))
    control.run()
    assert [len(output) for output in control.outputs("beams")] == [6, 6]
    assert control.outputs("beams") == control.expected("beams")


def test_one_beam_is_an_ordinary_request() -> None:
    control = Control()
    control.add("beam", prompt(5), n=1, max_tokens=6, beam_search=True)
    control.run()
    assert control.outputs("beam") == [expected_tokens(prompt(5), 6, VOCAB_SIZE)]
