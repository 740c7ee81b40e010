"""DraftBudget: guesses are verified where that pays, and nowhere else."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence

import pytest

from quire.core.request import Request
from quire.core.step import MAX_STEP_DRAFTS
from quire.scheduler.speculation import MARGIN, REST, DraftBudget, StepTimes


def requests_with(counts: Sequence[int]) -> list[Request]:
    """Requests with so many guesses each."""
    found = []
    for index, count in enumerate(counts):
        request = Request(f"r{index}", [1])
        request.guesser, request.drafts = "ngram", array("i", range(count))
        found.append(request)
    return found


def budget_with(times: dict[int, float]) -> DraftBudget:
    budget = DraftBudget()
    for num_tokens, microseconds in times.items():
        budget.note_step(num_tokens, num_tokens, round(microseconds))
        budget.note_step(0, num_tokens, round(microseconds))
    return budget


FLAT = {1: 1000.0, 16: 1000.0, 64: 1000.0, 128: 1000.0}
STEEP = {num_tokens: 1000.0 * num_tokens for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128)}


def test_where_more_tokens_cost_nothing_every_guess_is_verified() -> None:
    requests = requests_with([15, 3, 0, 7])
    budget_with(FLAT).share_out(requests, 4)
    assert [len(request.drafts) for request in requests] == [15, 3, 0, 7]


def test_where_each_token_costs_its_share_no_guess_is_verified() -> None:
    requests = requests_with([15, 3, 7])
    budget_with(STEEP).share_out(requests, 3)
    assert [len(request.drafts) for request in requests] == [0, 0, 0]


def test_a_step_verifies_only_so_many() -> None:
    requests = requests_with([15] * 20)
    budget_with(FLAT).share_out(requests, 20)
    assert sum(len(request.drafts) for request in requests) == MAX_STEP_DRAFTS


def test_before_anything_is_measured_guesses_are_tried() -> None:
    requests = requests_with([5])
    DraftBudget().share_out(requests, 1)
    assert len(requests[0].drafts) == 5


def test_the_likeliest_guesses_come_first() -> None:
    budget = budget_with({1: 1000.0, 4: 1000.0, 12: 4000.0})
    requests = requests_with([4, 4, 4])
    for _ in range(30):
        budget.note_verified(requests[1], 3, 3)
        budget.note_verified(requests[2], 3, 0)
    budget.share_out(requests, 3)
    counts = [len(request.drafts) for request in requests]
    assert counts[1] > counts[0] >= counts[2]


def test_the_choice_is_the_best_there_is() -> None:
    """No other number of guesses for each request brings more tokens for its time: on all curves that bend upwards."""
    for seed in range(60):
        rng = random.Random(seed)
        slope, times, now = rng.choice([5.0, 50.0, 200.0]), {}, 1000.0
        for num_tokens in (1, 2, 4, 8, 16, 32):
            times[num_tokens] = now
            now += slope * num_tokens
            slope *= rng.choice([1.0, 1.5])
        budget = budget_with(times)
        requests = requests_with([rng.randrange(1, 5) for _ in range(3)])
        for request in requests:
            for _ in range(rng.randrange(20)):
                budget.note_verified(request, 1, rng.randrange(2))
        chances = [budget._chance(request) for request in requests]
        most = [len(request.drafts) for request in requests]
        budget._rests.update(dict.fromkeys(requests, REST))  # no guess is only tried
        budget.share_out(requests, 3)
        chosen = tuple(len(request.drafts) for request in requests)

        def gain(counts: Sequence[int], chances: list[float] = chances, budget: DraftBudget = budget) -> float:
            expected = sum(
                sum(chance**place for place in range(count + 1)) for chance, count in zip(chances, counts, strict=True)
            )
            alone_us = budget.times.of(3)
            return expected / (alone_us + MARGIN * (budget.times.of(3 + sum(counts)) - alone_us))

        best = max(gain(counts) for counts in itertools.product(*(range(count + 1) for count in most)))
        assert gain(chosen) > 0.97 * best, seed


def test_a_request_without_a_worthy_guess_rests_and_is_tried_again() -> None:
    budget = budget_with({1: 1000.0, 2: 1300.0, 4: 1900.0})
    (request,) = requests_with([4])
    for _ in range(40):
        budget.note_verified(request, 1, 0)
    verified = []
    for _ in range(3 * REST):
        request.guesser, request.drafts = "ngram", array("i", range(4))
        budget.share_out([request], 1)
        verified.append(len(request.drafts))
    assert [place for place, count in enumerate(verified) if count] == [REST - 1, 2 * REST - 1, 3 * REST - 1]
    assert set(verified) == {0, 1}
    budget.forget(request)
    request.guesser, request.drafts = "ngram", array("i", range(4))
    budget.share_out([request], 1)
    assert request.drafts, "what was known of it is forgotten"


@pytest.mark.parametrize("seed", range(10))
def test_times_never_fall_as_steps_grow(seed: int) -> None:
    rng, times = random.Random(seed), StepTimes()
    assert times.of(5) == 0.0
    for _ in range(200):
        times.note(rng.randrange(1, 130), rng.random() * 1e5)
        found = [times.of(num_tokens) for num_tokens in range(1, 200)]
        assert found == sorted(found)


def test_the_time_of_a_step_follows_measurements_but_not_odd_ones() -> None:
    times = StepTimes()
    times.note(30, 3000.0)
    times.note(16, 100.0)  # the first step was odd: for 30 tokens it should have taken 187.5, or half as much again
    assert times.of(50) == pytest.approx(281.25 + 0.15 * (100 - 281.25))
    times = StepTimes()
    times.note(16, 100.0)
    times.note(24, 9000.0)  # the second one is: it should have taken 150
    assert times.of(50) == pytest.approx(100 + 0.15 * (225 - 100))


@pytest.mark.parametrize("duration_us", [0, 1])
def test_a_time_of_0_is_none(duration_us: int) -> None:
    budget = DraftBudget()
    budget.note_plain(1, 1, duration_us)
    budget.note_step(1, 1, duration_us, is_search=True)
    budget.note_step(1, 4, duration_us)
    budget.note_pass(1, duration_us)
    measured = (budget.plain_times, budget.search_times, budget.times, budget.pass_times)
    assert [times.least > 0 for times in measured] == [duration_us > 0] * 4
    budget.note_search(2, 2, duration_us, is_search=False)
    assert budget.trials.is_on(2) == (not duration_us), "a pause has begun"


def test_each_kind_of_proposer_is_trusted_by_what_it_has_shown() -> None:
    budget = budget_with({1: 1000.0, 4: 1300.0, 16: 4000.0})
    (request,) = requests_with([4])
    for _ in range(40):
        budget.note_verified(request, 4, 0)
    budget.share_out([request], 1)
    assert len(request.drafts) < 4
    request.guesser, request.drafts = "forced", array("i", range(4))
    budget.share_out([request], 1)
    assert len(request.drafts) == 4
    budget.note_verified(request, 4, 3)
    assert budget.counts["ngram"].right == [0] * len(budget.counts["ngram"].right)
    assert budget.counts["ngram"].verified[:5] == [40, 40, 40, 40, 0]
    assert budget.counts["forced"].right[:5] == [1, 1, 1, 0, 0]
    assert budget.counts["forced"].verified[:5] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("seed", range(40))
def test_where_not_even_sure_guesses_could_pay_none_is_verified(seed: int) -> None:
    rng = random.Random(seed)
    times, now = {}, 1000.0
    for num_tokens in (1, 2, 4, 8, 16, 32):
        times[num_tokens], now = now, now * rng.choice([1.0, 1.1, 1.5, 2.0])
    budget, num_running = budget_with(times), rng.randrange(1, 20)
    requests = requests_with([rng.randrange(1, 5) for _ in range(num_running)])
    could_pay = budget.could_pay(num_running)
    for _ in range(40):
        budget.note_verified(rng.choice(requests), 2, 2)
    budget.share_out(requests, num_running)
    assert could_pay or not any(len(request.drafts) for request in requests)


@pytest.mark.parametrize("num_running", [1, 4, 12, 40])
def test_guesses_are_searched_for_where_sure_ones_would_bring_much(num_running: int) -> None:
    """Steps of 2 ms and of 0.4 ms more for each token: at 40 at once sure guesses would bring a tenth at most."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    budget = budget_with({num_tokens: 2000.0 + 400.0 * num_tokens for num_tokens in sizes})
    assert budget.could_pay(num_running) == (num_running < 40)
    assert not budget_with(STEEP).could_pay(num_running)
    assert budget_with(FLAT).could_pay(num_running)


