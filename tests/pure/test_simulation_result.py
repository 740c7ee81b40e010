"""The figures of a simulated run: rates, shares and sums, also of runs in which nothing happened."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quire.memory.ledger import MemoryLedger, MissReason
from quire.simulate.histogram import Histogram
from quire.simulate.result import ReplicaResult, SimulationResult
from quire.simulate.timeline import TimelinePoint, mean_over_time

MISSES = {reason: number for number, reason in enumerate(MissReason)}
LEDGER = MemoryLedger(4, 100, 10, *[0] * 16, misses=MISSES)


def point(time_s: float, busy_s: float, used_blocks: float, stored_slots: float) -> TimelinePoint:
    return TimelinePoint(time_s, busy_s, 1.0, 2.0, used_blocks, 3.0, 4.0, stored_slots, *[0.0] * 6)


POINTS = (point(1.0, 3.0, 5.0, 10.0), point(9.0, 1.0, 1.0, 2.0))
REPLICA = ReplicaResult(
    7, 5, 4.0, num_preemptions=2, num_copied_blocks=3, num_moved_blocks=4, timeline=POINTS, ledger=LEDGER
)


def result(*replicas: ReplicaResult, **changes: float) -> SimulationResult:
    made = SimulationResult(
        duration_s=8.0,
        num_requests=10,
        num_refused=2,
        num_sequences=12,
        prompt_tokens=40,
        output_tokens=24,
        computed_tokens=60,
        hit_tokens=10,
        recomputed_tokens=1,
        mean_running=1.5,
        latencies={"ttft_s": Histogram().distribution()},
        replicas=replicas or (REPLICA,),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_rates_are_of_the_time_until_the_last_end_and_shares_of_what_was_asked() -> None:
    found = result(REPLICA, replace(REPLICA, num_preemptions=5, num_steps=6))
    assert (found.num_preemptions, found.num_steps) == (7, 11)
    assert (found.output_tokens_per_s, found.requests_per_s, found.hit_rate) == (3.0, 1.0, 0.25)


def test_nothing_in_no_time_has_no_rate() -> None:
    found = result(duration_s=0.0, prompt_tokens=0)
    assert (found.output_tokens_per_s, found.requests_per_s, found.hit_rate) == (0.0, 0.0, 0.0)


def test_shares_of_memory_are_means_over_the_time_of_steps_in_slots() -> None:
    assert REPLICA.num_slots == 40
    assert REPLICA.slots(POINTS[0], "used_blocks") == 20.0
    assert REPLICA.slots(POINTS[0], "stored_slots") == 10.0
    assert mean_over_time(POINTS, lambda each: each.used_blocks) == pytest.approx((3 * 5 + 1 * 1) / 4)
    assert REPLICA.mean_share("used_blocks") == pytest.approx(4 * 4 / 40)
    assert REPLICA.mean_share("stored_slots") == pytest.approx((3 * 10 + 1 * 2) / 4 / 40)
    assert REPLICA.stored_share_of_used == pytest.approx(8 / 16)
    idle = replace(REPLICA, timeline=())
    assert (idle.mean_share("used_blocks"), idle.stored_share_of_used) == (0.0, 0.0)


def test_a_result_can_be_written_as_json_with_what_is_derived_from_it() -> None:
    found = json.loads(json.dumps(result().as_json()))
    assert found["replicas"][0]["ledger"]["misses"] == {reason.value: number for reason, number in MISSES.items()}
    assert found["replicas"][0]["timeline"][1]["time_s"] == 9.0
    assert found["latencies"]["ttft_s"]["count"] == 0
    derived = {name: found[name] for name in ("num_preemptions", "num_steps", "hit_rate")}
    assert derived == {"num_preemptions": 2, "num_steps": 5, "hit_rate": 0.25}
    assert (found["output_tokens_per_s"], found["requests_per_s"]) == (3.0, 1.0)
