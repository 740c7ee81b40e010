"""Several replicas: what the product's router saves, what late and lost reports cost, and what a lost replica does."""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.routing.router import LEAST_WORK, ROUND_ROBIN, ROUTERS, Router
from quire.simulate.cost.linear import LinearCost
from quire.simulate.faults import BACK_S, DRAIN, KILL, NOTICED_S, SILENT, FaultPlan, ReplicaFault
from quire.simulate.frames import Frames
from quire.simulate.front import Reports
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.simulation import Simulation
from quire.simulate.workload.arrivals import BURSTS, POISSON, Arrivals
from quire.simulate.workload.conversations import Conversations, Turns
from quire.simulate.workload.drawn import DrawnPrompts, SharedPrefixes, drawn_requests
from quire.simulate.workload.lengths import UniformLengths
from quire.simulate.workload.offered import OfferedRequest, OpenLoop, RequestSource
from support.simulated_engines import SMALL, Answers, draw_requests

LARGE = EngineSetup(
    KVCacheSpec(16, 1, 8, "float32", (KVGroup((0,)),)),
    MemoryConfig(num_blocks=4000),
    SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192),
    LinearCost(0.006, 3e-5),
)
"""About a model of eight billion weights on a large card."""


def prefixed(
    count: int, num_tokens: int, rate: float, pattern: str = POISSON, duration_s: float = 12.0
) -> RequestSource:
    """Four equal requests at once, of which each engine gets one, and a second later the others."""
    prompts = DrawnPrompts(UniformLengths((50, 700), (20, 200)), 8192, SharedPrefixes(count, num_tokens))
    drawn = list(drawn_requests(Arrivals(rate, pattern), prompts, duration_s=duration_s, seed=1))
    first = [replace(drawn[0], request_id=f"first {number}", due_s=0.0) for number in range(4)]
    return OpenLoop([*first, *(replace(request, due_s=1.0 + request.due_s) for request in drawn)])


def chats() -> RequestSource:
    prompts = DrawnPrompts(UniformLengths((50, 500), (20, 200)), 8192)
    return Conversations(Arrivals(8.0), prompts, Turns(4, 3.0), duration_s=6.0, seed=1)


LOADS: dict[str, Callable[[], RequestSource]] = {
    "many prefixes": lambda: prefixed(30, 3000, 30.0, duration_s=9.0),
    "few prefixes in bursts": lambda: prefixed(10, 3000, 20.0, BURSTS, 4.0),
    "one prefix": lambda: prefixed(1, 2000, 50.0, duration_s=4.0),
    "no prefixes": lambda: prefixed(1, 0, 60.0),
    "chats": chats,
}
SAVES = {"many prefixes": 2.0, "few prefixes in bursts": 1.2, "one prefix": 1.0, "no prefixes": 1.0, "chats": 2.0}
"""How many times fewer tokens of prompts are computed at least."""
WAITS = {"no prefixes": 1.03}
"""How many times as long the last hundredth may wait for a first token, where taking turns cannot be improved on."""


def simulate(
    setup: EngineSetup, source: RequestSource, policy: str = LEAST_WORK, reports: Reports | None = None
) -> SimulationResult:
    engines = [PagedEngine(setup) for _ in range(4)]
    router = Router(setup.spec.block_size, b"", policy)
    return Simulation(engines, source, router=router, reports=reports).run()


@functools.cache
def simulate_load(load: str, policy: str) -> SimulationResult:
    return simulate(LARGE, LOADS[load](), policy)


def num_computed(result: SimulationResult) -> int:
    return result.prompt_tokens - result.hit_tokens


@pytest.mark.parametrize("load", LOADS)
def test_fewer_tokens_are_computed_than_by_taking_turns_and_the_last_hundredth_waits_no_longer(load: str) -> None:
    turns, routed = simulate_load(load, ROUND_ROBIN), simulate_load(load, LEAST_WORK)
    assert num_computed(turns) >= SAVES[load] * num_computed(routed)
    assert routed.latencies["ttft_s"].p99 <= WAITS.get(load, 1.0) * turns.latencies["ttft_s"].p99


def test_late_and_lost_reports_cost_little() -> None:
    load = "many prefixes"
    turns, exact = simulate_load(load, ROUND_ROBIN), simulate_load(load, LEAST_WORK)
    for reports in (Reports(delay_s=0.5), Reports(1.0, 0.3, seed=5)):
        routed = simulate(LARGE, LOADS[load](), reports=reports)
        assert num_computed(turns) >= 1.5 * num_computed(routed)
        assert routed.latencies["ttft_s"].p99 <= turns.latencies["ttft_s"].p99
        assert num_computed(routed) != num_computed(exact), "the reports were exact"


# ---- faults ---------------------------------------------------------------------------------------------------------


def draw_setup(rng: random.Random) -> EngineSetup:
    scheduler = replace(SMALL.scheduler, max_steps_under_way=rng.choice([1, 2]))
    memory = replace(
        SMALL.memory,
        num_blocks=rng.choice([40, 80]),
        num_host_blocks=rng.choice([0, 30]),
        prefix_index=rng.choice(["hash_chain", "radix_tree", "none"]),
    )
    return replace(SMALL, scheduler=scheduler, memory=memory)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32), policy=st.sampled_from(ROUTERS), num_replicas=st.integers(1, 3))