@pytest.mark.parametrize(("plain_us", "are_verified"), [(1000, False), (1450, True)])
def test_what_any_guess_costs_a_step_is_weighed_too(plain_us: int, are_verified: bool) -> None:
    """More tokens cost nothing here, but a step with guesses takes longer than one without: it is planned with care."""
    budget, requests = DraftBudget(), requests_with([4, 0, 0, 0])
    budget.note_step(4, 4, plain_us)
    for num_tokens in (5, 8, 16):
        budget.note_step(4, num_tokens, 1500)
    for _ in range(30):
        budget.note_verified(requests[0], 1, 0)  # it has shown little
    budget.note_verified(requests[0], 1, 1)
    budget.share_out(requests, 4)
    assert any(len(request.drafts) for request in requests) == are_verified


def model_budget(num_running: int, times: dict[int, int], pass_us: int) -> tuple[DraftBudget, list[Request]]:
    """A budget that has measured steps and passes, and requests that a draft model may guess for."""
    budget, requests = (
        budget_with({count: float(time) for count, time in times.items()}),
        requests_with([0] * num_running),
    )
    budget.note_pass(num_running, pass_us)
    for request in requests:
        request.guesser = "draft_model"
    return budget, requests


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_model_guesses_where_that_brings_most_tokens_for_the_time(seed: int) -> None:
    """As many passes for as many requests, the likeliest first, as no other choice beats by much."""
    rng = random.Random(seed)
    num_running, time, times = rng.randrange(1, 12), rng.uniform(5_000, 30_000), dict[int, int]()
    for num_tokens in (1, 2, 4, 8, 16, 32, 64):
        time += num_tokens * rng.uniform(0, 400)
        times[num_tokens] = round(time)
    budget, requests = model_budget(num_running, times, round(time * rng.choice([0.02, 0.1, 0.3, 1.0])))
    for request in requests:
        for _ in range(rng.randrange(20)):
            budget.note_verified(request, 4, rng.randrange(5))
    chances = sorted((budget._chance(request) for request in requests), reverse=True)

    def rate(count: int, depth: int) -> float:
        expected = num_running + sum(chance**place for chance in chances[:count] for place in range(1, depth + 1))
        return expected / (budget.times.of(num_running + count * depth) + depth * budget._pass_us(count))

    chosen = budget.depths(requests, num_running, 15)
    (depth,) = set(chosen.values()) or {0}
    possible = [(count, depth) for depth in range(1, 16) for count in range(1, min(num_running, 64 // depth) + 1)]
    best = max(rate(0, 0), *itertools.starmap(rate, possible))
    assert rate(len(chosen), depth) >= 0.97 * best
    assert sorted((budget._chance(request) for request in chosen), reverse=True) == chances[: len(chosen)]


def test_a_draft_model_that_is_wrong_rests_longer_and_longer_but_for_one_guess() -> None:
    budget, requests = model_budget(3, {1: 10_000, 2: 10_100, 4: 10_200, 8: 10_400, 16: 10_800}, 2_000)
    assert set(budget.depths(requests, 3, 15)) == set(requests)
    for _ in range(40):
        for request in requests:
            budget.note_verified(request, 3, 0)
    requests[1].tokens = array("i", [])  # of which least is to be read
    tried = []
    for step in range(20 * REST):
        if chosen := budget.depths(requests, 3, 15):
            assert chosen == {requests[1]: 1}
            tried.append(step + 1)
            requests[1].drafts = array("i", [5])
            budget.share_out(requests, 3)
            assert len(requests[1].drafts) == 1  # it is verified, however unlikely it is
            budget.note_verified(requests[1], 1, 0)
    assert tried == [REST, 3 * REST, 7 * REST, 15 * REST]


def test_a_draft_model_that_is_right_again_guesses_again_soon() -> None:
    budget, requests = model_budget(1, {1: 10_000, 2: 10_100, 4: 10_200, 8: 10_400, 16: 10_800}, 4_000)
    for _ in range(40):
        budget.note_verified(requests[0], 3, 0)
    depths = []
    for _ in range(2 * REST):
        depths.append(budget.depths(requests, 1, 15).get(requests[0], 0))
        if depths[-1]:
            budget.note_verified(requests[0], 1, 1)
    assert depths[: REST + 2] == [0] * (REST - 1) + [1] * 3
    assert depths[-1] > 1


def test_a_request_begins_with_what_others_have_shown() -> None:
    budget = budget_with({1: 1000.0, 2: 1400.0, 4: 2200.0})
    for seen in requests_with([4] * 8):
        for _ in range(8):
            budget.note_verified(seen, 1, 0)
        budget.forget(seen)
    (new,) = requests_with([4])
    verified = []
    for _ in range(REST + 1):
        new.drafts = array("i", range(4))
        budget.share_out([new], 1)
        verified.append(len(new.drafts))
        if new.drafts:
            budget.note_verified(new, 1, 0)
    assert verified == [1, *[0] * (REST - 1), 1]  # its first guess is tried, and then one now and then


def test_a_pass_for_fewer_rows_than_measured_takes_less() -> None:
    budget, _ = model_budget(16, {1: 1_000, 16: 4_000}, 2_000)
    assert budget._pass_us(16) == 2_000
    assert budget._pass_us(1) == 500


def test_what_is_foreseen_is_the_gain_of_guesses_that_are_as_right_as_they_were() -> None:
    budget, request = DraftBudget(), Request("r", [1])
    assert budget.foreseen.gain == 1.0
    for num_tokens, duration_us in ((1, 10_000), (2, 11_000), (4, 13_000)):
        budget.note_step(num_tokens, num_tokens, duration_us)
        budget.note_step(0, num_tokens, duration_us)
    budget.note_pass(1, 1_000)
    request.guesser = "draft_model"
    for _ in range(80):
        budget.note_verified(request, 3, 3)
    budget.foresee(1, [(request, 3)], [3], took_us=15_000, is_search=True)
    assert budget.foreseen.gain == pytest.approx(4 * 10_000 / (13_000 + 3 * 1_000))
    budget.foresee(1, [], took_us=11_000, is_search=True)
    assert budget.foreseen.gain == pytest.approx(50_000 / (16_000 + 10_000))
    assert budget.foreseen.taken_us == 26_000


def test_the_layer_of_a_model_counts_as_a_draft_model() -> None:
    """Its chances decide how many tokens it guesses, and its guesses are counted under its own name."""
    budget, (request,) = budget_with({1: 10_000, 8: 11_000, 16: 12_000}), requests_with([0])
    budget.note_pass(1, 1000)
    depths = [budget.depths([request], num_running=1, most=15)[request]]
    request.guesser = "mtp"
    for _ in range(20):
        budget.note_verified(request, 4, 0)
        depths.append(budget.depths([request], num_running=1, most=15).get(request, 0))
    assert depths[0] >= 3 and depths[-1] <= 1
    assert budget.counts["mtp"].verified[:4] == [20] * 4 and not any(budget.counts["draft_model"].verified)
    budget.forget(request)
    assert not budget._chances
