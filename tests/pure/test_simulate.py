"""The simulation: times are those that a slow observer sees, hits those of an oracle, and logs give the same plans."""

from __future__ import annotations

import gc
import io
import itertools
import random
import tracemalloc
from array import array
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import InvariantError
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.request import Request
from quire.engine.records.step_log import PLANNED, read_records, replay, replayed
from quire.routing.router import ROUTERS, Router
from quire.scheduler.commit import StepOutcome
from quire.simulate.cost.linear import LinearCost
from quire.simulate.histogram import Histogram
from quire.simulate.meter import Latencies
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.simulation import Simulation
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.closed_loop import ClosedLoop
from quire.simulate.workload.conversations import Conversations, Turns
from quire.simulate.workload.drawn import DrawnPrompts, SharedPrefixes, drawn_requests
from quire.simulate.workload.lengths import FixedLengths, UniformLengths
from quire.simulate.workload.offered import OfferedRequest, OpenLoop, RequestSource
from quire.simulate.workload.step_log import logged_requests

FULL = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),))
MIXED = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)), KVGroup((1,), window=9)))
LONGEST = 60
INDEXES = ["hash_chain", "radix_tree"]


def setup_for(rng: random.Random, *, max_num_seqs: int = 6) -> EngineSetup:
    """A small engine that is often short of blocks."""
    spec = rng.choice([FULL, FULL, MIXED])
    memory = MemoryConfig(
        num_blocks=rng.choice([70, 100, 400]),
        num_host_blocks=rng.choice([0, 50]),
        prefix_index=rng.choice(["hash_chain", "radix_tree", "none"]),
    )
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([6, 16, 200]),
        max_model_len=LONGEST,
        headroom=rng.choice([0.0, 0.02]),
        policy=rng.choice(["fcfs", "priority", "fair_share"]),
        preemption=rng.choice(["auto", "swap", "recompute"]),
        max_steps_under_way=rng.choice([1, 1, 2, 3]),
    )
    return EngineSetup(spec, memory, scheduler, LinearCost(0.5, 0.125))


def requests_for(rng: random.Random, *, most: int = 25) -> list[OfferedRequest]:
    """Requests that share beginnings, some with samples, some with beams."""
    prefixes = [array("i", [rng.randrange(9) for _ in range(rng.choice([0, 8, 15]))]) for _ in range(3)]
    times = sorted(rng.uniform(0.0, 40.0) for _ in range(rng.randint(1, most)))
    return [
        OfferedRequest(
            f"r{number}",
            due_s,
            rng.choice(prefixes) + array("i", [rng.randrange(3) for _ in range(rng.randint(1, 20))]),
            rng.randint(1, 20),
            *rng.choice([(1, False), (1, False), (3, False), (2, True)]),
        )
        for number, due_s in enumerate(times)
    ]


def run(setup: EngineSetup, source: RequestSource) -> SimulationResult:
    return Simulation([PagedEngine(setup)], source).run()


# ---- time -----------------------------------------------------------------------------------------------------------