def test_texts_are_the_same_whatever_happens_to_replicas(seed: int, policy: str, num_replicas: int) -> None:
    rng = random.Random(seed)
    setup, requests = draw_setup(rng), draw_requests(rng)
    whole, faulty = Answers(requests), Answers(requests)
    Simulation([PagedEngine(setup)], whole).run()
    faults = tuple(
        ReplicaFault(rng.uniform(0.0, 70.0), rng.randrange(num_replicas), rng.choice([KILL, SILENT, DRAIN]))
        for _ in range(rng.randint(1, 4))
    )
    engines = [PagedEngine(setup) for _ in range(num_replicas)]
    result = Simulation(
        engines,
        faulty,
        router=Router(4, b"", policy),
        reports=Reports(rng.choice([0.0, 3.0]), rng.choice([0.0, 0.3]), seed),
        plan=FaultPlan(faults, lambda: PagedEngine(setup)),
    ).run()
    assert faulty.texts == whole.texts
    assert result.num_refused == 0
    assert result.latencies["ttft_s"].count == result.num_requests == len(requests)
    assert result.latencies["latency_s"].count == len(requests)


def one_fault(kind: str) -> SimulationResult:
    """Two requests at two replicas; that at the first has told five tokens when something happens."""
    requests = [OfferedRequest(f"r{n}", 0.0, array("i", [n] * 8), 40) for n in range(2)]
    setup = replace(SMALL, cost=LinearCost(1.0, 0.0))
    return Simulation(
        [PagedEngine(setup) for _ in range(2)],
        OpenLoop(requests),
        router=Router(4, b""),
        plan=FaultPlan((ReplicaFault(4.5, 0, kind),), lambda: PagedEngine(setup)),
    ).run()


def test_blocks_of_a_request_that_began_in_another_replica_are_drawn() -> None:
    requests = [OfferedRequest(f"r{n}", 0.0, array("i", [n] * 8), 40) for n in range(2)]
    setup, frames = replace(SMALL, cost=LinearCost(1.0, 0.0)), Frames()
    Simulation(
        [PagedEngine(setup) for _ in range(2)],
        OpenLoop(requests),
        router=Router(4, b""),
        watchers=[frames.watch],
        plan=FaultPlan((ReplicaFault(4.5, 1, KILL),), lambda: PagedEngine(setup)),
    ).run()
    assert max(frame.num_running for frame in frames.frames) == 2


def test_a_killed_replica_costs_a_pause_and_what_it_had_computed() -> None:
    result = one_fault(KILL)
    assert result.num_moved_requests == 1
    assert result.recomputed_tokens == 12, "8 of the prompt, and 4 of 5 told: the last one was not computed yet"
    assert result.latencies["itl_s"].most == pytest.approx(2.0), "the step under way at the other ends, then its own"
    assert [replica.num_requests for replica in result.replicas] == [1, 2]


def test_a_silent_replica_is_noticed_late_and_a_draining_one_works_on() -> None:
    silent, draining = one_fault(SILENT), one_fault(DRAIN)
    assert silent.latencies["itl_s"].most == pytest.approx(NOTICED_S[SILENT] + 1.0)
    assert draining.num_moved_requests == 1
    assert draining.recomputed_tokens == silent.recomputed_tokens + NOTICED_S[DRAIN]
    assert draining.latencies["itl_s"].most < 2.5


def test_nothing_is_sent_to_a_replica_that_is_away_and_requests_wait_if_there_is_no_other() -> None:
    requests = [OfferedRequest(f"r{n}", float(n), array("i", [n] * 8), 3) for n in (1, 10, 11, 12, 30)]
    setup = replace(SMALL, cost=LinearCost(0.1, 0.0))
    result = Simulation(
        [PagedEngine(setup)],
        OpenLoop(requests),
        router=Router(4, b""),
        plan=FaultPlan((ReplicaFault(9.0, 0, DRAIN),), lambda: PagedEngine(setup)),
    ).run()
    back_s = 9.0 + NOTICED_S[DRAIN] + BACK_S
    assert result.latencies["ttft_s"].most == pytest.approx(back_s + 0.1 - 10.0)
    assert result.num_moved_requests == 0


def test_faults_that_cannot_be_are_refused() -> None:
    for text in ("1:0", "x:0:kill", "1:0:kill:2", "1:y:drain", ""):
        with pytest.raises(InvalidConfigError, match=r"allowed: SECONDS:REPLICA:KIND, such as 60:0:kill"):
            ReplicaFault.parse(text)
    with pytest.raises(InvalidConfigError, match=r"kind of a fault is 'sleep'"):
        ReplicaFault.parse("1:0:sleep")
    with pytest.raises(InvalidConfigError, match=r"time of a fault"):
        ReplicaFault.parse("nan:0:kill")
    plan = FaultPlan((ReplicaFault(1.0, 2, KILL),), lambda: PagedEngine(SMALL))
    with pytest.raises(InvalidConfigError, match=r"replica of a fault is 2"):
        Simulation([PagedEngine(SMALL)], OpenLoop([]), plan=plan)
    samples = [OfferedRequest("r", 0.0, array("i", [1, 2]), 20, 2)]
    with pytest.raises(InvalidConfigError, match=r"fault is 'r'; allowed: none while a request with several sequences"):
        Simulation(
            [PagedEngine(SMALL) for _ in range(2)],
            OpenLoop(samples),
            plan=FaultPlan((ReplicaFault(1.0, 0, KILL),), lambda: PagedEngine(SMALL)),
        ).run()
