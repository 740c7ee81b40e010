"""Deterministic simulation: whatever happens around a request, it ends, with its own tokens, and leaves nothing behind.

Each seed is a run of its own: settings, requests, arrivals, aborts, stops, resets, failing rows and steps, drafts right
and wrong, one to three steps under way, pools that hold just the largest request. `support.simulation` says what is
checked after every action and at the end. A seed that found a mistake which few others find is added to `RARE`.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from support.shadow_disk import DiskChaos, ShadowDisk
from support.simulation import Chaos, FailingAllocations, Scenario, Simulation
from support.step_faults import StepFaults

NUM_SHARDS = 2
SEEDS_PER_SHARD = 50
RARE = (370, 417, 585, 630)  # drafts beyond a stop, late openings, searches that begin again under way


def run_seed(seed: int) -> Counter[str]:
    return Simulation(Scenario.draw(seed)).run()


def run_with_failing_allocations(seed: int) -> None:
    rng = random.Random(seed)
    share, last = rng.choice([0.1, 0.5, 0.9]), rng.choice([20, 100])
    Simulation(Scenario.draw(seed), FailingAllocations(lambda n: n < last and rng.random() < share)).run()


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_requests_end_with_their_own_tokens_and_leave_nothing_behind(shard: int) -> None:
    seen = Counter[str]()
    for seed in range(shard * SEEDS_PER_SHARD, (shard + 1) * SEEDS_PER_SHARD):
        seen += run_seed(seed)
    happened = ("moves_out", "moves_in", "copies", "drafts", "depths", "hits", "evictions", "merged blocks")
    happened += ("preemptions",)
    happened += ("refused", "stop", "length", "abort", "error", "beams resumed", "samples resumed", "searches over")
    assert [name for name in happened if not seen[name]] == []


@pytest.mark.parametrize("seed", RARE)
def test_seeds_that_go_where_few_others_do(seed: int) -> None:
    run_seed(seed)


def test_a_seed_decides_every_plan() -> None:
    for seed in range(10):
        first, second = Simulation(Scenario.draw(seed)), Simulation(Scenario.draw(seed))
        first.run(), second.run()
        assert first.plans.digest() == second.plans.digest()


def test_allocations_that_fail_for_a_while_delay_requests_and_nothing_else() -> None:
    for seed in range(1000, 1040):
        run_with_failing_allocations(seed)


@pytest.mark.parametrize("seed", [10625, 19409])
def test_a_request_that_comes_back_from_the_host_takes_as_many_tokens_as_there_is_room_for(seed: int) -> None:
    """Its window leaves room for a smaller chunk only. Without one, nothing was planned and nothing was under way."""
    run_seed(seed)


def sweep_failing_allocation(scenario: Scenario) -> int:
    """Fail allocation 0, then 1, … until a run has fewer allocations than that; return how many runs were struck."""
    place = 0
    while True:
        faults = FailingAllocations(lambda n, place=place: n == place)
        Simulation(scenario, faults).run()
        if not faults.num_failures:
            return place
        place += 1


@pytest.mark.parametrize(
    "seed", [48, 254, *(pytest.param(seed, marks=pytest.mark.long) for seed in (199, 614, 678, 894))]
)
def test_any_single_allocation_may_fail(seed: int) -> None:
    assert sweep_failing_allocation(Scenario.draw(seed).with_chaos(Chaos())) > 10


def run_with_failing_steps(seed: int) -> Counter[str]:
    """Whoever is not at fault ends as if nobody were: `Simulation` lets nobody else end with an error."""
    rng = random.Random(seed)
    scenario = Scenario.draw(seed)
    faults = StepFaults.draw(rng, [job.request_id for job in scenario.jobs], longest=40)
    chaos = rng.choice([Chaos(), Chaos(), Chaos(abort=0.02, stop=0.02, reset=0.05)])
    allocations = FailingAllocations(lambda n: n < 60 and rng.random() < 0.3) if rng.random() < 0.2 else None
    return Simulation(scenario.with_chaos(chaos).with_step_faults(faults), allocations).run()


@pytest.mark.parametrize("seed", [72926, 74094])
def test_searches_that_fail_only_together_end_one_after_the_other(seed: int) -> None:
    """A search that is set back begins again, alone, and these steps must not count as getting along."""
    run_with_failing_steps(seed)


def test_steps_that_fail_end_only_who_is_at_fault() -> None:
    seen = Counter[str]()
    for seed in range(3000, 3040):
        seen += run_with_failing_steps(seed)
    happened = ("failed steps", "memory failures", "culprits", "smaller steps", "error", "length", "stop")
    happened += ("moves_out", "moves_in", "drafts", "hits", "evictions", "preemptions", "searches over")
    assert [name for name in happened if not seen[name]] == []


def sweep_failing_step(scenario: Scenario) -> int:
    """Fail step 0, then 1, … until a run has fewer steps than that; return how many runs were struck."""
    place = 0
    while True:
        seen = Simulation(scenario.with_step_faults(StepFaults(step=place))).run()
        assert not seen["error"]
        if not seen["failed steps"]:
            return place
        place += 1


@pytest.mark.parametrize(
    "seed", [48, 254, *(pytest.param(seed, marks=pytest.mark.long) for seed in (199, 370, 417, 614))]
)
def test_any_single_step_may_fail(seed: int) -> None:
    assert sweep_failing_step(Scenario.draw(seed).with_chaos(Chaos())) > 5


def run_with_late_rows(seed: int) -> Counter[str]:
    """Rows whose samples come late, again and again, with all else that may happen."""
    rng = random.Random(seed)
    scenario = Scenario.draw(seed).with_late_rows(rng.choice([0.05, 0.3, 0.8]))
    if rng.random() < 0.3:
        scenario = scenario.with_step_faults(StepFaults.draw(rng, [job.request_id for job in scenario.jobs], 40))
        scenario = scenario.with_chaos(Chaos())
    return Simulation(scenario).run()


def test_rows_that_are_late_end_with_the_same_tokens() -> None:
    seen = Counter[str]()
    for seed in range(5000, 5040):
        seen += run_with_late_rows(seed)
    happened = ("postponed", "moves_out", "drafts", "hits", "preemptions", "stop", "length", "searches over")
    assert [name for name in happened if not seen[name]] == []


def run_with_images(seed: int) -> Counter[str]:
    """Requests whose prompts have images: the cache must tell the same tokens with other images apart."""
    rng = random.Random(seed)
    disk = ShadowDisk(seed, DiskChaos.draw(rng)) if seed % 3 == 0 else None
    scenario = Scenario.draw(seed)
    scenario = (scenario if disk is None else scenario.with_disk(rng)).with_images(rng)
    return Simulation(scenario, disk=disk).run()


def test_prompts_with_images_end_with_their_own_tokens() -> None:
    seen = Counter[str]()
    for seed in range(4000, 4050):
        seen += run_with_images(seed)
    assert [name for name in ("hits", "merged blocks", "preemptions", "moves_in", "copies") if not seen[name]] == []


def run_with_states(seed: int) -> Counter[str]:
    """Rows that are late, steps that fail, and in every third run a disk, over which a second engine starts."""
    rng = random.Random(seed)
    scenario = Scenario.draw(seed).with_states(rng).with_late_rows(rng.choice([0.0, 0.3, 0.8]))
    if rng.random() < 0.3:
        scenario = scenario.with_step_faults(StepFaults.draw(rng, [job.request_id for job in scenario.jobs], 40))
        scenario = scenario.with_chaos(Chaos())
    if seed % 3:
        return Simulation(scenario).run()
    scenario, disk = scenario.with_disk(rng), ShadowDisk(seed, DiskChaos.draw(rng))
    return Simulation(scenario, disk=disk).run() + Simulation(scenario, disk=disk).run()


def test_states_are_those_of_the_tokens_before() -> None:
    seen = Counter[str]()
    for seed in range(7000, 7027):
        seen += run_with_states(seed)
    happened = ("moves_out", "moves_in", "copies", "hits", "evictions", "merged blocks", "preemptions", "postponed")
    happened += ("failed steps", "stored", "from disk", "stop", "length", "abort", "beams resumed", "searches over")
    assert [name for name in happened if not seen[name]] == []


@pytest.mark.long
@pytest.mark.parametrize("shard", range(40))
def test_many_seeds(shard: int) -> None:
    for seed in range(10_000 + 500 * shard, 10_500 + 500 * shard):
        run_seed(seed)
    for seed in range(50_000 + 50 * shard, 50_050 + 50 * shard):
        run_with_failing_allocations(seed)
    for seed in range(100 + 2 * shard, 102 + 2 * shard):
        sweep_failing_allocation(Scenario.draw(seed))
    for seed in range(70_000 + 200 * shard, 70_200 + 200 * shard):
        run_with_failing_steps(seed)
    for seed in range(80_000 + 200 * shard, 80_200 + 200 * shard):
        run_with_late_rows(seed)
    for seed in range(90_000 + 200 * shard, 90_200 + 200 * shard):
        run_with_states(seed)
    for seed in range(300 + 2 * shard, 302 + 2 * shard):
        sweep_failing_step(Scenario.draw(seed).with_chaos(Chaos()))
