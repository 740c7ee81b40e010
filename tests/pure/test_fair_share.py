"""Fair share: what is computed for tenants who always have more to ask is the same for each.

Whatever their lengths are, however their requests end, and whatever is computed in vain.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.request import CacheScope
from quire.instruments.bench import fairness
from quire.instruments.bench.busy_tenants import ENDS, BusyTenants, Habit, worst_miss
from support.control import Control
from support.covering import covering
from support.simulation import Scenario, Simulation

FAIR = 0.05
"""By how much the share of a tenant may miss the fair one, as a part of that."""

FEWEST_ENDED = 25
"""Requests of each tenant that must have ended before shares are compared: what one may be owed is at most a few."""


def fair_engine(rows: int, budget: int = 2048, depth: int = 1) -> SchedulerConfig:
    """Return the settings of a scheduler with so many rows, tokens in a step, and steps under way."""
    return SchedulerConfig(
        policy="fair_share",
        max_model_len=1024,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_steps_under_way=depth,
    )


def draw_tenants(seed: int) -> tuple[BusyTenants, int]:
    """Return two or three tenants on an engine of drawn settings, and tokens enough to see their shares."""
    rng = random.Random(seed)
    tenants = [Habit(rng.randint(1, 30), rng.randint(1, 40), ENDS[(seed + i) % len(ENDS)]) for i in range(2 + seed % 2)]
    block_size = rng.choice([1, 3, 16, 64, 1024])
    rows, budget = rng.choice([(2, 8), (3, 12), (4, 64), (8, 16)])
    longest = max(habit.num_prompt_tokens + 2 * habit.num_output_tokens + 40 for habit in tenants)
    accuracy = rng.choice([None, None, 0.0, 0.7])
    num_blocks = -(-longest // block_size) * rng.choice([2, 2, 4, 40])
    busy = BusyTenants(
        tenants,
        fair_engine(rows, budget, rng.choice([1, 2, 3])),
        block_size=block_size,
        at_once=rng.choice([rows, 2 * rows, 20 * rows]),
        memory=MemoryConfig(num_blocks=num_blocks, num_host_blocks=rng.choice([0, 100])),
        acceptance=accuracy,
    )
    return busy, 25 * len(tenants) * rows * max(habit.most_tokens for habit in tenants)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6, 7])
def test_each_tenant_has_its_share_of_what_is_computed(seed: int) -> None:
    busy, num_tokens = draw_tenants(seed)
    computed = busy.run(num_tokens)
    # Where memory is short, a request is computed many times over, and these tokens are those of a few requests.
    while min(busy.ended[tenant] for tenant in busy.habits) < FEWEST_ENDED:
        computed = busy.run(computed.total() + num_tokens)
    assert worst_miss(computed) < FAIR, (busy.habits, busy.executor.computed, busy.ended)


@pytest.mark.long
@pytest.mark.parametrize("seed", [5, *range(8, 1000)])
def test_many_tenants(seed: int) -> None:
    test_each_tenant_has_its_share_of_what_is_computed(seed)


def test_two_and_65_tokens_have_the_same_share() -> None:
    busy = BusyTenants([Habit(2, 2), Habit(2, 65)], fair_engine(4), block_size=16, at_once=64)
    assert worst_miss(busy.run(8000)) < FAIR


def test_texts_that_end_by_a_stop_string_are_charged() -> None:
    busy = BusyTenants([Habit(8, 10, "stop string"), Habit(8, 10)], fair_engine(4), block_size=16, at_once=64)
    assert worst_miss(busy.run(8000)) < FAIR
    assert abs(busy.ended["a"] - busy.ended["b"]) < FAIR * busy.ended["b"]


@pytest.mark.parametrize("at_once", [3, 4])
def test_who_has_nothing_waiting_for_a_moment_keeps_its_turn(at_once: int) -> None:
    """A client that sends its next request when one has ended has an empty queue between two of them."""
    busy = BusyTenants([Habit(2, 2), Habit(20, 65)], fair_engine(4), block_size=16, at_once=at_once)
    assert worst_miss(busy.run(8000)) < FAIR


def test_tokens_from_the_cache_are_free_and_those_computed_again_are_not() -> None:
    control = Control(policy="fair_share", num_blocks=12, preemption="recompute", max_num_seqs=2)
    served = control.scheduler._policy._served
    for name, tenant in (("first", "a"), ("again", "a"), ("other", "b")):
        control.add(name, range(12), max_tokens=1, scope=CacheScope(tenant, salt=tenant))
        control.run()
    assert served == {"a": 12 + 1, "b": 13 + 12}, "the second time a computes one token; b begins where a stands"
    control.add("in front", range(20), max_tokens=20, scope=CacheScope("b", salt="b"))
    victim = control.add("yields", range(20), max_tokens=20, scope=CacheScope("a", salt="a"))
    before, charged = control.executor.num_tokens_computed, served.total()
    control.run()
    computed = control.executor.num_tokens_computed - before
    assert victim.num_preemptions
    assert computed > 2 * (20 + 20 - 1) - 12 - 12, "something is computed again"
    assert served.total() - charged == computed


# ---- a newcomer beside a tenant that takes all there is --------------------------------------------------------------


def flooded(*, depth: int = 1, num_requests: int = 10, length: int = 4, **settings: Any) -> Control:
    """A tenant that has asked for more than there is, for some steps already."""
    of_control = {name: settings.pop(name) for name in ("max_num_seqs", "max_num_batched_tokens", "preemption")}
    control = Control(
        policy="fair_share",
        num_blocks=3000,
        max_model_len=1000,
        max_steps_under_way=depth,
        check_every=20,
        **of_control,
    )
    for number in range(num_requests):
        tokens = [(7 * number + 3 * index) % 50 for index in range(length)]
        control.add(f"flood {number}", tokens, scope=CacheScope("flood"), **settings)
    for _ in range(10):
        control.step()
    return control


def steps_to_first_token(control: Control, name: str, num_prompt_tokens: int, **sampling: Any) -> int:
    """Add a request of a tenant of its own; return how many steps it waits for its first token."""
    request = control.add(name, range(num_prompt_tokens), scope=CacheScope(name), max_tokens=3, **sampling)
    for num_steps in range(1, 1000):
        control.step()
        if request.num_output_tokens:
            return num_steps
    raise AssertionError("it never came to that")


@pytest.mark.parametrize(
    ("sampling", "depth", "preemption"),
    covering(({}, {"n": 4}, {"n": 4, "beam_search": True}), (1, 3), ("recompute", "swap")),
)
def test_a_newcomer_gets_a_row_from_a_tenant_that_holds_all(
    sampling: dict[str, Any], depth: int, preemption: str
) -> None:
    control = flooded(
        depth=depth, max_num_seqs=8, max_num_batched_tokens=64, preemption=preemption, max_tokens=60, **sampling
    )
    first = control.scheduler.running[0]
    assert len(control.scheduler.running) == 8
    for name in ("one", "another"):
        assert steps_to_first_token(control, name, 5) <= 3 + depth
    assert not first.num_preemptions, "the first in order never yields"
    control.run()
    control.check_outputs()


def test_a_newcomer_gets_all_the_rows_that_it_needs_or_none() -> None:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "preemption": "recompute", "max_tokens": 100}
    control = flooded(**settings)
    assert steps_to_first_token(control, "four", 5, n=4) <= 4
    assert control.scheduler.num_preemptions == 4
    control = flooded(**settings)
    assert steps_to_first_token(control, "five", 5, n=5) > 50
    assert control.scheduler.num_preemptions == 0, "three rows for the one that holds all, five for the other"


def test_a_single_row_is_never_taken_away() -> None:
    control = flooded(max_num_seqs=1, max_num_batched_tokens=64, preemption="recompute", max_tokens=60)
    assert 40 < steps_to_first_token(control, "late", 5) < 60
    assert control.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_leaves_tokens_to_the_first_chunk_of_another_tenant(depth: int) -> None:
    control = flooded(
        depth=depth, length=900, max_num_seqs=16, max_num_batched_tokens=32, preemption="recompute", max_tokens=4
    )
    for name in ("one", "another", "third"):
        assert steps_to_first_token(control, name, 10) <= 5 + depth
    assert control.requests["flood 0"].num_output_tokens == 0, "the long prompt is still being computed"
    together = [control.add(name, range(40), scope=CacheScope(name), max_tokens=1) for name in "xyz"]
    for _ in range(12):
        control.step()
    assert all(request.is_finished for request in together), "three prompts of 40 in a quarter of the tokens each"


def test_tenants_who_are_served_alike_do_not_make_each_other_yield() -> None:
    busy = BusyTenants([Habit(10, 30), Habit(5, 12)], fair_engine(8), block_size=16, at_once=40)
    busy.run(30_000)
    assert busy.ended.total() > 800
    assert busy.engine.scheduler.num_preemptions < 0.02 * busy.ended.total()


@pytest.mark.parametrize("seed", range(16))
def test_for_a_single_tenant_it_is_first_come_first_served(seed: int) -> None:
    scenario = Scenario.draw(seed)
    jobs = [replace(job, scope=CacheScope("a", job.scope.salt)) for job in scenario.jobs]

    def plans(policy: str) -> bytes:
        run = Simulation(replace(scenario, jobs=jobs, scheduler=replace(scenario.scheduler, policy=policy)))
        run.run()
        return run.plans.digest()

    assert plans("fair_share") == plans("fcfs")


def test_the_instrument_measures_shares_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "NUM_TOKENS", 5000)
    monkeypatch.setattr(fairness, "PAIRS", fairness.PAIRS[:3])
    monkeypatch.setattr(
        fairness, "FLOODS", [(name, 3, 3000, sampling) for name, _, _, sampling in fairness.FLOODS[-1:]]
    )
    shares, newcomers = fairness.measure_shares(print), fairness.measure_newcomers(print)
    assert [row[0] for row in shares.rows] == [name for name, *_ in fairness.PAIRS]
    goals = shares.goals + newcomers.goals
    assert len(goals) == 4
    assert all(goal.is_met for goal in goals), goals
