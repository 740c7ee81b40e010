"""Who may start, who yields how, and who is to blame, against the rules as they are written down."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.config import SchedulerConfig
from quire.core.request import Request, RequestGroup, RequestStatus
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.scheduler.admission import Admission
from quire.scheduler.isolation import MAX_CULPRITS_IN_A_ROW, MAX_FURTHER, FailedStep, Isolation
from support.control import Control
from support.memory import ByHand

BLOCK = 4


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


# ---- admission ------------------------------------------------------------------------------------------------------


@given(
    num_blocks=st.integers(4, 40),
    headroom=st.sampled_from([0.0, 0.01, 0.1, 0.25]),
    running=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 6), st.integers(1, 20)), max_size=4),
    newcomer=st.tuples(st.integers(1, 20), st.integers(1, 12)),
    num_groups=st.sampled_from([1, 2]),
)
def test_a_request_starts_where_its_prompt_fits_beside_what_the_others_need(
    num_blocks: int,
    headroom: float,
    running: list[tuple[int, int, int]],
    newcomer: tuple[int, int],
    num_groups: int,
) -> None:
    memory = ByHand(num_blocks=num_blocks, prefix_index="none", windows=(None,) * num_groups)
    admission = Admission(memory.manager, SchedulerConfig(headroom=headroom))
    others, owed = [], 0
    for number, (planned, backlog, to_come) in enumerate(running):
        request = memory.request([1] * (planned + backlog), name=f"r{number}")
        request.max_total_tokens = planned + backlog + to_come
        if not memory.open(request, planned):
            continue
        memory.plan(request, planned)
        request.backlog = backlog
        others.append(request)
        if backlog > 1:
            owed += num_groups * (blocks_for(planned + backlog) - blocks_for(planned))
    length, to_come = newcomer
    new = memory.request([2] * length, name="new")
    new.max_total_tokens = length + to_come
    needed = admission.num_blocks_needed(new)
    assert needed == num_groups * blocks_for(length)
    kept = len(others) * num_groups + math.ceil(headroom * num_blocks)
    most = sum(num_groups * blocks_for(request.max_total_tokens - 1) for request in [*others, new])
    fits = not others or needed + owed + kept <= memory.pool.num_available or most <= num_blocks
    assert admission.has_room(new, needed, others) == fits
    assert admission.all_fit([*others, new]) == (most <= num_blocks)


def test_a_group_that_will_open_counts_for_each_of_its_sequences() -> None:
    memory = ByHand(num_blocks=12)
    admission = Admission(memory.manager, SchedulerConfig())
    request = Request("r", [1] * 5, SamplingParams(n=3))
    request.max_total_tokens = 17
    assert admission.all_fit([request, request, request])
    request.group = RequestGroup(request)
    assert admission.all_fit([request])
    request.max_total_tokens = 18
    assert not admission.all_fit([request]), "3 times 5 blocks"
    request.group.opened = True
    assert admission.all_fit([request])


def test_limits_are_those_of_the_memory_where_they_promise_more() -> None:
    memory = ByHand(num_blocks=12)
    admission = Admission(memory.manager, SchedulerConfig())
    plain = Request("plain", [1] * 9)
    search = Request("search", [1] * 9, SamplingParams(n=3, beam_search=True, temperature=0.0))

    def longest(request: Request, promised: int) -> int:
        limits = RequestLimits(50, 99, promised, 8)
        narrowed = admission.limits_for(request, limits)
        assert (narrowed.vocab_size, narrowed.max_model_len, narrowed.max_num_seqs) == (50, 99, 8)
        return narrowed.max_sequence_tokens

    assert (longest(plain, 1000), longest(plain, 30)) == (48, 30)
    assert (longest(search, 1000), longest(search, 15)) == (20, 15), "2 blocks shared, then 3 for each of 3"


# ---- which way to yield ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("faster", "expected"), [(1, RequestStatus.PREEMPTED), (1.01, RequestStatus.SWAPPED)])
def test_a_request_is_swapped_where_that_takes_less_time(faster: float, expected: RequestStatus) -> None:
    control = Control(preemption="auto", num_host_blocks=8, recompute_tokens_per_s=10.0)
    bytes_both_ways = 2 * 3 * control.spec.bytes_per_block
    control = Control(
        preemption="auto",
        num_host_blocks=8,
        recompute_tokens_per_s=10.0,
        swap_bytes_per_s=faster * bytes_both_ways / (9 / 10.0),
    )
    request = control.add("r", [1] * 9, max_tokens=5)
    control.step()
    assert (request.num_planned, len(control.memory.block_tables(request)[0])) == (9, 3)
    control.scheduler._preemption.preempt(request)
    assert request.status is expected
    assert (request.num_preemptions, control.scheduler.num_preemptions, request.num_late_results) == (1, 1, 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_results_that_will_come_late_are_counted(depth: int) -> None:
    control = Control(max_steps_under_way=depth)
    request = control.add("r", [1, 2, 3], max_tokens=9)
    for _ in range(depth):
        control.plan()
    control.scheduler._preemption.preempt(request)
    assert (request.num_late_results, request.row, request.num_planned) == (depth, -1, 0)
    assert control.plan() is None, "it starts again when they are in"
    for left in range(depth - 1, -1, -1):
        control.collect()
        assert request.num_late_results == left
    control.run()
    control.check_outputs()


def test_who_is_set_back_has_not_been_preempted_for_others() -> None:
    control = Control(preemption="swap", num_host_blocks=8)
    request = control.add("r", [1, 2, 3], max_tokens=9)
    control.step()
    preemption = control.scheduler._preemption
    preemption.set_back([request])
    assert (request.status, control.scheduler.num_preemptions) == (RequestStatus.PREEMPTED, 0)
    assert not control.memory.memories
    preemption.set_back([request])
    assert request.num_preemptions == 1, "who waits already stays where it is"
    control.run()
    control.check_outputs()


# ---- who is to blame ------------------------------------------------------------------------------------------------


def round_of(isolation: Isolation, requests: dict[str, Request], culprits: set[str]) -> tuple[list[str], int]:
    """Try the groups until nobody is suspected; return who was blamed, in order, and how many steps were made."""
    blamed, num_steps = [], 0
    while isolation.is_under_way:
        num_steps += 1
        trial = [request for request in requests.values() if not isolation.holds_back(request)]
        assert trial, "somebody is always on trial"
        isolation.check(trial, requests)
        if culprits.intersection(request.request_id for request in trial):
            found = isolation.note_failure(FailedStep(dict.fromkeys(trial, 3), len(trial)))
            if found is not None:
                blamed.append(found)
                culprit = requests.pop(found)
                culprit.status = RequestStatus.FINISHED
                isolation.note_ended(culprit)
        else:
            isolation.note_success(trial)
            for request in trial:
                request.num_computed = 3
                assert isolation.has_passed(request)
                isolation.note_passed(request)
    return blamed, num_steps


@given(st.integers(1, 24), st.sets(st.integers(0, 23), max_size=4))
def test_exactly_the_culprits_are_found(num_requests: int, numbers: set[int]) -> None:
    isolation = Isolation(64)
    requests = {f"r{number}": Request(f"r{number}", [1, 2, 3]) for number in range(num_requests)}
    culprits = {f"r{number}" for number in numbers if number < num_requests}
    assert isolation.note_failure(FailedStep(dict.fromkeys(requests.values(), 3), num_requests)) is None
    assert isolation.num_suspects == num_requests
    blamed, num_steps = round_of(isolation, requests, culprits)
    assert (set(blamed), len(blamed)) == (culprits, len(culprits))
    assert isolation.num_culprits == len(culprits)
    assert isolation.num_suspects == 0
    halvings = math.ceil(math.log2(num_requests)) if num_requests > 1 else 1
    assert num_steps <= 2 + 2 * len(culprits) * (halvings + 1)
    assert not any(isolation.holds_back(request) for request in requests.values())


def failed(*requests: Request, goal: int = 3, num_tokens: int = 8) -> FailedStep:
    return FailedStep(dict.fromkeys(requests, goal), num_tokens)


def two() -> tuple[Request, Request]:
    return Request("a", [1, 2, 3]), Request("b", [1, 2, 3])


def test_each_round_that_finds_nobody_runs_twice_as_far_past_the_failure() -> None:
    isolation = Isolation(64)
    expected = 0
    for _ in range(15):
        first, second = two()
        isolation.note_failure(failed(first, second, goal=10))
        first.num_computed = 10 + expected - 1
        assert not isolation.has_passed(first)
        first.num_computed += 1
        assert isolation.has_passed(first)
        isolation.note_passed(first)
        isolation.note_passed(second)
        assert not isolation.is_under_way
        expected = min(2 * expected + 1, MAX_FURTHER)
    assert expected == MAX_FURTHER == isolation._further
    isolation.note_success(two())
    assert isolation._further == MAX_FURTHER - 1
    first, second = two()
    isolation.note_success([first])
    isolation.note_success([first, first.open_branch(1)])
    assert isolation._further == MAX_FURTHER - 1, "a step of a lone request shows nothing"
    isolation.note_failure(failed(first, second))
    isolation.note_success([first, second])
    assert isolation._further == MAX_FURTHER - 1, "steps of a round take nothing off"
    for _ in range(MAX_FURTHER + 5):
        isolation._goals.clear()
        isolation.note_success([first, second])
    assert isolation._further == 0


def test_a_step_without_memory_is_halved_until_one_token_is_left() -> None:
    isolation = Isolation(64)
    first, second = two()
    sizes = []
    for num_tokens in (40, 20, 10, 5, 2):
        assert isolation.note_failure(failed(first, second, num_tokens=num_tokens), out_of_memory=True) is None
        sizes.append(isolation.max_step_tokens)
    assert (sizes, isolation.num_memory_failures) == ([20, 10, 5, 2, 1], 5)
    assert isolation.note_failure(failed(first, num_tokens=1), out_of_memory=True) == "a"
    assert (isolation.max_step_tokens, isolation.num_failed_steps) == (1, 6)


def test_the_size_is_forgiven_where_it_was_a_request_and_kept_where_it_was_not() -> None:
    isolation = Isolation(64)
    first, second = two()
    isolation.note_failure(failed(first, second, num_tokens=64), out_of_memory=True)
    assert isolation.max_step_tokens == 32
    isolation.note_passed(first)
    isolation.note_passed(second)
    assert isolation.max_step_tokens == 32, "nobody was to blame"
    isolation.note_failure(failed(first, second, num_tokens=32), out_of_memory=True)
    assert isolation.max_step_tokens == 16
    assert isolation.note_failure(failed(first, num_tokens=8)) == "a"
    first.status = RequestStatus.FINISHED
    isolation.note_ended(first)
    assert isolation.max_step_tokens == 16, "the round is not over"
    isolation.note_passed(second)
    assert isolation.max_step_tokens == 32, "as before the round"


def test_a_larger_step_that_fails_makes_none_larger() -> None:
    isolation = Isolation(16)
    first, second = two()
    assert isolation.note_failure(failed(first, second, num_tokens=100), out_of_memory=True) is None
    assert isolation.max_step_tokens == 16
    assert isolation.note_failure(failed(first, num_tokens=100), out_of_memory=True) == "a"


def test_many_culprits_in_a_row_are_no_culprits() -> None:
    isolation = Isolation(64)
    requests = [Request(f"r{number}", [1]) for number in range(MAX_CULPRITS_IN_A_ROW)]
    for number, request in enumerate(requests):
        assert isolation.is_hopeless is False
        isolation.note_failure(failed(request))
        assert isolation.note_failure(failed(request)) == f"r{number}"
        request.status = RequestStatus.FINISHED
        isolation.note_ended(request)
    assert isolation.is_hopeless is True
    isolation.note_success(requests)
    assert isolation.is_hopeless is False


def test_culprits_of_a_round_with_a_success_do_not_count() -> None:
    isolation = Isolation(64)
    first, second = two()
    isolation.note_failure(failed(first, second))
    isolation.note_success([first])
    assert isolation.note_failure(failed(first)) == "a"
    assert (isolation._culprits_in_a_row, isolation.num_culprits, isolation.num_failed_steps) == (0, 1, 2)


def test_sequences_of_a_request_pass_one_by_one() -> None:
    isolation = Isolation(64)
    leader = Request("samples", [1, 2], SamplingParams(n=2))
    leader.group = RequestGroup(leader)
    other = leader.open_branch(1)
    leader.group.members.append(other)
    isolation.note_failure(failed(leader, other))
    assert isolation.num_suspects == 1
    isolation.note_passed(leader)
    assert (isolation.holds_back(leader), isolation.holds_back(other), isolation.is_under_way) == (True, False, True)
    isolation.note_passed(other)
    assert not isolation.is_under_way


def test_one_that_was_not_in_the_step_has_passed_and_its_end_changes_nothing() -> None:
    isolation = Isolation(64)
    (first, second), stranger = two(), Request("stranger", [1])
    assert isolation.holds_back(stranger) is False
    isolation.note_failure(failed(first, second))
    assert isolation.holds_back(stranger) is True, "everybody else waits"
    assert isolation.has_passed(stranger) is True
    isolation.note_ended(stranger)
    isolation.note_passed(stranger)
    assert isolation.num_suspects == 2


@pytest.mark.parametrize("arrives_later", [False, True], ids=["in the same step", "a step later"])
@pytest.mark.parametrize(("num_waiting", "starts"), [(2, True), (3, False)])
def test_a_step_passes_over_one_request_more_than_may_run(num_waiting: int, starts: bool, arrives_later: bool) -> None:
    """Requests that wait for a block which another one computes let others start, up to a bound: a step stays short."""
    control = Control(max_num_seqs=2, max_steps_under_way=2)
    shared = list(range(1, 25))
    control.add("computes", shared, max_tokens=4)
    for index in range(num_waiting):
        control.add(f"waits {index}", [*shared, 30 + index], max_tokens=2)
    if arrives_later:
        control.plan()
    control.add("differs", [45, 46], max_tokens=2)
    control.plan()
    assert (control.requests["differs"].row >= 0) is starts
    control.run()
    control.check_outputs()
