"""Engines before paging: buddies against a map of slots, and runs that keep every promise and waste what they must."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import InvalidConfigError, InvariantError
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.simulate.baselines.buddy import BuddyAllocator, run_size
from quire.simulate.baselines.contiguous import ITERATION, MAX, ORACLE, POW2, STATIC, ContiguousEngine, ContiguousSetup
from quire.simulate.cost.linear import LinearCost
from quire.simulate.faults import KILL, FaultPlan, ReplicaFault
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.simulation import Simulation
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.drawn import DrawnPrompts, drawn_requests
from quire.simulate.workload.lengths import LognormalLengths
from quire.simulate.workload.offered import OfferedRequest, OpenLoop

LONGEST = 64
SETUP = ContiguousSetup(500, 1, LONGEST, max_num_seqs=8, cost=LinearCost(0.5, 0.125))


# ---- buddies --------------------------------------------------------------------------------------------------------


@given(num_slots=st.integers(1, 300), seed=st.integers(0, 1 << 32))
def test_runs_never_overlap_and_all_comes_back(num_slots: int, seed: int) -> None:
    rng, buddy, held = random.Random(seed), BuddyAllocator(num_slots), dict[int, int]()
    for _ in range(60):
        if held and rng.random() < 0.5:
            start = rng.choice(list(held))
            buddy.free(start)
            del held[start]
        else:
            wanted = rng.randint(1, max(1, num_slots // 3))
            start = buddy.allocate(wanted)
            if start is not None:
                run = set(range(start, start + run_size(wanted)))
                assert max(run) < num_slots
                assert not any(run & set(range(other, other + size)) for other, size in held.items())
                held[start] = run_size(wanted)
        buddy.check()
        assert buddy.num_free == num_slots - sum(held.values())
    for start in held:
        buddy.free(start)
    buddy.check()
    assert buddy.allocate(1 << (num_slots.bit_length() - 1)) is not None


def test_a_run_is_given_back_once() -> None:
    buddy = BuddyAllocator(8)
    start = buddy.allocate(3)
    assert start is not None
    buddy.free(start)
    with pytest.raises(InvariantError):
        buddy.free(start)


# ---- engines --------------------------------------------------------------------------------------------------------


def requests_for(rng: random.Random) -> list[OfferedRequest]:
    times = sorted(rng.uniform(0.0, 30.0) for _ in range(rng.randint(1, 30)))
    return [
        OfferedRequest(
            f"r{number}",
            due_s,
            array("i", [rng.randrange(100) for _ in range(rng.randint(1, 30))]),
            rng.randint(1, 30),
            rng.choice([1, 1, 3]),
        )
        for number, due_s in enumerate(times)
    ]


def run(setup: ContiguousSetup, requests: list[OfferedRequest]) -> SimulationResult:
    return Simulation([ContiguousEngine(setup)], OpenLoop(requests)).run()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    reserves=st.sampled_from([MAX, POW2, ORACLE]),
    batches=st.sampled_from([ITERATION, STATIC]),
)
def test_every_request_ends_with_its_tokens(seed: int, reserves: str, batches: str) -> None:
    requests = requests_for(random.Random(seed))
    result = run(replace(SETUP, reserves=reserves, batches=batches), requests)  # which checks itself
    assert result.num_refused == 0
    assert result.output_tokens == sum(request.num_sequences * request.num_output_tokens for request in requests)
    assert result.num_preemptions == result.hit_tokens == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_with_room_for_all_it_takes_the_very_steps_of_the_product(seed: int) -> None:
    """Where memory is no matter and nothing is shared, iteration-level scheduling is what the product does too."""
    requests = [
        replace(request, num_sequences=1, prompt=array("i", [number, *request.prompt]))
        for number, request in enumerate(requests_for(random.Random(seed)))
    ]
    before = run(ContiguousSetup(1 << 20, 1, LONGEST, max_num_seqs=64, cost=SETUP.cost), requests)
    spec = KVCacheSpec(16, 1, 8, "float32", (KVGroup((0,)),))
    scheduler = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=1 << 20, max_model_len=LONGEST)
    paged = EngineSetup(spec, MemoryConfig(num_blocks=10_000, prefix_index="none"), scheduler, SETUP.cost)
    after = Simulation([PagedEngine(paged)], OpenLoop(requests)).run()
    assert before.latencies == after.latencies
    assert (before.num_steps, before.mean_running) == (after.num_steps, after.mean_running)


def test_a_static_batch_ends_as_one() -> None:
    requests = [OfferedRequest(f"r{at}", 0.0, array("i", [at]), output) for at, output in enumerate((2, 10, 4))]
    cost = LinearCost(1.0, 0.0)
    static = run(replace(SETUP, batches=STATIC, cost=cost), requests)
    assert (static.latencies["latency_s"].least, static.latencies["latency_s"].most) == (10.0, 10.0)
    iteration = run(replace(SETUP, cost=cost), requests)
    assert (iteration.latencies["latency_s"].least, iteration.latencies["latency_s"].most) == (2.0, 10.0)


def test_who_reserves_more_runs_fewer() -> None:
    prompts = DrawnPrompts(LognormalLengths("", 15.0, 15.0), longest=LONGEST)
    running, stored = {}, {}
    for reserves in (MAX, POW2, ORACLE):
        requests = list(drawn_requests(Arrivals(8.0), prompts, duration_s=40.0, seed=0))
        result = run(replace(SETUP, reserves=reserves, max_num_seqs=64), requests)
        running[reserves] = result.mean_running
        stored[reserves] = result.replicas[0].stored_share_of_used
    assert running[MAX] < running[POW2] < running[ORACLE]
    assert stored[MAX] < stored[POW2] < stored[ORACLE]


def test_what_no_run_can_hold_is_refused() -> None:
    crowd = OfferedRequest("crowd", 0.0, array("i", range(30)), 30, 8)
    result = run(replace(SETUP, num_slots=256), [crowd, OfferedRequest("one", 0.0, array("i", [1]), 2)])
    assert (result.num_requests, result.num_refused) == (2, 1)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="max_model_len"):
        ContiguousSetup(100, 1, 200)
    with pytest.raises(InvalidConfigError, match="reserves"):
        ContiguousSetup(100, 1, 50, reserves="half")


@pytest.mark.parametrize("batches", [ITERATION, STATIC])
def test_requests_of_a_killed_engine_continue_in_another_one(batches: str) -> None:
    setup = replace(SETUP, batches=batches)
    requests = [OfferedRequest(f"r{n}", 0.0, array("i", [n] * 8), 20 + n) for n in range(6)]
    result = Simulation(
        [ContiguousEngine(setup) for _ in range(2)],
        OpenLoop(requests),
        plan=FaultPlan(tuple(ReplicaFault(at_s, 1, KILL) for at_s in (7.0, 40.0)), lambda: ContiguousEngine(setup)),
    ).run()
    assert (result.num_refused, result.num_sequences) == (0, 6)
    assert result.num_moved_requests >= 3
