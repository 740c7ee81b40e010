"""GuessPlanner: when guesses are requested, for how many tokens, and which of them a plan verifies."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from quire.core.config import MOST_DRAFTS
from quire.core.step import StepPlan
from support.control import Control, Guess
from support.shadow import expected_tokens
from support.step_faults import StepFaults

VOCAB_SIZE = 50


def prompt(length: int, first: int = 0) -> list[int]:
    """A prompt whose tokens say where it began."""
    return [(first + 3 * index) % VOCAB_SIZE for index in range(length)]


def guesses(num_right: int) -> Guess:
    """Guess this many tokens, all of them right."""

    def guess(request_id: str, known: array[int], most: int) -> Sequence[int]:
        return expected_tokens(known.tolist(), num_right, VOCAB_SIZE)

    return guess


def control_of(num_right: int, **settings: Any) -> Control:
    return Control(guess=guesses(num_right), vocab_size=VOCAB_SIZE, **settings)


def planned(control: Control) -> StepPlan:
    plan = control.step()
    assert plan is not None
    return plan


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_guesses_are_requested_for_the_tokens_that_may_follow(num_right: int) -> None:
    """A draft before the last token: the token after the drafts is sampled too. None is requested for what is left."""
    control = control_of(num_right)
    request = control.add("r", prompt(6), max_tokens=12)
    while not request.is_finished:
        plan = planned(control)
        num_drafts = sum(map(len, plan.drafts.values()))
        next_start = plan.starts[0] + plan.counts[0] - num_drafts
        most = min(MOST_DRAFTS, request.max_total_tokens - 2 - next_start)
        assert plan.proposals == ({plan.rows[0]: most} if most > 0 else {})
        assert plan.depths == {}
    control.check_outputs()


def test_while_a_prompt_is_computed_nothing_is_guessed() -> None:
    control = control_of(3, max_num_batched_tokens=16)
    control.add("text", prompt(6), max_tokens=60)
    planned(control)
    assert planned(control).drafts
    control.add("prompt", prompt(50, 1), max_tokens=4)
    plans = [planned(control) for _ in range(3)]
    assert all(plan.num_tokens == 16 for plan in plans), "the prompt takes the tokens of the step"
    assert [plan.drafts for plan in plans[1:]] == [{}] * 2
    assert [plan.proposals for plan in plans[1:]] == [{}] * 2
    control.run()
    control.check_outputs()


def test_beams_and_suspects_get_no_guesses() -> None:
    control = control_of(3)
    control.add("beams", prompt(6), max_tokens=8, n=2, beam_search=True)
    planned(control)
    assert planned(control).proposals == {}
    control.run()
    control = control_of(3)
    for number in range(2):
        control.add(f"r{number}", prompt(6, number), max_tokens=30)
    planned(control)
    control.executor.fault = StepFaults({"r1": 12}).fault()
    while not control.scheduler.isolation.is_under_way:
        control.step()
    while plan := control.plan():
        if not control.scheduler.isolation.is_under_way:
            break
        assert plan.proposals == {}
        control.collect()
    control.run()


@pytest.mark.parametrize("depth", [2, 3])
def test_a_request_waits_for_its_guesses_if_steps_are_in_flight(depth: int) -> None:
    control = control_of(3, max_steps_under_way=depth)
    control.add("r", prompt(6), max_tokens=30)
    while control.scheduler.requests:
        plan = control.plan()
        if plan is None:
            control.collect()
            continue
        assert control.scheduler.num_steps_under_way == 1, "each plan needs the guesses of the one before"
    control.check_outputs()


def test_a_text_without_guesses_goes_on() -> None:
    control = control_of(0, max_steps_under_way=2)
    control.add("r", prompt(6), max_tokens=9)
    control.run()
    assert not any(plan.drafts for plan in control.plans)
    control.check_outputs()


@pytest.mark.parametrize("num_running", [1, 3])
def test_a_draft_model_guesses_as_far_as_there_are_slots(num_running: int) -> None:
    """It gets new blocks only if there are more than running requests."""
    control = control_of(2, max_depth=3, num_blocks=9, block_size=4, max_model_len=24)
    requests = [control.add(f"r{number}", prompt(5, number), max_tokens=12) for number in range(num_running)]
    depths = list[int]()
    while control.scheduler.requests:
        plan = control.plan()
        if plan is None:
            break
        for row, depth in plan.depths.items():
            (request,) = (each for each in requests if each.row == row)
            assert 0 < depth <= 3
            assert request.num_planned + depth <= control.memory.num_slots(request)
            assert request.num_planned + depth < request.max_total_tokens
            assert row in plan.proposals
            depths.append(depth)
        control.collect()
    assert max(depths) == 3
    assert (min(depths) < 3) == (num_running > 1) or min(depths) < 3
    control.check_outputs()


def test_steps_are_measured_by_what_they_search_and_verify() -> None:
    control = control_of(3)
    drafts, collect = control.scheduler.drafts, control.executor.collect
    control.executor.collect = lambda: replace(collect(), duration_us=1000)  # type: ignore[method-assign]
    control.add("r", prompt(6), max_tokens=40)
    planned(control)
    assert not drafts.search_times.has(1) and not drafts.times.has(4), "a step with a prompt is not measured"
    for _ in range(4):
        planned(control)
    assert drafts.times.has(4) and not drafts.plain_times.has(1)
    num_verified = sum(bool(plan.drafts) for plan in control.plans)
    assert drafts.num_verified == num_verified > 1
    assert drafts.counts["ngram"].right[:4] == [num_verified] * 3 + [0]
    control.executor.guess = lambda request_id, known, most: ()
    planned(control)
    planned(control)
    assert drafts.search_times.has(1)
    drafts.trials.is_on = lambda num_running: False  # type: ignore[method-assign]
    planned(control)
    assert planned(control).proposals == {}
    assert drafts.plain_times.has(1)
