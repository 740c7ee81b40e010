"""SearchTrials: a search that pays goes on, one that does not costs little, and what changes is noticed."""

from __future__ import annotations

import random

import pytest

from quire.scheduler.search_trials import LONGEST_EACH, LONGEST_REST, PAUSE, TRIAL, SearchTrials

PLAIN_US = 1000.0


def time_of_tokens(
    trials: SearchTrials, num_running: int, num_steps: int, *, cost: float, brings: float, rng: random.Random
) -> float:
    """Return how many times as long tokens take as without any search, in steps that search when they are told to.

    `cost`: how many times as long a step with a search takes; `brings`: how many tokens of a request it brings.
    """
    took_us = tokens = 0.0
    for _ in range(num_steps):
        is_search = trials.is_on(num_running)
        duration_us = PLAIN_US * (cost if is_search else 1.0) * rng.uniform(0.9, 1.1)
        brought = num_running * (brings if is_search else 1.0)
        num_brought = int(brought) + (rng.random() < brought % 1)
        trials.note(
            num_running, num_brought=num_brought, duration_us=duration_us, plain_us=PLAIN_US, is_search=is_search
        )
        took_us, tokens = took_us + duration_us, tokens + num_brought
    return took_us * num_running / (tokens * PLAIN_US)


@pytest.mark.parametrize("seed", range(40))
def test_a_search_that_loses_costs_little_and_one_that_wins_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    num_running, cost = rng.choice([1, 4, 32]), rng.uniform(1.0, 1.5)
    loses = time_of_tokens(SearchTrials(), num_running, 4000, cost=cost * 1.2, brings=cost, rng=rng)
    assert loses < 1 + 0.2 * 2 * TRIAL / min(LONGEST_REST, LONGEST_EACH * num_running) + 0.02
    wins = time_of_tokens(SearchTrials(), num_running, 4000, cost=cost, brings=cost * 1.5, rng=rng)
    assert wins < 1 / 1.4


@pytest.mark.parametrize("seed", range(20))
def test_a_search_that_begins_to_pay_is_noticed_and_one_that_stops_to_is_given_up(seed: int) -> None:
    rng, trials = random.Random(seed), SearchTrials()
    time_of_tokens(trials, 1, 1000, cost=1.5, brings=1.1, rng=rng)
    assert time_of_tokens(trials, 1, 2 * LONGEST_REST, cost=1.1, brings=3.0, rng=rng) < 0.75
    time_of_tokens(trials, 1, 50, cost=1.5, brings=1.0, rng=rng)
    assert time_of_tokens(trials, 1, 1000, cost=1.5, brings=1.0, rng=rng) < 1.15


def test_steps_of_other_numbers_of_requests_are_judged_apart() -> None:
    trials, rng = SearchTrials(), random.Random(0)
    time_of_tokens(trials, 32, PAUSE + TRIAL, cost=2.0, brings=1.0, rng=rng)
    time_of_tokens(trials, 1, PAUSE + TRIAL, cost=1.0, brings=2.0, rng=rng)
    assert [trials.is_on(num_running) for num_running in (32, 40, 1, 2, 64)] == [False, False, True, True, True]


def test_steps_without_a_search_are_measured_again_and_again() -> None:
    trials, rng = SearchTrials(), random.Random(0)
    was_on = []
    for _ in range(200):
        was_on.append(trials.is_on(1))
        time_of_tokens(trials, 1, 1, cost=1.0, brings=2.0, rng=rng)
    assert 4 <= was_on.count(False) <= 10
