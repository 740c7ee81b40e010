"""The scheduler, case by case: what is known to break engines like this one.

Every case runs over a cache that is read back through the block tables (`support.control`), and the books are audited
after every plan and every result, so wrong tokens and lost blocks fail wherever they appear. Groups have a file of
their own.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from quire.core.errors import (
    InvalidRequestError,
    InvariantError,
    RequestStateError,
    RequestTooLargeError,
    UnknownRequestError,
)
from quire.core.request import CacheScope, FinishReason, Request, RequestStatus
from quire.core.step import StepPlan, StepResult, column
from quire.memory.sizing import max_sequence_tokens
from quire.scheduler import plan_builder
from quire.scheduler.commit import note_prompt
from support.control import VOCAB_SIZE, Control
from support.covering import covering
from support.shadow import Guess, expected_report, expected_tokens


def prompt(length: int, first: int = 0) -> list[int]:
    """A prompt whose tokens say where it began."""
    return [(first + 3 * index) % VOCAB_SIZE for index in range(length)]


def steps_until(control: Control, what: Any, most: int = 500) -> None:
    """Step until something holds."""
    for _ in range(most):
        if what():
            return
        control.step()
    raise AssertionError("it never came to that")


# ---- hits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("prefix_index", ["hash_chain", "radix_tree"])
def test_a_prompt_that_is_cached_whole_computes_its_last_token_only(block_size: int, prefix_index: str) -> None:
    control = Control(block_size=block_size, prefix_index=prefix_index)
    control.add("first", prompt(16), max_tokens=3)
    control.run()
    computed = control.executor.num_tokens_computed
    control.add("second", prompt(16), max_tokens=1)
    control.run()
    assert control.requests["second"].num_cached_tokens == 15
    assert control.executor.num_tokens_computed == computed + 1
    control.check_outputs()


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_prompt_that_is_cached_whole_and_in_use_copies_its_last_block(block_size: int) -> None:
    control = Control(block_size=block_size)
    control.add("first", prompt(16), max_tokens=20)
    control.step()
    control.add("second", prompt(16), max_tokens=20)
    plan = control.step()
    assert plan is not None
    assert len(plan.copies) == 1
    assert control.requests["second"].num_cached_tokens == 15
    control.run()
    control.check_outputs()


def test_a_preempted_request_hits_its_own_blocks_when_it_resumes() -> None:
    control = Control(num_blocks=10, preemption="recompute")
    control.add("front", prompt(8), max_tokens=20)
    victim = control.add("victim", prompt(8, 25), max_tokens=20)
    steps_until(control, lambda: victim.status is RequestStatus.PREEMPTED)
    lost = len(victim.tokens) - 1
    control.run()
    control.check_outputs()
    assert victim.num_preemptions == 1
    assert victim.num_cached_tokens == 0, "what it hit when it resumed is not what the caller is told"
    ledger = control.memory.ledger()
    assert ledger.hit_tokens == 0
    assert ledger.resumed_hit_tokens > 0
    useful = sum(request.num_prompt_tokens + request.sampling.max_tokens - 1 for request in control.requests.values())
    assert control.executor.num_tokens_computed == useful + lost - ledger.resumed_hit_tokens


@pytest.mark.parametrize("prefix_index", ["hash_chain", "radix_tree"])
def test_48_requests_with_one_new_prefix_compute_it_once(prefix_index: str) -> None:
    control = Control(
        num_blocks=400, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=256, prefix_index=prefix_index
    )
    prefix = prompt(100)
    for number in range(48):
        control.add(f"r{number}", [*prefix, number, 1, 2], max_tokens=1)
    control.run()
    control.check_outputs()
    assert control.executor.num_tokens_computed == 100 + 48 * 3
    cached = sorted(request.num_cached_tokens for request in control.requests.values())
    assert cached == [0] + [100] * 47


def test_without_an_index_nobody_waits_for_anybody() -> None:
    control = Control(num_blocks=400, max_num_batched_tokens=1000, prefix_index="none")
    for number in range(8):
        control.add(f"r{number}", [*prompt(100), number], max_tokens=1)
    plan = control.plan()
    assert plan is not None
    assert len(plan.rows) == 8


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("prefix_index", ["hash_chain", "radix_tree"])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_cached_tokens_are_the_longest_prefix_of_committed_blocks(
    seed: int, prefix_index: str, block_size: int
) -> None:
    """Against brute force: every prefix of whole blocks that was ever computed, while nothing is evicted."""
    rng = random.Random(seed)
    control = Control(
        block_size=block_size,
        num_blocks=1600 // block_size,
        prefix_index=prefix_index,
        hash_bits=8,
        max_steps_under_way=2,
        check_every=10,
    )
    committed: set[tuple[str, tuple[int, ...]]] = set()
    admitted: set[str] = set()
    hits = 0
    for number in range(45):
        tokens = [rng.randrange(2) for _ in range(rng.choice([1, 2, 8, 13, 19]))]
        tokens.append(2 + number)  # a block that was hit whole cannot be hit for the moment in which it is written
        salt = rng.choice(["", "", "pepper"])
        control.add(f"r{number}", tokens, max_tokens=rng.randrange(1, 12), scope=CacheScope(salt=salt))
        while control.scheduler.requests and rng.random() < (0.9 if number == 44 else 0.7):
            under_way = control.scheduler.num_steps_under_way
            if under_way == 2 or (under_way and rng.random() < 0.5) or control.plan() is None:
                for request in control.collect().advanced:
                    whole = request.num_computed // block_size * block_size
                    known = request.tokens.tolist()
                    for end in range(block_size, whole + 1, block_size):
                        committed.add((request.scope.salt, tuple(known[:end])))
                continue
            for request in control.scheduler.running:
                if request.request_id not in admitted:
                    admitted.add(request.request_id)
                    known = request.tokens.tolist()
                    end = 0
                    while (request.scope.salt, tuple(known[: end + block_size])) in committed and end < len(known):
                        end += block_size
                    assert request.num_cached_tokens == min(end, request.num_prompt_tokens - 1)
                    hits += request.num_cached_tokens > 0
    assert hits > 2
    assert not control.memory.ledger().evictions
    assert len(admitted) > 20


# ---- what fits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_512_requests_on_a_tiny_pool(preemption: str) -> None:
    control = Control(num_blocks=12, num_host_blocks=30, preemption=preemption, max_num_seqs=64, check_every=25)
    for number in range(512):
        control.add(f"r{number}", [number % 50, number // 50, 1, 2, 3, 4], max_tokens=1 + number % 9)
    control.run(most_steps=4000)
    control.check_outputs()


@pytest.mark.parametrize(
    ("spare", "depth", "windows", "block_size"),
    covering((0, 1), (1, 2, 3), ((None,), (None, 5), (5,), (1, 2), (None, None)), (1, 4), strength=3),
)
def test_each_ends_when_the_pool_holds_just_one(
    spare: int, depth: int, windows: tuple[int | None, ...], block_size: int
) -> None:
    needed = Control(windows=windows, block_size=block_size).spec.num_blocks_for(10 + 13 - 1)
    control = Control(
        num_blocks=needed + spare, windows=windows, block_size=block_size, max_steps_under_way=depth, headroom=0.5
    )
    for number in range(4):
        control.add(f"r{number}", prompt(10, number), max_tokens=13)
    control.run()
    control.check_outputs()


@pytest.mark.parametrize("windows", [(None,), (None, 5), (None, None)])
def test_what_can_never_fit_is_refused_at_once(windows: tuple[int | None, ...]) -> None:
    control = Control(num_blocks=12, windows=windows, max_model_len=1000)
    longest = max_sequence_tokens(12, control.spec)
    assert control.spec.num_blocks_for(longest) <= 12 < control.spec.num_blocks_for(longest + 1)
    with pytest.raises(RequestTooLargeError) as error:
        control.add("too long", prompt(10), max_tokens=longest + 2 - 10)
    assert str(longest + 2) in str(error.value)
    assert str(longest + 1) in str(error.value)
    assert not control.scheduler.requests
    control.add("just fits", prompt(10), max_tokens=longest + 1 - 10)
    with pytest.raises(RequestTooLargeError):
        control.add("prompt too long", prompt(longest + 1))
    control.add("longest prompt", prompt(longest))
    control.run()
    control.check_outputs()


def test_longer_than_the_context_is_refused_at_once() -> None:
    control = Control(num_blocks=100, max_model_len=20)
    with pytest.raises(RequestTooLargeError, match=r"together are 21 tokens; .* is 20 tokens"):
        control.add("too long", prompt(10), max_tokens=11)


@pytest.mark.parametrize(("max_model_len", "num_blocks", "ends_at"), [(30, 100, 30), (128, 5, 21), (21, 5, 21)])
def test_without_max_tokens_a_request_grows_as_far_as_it_can(max_model_len: int, num_blocks: int, ends_at: int) -> None:
    control = Control(num_blocks=num_blocks, max_model_len=max_model_len)
    request = control.add("open end", prompt(6))
    other = control.add("other", prompt(3), max_tokens=10)
    control.run()
    assert len(request.tokens) == ends_at
    assert request.finish_reason is other.finish_reason is FinishReason.LENGTH
    control.check_outputs()


def test_limits_that_promise_too_much_are_not_believed() -> None:
    control = Control(num_blocks=4)
    limits = control.scheduler.limits
    control.scheduler.limits = type(limits)(VOCAB_SIZE, 128, 128, 16)
    with pytest.raises(RequestTooLargeError):
        control.add("too long", prompt(16), max_tokens=2)


# ---- ids -----------------------------------------------------------------------------------------------------------


def test_an_id_in_use_is_refused_and_one_that_ended_may_come_again() -> None:
    control = Control()
    first = control.add("id", prompt(5), max_tokens=3)
    with pytest.raises(InvalidRequestError, match="request_id"):
        control.scheduler.add(Request("id", prompt(4)))
    control.run()
    assert control.requests["id"] is first
    second = control.add("id", prompt(7), max_tokens=2)
    control.run()
    assert second.output_token_ids == expected_tokens(prompt(7), 2, VOCAB_SIZE)


def test_a_request_that_has_run_cannot_run_again() -> None:
    control = Control()
    request = control.add("id", prompt(5), max_tokens=3)
    control.run()
    with pytest.raises(RequestStateError, match="has run already"):
        control.scheduler.add(request)
    assert not control.scheduler.requests


def test_ids_that_are_not_here_are_unknown() -> None:
    control = Control()
    control.add("id", prompt(5), max_tokens=1)
    control.run()
    for call in (control.scheduler.abort, control.scheduler.stop):
        with pytest.raises(UnknownRequestError, match="'id' is unknown"):
            call("id")


def test_a_result_that_is_not_awaited_is_refused() -> None:
    control = Control()
    control.add("id", prompt(5), max_tokens=3)
    plan = control.plan()
    assert plan is not None
    for result in (StepResult(plan.step_id + 1, column(1), column(5)), StepResult(plan.step_id, column(), column())):
        with pytest.raises(InvariantError):
            control.scheduler.update(result)
    control.run()
    control.check_outputs()


# ---- whose turn ----------------------------------------------------------------------------------------------------


def order_of_ends(control: Control) -> list[str]:
    ended = []
    while control.scheduler.requests:
        control.plan()
        ended += [request.request_id for request in control.collect().finished]
    return ended


def test_first_come_first_served() -> None:
    control = Control(max_num_seqs=1, max_num_batched_tokens=8)
    for number in range(5):
        control.add(f"r{number}", prompt(3, number), max_tokens=2, priority=-number)
    assert order_of_ends(control) == [f"r{number}" for number in range(5)]


def test_the_more_urgent_goes_first_and_waiting_makes_urgent() -> None:
    control = Control(max_num_seqs=1, policy="priority", priority_ageing_s=10.0)
    control.add("late", prompt(3, 1), max_tokens=2, priority=1, arrival_s=25.0)
    control.add("low", prompt(3, 2), max_tokens=2, priority=3, arrival_s=0.0)
    control.add("urgent", prompt(3, 3), max_tokens=2, priority=-1, arrival_s=25.0)
    control.add("same as urgent", prompt(3, 4), max_tokens=2, priority=-1, arrival_s=25.0)
    assert order_of_ends(control) == ["urgent", "same as urgent", "low", "late"]


def test_a_low_priority_ends_under_a_stream_of_urgent_ones() -> None:
    control = Control(max_num_seqs=1, policy="priority", priority_ageing_s=10.0)
    low = control.add("low", prompt(6), max_tokens=4, priority=5)
    number = 0
    while not low.is_finished:
        while control.scheduler.num_waiting < 3:
            control.add(f"urgent {number}", prompt(4, number), max_tokens=4, arrival_s=float(number))
            number += 1
        control.step()
    assert 50 <= number <= 55, "after 5 levels of 10 seconds it counts as urgent as those that arrive"
    control.run()
    control.check_outputs()


def test_the_more_urgent_is_preempted_last() -> None:
    control = Control(num_blocks=8, policy="priority", preemption="recompute")
    control.add("low", prompt(4), max_tokens=20, priority=1)
    control.step()
    urgent = control.add("urgent", prompt(4, 7), max_tokens=20, priority=0)
    control.run()
    assert urgent.num_preemptions == 0
    assert control.requests["low"].num_preemptions > 0
    control.check_outputs()


def served_tokens(control: Control) -> Counter[str]:
    served = Counter[str]()
    for request in control.requests.values():
        served[request.scope.tenant] += request.num_computed
    return served


def test_a_flood_of_one_tenant_does_not_starve_another() -> None:
    control = Control(policy="fair_share", max_num_seqs=4, num_blocks=100)
    for number in range(100):
        control.add(f"flood {number}", prompt(8, number), max_tokens=8, scope=CacheScope("flood"))
    for number in range(20):
        control.add(f"quiet {number}", prompt(8, 100 + number), max_tokens=8, scope=CacheScope("quiet"))
    for _ in range(60):
        control.step()
        served = served_tokens(control)
        assert abs(served["flood"] - served["quiet"]) <= 4 * 16, "more than what can run at once apart"
    assert served["quiet"] > 200
    control.run()
    control.check_outputs()


def test_idling_earns_no_credit() -> None:
    control = Control(policy="fair_share", max_num_seqs=1, num_blocks=100)
    for number in range(20):
        control.add(f"early {number}", prompt(8, number), max_tokens=8, scope=CacheScope("early"))
        control.run()
    for number in range(10):
        control.add(f"late {number}", prompt(8, 50 + number), max_tokens=8, scope=CacheScope("late"))
        control.add(f"again {number}", prompt(8, 80 + number), max_tokens=8, scope=CacheScope("early"))
    ends = order_of_ends(control)
    tenants = [name.split()[0] for name in ends]
    assert 4 <= tenants[:10].count("again") <= 6, "the tenant that was away does not make up for it"


# ---- chunks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_never_stalls_those_that_decode(depth: int) -> None:
    control = Control(
        num_blocks=200, max_num_seqs=12, max_num_batched_tokens=16, max_model_len=400, max_steps_under_way=depth
    )
    decoding = [control.add(f"r{number}", prompt(2, number), max_tokens=60) for number in range(10)]
    steps_until(control, lambda: all(request.num_output_tokens for request in decoding))
    control.add("long", prompt(150, 7), max_tokens=5)
    rows = {request.row for request in decoding}
    chunks = 0
    long = control.requests["long"]
    while not long.num_output_tokens:
        plan = control.step()
        assert plan is not None
        assert rows <= set(plan.rows), "a decode was left out of a step"
        assert plan.num_tokens <= 16
        chunks += len(plan.rows) > plan.num_decodes
    assert chunks >= 150 // 6
    control.run()
    control.check_outputs()


def test_two_long_prompts_share_the_budget_with_each_other_and_all_decodes() -> None:
    control = Control(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=8, max_model_len=200)
    for number in range(8):
        control.add(f"r{number}", prompt(30 + number, number), max_tokens=10)
    control.run()
    control.check_outputs()
    assert max(plan.num_tokens for plan in control.plans) <= 8


@pytest.mark.parametrize("budget", [16, 20])
def test_prompts_of_one_token_count_against_the_budget(budget: int) -> None:
    control = Control(max_num_seqs=16, max_num_batched_tokens=budget)
    control.add("long", prompt(40), max_tokens=4)
    for number in range(15):
        control.add(f"r{number}", [number], max_tokens=3)
    control.run()
    assert max(plan.num_tokens for plan in control.plans) <= budget
    control.check_outputs()


# ---- preemption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "output", "settings", "most"),
    [
        (60, 8, {"num_blocks": 80, "block_size": 1, "max_num_batched_tokens": 16, "headroom": 0.02}, 0),
        (8, 24, {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 64, "headroom": 0.05}, 1),
    ],
)
def test_admission_keeps_room_for_those_who_run(length: int, output: int, settings: dict[str, Any], most: int) -> None:
    """Prompts that start chunk by chunk, and short ones that grow long, thrash if they are let in while blocks last."""

    def num_preemptions(*, keep_room: bool) -> list[int]:
        control = Control(max_num_seqs=16, prefix_index="none", **settings)
        if not keep_room:
            control.scheduler._admission.has_room = lambda request, needed, running: True
        for number in range(40):
            control.add(f"r{number}", prompt(length, number), max_tokens=output)
        control.run()
        control.check_outputs()
        return [request.num_preemptions for request in control.requests.values()]

    with_room, without = num_preemptions(keep_room=True), num_preemptions(keep_room=False)
    assert max(with_room) <= most < max(without)
    assert sum(without) > 2 * sum(with_room)


@pytest.mark.parametrize("num_host_blocks", [0, 2, 5, 100])
def test_a_full_host_tier_falls_back_to_recompute(num_host_blocks: int) -> None:
    control = Control(num_blocks=14, num_host_blocks=num_host_blocks, preemption="swap")
    seen = set()
    for number in range(6):
        control.add(f"r{number}", prompt(8, number), max_tokens=24)
    while control.scheduler.requests:
        control.step()
        seen |= {request.status for request in control.requests.values()}
    assert (RequestStatus.SWAPPED in seen) == (num_host_blocks > 0)
    assert (RequestStatus.PREEMPTED in seen) == (num_host_blocks < 100)
    control.check_outputs()
    control.check_nothing_held()


@pytest.mark.parametrize(
    ("swap_bytes_per_s", "expected"), [(1e9, RequestStatus.SWAPPED), (1e3, RequestStatus.PREEMPTED)]
)
def test_auto_takes_the_cheaper_way(swap_bytes_per_s: float, expected: RequestStatus) -> None:
    control = Control(
        num_blocks=8,
        num_host_blocks=20,
        preemption="auto",
        swap_bytes_per_s=swap_bytes_per_s,
        recompute_tokens_per_s=1000.0,
    )
    control.add("front", prompt(4), max_tokens=20)
    victim = control.add("victim", prompt(4, 9), max_tokens=20)
    steps_until(control, lambda: victim.num_preemptions)
    assert victim.status is expected
    control.run()
    control.check_outputs()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_of_steps_under_way_count_though_the_request_was_preempted(preemption: str, depth: int) -> None:
    control = Control(num_blocks=8, num_host_blocks=20, preemption=preemption, max_steps_under_way=depth)
    control.add("front", prompt(4), max_tokens=20)
    victim = control.add("victim", prompt(4, 9), max_tokens=20)
    while not victim.num_preemptions:
        while (
            control.scheduler.num_steps_under_way < depth and control.plan() is not None and not victim.num_preemptions
        ):
            pass
        if not victim.num_preemptions:
            control.collect()
    late, known = victim.num_late_results, victim.num_output_tokens
    assert late == control.scheduler.num_steps_under_way - 1 > 0, "in all but the step that it made room for"
    while victim.num_late_results:
        assert victim.row < 0, "it does not resume before they are in"
        control.collect()
        control.plan()
    assert victim.num_output_tokens >= known + late
    control.run()
    control.check_outputs()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_may_end_while_it_is_preempted(preemption: str) -> None:
    """The step under way brings its last token."""
    control = Control(num_blocks=8, num_host_blocks=20, preemption=preemption, max_steps_under_way=2)
    control.add("front", prompt(4), max_tokens=24)
    victim = control.add("victim", prompt(4, 9), max_tokens=24)
    steps_until(control, lambda: victim.num_preemptions)
    tokens = victim.num_output_tokens
    again = Control(num_blocks=8, num_host_blocks=20, preemption=preemption, max_steps_under_way=2)
    again.add("front", prompt(4), max_tokens=24)
    victim = again.add("victim", prompt(4, 9), max_tokens=tokens)
    again.run()
    assert victim.finish_reason is FinishReason.LENGTH
    again.check_outputs()


# ---- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4])
def test_nothing_is_planned_beyond_the_last_token(depth: int, block_size: int) -> None:
    control = Control(max_steps_under_way=depth, block_size=block_size)
    control.add("exact", prompt(5), max_tokens=9)
    control.run()
    ends = [start + count for plan in control.plans for start, count in zip(plan.starts, plan.counts, strict=True)]
    assert max(ends) == 5 + 9 - 1, "the last token is only sampled"
    assert len(ends) == 9
    control.check_outputs()


@pytest.mark.parametrize("depth", [2, 3])
def test_a_stop_is_noticed_late_and_what_was_computed_beyond_it_is_dropped(depth: int) -> None:
    tokens = expected_tokens(prompt(5), 20, VOCAB_SIZE)
    stop = next(token for index, token in enumerate(tokens) if index >= 4 and token not in tokens[:index])
    control = Control(max_steps_under_way=depth)
    request = control.add("stops", prompt(5), max_tokens=20, stop_token_ids=(stop,))
    other = control.add("other", prompt(5, 30), max_tokens=20)
    control.run()
    length = tokens.index(stop) + 1
    assert request.output_token_ids == tokens[:length]
    assert request.finish_reason is FinishReason.STOP
    planned = sum(0 in plan.rows and plan.samples[plan.rows.index(0)] for plan in control.plans)
    assert planned >= length + depth - 1
    assert other.output_token_ids == expected_tokens(prompt(5, 30), 20, VOCAB_SIZE)


STREAM = expected_tokens(prompt(6), 30, VOCAB_SIZE)


def ends_at(stops: set[int], min_tokens: int) -> int:
    return next((at for at, token in enumerate(STREAM, 1) if at >= min_tokens and token in stops), 30)


@pytest.mark.parametrize(
    ("min_tokens", "stop", "as_eos", "drafts"),
    covering(
        (0, 1, 2, 3, 7, 8, 9, 29, 30), (STREAM[0], STREAM[1], STREAM[7], STREAM[8], 49), (True, False), (True, False)
    ),
)
def test_stop_tokens_count_from_min_tokens_on(min_tokens: int, stop: int, as_eos: bool, drafts: bool) -> None:
    guess = right_guesses(3) if drafts else None
    control = Control(eos=(stop,) if as_eos else (), block_size=4, guess=guess)
    stop_token_ids = () if as_eos else (stop,)
    request = control.add("stops", prompt(6), max_tokens=30, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
    control.run()
    expected = ends_at({stop}, min_tokens)
    assert request.output_token_ids == STREAM[:expected]
    stopped = STREAM[expected - 1] == stop and expected >= min_tokens
    assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_ignore_eos_ignores_eos_and_nothing_else(ignore_eos: bool) -> None:
    eos, stop = STREAM[2], STREAM[9]
    control = Control(eos=(eos,))
    request = control.add("r", prompt(6), max_tokens=30, ignore_eos=ignore_eos, stop_token_ids=(stop,))
    control.run()
    assert request.num_output_tokens == ends_at({stop} if ignore_eos else {stop, eos}, 0)


def test_an_eos_in_the_prompt_ends_nothing() -> None:
    control = Control(eos=(prompt(6)[-1],))
    request = control.add("r", prompt(6), max_tokens=1)
    control.run()
    assert request.num_output_tokens == 1


def test_a_stop_string_ends_a_request_between_two_steps() -> None:
    control = Control()
    request = control.add("r", prompt(6), max_tokens=30)
    steps_until(control, lambda: request.num_output_tokens == 4)
    control.scheduler.stop("r")
    assert request.finish_reason is FinishReason.STOP
    control.run()
    assert request.num_output_tokens == 4


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_frees_everything_at_once_and_late_results_are_dropped(depth: int) -> None:
    control = Control(max_steps_under_way=depth)
    request = control.add("r", prompt(6), max_tokens=30)
    steps_until(control, lambda: request.num_output_tokens == 4)
    while control.scheduler.num_steps_under_way < depth:
        control.plan()
    control.scheduler.abort("r")
    assert request.finish_reason is FinishReason.ABORT
    control.check_nothing_held()
    control.run()
    assert request.output_token_ids == expected_tokens(prompt(6), request.num_output_tokens, VOCAB_SIZE)


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_row_ends_its_request_only(depth: int) -> None:
    control = Control(max_steps_under_way=depth)
    for number in range(4):
        control.add(f"r{number}", prompt(6, number), max_tokens=12)
    steps_until(control, lambda: control.requests["r2"].num_output_tokens >= 3)
    control.executor.fail_rows = {control.requests["r2"].row}
    control.run()
    failed = control.requests.pop("r2")
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error == "told to fail"
    control.check_outputs()


def test_what_a_failed_request_computed_is_not_cached() -> None:
    control = Control()
    failing = control.add("failing", prompt(16), max_tokens=12)
    control.step()
    control.executor.fail_rows = {failing.row}
    control.run()
    assert control.memory.pool.num_cached == 0
    control.add("again", prompt(16), max_tokens=3)
    control.run()
    assert control.requests["again"].num_cached_tokens == 0


@pytest.mark.parametrize("windows", [(None,), (None, 5), (5,)])
@pytest.mark.parametrize("when", ["waiting", "resumed"])
@pytest.mark.parametrize("sampling", [{}, {"n": 3}, {"n": 3, "beam_search": True}])
def test_what_a_failed_request_computed_before_it_yielded_is_not_cached(
    sampling: dict[str, Any], when: str, windows: tuple[int | None, ...]
) -> None:
    control = Control(num_blocks=64, windows=windows, preemption="recompute")
    control.add("first", prompt(12, 5), max_tokens=4)
    control.run()
    kept = {block.block_id for block in control.memory.pool.cached_blocks()}
    control.add("failing", prompt(16), max_tokens=24, **sampling)
    steps_until(control, lambda: control.members("failing")[0].num_output_tokens > 12)
    control.scheduler._preemption.set_back(control.scheduler.running)
    assert control.memory.pool.num_cached > len(kept)
    if when == "resumed":
        steps_until(control, lambda: control.members("failing")[0].num_computed > 20)
    control.scheduler.fail("failing", "told to fail")
    assert {block.block_id for block in control.memory.pool.cached_blocks()} == kept
    control.scheduler.check()
    control.add("again", prompt(16), max_tokens=3)
    control.run()
    assert control.requests["again"].num_cached_tokens == 0


def test_a_request_that_fails_before_it_ran_takes_nothing_from_the_cache() -> None:
    control = Control(max_num_seqs=1)
    control.add("first", prompt(16), max_tokens=2)
    control.run()
    control.add("running", prompt(4, 9), max_tokens=9)
    control.step()
    control.add("failing", prompt(16), max_tokens=2)
    control.scheduler.fail("failing", "told to fail")
    assert control.memory.pool.num_cached == 4


def test_what_a_failed_request_shares_stays_cached() -> None:
    control = Control()
    control.add("first", prompt(16), max_tokens=12)
    control.step()
    failing = control.add("failing", [*prompt(16), 1, 2], max_tokens=12)
    control.step()
    control.executor.fail_rows = {failing.row}
    control.run()
    control.requests.pop("failing")
    control.add("again", [*prompt(16), 1, 2], max_tokens=3)
    control.run()
    assert control.requests["again"].num_cached_tokens == 16
    control.check_outputs()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lost_step_sets_back_those_in_it_and_in_the_steps_behind_it(depth: int) -> None:
    control = Control(max_steps_under_way=depth, max_num_seqs=2)
    for number in range(4):
        control.add(f"r{number}", prompt(6, number), max_tokens=12)
    steps_until(control, lambda: control.requests["r1"].num_output_tokens >= 3)
    while control.scheduler.num_steps_under_way < depth:
        control.plan()
    control.executor.fail_next_collect = True
    outcome = control.collect()
    assert not outcome.finished
    assert not control.scheduler.num_steps_under_way
    assert not control.scheduler.running
    statuses = [control.requests[f"r{number}"].status for number in range(4)]
    assert statuses == [RequestStatus.PREEMPTED] * 2 + [RequestStatus.WAITING] * 2
    control.run()
    control.check_outputs()


# ---- drafts --------------------------------------------------------------------------------------------------------


def right_guesses(num_right: int, num_wrong: int = 0) -> Guess:
    """Guesses so many tokens rightly, and then so many wrongly."""

    def guess(request_id: str, known: array[int], most: int) -> list[int]:
        right = expected_tokens(known.tolist(), num_right + num_wrong, VOCAB_SIZE)
        return right[:num_right] + [(token + 1) % VOCAB_SIZE for token in right[num_right:]]

    return guess


@pytest.mark.parametrize("num_wrong", [0, 1, 3])
@pytest.mark.parametrize("num_right", [0, 1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 4])
def test_accepted_drafts_count_and_refused_ones_do_not(num_right: int, num_wrong: int, block_size: int) -> None:
    control = Control(block_size=block_size, guess=right_guesses(num_right, num_wrong))
    request = control.add("r", prompt(6), max_tokens=24)
    control.step()
    assert request.num_output_tokens == 1
    while not request.is_finished:
        known, left = len(request.tokens), request.max_total_tokens - len(request.tokens)
        plan = control.step()
        assert plan is not None
        num_drafts = min(num_right + num_wrong, left - 1)
        assert [len(tokens) for tokens in plan.drafts.values()] == ([num_drafts] if num_drafts else [])
        assert plan.starts.tolist() == [known - 1]
        assert plan.counts.tolist() == [1 + num_drafts]
        accepted = min(num_right, num_drafts)
        assert len(request.tokens) == known + accepted + 1
        if not request.is_finished:
            assert request.num_computed == request.num_planned == len(request.tokens) - 1
    control.run()
    control.check_outputs()


def test_drafts_give_way_where_there_is_no_room() -> None:
    control = Control(num_blocks=6, guess=right_guesses(3), preemption="recompute")
    for number in range(3):
        control.add(f"r{number}", prompt(6, number), max_tokens=14)
    control.run()
    control.check_outputs()


def test_nothing_is_known_of_requests_that_have_ended() -> None:
    """One ends in a step that verifies its guesses, the other one while such a step is in flight."""
    control = Control(guess=right_guesses(3))
    control.add("ends", prompt(6), max_tokens=9)
    control.add("aborted", prompt(6, 1), max_tokens=40)
    while "ends" in control.scheduler.requests:
        control.step()
    plan = control.plan()
    assert plan is not None and plan.drafts
    control.scheduler.abort("aborted")
    control.collect()
    drafts = control.scheduler.drafts
    assert drafts.num_verified > 2
    assert not drafts._chances and not drafts._rests


@pytest.mark.parametrize("prefix_index", ["hash_chain", "radix_tree"])
@pytest.mark.parametrize("stop_at", [index for index in range(1, 14) if STREAM.index(STREAM[index]) == index])
def test_drafts_beyond_the_token_that_ends_a_request_are_not_published(prefix_index: str, stop_at: int) -> None:
    """They are computed, but not known: a block of them must not become one that others hit."""
    stop = STREAM[stop_at]
    control = Control(block_size=2, prefix_index=prefix_index, guess=right_guesses(10))
    control.add("stops", prompt(6), max_tokens=30, stop_token_ids=(stop,))
    control.run()
    control.memory.check()
    assert all(len(entry.key) == 4 * 2 for entry in control.memory.index)
    control.add("again", [*prompt(6), *STREAM[:20]], max_tokens=4)
    control.run()
    assert control.requests["again"].num_cached_tokens <= 6 + stop_at + 1
    assert control.outputs("again") == control.expected("again")


# ---- plans ---------------------------------------------------------------------------------------------------------


def steady_plans(control: Control, count: int) -> list[StepPlan]:
    """Plans of steps in which everybody just decodes."""
    plans = []
    for _ in range(count):
        plan = control.step()
        assert plan is not None
        assert plan.num_decodes == len(plan.rows)
        plans.append(plan)
    return plans


def test_a_steady_plan_says_only_what_changed() -> None:
    control = Control(block_size=8, num_blocks=200, max_model_len=1000, max_num_batched_tokens=256)
    for number in range(6):
        control.add(f"r{number}", prompt(9 + number, number), max_tokens=200)
    control.step()
    rows = {request.row: request for request in control.requests.values()}
    for plan in steady_plans(control, 40):
        assert not plan.row_starts
        assert not plan.released_rows
        assert not plan.copies
        new = set(plan.tables.rows)
        assert new == {row for row, start in zip(plan.rows, plan.starts, strict=True) if start % 8 == 0}
        assert len(plan.tables) == len(new), "one block at a time"
    assert len(rows) == 6


def test_the_size_of_a_plan_does_not_depend_on_the_length_of_the_context() -> None:
    sizes = []
    for length in (9, 90, 900):
        control = Control(block_size=16, num_blocks=200, max_model_len=2000, max_num_batched_tokens=1000)
        control.add("r", prompt(length), max_tokens=100)
        control.step()
        plans = steady_plans(control, 60)
        sizes.append({len(plan.to_bytes()) for plan in plans})
    assert sizes[0] == sizes[1] == sizes[2]
    assert len(sizes[0]) == 2, "with a new block, and without"
    assert max(sizes[0]) < 250


def test_a_row_is_announced_once_and_released_before_it_is_taken_again() -> None:
    control = Control(max_num_seqs=2, num_blocks=12, preemption="recompute")
    for number in range(12):
        control.add(f"r{number}", prompt(5, number), max_tokens=1 + 3 * (number % 5))
    control.run()
    held: set[int] = set()
    for plan in control.plans:
        released = set(plan.released_rows)
        assert released <= held
        held -= released
        started = [start.row for start in plan.row_starts]
        assert not held.intersection(started)
        held.update(started)
        assert held >= set(plan.rows)
    for before, after in pairwise(control.plans):
        assert after.step_id == before.step_id + 1


def test_nothing_to_do_is_no_plan() -> None:
    control = Control(max_steps_under_way=3)
    assert control.scheduler.schedule() is None
    control.add("r", prompt(5), max_tokens=1)
    assert control.plan() is not None
    assert control.scheduler.schedule() is None, "its only token is on its way"
    control.collect()
    assert control.scheduler.schedule() is None


def test_clearing_the_cache_leaves_those_who_run_alone() -> None:
    control = Control(num_blocks=12, num_host_blocks=20, preemption="swap", max_steps_under_way=2)
    for number in range(4):
        control.add(f"r{number}", [*prompt(8), number], max_tokens=20)
    for _ in range(300):
        control.step()
        control.memory.reset()
    control.run()
    control.check_outputs()


# ---- log-probabilities of prompts ----------------------------------------------------------------------------------


def test_who_wants_its_prompt_reported_reads_no_cache_and_fills_it() -> None:
    control = Control()
    control.add("first", prompt(20), max_tokens=2)
    control.run()
    reported = control.add("reported", prompt(20), max_tokens=2, prompt_logprobs=0)
    control.run()
    assert reported.num_cached_tokens == 0
    assert reported.prompt_logprobs == expected_report(prompt(20))
    control.add("last", prompt(20), max_tokens=2)
    control.run()
    assert control.requests["last"].num_cached_tokens == 19
    control.memory.reset()
    control.add("alone", prompt(20), max_tokens=2, prompt_logprobs=0)
    control.run()
    control.add("hit", prompt(20), max_tokens=2)
    control.run()
    assert control.requests["hit"].num_cached_tokens == 19
    control.check_outputs()


@pytest.mark.parametrize("max_steps_under_way", [1, 3])
def test_few_logits_of_prompts_are_wanted_in_one_step(
    monkeypatch: pytest.MonkeyPatch, max_steps_under_way: int
) -> None:
    monkeypatch.setattr(plan_builder, "MAX_PROMPT_LOGITS", 7)
    control = Control(max_steps_under_way=max_steps_under_way)
    for index in range(3):
        control.add(f"reported{index}", prompt(20 + index, index), max_tokens=3, prompt_logprobs=0)
    control.add("plain", prompt(30, 9), max_tokens=3)
    control.run()
    for index in range(3):
        expected = expected_report(prompt(20 + index, index))
        assert control.requests[f"reported{index}"].prompt_logprobs == expected
    most: dict[int, int] = {}
    wanted = []
    for plan in control.plans:
        most |= {start.row: start.num_prompt_logits for start in plan.row_starts}
        spans = zip(plan.rows, plan.starts, plan.counts, strict=True)
        wanted.append(sum(max(0, min(start + count, most[row]) - start) for row, start, count in spans))
    assert max(wanted) == 7
    assert sum(wanted) == 19 + 20 + 21
    control.check_outputs()


def test_a_prompt_is_reported_once_whatever_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_builder, "MAX_PROMPT_LOGITS", 6)
    for preemption, num_host_blocks in (("recompute", 0), ("swap", 20)):
        control = Control(num_blocks=14, preemption=preemption, num_host_blocks=num_host_blocks)
        for index in range(3):
            control.add(f"r{index}", prompt(20, 5 * index), max_tokens=20, prompt_logprobs=0, n=1 + index % 2)
        control.run()
        assert control.scheduler.num_preemptions
        for index in range(3):
            assert control.requests[f"r{index}"].prompt_logprobs == expected_report(prompt(20, 5 * index))
        control.check_outputs()


def test_a_report_with_a_gap_is_our_own_mistake() -> None:
    control = Control()
    control.add("r", prompt(8), prompt_logprobs=0)
    control.step()
    request = control.requests["r"]
    with pytest.raises(InvariantError, match="the prompt log-probabilities before 9 are missing"):
        note_prompt(request, 9, ())