class Watched(PagedEngine):
    """Looks at every request after every step, and notes when each of its tokens came."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.times: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.known: dict[tuple[str, int], int] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}

    def step(self) -> StepOutcome | None:
        outcome = super().step()
        seen = {} if outcome is None else {(r.request_id, r.branch): r for r in self.sequences(outcome)}
        for key, request in seen.items():
            before = self.known.get(key, 0)
            self.times[key] += [self.clock.now()] * max(0, request.num_output_tokens - before)
            self.known[key] = request.num_output_tokens
            if request.is_finished:
                self.outputs[key] = request.output_token_ids
        return outcome

    def sequences(self, outcome: StepOutcome) -> list[Request]:
        return [*outcome.advanced, *outcome.opened, *outcome.finished]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_times_are_those_that_a_slow_observer_notes(seed: int) -> None:
    rng = random.Random(seed)
    engine = Watched(setup_for(rng))
    requests = [replace(request, beam_search=False) for request in requests_for(rng)]
    result = Simulation([engine], OpenLoop(requests)).run()
    due = {request.request_id: request.due_s for request in requests}
    expected = Latencies()
    for (name, branch), times in engine.times.items():
        if not branch:
            expected.ttft_s.add(times[0] - due[name])
        for before, after in itertools.pairwise(times):
            expected.itl_s.add(after - before)
        expected.latency_s.add(times[-1] - due[name])
        expected.normalised_latency_s.add((times[-1] - due[name]) / len(times))
        if len(times) > 1:
            expected.tpot_s.add((times[-1] - times[0]) / (len(times) - 1))
    for name in Latencies.NAMES:
        found, wanted = result.latencies[name], getattr(expected, name).distribution()
        assert found.count == wanted.count, name
        assert (found.least, found.most, found.p50) == (wanted.least, wanted.most, wanted.p50), name
        assert found.mean == pytest.approx(wanted.mean), name


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_runs_beside_it_a_request_has_the_same_tokens(seed: int) -> None:
    rng = random.Random(seed)
    requests = [replace(request, beam_search=False) for request in requests_for(rng)]
    outputs = []
    for _ in range(2):
        engine = Watched(setup_for(rng))
        Simulation([engine], OpenLoop(requests)).run()
        outputs.append(engine.outputs)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == sum(request.num_sequences for request in requests)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32), router=st.sampled_from(ROUTERS), num_replicas=st.integers(1, 3))
def test_what_goes_in_comes_out_wherever_it_goes(seed: int, router: str, num_replicas: int) -> None:
    rng = random.Random(seed)
    engines = [PagedEngine(setup_for(rng)) for _ in range(num_replicas)]
    requests = requests_for(rng)
    result = Simulation(engines, OpenLoop(requests), router=Router(4, b"", router)).run()
    assert result.num_refused == 0
    assert result.output_tokens == sum(r.num_sequences * r.num_output_tokens for r in requests)
    assert sum(replica.num_requests for replica in result.replicas) == len(requests)
    assert result.latencies["latency_s"].count == sum(r.num_sequences for r in requests)


def test_a_meter_that_counts_wrongly_is_found_out() -> None:
    class Forgetful(PagedEngine):
        def step(self) -> StepOutcome | None:
            outcome = super().step()
            if outcome is not None and outcome.finished and self.clock.now() > 5.0:
                outcome.finished.pop()
            return outcome

    requests = [OfferedRequest(f"r{at}", float(at), array("i", [at, 1]), 9) for at in range(3)]
    setup = EngineSetup(FULL, MemoryConfig(num_blocks=50), SchedulerConfig(max_num_seqs=4), LinearCost(0.5, 0.0))
    with pytest.raises(InvariantError):
        Simulation([Forgetful(setup)], OpenLoop(requests)).run()


def test_what_can_never_fit_is_refused_and_counted() -> None:
    requests = [
        OfferedRequest("fits", 0.0, array("i", [1, 2]), 3),
        OfferedRequest("long", 0.0, array("i", range(50)), 20),
    ]
    setup = EngineSetup(FULL, MemoryConfig(num_blocks=50), SchedulerConfig(max_num_seqs=4, max_model_len=LONGEST))
    result = run(setup, OpenLoop(requests))
    assert (result.num_requests, result.num_refused, result.output_tokens) == (2, 1, 3)


def test_users_who_are_refused_do_not_come_back() -> None:
    loop = ClosedLoop(3, DrawnPrompts(FixedLengths(200, 20)), duration_s=10.0, seed=0)
    setup = EngineSetup(FULL, MemoryConfig(num_blocks=50), SchedulerConfig(max_num_seqs=4, max_model_len=LONGEST))
    result = run(setup, loop)
    assert (result.num_requests, result.num_refused, result.duration_s, result.num_steps) == (3, 3, 0.0, 0)
    assert result.requests_per_s == result.hit_rate == result.replicas[0].stored_share_of_used == 0.0


def test_idle_time_is_waited_and_not_computed() -> None:
    requests = [OfferedRequest("a", 10.0, array("i", [1]), 2), OfferedRequest("b", 1000.0, array("i", [2]), 1)]
    setup = EngineSetup(FULL, MemoryConfig(num_blocks=50), SchedulerConfig(max_num_seqs=4), LinearCost(0.5, 0.0))
    result = run(setup, OpenLoop(requests))
    assert result.duration_s == 1000.5 - 10.0
    assert (result.replicas[0].busy_s, result.num_steps) == (1.5, 3)
    assert (result.latencies["ttft_s"].most, result.latencies["latency_s"].most) == (0.5, 1.0)


# ---- the cache ------------------------------------------------------------------------------------------------------


def brute_force_hits(prompts: list[array[int]], answers: list[array[int]], block: int) -> int:
    """Tokens of prompts that unlimited memory would have, where each request ends before the next begins."""
    known: set[bytes] = set()
    hits = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        found = 0
        while found + block <= len(prompt) and prompt[: found + block].tobytes() in known:
            found += block
        hits += min(found, len(prompt) - 1)
        computed = prompt + answer[:-1]
        known |= {computed[:end].tobytes() for end in range(block, len(computed) + 1, block)}
    return hits


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    index=st.sampled_from(INDEXES),
    block=st.sampled_from([1, 2, 4, 7]),
)
def test_hits_are_those_of_a_brute_force_search(seed: int, index: str, block: int) -> None:
    rng = random.Random(seed)
    prompts, answers = [], []
    setup = EngineSetup(
        replace(FULL, block_size=block),
        MemoryConfig(num_blocks=5000, prefix_index=index),
        SchedulerConfig(max_num_seqs=4, max_model_len=400),
    )

    class Source:
        """One request after another; some prompts go on from what was said before, whole or in part."""

        def next_due_s(self) -> float | None:
            return 1000.0 * len(prompts) if len(prompts) < 30 and len(answers) == len(prompts) else None

        def take(self) -> OfferedRequest:
            prompt = array("i", [rng.randrange(3) for _ in range(rng.randint(1, 12))])
            if prompts and rng.random() < 0.7:
                before = rng.randrange(len(prompts))
                said = prompts[before] + answers[before]
                prompt = said[: rng.randint(1, len(said))] + (prompt if rng.random() < 0.7 else array("i"))
            prompts.append(prompt[:300])
            return OfferedRequest(f"r{len(prompts)}", 1000.0 * (len(prompts) - 1), prompts[-1], rng.randint(1, 9))

        def ended(self, request_id: str, output: array[int], now_s: float) -> None:
            answers.append(output)

    result = run(setup, Source())
    assert result.hit_tokens == brute_force_hits(prompts, answers, block)
    assert result.hit_tokens > 0


def test_a_chat_hits_all_that_was_said_but_the_last_block() -> None:
    prompts = DrawnPrompts(FixedLengths(10, 6), longest=200)
    chats = Conversations(Arrivals(0.1), prompts, Turns(4, 50.0), duration_s=100.0, seed=3)
    setup = EngineSetup(FULL, MemoryConfig(num_blocks=4000), SchedulerConfig(max_num_seqs=8, max_model_len=200))
    result = run(setup, chats)
    num_chats = result.num_requests // 4
    said = [15, 31, 47]  # tokens with keys and values after each answer: all but the last one
    assert result.hit_tokens == num_chats * sum(tokens // 4 * 4 for tokens in said)


def test_affinity_hits_more_than_taking_turns() -> None:
    prompts = DrawnPrompts(UniformLengths((4, 8), (2, 6)), prefixes=SharedPrefixes(12, 40), longest=LONGEST)
    hits = {}
    for name in ROUTERS:
        source = OpenLoop(drawn_requests(Arrivals(2.0), prompts, duration_s=60.0, seed=1))
        setup = EngineSetup(FULL, MemoryConfig(num_blocks=60), SchedulerConfig(max_num_seqs=4, max_model_len=LONGEST))
        engines = [PagedEngine(setup) for _ in range(3)]
        hits[name] = Simulation(engines, source, router=Router(4, b"", name)).run().hit_rate
    assert hits["least_work"] > hits["round_robin"]


# ---- the same plans -------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_log_of_a_run_gives_the_same_plans(seed: int) -> None:
    rng = random.Random(seed)
    setup, requests = setup_for(rng), requests_for(rng)
    logs = []
    for _ in range(2):
        log = io.BytesIO()
        result = Simulation([PagedEngine(setup, log=log)], OpenLoop(requests)).run()
        logs.append(log.getvalue())
    assert logs[0] == logs[1]
    assert replay(io.BytesIO(logs[0])) == result.num_steps


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_log_offers_what_was_asked_in_order(seed: int) -> None:
    rng = random.Random(seed)
    requests, log = requests_for(rng), io.BytesIO()
    engine = PagedEngine(setup_for(rng), log=log)
    Simulation([engine], OpenLoop(requests)).run()
    logged = list(logged_requests(replayed(io.BytesIO(log.getvalue()))))
    plain = [replace(request, due_s=0.0, outputs=()) for request in logged]
    assert plain == [replace(request, due_s=0.0) for request in requests]
    for request in logged:
        lengths = [] if request.beam_search else [request.num_output_tokens] * request.num_sequences
        assert list(map(len, request.outputs)) == lengths
    assert all(before.due_s <= after.due_s for before, after in itertools.pairwise(logged))


@pytest.mark.parametrize("seed", [10, 26, 35, 42])
def test_a_search_that_yielded_goes_on_when_others_take_its_old_rows(seed: int) -> None:
    scheduler = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=LONGEST, headroom=0.0)
    setup = EngineSetup(FULL, MemoryConfig(num_blocks=30), scheduler)
    requests = [replace(request, due_s=0.0) for request in requests_for(random.Random(seed))]
    assert run(setup, OpenLoop(requests)).num_preemptions > 0


def test_a_batch_of_the_engine_and_of_the_simulator_are_planned_alike() -> None:
    setup = EngineSetup(FULL, MemoryConfig(num_blocks=70), SchedulerConfig(max_num_seqs=4, max_model_len=LONGEST))
    requests = [replace(request, due_s=0.0) for request in requests_for(random.Random(7))]
    plans = []
    for simulated in (True, False):
        log = io.BytesIO()
        engine = PagedEngine(setup, log=log)
        if simulated:
            Simulation([engine], OpenLoop(requests)).run()
        else:
            for request in requests:
                engine.core.add_request(request.request())
            engine.core.run()
        plans.append([payload for kind, _, payload in read_records(io.BytesIO(log.getvalue())) if kind == PLANNED])
    assert plans[0] == plans[1]
    assert len(plans[0]) > 20


# ---- size -----------------------------------------------------------------------------------------------------------


def test_a_long_run_holds_no_more_than_what_is_under_way() -> None:
    memory = MemoryConfig(num_blocks=60, prefix_index="none")  # an index remembers 65,536 evictions before it forgets
    scheduler = SchedulerConfig(max_num_seqs=8, max_model_len=LONGEST)
    setup = EngineSetup(FULL, memory, scheduler, LinearCost(0.5, 0.0))
    loop = ClosedLoop(8, DrawnPrompts(FixedLengths(4, 2), longest=LONGEST), duration_s=160.0, seed=0)
    gc.collect()
    tracemalloc.start()
    result = run(setup, loop)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.num_requests > 1200
    assert most < 200 * result.num_requests  # one request alone takes several times as much


@given(values=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=200), percent=st.floats(0.0, 100.0))
def test_percentiles_are_right_to_one_percent(values: list[float], percent: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(1, -int(-len(values) * percent // 100)) - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=0.0101)
