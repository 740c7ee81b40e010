"""Prompts and tokens at replicas of their own: the same texts, times to the second, and what ranks exchange."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.config import MemoryConfig
from quire.core.errors import InvalidConfigError
from quire.routing.router import ROUTERS, Router
from quire.simulate.cost.linear import LinearCost
from quire.simulate.faults import NO_FAULTS
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.simulation import Simulation
from quire.simulate.split import ReceivedCost, Split
from quire.simulate.workload.offered import OfferedRequest, OpenLoop
from support.simulated_engines import SMALL, Answers, draw_requests


def simulate(
    setup: EngineSetup, source: OpenLoop, num_replicas: int, split: Split | None, policy: str = "least_work"
) -> SimulationResult:
    first = num_replicas if split is None else split.num_prompt_replicas
    costs = [setup.cost if index < first else ReceivedCost(setup.cost) for index in range(num_replicas)]
    engines = [PagedEngine(replace(setup, cost=cost)) for cost in costs]
    router = Router(setup.spec.block_size, b"", policy)
    return Simulation(engines, source, router=router, plan=split or NO_FAULTS).run()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), policy=st.sampled_from(ROUTERS), num_replicas=st.integers(2, 4))
def test_texts_are_those_of_one_replica(seed: int, policy: str, num_replicas: int) -> None:
    rng = random.Random(seed)
    scheduler = replace(SMALL.scheduler, max_steps_under_way=rng.choice([1, 2]))
    memory = replace(
        SMALL.memory,
        num_blocks=rng.choice([40, 80]),
        num_host_blocks=rng.choice([0, 30]),
        prefix_index=rng.choice(["hash_chain", "radix_tree", "none"]),
    )
    setup, requests = replace(SMALL, scheduler=scheduler, memory=memory), draw_requests(rng)
    whole, apart = Answers(requests), Answers(requests)
    simulate(setup, whole, 1, None)
    split = Split(rng.randint(1, num_replicas - 1), rng.choice([0.0, 0.01, 0.5]))
    result = simulate(setup, apart, num_replicas, split, policy)
    assert apart.texts == whole.texts
    assert result.num_moved_requests == sum(request.num_output_tokens > 1 for request in requests)
    for name in ("ttft_s", "latency_s"):
        assert result.latencies[name].count == len(requests)
    assert result.latencies["itl_s"].count == sum(request.num_output_tokens - 1 for request in requests)


def test_a_prompt_costs_its_replica_the_link_the_bytes_and_the_other_one_nothing() -> None:
    requests = [OfferedRequest(f"r{n}", 0.0, array("i", [n] * 8), 3) for n in range(2)]
    setup = replace(SMALL, cost=LinearCost(1.0, 0.0))
    result = simulate(setup, OpenLoop(requests), 2, Split(1, 0.25))
    # Both prompts are in one step, which ends after 1 s; the link has 8 tokens of each, 2 s, one after the other. Two
    # steps of a second follow each; the second request comes as the first one ends its second step, at 5 s.
    assert result.latencies["ttft_s"].most == pytest.approx(1.0)
    assert result.latencies["itl_s"].most == pytest.approx(5.0 + 1.0 - 1.0, rel=0.02)
    assert result.duration_s == pytest.approx(7.0)
    assert result.computed_tokens == 2 * (8 + 2)
    assert result.recomputed_tokens == result.hit_tokens == 0
    assert [replica.num_steps for replica in result.replicas] == [1, 4]


def test_a_prefix_is_hit_where_prompts_are_computed() -> None:
    requests = [OfferedRequest(f"r{n}", 9.0 * n, array("i", [5] * 8 + [n]), 3) for n in range(2)]
    result = simulate(replace(SMALL, cost=LinearCost(1.0, 0.0)), OpenLoop(requests), 2, Split(1, 0.0))
    assert (result.hit_tokens, result.computed_tokens) == (8, 9 + 2 + 1 + 2)


def test_what_a_preemption_throws_away_is_computed_and_not_received_again() -> None:
    setup = replace(SMALL, memory=MemoryConfig(num_blocks=9, prefix_index="none"), cost=LinearCost(0.0, 1.0))
    requests = [OfferedRequest(f"r{n}", 0.0, array("i", [n] * 8), 20) for n in range(2)]
    result = simulate(setup, OpenLoop(requests), 2, Split(1, 0.0))
    assert result.num_preemptions > 0 and result.recomputed_tokens > 0
    assert result.computed_tokens == 2 * (8 + 19) + result.recomputed_tokens
    assert sum(replica.busy_s for replica in result.replicas) == pytest.approx(result.computed_tokens)


def test_splits_that_cannot_be_are_refused() -> None:
    for num_prompt_replicas in (0, 2):
        with pytest.raises(InvalidConfigError, match=r"prompt replicas is"):
            simulate(SMALL, OpenLoop([]), 2, Split(num_prompt_replicas, 0.1))
    samples = [OfferedRequest("r", 0.0, array("i", [1, 2]), 20, 2)]
    with pytest.raises(InvalidConfigError, match=r"prompt replicas is 'r'; allowed: requests of one sequence"):
        simulate(SMALL, OpenLoop(samples), 2, Split(1, 0.1))
